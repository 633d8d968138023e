//! Tokens: `mst_<boot|join|heal>_<id>_<seed>_<crc>`, lower-case base32.
//!
//! The seed is an Ed25519 private key. It goes only from the issuer's machine to the host; the
//! service knows the public key only. The prefix lets secret scanners find a token. The CRC detects
//! a bad paste without a request to the service.

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE32_NOPAD;
use secrecy::{ExposeSecret, SecretString};
use zeroize::Zeroizing;

use crate::etcd_token::ETCD_TOKEN_PREFIX;
use crate::grant::{GrantId, TokenKind};
use crate::key::{PAPER_PREFIX, PublicKey, SigningKey};

/// Prefix of every token.
pub const TOKEN_PREFIX: &str = "mst_";
/// Length of every token in characters.
pub const TOKEN_LENGTH: usize = 4 + 4 + 1 + 16 + 1 + 52 + 1 + 7;

/// Whether a text contains a token or a private key, or a part of one. No message may repeat such a
/// text.
pub fn holds_secret(text: &str) -> bool {
    let digit = |c: char| c.is_ascii_lowercase() || ('2'..='7').contains(&c);
    let begins_one = |start: &str| {
        text.split(start).skip(1).any(|rest| rest.chars().take_while(|c| digit(*c)).count() >= 8)
    };
    let starts = TokenKind::ALL.map(|kind| format!("{TOKEN_PREFIX}{kind}_"));
    // `AGE-SECRET-KEY-` begins a private key of the program `age`, and `PAPER_PREFIX` one of ours.
    ["PRIVATE KEY-----", "AGE-SECRET-KEY-", PAPER_PREFIX].iter().any(|start| text.contains(start))
        || starts.iter().any(|start| begins_one(start))
        || begins_one(ETCD_TOKEN_PREFIX)
}

/// Reason why a text is no token. No error message repeats the text, because it may contain most of
/// a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The text doesn't begin with `mst_`.
    #[error("a token begins with mst_")]
    Prefix,
    /// The text begins with `mst_`, but has the wrong length. The number is its length in
    /// characters.
    #[error("a token has {TOKEN_LENGTH} characters, this has {0}: was all of it copied?")]
    Length(usize),
    /// The parts of the token don't have the right form.
    #[error("the token is mangled: it reads mst_boot_…, mst_join_… or mst_heal_…, in a-z and 2-7")]
    Form,
    /// The CRC at the end doesn't match the text before it.
    #[error("the token's checksum is wrong: a character was changed on the way, copy it again")]
    Checksum,
}

/// A token, which its holder can redeem under one grant. Only [`Token::expose`] shows the secret.
pub struct Token {
    kind: TokenKind,
    id: GrantId,
    key: SigningKey,
}

impl Token {
    /// Generates a new random token.
    pub fn generate(kind: TokenKind) -> Self {
        Self { kind, id: GrantId::random(), key: SigningKey::generate() }
    }

    /// Returns the purpose of the token.
    pub fn kind(&self) -> TokenKind {
        self.kind
    }

    /// Returns the id of the token's grant.
    pub fn id(&self) -> GrantId {
        self.id
    }

    /// Returns the private key that the token holds.
    pub fn key(&self) -> &SigningKey {
        &self.key
    }

    /// Returns the public key of the token, as the grant contains it.
    pub fn public(&self) -> &PublicKey {
        self.key.public()
    }

    /// Returns the whole text of the token. It may only be written to a file or terminal of the
    /// person who made the token.
    pub fn expose(&self) -> SecretString {
        let seed = Zeroizing::new(encode_base32(self.key.seed().expose_secret()));
        let body = Zeroizing::new(format!("{TOKEN_PREFIX}{}_{}_{}", self.kind, self.id, *seed));
        SecretString::from(format!("{}_{}", *body, checksum(&body)))
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let rest = text.strip_prefix(TOKEN_PREFIX).ok_or(TokenError::Prefix)?;
        if text.len() != TOKEN_LENGTH {
            return Err(TokenError::Length(text.chars().count()));
        }
        let mut parts = rest.split('_');
        let (Some(kind), Some(id), Some(seed), Some(crc), None) =
            (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Form);
        };
        let kind = match kind {
            "boot" => TokenKind::Boot,
            "join" => TokenKind::Join,
            "heal" => TokenKind::Heal,
            _ => return Err(TokenError::Form),
        };
        let body = text.strip_suffix(crc).and_then(|b| b.strip_suffix('_'));
        if body.map(checksum).as_deref() != Some(crc) {
            return Err(TokenError::Checksum);
        }
        let id = id.parse().map_err(|_| TokenError::Form)?;
        let seed = Zeroizing::new(decode_base32(seed).ok_or(TokenError::Form)?);
        let seed: &[u8; 32] = seed.as_slice().try_into().map_err(|_| TokenError::Form)?;
        Ok(Self { kind, id, key: SigningKey::from_seed(seed) })
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({}, {}, …)", self.kind, self.id)
    }
}

pub(crate) fn checksum(body: &str) -> String {
    encode_base32(&crc32c::crc32c(body.as_bytes()).to_be_bytes())
}

pub(crate) fn encode_base32(bytes: &[u8]) -> String {
    let mut text = BASE32_NOPAD.encode(bytes);
    text.make_ascii_lowercase();
    text
}

pub(crate) fn decode_base32(text: &str) -> Option<Vec<u8>> {
    if text.bytes().any(|b| b.is_ascii_uppercase()) {
        return None;
    }
    let upper = Zeroizing::new(text.to_ascii_uppercase());
    BASE32_NOPAD.decode(upper.as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn exposed(token: &Token) -> String {
        token.expose().expose_secret().to_owned()
    }

    #[test]
    fn a_token_survives_a_round_trip_through_its_text() {
        for kind in TokenKind::ALL {
            let token = Token::generate(kind);
            let again: Token = exposed(&token).parse().unwrap();
            assert_eq!((again.kind(), again.id()), (kind, token.id()));
            assert_eq!(again.public(), token.public());
            assert_eq!(exposed(&token).len(), TOKEN_LENGTH);
        }
    }

    #[test]
    fn debug_shows_no_secret() {
        let token = Token::generate(TokenKind::Boot);
        let text = exposed(&token);
        let seed = text.split('_').nth(3).unwrap();
        assert!(!format!("{token:?}").contains(seed));
    }

    #[test]
    fn junk_is_refused_without_being_shown() {
        for (text, error) in [
            ("", TokenError::Prefix),
            ("x".repeat(4096).as_str(), TokenError::Prefix),
            ("mst_boot_abc", TokenError::Length(12)),
            (&format!("mst_{}", "x".repeat(TOKEN_LENGTH - 4)), TokenError::Form),
            (&format!("mst_root_{}", "x".repeat(TOKEN_LENGTH - 9)), TokenError::Form),
        ] {
            assert_eq!(text.parse::<Token>().err(), Some(error));
        }
    }

    #[test]
    fn private_keys_and_parts_of_tokens_are_secrets() {
        let token = exposed(&Token::generate(TokenKind::Join));
        for secret in ["-----BEGIN PRIVATE KEY-----", "x AGE-SECRET-KEY-1QQ", &token[..30]] {
            assert!(holds_secret(secret), "{secret}");
        }
        for text in ["age1yzhwf0p", "mst_boot_FILE", "key.pem"] {
            assert!(!holds_secret(text), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_one_changed_character_is_noticed(position in 0..TOKEN_LENGTH, to in "[a-z2-7]") {
            let text = exposed(&Token::generate(TokenKind::Boot));
            let mut changed = text.clone();
            changed.replace_range(position..=position, &to);
            prop_assume!(changed != text);
            prop_assert!(changed.parse::<Token>().is_err());
        }

        #[test]
        fn no_text_makes_the_token_parser_panic(text in "(mst_)?(boot_|join_)?\\PC{0,120}") {
            prop_assert!(text.parse::<Token>().is_err());
        }
    }
}
