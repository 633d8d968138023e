//! Random secrets that a browser holds: the code in a sign-in link, and the value of a session's
//! cookie.

use data_encoding::HEXLOWER;
use discovery_types::digest::Digest;
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

/// Number of random bytes of a secret.
const SECRET_BYTES: usize = 32;

/// A random secret. Only its hash is stored, and it has no `Debug` form.
pub(crate) struct BrowserSecret(Zeroizing<[u8; SECRET_BYTES]>);

impl BrowserSecret {
    /// Makes a new secret.
    pub(crate) fn generate() -> Self {
        let mut bytes = Zeroizing::new([0; SECRET_BYTES]);
        let filled = SystemRandom::new().fill(&mut *bytes);
        filled.expect("the kernel's random generator always answers");
        BrowserSecret(bytes)
    }

    /// Parses the text of a secret: 64 lower-case hexadecimal digits.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let bytes = Zeroizing::new(HEXLOWER.decode(text.as_bytes()).ok()?);
        Some(BrowserSecret(Zeroizing::new(bytes.as_slice().try_into().ok()?)))
    }

    /// Returns the text of the secret. Only the browser may get it.
    pub(crate) fn expose_text(&self) -> Zeroizing<String> {
        Zeroizing::new(HEXLOWER.encode(&*self.0))
    }

    /// Returns the hash under which the secret is stored. The secret is long and random, so the
    /// hash needs no salt, and hashes need not be compared in constant time.
    pub(crate) fn hash(&self) -> Digest {
        Digest::of(&*self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_parsed_from_its_own_text_alone() {
        let secret = BrowserSecret::generate();
        let text = secret.expose_text();
        assert_eq!(BrowserSecret::parse(&text).unwrap().hash(), secret.hash());
        assert_ne!(BrowserSecret::generate().hash(), secret.hash());
        for bad in ["", &text[1..], &format!("{}0", *text), &text.to_uppercase(), "x"] {
            assert!(BrowserSecret::parse(bad).is_none_or(|other| other.hash() == secret.hash()));
        }
        assert!(BrowserSecret::parse(&text[2..]).is_none());
    }
}
