//! An admin's context: the URLs and pinned keys of a discovery service, and the owner keys to
//! trust. It is one line of text without a secret.

use std::fmt;
use std::str::FromStr;

use crate::bundle::{LineError, LineParser, join_with_commas, parse_list};
use crate::digest::Digest;
use crate::key::{KeyError, PublicKey};
use crate::url::ServiceUrl;

/// First word of an admin's context. It ends with the version of the format.
pub const CONTEXT_WORD: &str = "muster-context1";
/// Largest number of owner keys in a context.
pub const MAX_OWNERS: usize = 16;

/// Facts about a discovery service with which an admin's tool starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// URLs of the service, in order of preference.
    pub urls: Vec<ServiceUrl>,
    /// SHA-256 of the service's TLS key (SPKI).
    pub pins: Vec<Digest>,
    /// Keys of trusted owners. One of them must have signed the first statement of a chain.
    pub owners: Vec<PublicKey>,
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { urls, pins, owners } = self;
        let (urls, pins, owners) =
            (join_with_commas(urls), join_with_commas(pins), join_with_commas(owners));
        write!(f, "{CONTEXT_WORD} urls={urls} pins={pins} owners={owners}")
    }
}

impl FromStr for Context {
    type Err = LineError;

    fn from_str(text: &str) -> Result<Self, LineError> {
        let mut line = LineParser::parse(text, CONTEXT_WORD)?;
        let owner = |text: &str| text.parse().map_err(|error: KeyError| error.to_string());
        let context = Self {
            urls: line.urls()?,
            pins: line.pins()?,
            owners: line.take_value("owners", |text| parse_list(text, MAX_OWNERS, owner))?,
        };
        line.finish()?;
        Ok(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::SigningKey;

    #[test]
    fn a_context_survives_a_round_trip_through_its_line() {
        let context = Context {
            urls: vec!["https://10.0.0.1:8443".parse().unwrap()],
            pins: vec![Digest::of(b"a"), Digest::of(b"b")],
            owners: vec![*SigningKey::generate().public()],
        };
        assert_eq!(context.to_string().parse(), Ok(context.clone()));
        assert_eq!(format!("  {context}\n").parse(), Ok(context));
    }
}
