//! Private keys on paper: a text that a person can print, and type again years later.
//!
//! The text is the prefix [`PAPER_PREFIX`] and 59 characters of base32 in groups of four: the seed
//! (RFC 8032's private key) and a CRC-32C over prefix and seed. Letter case, blanks, hyphens and
//! line ends between the groups are ignored when a key is read.

use secrecy::{ExposeSecret, SecretString};
use zeroize::Zeroizing;

use super::SigningKey;
use crate::token::{checksum, decode_base32, encode_base32};

/// Beginning of every key on paper.
pub const PAPER_PREFIX: &str = "muster-key1";
/// Number of characters in a group.
const GROUP: usize = 4;
/// Number of base32 characters of a seed.
const SEED_LENGTH: usize = 52;
/// Number of base32 characters of a CRC.
const CRC_LENGTH: usize = 7;
/// Number of base32 characters of a key.
const DIGITS: usize = SEED_LENGTH + CRC_LENGTH;
/// Longest text that is read, in bytes.
const MAX_TEXT: usize = 1_024;

/// Reason why a typed text is no key. No message repeats the text, which is most of a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PaperKeyError {
    /// The text doesn't begin as a key on paper does.
    #[error("a key on paper begins with {PAPER_PREFIX}")]
    Prefix,
    /// The text has the wrong number of characters after the prefix; holds that number.
    #[error("a key on paper has {DIGITS} characters after {PAPER_PREFIX}, this has {0}")]
    Length(usize),
    /// A character isn't in the base32 alphabet.
    #[error("a key on paper is made of a-z and 2-7: 0 is o, 1 is l or i, 8 is b")]
    Character,
    /// The CRC at the end doesn't match the text before it.
    #[error("the key's checksum is wrong: a character was read or typed wrongly")]
    Checksum,
}

impl SigningKey {
    /// Returns the key as a text for paper. It may only be shown to the key's owner.
    pub fn to_paper(&self) -> SecretString {
        let seed = Zeroizing::new(encode_base32(self.seed().expose_secret()));
        let body = Zeroizing::new(format!("{PAPER_PREFIX}{}", *seed));
        let digits = Zeroizing::new(format!("{}{}", *seed, checksum(&body)));
        let mut text = Zeroizing::new(String::from(PAPER_PREFIX));
        for group in digits.as_bytes().chunks(GROUP) {
            text.push(' ');
            text.extend(group.iter().copied().map(char::from));
        }
        SecretString::from(text.as_str())
    }

    /// Reads a key that somebody typed from paper.
    pub fn from_paper(text: &str) -> Result<Self, PaperKeyError> {
        if text.len() > MAX_TEXT {
            return Err(PaperKeyError::Length(text.chars().count()));
        }
        let text = Zeroizing::new(text.trim().to_ascii_lowercase());
        let rest = text.strip_prefix(PAPER_PREFIX).ok_or(PaperKeyError::Prefix)?;
        let is_between = |c: &char| c.is_whitespace() || *c == '-';
        let digits: Zeroizing<String> =
            Zeroizing::new(rest.chars().filter(|c| !is_between(c)).collect());
        if !digits.chars().all(|c| c.is_ascii_lowercase() || ('2'..='7').contains(&c)) {
            return Err(PaperKeyError::Character);
        }
        if digits.len() != DIGITS {
            return Err(PaperKeyError::Length(digits.len()));
        }
        let (seed, crc) = digits.split_at(SEED_LENGTH);
        let body = Zeroizing::new(format!("{PAPER_PREFIX}{seed}"));
        if checksum(&body) != crc {
            return Err(PaperKeyError::Checksum);
        }
        let seed = Zeroizing::new(decode_base32(seed).ok_or(PaperKeyError::Checksum)?);
        let seed: &[u8; 32] = seed.as_slice().try_into().map_err(|_| PaperKeyError::Checksum)?;
        Ok(SigningKey::from_seed(seed))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn paper(key: &SigningKey) -> String {
        key.to_paper().expose_secret().to_owned()
    }

    #[test]
    fn a_key_survives_paper_however_it_is_typed() {
        let key = SigningKey::generate();
        let text = paper(&key);
        for typed in [
            text.clone(),
            text.to_uppercase(),
            text.replace(' ', ""),
            text.replace(' ', "\n  "),
            text.replace(' ', "-"),
            format!("\n{text}\r\n"),
        ] {
            assert_eq!(SigningKey::from_paper(&typed).unwrap().public(), key.public(), "{typed}");
        }
        assert!(crate::token::holds_secret(&text));
    }

    #[test]
    fn a_text_that_is_no_key_is_refused_with_its_reason() {
        let text = paper(&SigningKey::generate());
        use PaperKeyError::{Character, Length, Prefix};
        for (typed, error) in [
            ("", Prefix),
            (&text[4..], Prefix),
            (&text[..text.len() - 1], Length(58)),
            (&format!("{text}a"), Length(60)),
            (&text.replacen(' ', " 0", 1), Character),
            (&"x".repeat(5_000), Length(5_000)),
        ] {
            assert_eq!(SigningKey::from_paper(typed).err(), Some(error));
        }
    }

    proptest! {
        #[test]
        fn any_one_wrong_character_is_noticed(position in 0..59_usize, to in "[a-z2-7]") {
            let text = paper(&SigningKey::generate());
            let at = PAPER_PREFIX.len() + 1 + position + position / GROUP;
            let mut wrong = text.clone();
            wrong.replace_range(at..=at, &to);
            prop_assume!(wrong != text);
            prop_assert_eq!(SigningKey::from_paper(&wrong).err(), Some(PaperKeyError::Checksum));
        }
    }
}
