//! The join bundle: one line with everything that a host needs to join a cluster. The admin's
//! context is a line of the same form.
//!
//! `muster1 urls=https://a:8443,https://b:8443 pins=<hex> cluster=<id> statement=<hex> mst_…`

use std::str::FromStr;

use secrecy::{ExposeSecret, SecretString};
use uuid::Uuid;
use zeroize::Zeroizing;

use crate::digest::Digest;
use crate::token::{TOKEN_PREFIX, Token, TokenError};
use crate::url::{ServiceUrl, UrlError};

/// First word of a bundle.
pub const BUNDLE_WORD: &str = "muster1";
/// Longest bundle or context that is parsed, in bytes.
pub const MAX_LINE: usize = 4096;
/// Largest number of URLs of a service.
pub const MAX_URLS: usize = 8;
/// Largest number of pins: two while the service's key is being changed.
pub const MAX_PINS: usize = 2;

/// Reason why a text is no bundle or context. The error message never contains the token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The text is empty.
    #[error("empty: expected one line that begins with `{0}`")]
    Empty(&'static str),
    /// The line is longer than [`MAX_LINE`].
    #[error("longer than {MAX_LINE} bytes: expected one line that begins with `{0}`")]
    TooLong(&'static str),
    /// The text has more than one line.
    #[error("expected one line that begins with `{0}`, found several")]
    MultipleLines(&'static str),
    /// The line begins with another word than expected.
    #[error("expected one line that begins with `{expected}`{hint}")]
    FirstWord {
        /// First word that was expected.
        expected: &'static str,
        /// Guess at the kind of the text; empty if there is no guess.
        hint: &'static str,
    },
    /// The line has no `key=value` word with this key.
    #[error("`{0}=` is missing: was all of the line copied?")]
    Missing(&'static str),
    /// The line has two `key=value` words with this key.
    #[error("`{0}=` stands there twice")]
    Duplicate(&'static str),
    /// A word doesn't belong in the line. The number is its position, counted from 1.
    #[error("word {0} of the line is not one that belongs there")]
    Unexpected(usize),
    /// The value of this key can't be parsed. The text gives the reason.
    #[error("`{0}=` can't be read: {1}")]
    Value(&'static str, String),
    /// The token at the end is missing.
    #[error("the token (mst_…) is missing at the end: was all of the line copied?")]
    NoToken,
    /// The token can't be read.
    #[error(transparent)]
    Token(#[from] TokenError),
}

/// Everything that a host needs to become a member, read from a join bundle.
#[derive(Debug)]
pub struct Bundle {
    /// URLs of the service, in order of preference.
    pub urls: Vec<ServiceUrl>,
    /// SHA-256 of the service's TLS key (SPKI): one hash, or two while the key is being changed.
    pub pins: Vec<Digest>,
    /// Cluster that the token is for.
    pub cluster: Uuid,
    /// Hash of a statement of the cluster. The host trusts the statement with this hash.
    pub statement: Digest,
    /// Token that the host redeems.
    pub token: Token,
}

impl Bundle {
    /// Returns the bundle's line, without a newline. The line contains the token's secret.
    pub fn expose(&self) -> SecretString {
        let token = self.token.expose();
        SecretString::from(format!(
            "{BUNDLE_WORD} urls={} pins={} cluster={} statement={} {}",
            join_with_commas(&self.urls),
            join_with_commas(&self.pins),
            self.cluster,
            self.statement,
            token.expose_secret(),
        ))
    }
}

impl FromStr for Bundle {
    type Err = LineError;

    fn from_str(text: &str) -> Result<Self, LineError> {
        let mut line = LineParser::parse(text, BUNDLE_WORD)?;
        let bundle = Self {
            urls: line.urls()?,
            pins: line.pins()?,
            cluster: line.take_value("cluster", |text| {
                Uuid::try_parse(text).map_err(|_| "expected a UUID".to_owned())
            })?,
            statement: line.take_value("statement", |text| {
                text.parse().map_err(|error: crate::digest::NotHex| error.to_string())
            })?,
            token: line.token()?,
        };
        line.finish()?;
        Ok(bundle)
    }
}

/// Parser of a line of `key=value` words. Each word is removed when it is read.
pub(crate) struct LineParser<'t> {
    words: Vec<Option<&'t str>>,
}

impl<'t> LineParser<'t> {
    pub(crate) fn parse(text: &'t str, first: &'static str) -> Result<Self, LineError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(LineError::Empty(first));
        }
        let mut words: Vec<_> = text.split_ascii_whitespace().take(16).map(Some).collect();
        if words[0] != Some(first) {
            let hint = match words[0].unwrap_or_default() {
                word if word.starts_with(TOKEN_PREFIX) => {
                    ": this is a token alone, the whole bundle is needed"
                }
                BUNDLE_WORD => ": this is a join bundle, for a host and not for an admin",
                crate::context::CONTEXT_WORD => {
                    ": this is an admin's context, a host needs a join bundle"
                }
                word if word.starts_with("muster") => ": it is of another version of Muster",
                word if word.starts_with("-----BEGIN") => ": this is a PEM file",
                _ => "",
            };
            return Err(LineError::FirstWord { expected: first, hint });
        }
        if text.len() > MAX_LINE {
            return Err(LineError::TooLong(first));
        }
        if text.contains(['\n', '\r']) {
            return Err(LineError::MultipleLines(first));
        }
        words[0] = None;
        Ok(Self { words })
    }

    pub(crate) fn take_value<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<T, LineError> {
        let mut found = None;
        for word in &mut self.words {
            let value = word.and_then(|w| w.strip_prefix(key)?.strip_prefix('='));
            if let Some(value) = value {
                if found.replace(value).is_some() {
                    return Err(LineError::Duplicate(key));
                }
                *word = None;
            }
        }
        let value = found.ok_or(LineError::Missing(key))?;
        parse(value).map_err(|reason| LineError::Value(key, reason))
    }

    pub(crate) fn urls(&mut self) -> Result<Vec<ServiceUrl>, LineError> {
        self.take_value("urls", |text| {
            parse_list(text, MAX_URLS, |url| {
                url.parse().map_err(|error: UrlError| error.to_string())
            })
        })
    }

    pub(crate) fn pins(&mut self) -> Result<Vec<Digest>, LineError> {
        self.take_value("pins", |text| {
            let pin = |pin: &str| pin.parse().map_err(|e: crate::digest::NotHex| e.to_string());
            parse_list(text, MAX_PINS, pin)
        })
    }

    fn token(&mut self) -> Result<Token, LineError> {
        let word = self.words.iter_mut().find(|w| w.is_some_and(|w| w.starts_with(TOKEN_PREFIX)));
        let token =
            Zeroizing::new(word.and_then(Option::take).ok_or(LineError::NoToken)?.to_owned());
        Ok(token.parse()?)
    }

    pub(crate) fn finish(self) -> Result<(), LineError> {
        match self.words.iter().position(Option::is_some) {
            Some(position) => Err(LineError::Unexpected(position + 1)),
            None => Ok(()),
        }
    }
}

pub(crate) fn parse_list<T>(
    text: &str,
    most: usize,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let items = text.split(',').map(parse).collect::<Result<Vec<_>, _>>()?;
    if items.len() > most {
        return Err(format!("at most {most}"));
    }
    Ok(items)
}

pub(crate) fn join_with_commas<T: std::fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;
