//! Names of clusters, members and zones.

use std::fmt;
use std::str::FromStr;

use crate::text::wire_text;

/// Longest name, in characters.
pub const MAX_NAME: usize = 63;

/// A name: `^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`. It needs no quoting in a DNS label, a file name
/// or a log line.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(String);

/// Reason why a text isn't a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty, or longer than [`MAX_NAME`].
    #[error("a name has 1 to {MAX_NAME} characters")]
    Length,
    /// The text has a character that isn't allowed, or begins or ends with a hyphen.
    #[error("a name is made of a-z, 0-9 and hyphens, and begins and ends with a letter or digit")]
    Character,
}

impl Name {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if text.is_empty() || text.len() > MAX_NAME {
            return Err(NameError::Length);
        }
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if !text.bytes().all(inner) || text.starts_with('-') || text.ends_with('-') {
            return Err(NameError::Character);
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

wire_text!(Name, "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dns_labels_are_accepted_as_names() {
        for good in ["a", "0", "db-1", "a--b", &"x".repeat(63)] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
    }

    #[test]
    fn a_text_that_is_no_dns_label_is_refused() {
        for bad in ["", "-a", "a-", "A", "a.b", "a_b", "a b", "a\n", "é", "../x", &"x".repeat(64)]
        {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }
}
