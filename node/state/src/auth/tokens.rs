//! Simple tokens, which a client presents after it has authenticated with a password.
//!
//! A token is random letters and the index of the log entry that assigned it. The entry contains
//! only a hash of the letters, so neither the log nor a member's memory holds a usable token.
//!
//! Every member knows every token that was assigned since the member started, or since it last
//! installed a snapshot. Each member keeps its own expiry times: using a token on one member
//! extends its lifetime on that member only.
//!
//! A token becomes invalid when its user is deleted or gets another password, and when
//! authentication is disabled.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom as _, SystemRandom};
use zeroize::Zeroizing;

/// SHA-256 hash of a token's letters.
pub type SecretHash = [u8; 32];

/// Maximum number of tokens that are valid at a time. A further one makes the oldest invalid.
const MAX_TOKENS: usize = 100_000;
/// Number of letters in a token, which gives 91 bits of randomness.
const TOKEN_LETTERS: usize = 16;
const ALPHABET: &[u8; 52] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
/// Largest multiple of the alphabet's length that fits a byte. Random bytes from here on are
/// discarded, since they would favour some letters.
const UNBIASED_LIMIT: u8 = 208;

/// The letters of a token whose log index is not known yet.
pub struct TokenSecret(Zeroizing<String>);

impl TokenSecret {
    /// Draws the random letters of a new token.
    #[must_use]
    pub fn random() -> Self {
        let random = SystemRandom::new();
        let mut letters = Zeroizing::new(String::with_capacity(TOKEN_LETTERS));
        let mut bytes = Zeroizing::new([0; TOKEN_LETTERS]);
        while letters.len() < TOKEN_LETTERS {
            random.fill(&mut bytes[..]).expect("the kernel has random numbers");
            let fair = bytes.iter().filter(|byte| **byte < UNBIASED_LIMIT);
            let wanted = TOKEN_LETTERS - letters.len();
            letters
                .extend(fair.take(wanted).map(|byte| char::from(ALPHABET[usize::from(byte % 52)])));
        }
        Self(letters)
    }

    /// Returns the hash of the letters, which the log entry contains.
    #[must_use]
    pub fn hash(&self) -> SecretHash {
        hash(&self.0)
    }

    /// Returns the token that the entry `index` assigned.
    #[must_use]
    pub fn token(&self, index: u64) -> String {
        format!("{}.{index}", self.0.as_str())
    }
}

fn hash(letters: &str) -> SecretHash {
    digest(&SHA256, letters.as_bytes()).as_ref().try_into().expect("a SHA-256 has 32 bytes")
}

/// Splits a token into its letters and log index. Returns `None` if it does not have this form.
fn split(token: &str) -> Option<(&str, u64)> {
    let (letters, index) = token.split_once('.')?;
    let is_number = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
    Some((letters, is_number.then(|| index.parse().ok())??))
}

struct SimpleToken {
    secret: SecretHash,
    user: Arc<str>,
    /// Expiry time. `None` until [`SimpleTokens::find`] or [`SimpleTokens::expire`] first sees the
    /// token.
    expires_at: Option<Duration>,
}

/// The tokens that a member knows, each under the index of the log entry that assigned it. All
/// times are of the caller's monotonic clock.
#[derive(Default)]
pub struct SimpleTokens {
    by_index: BTreeMap<u64, SimpleToken>,
}

impl SimpleTokens {
    /// Records that the entry `index` assigned a token to `user`.
    pub fn assign(&mut self, index: u64, secret: SecretHash, user: Arc<str>) {
        self.by_index.insert(index, SimpleToken { secret, user, expires_at: None });
        if self.by_index.len() > MAX_TOKENS {
            self.by_index.pop_first();
        }
    }

    /// Returns the user of a valid token, and extends its life to `ttl` from now.
    pub fn find(&mut self, token: &str, now: Duration, ttl: Duration) -> Option<Arc<str>> {
        let (letters, index) = split(token)?;
        let found = self.by_index.get_mut(&index)?;
        let is_over = found.expires_at.is_some_and(|until| until <= now);
        if is_over || found.secret != hash(letters) {
            return None;
        }
        found.expires_at = Some(now + ttl);
        Some(found.user.clone())
    }

    /// Removes expired tokens. Each token that has no expiry time yet gets one: `ttl` from now.
    pub fn expire(&mut self, now: Duration, ttl: Duration) {
        self.by_index.retain(|_, token| *token.expires_at.get_or_insert(now + ttl) > now);
    }

    /// Removes all tokens of a user, so that they become invalid.
    pub fn revoke_user(&mut self, user: &str) {
        self.by_index.retain(|_, token| &*token.user != user);
    }

    /// Removes all tokens, so that they become invalid.
    pub fn clear(&mut self) {
        self.by_index.clear();
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_index.len()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_index.is_empty()
    }
}

/// Shows the number of tokens only, since a token is a secret.
impl std::fmt::Debug for SimpleTokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens").field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(300);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn given(tokens: &mut SimpleTokens, index: u64, user: &str) -> String {
        let secret = TokenSecret::random();
        tokens.assign(index, secret.hash(), user.into());
        secret.token(index)
    }

    #[test]
    fn a_token_consists_of_letters_and_an_entry_index() {
        let token = TokenSecret::random().token(81);
        let (letters, index) = token.split_once('.').unwrap();
        assert_eq!((letters.len(), index), (16, "81"));
        assert!(letters.bytes().all(|letter| letter.is_ascii_alphabetic()), "{letters}");
        assert_ne!(token, TokenSecret::random().token(81));
        assert_eq!(split(&token), Some((letters, 81)));
        for none in
            ["", "abc", "abc.", "abc.x", "abc.+1", "abc.1.2", ".", "abc.99999999999999999999"]
        {
            assert_eq!(split(none), None, "{none}");
        }
    }

    #[test]
    fn only_an_exact_token_identifies_its_user() {
        let mut tokens = SimpleTokens::default();
        let (a, b) = (given(&mut tokens, 5, "a"), given(&mut tokens, 6, "b"));
        assert_eq!(tokens.find(&a, at(0), TTL).as_deref(), Some("a"));
        assert_eq!(tokens.find(&b, at(0), TTL).as_deref(), Some("b"));
        let letters = a.split_once('.').unwrap().0;
        for other in [format!("{letters}.6"), format!("{letters}.7"), letters.to_owned()] {
            assert_eq!(tokens.find(&other, at(0), TTL), None, "{other}");
        }
        let mut wrong = a.clone().into_bytes();
        wrong[0] = if wrong[0] == b'a' { b'b' } else { b'a' };
        assert_eq!(tokens.find(std::str::from_utf8(&wrong).unwrap(), at(0), TTL), None);
    }

    #[test]
    fn a_token_expires_when_it_is_not_used() {
        let mut tokens = SimpleTokens::default();
        let (used, unused) = (given(&mut tokens, 5, "a"), given(&mut tokens, 6, "a"));
        tokens.expire(at(10), TTL);
        assert!(tokens.find(&used, at(309), TTL).is_some());
        assert!(tokens.find(&unused, at(310), TTL).is_none(), "also before it is taken away");
        tokens.expire(at(310), TTL);
        assert_eq!(tokens.len(), 1);
        assert!(tokens.find(&used, at(608), TTL).is_some());
        tokens.expire(at(908), TTL);
        assert!(tokens.is_empty());
    }

    #[test]
    fn tokens_are_removed_with_their_user() {
        let mut tokens = SimpleTokens::default();
        let (a, b) = (given(&mut tokens, 5, "a"), given(&mut tokens, 6, "b"));
        tokens.revoke_user("a");
        assert!(tokens.find(&a, at(0), TTL).is_none() && tokens.find(&b, at(0), TTL).is_some());
        tokens.clear();
        assert!(tokens.find(&b, at(0), TTL).is_none());
    }

    #[test]
    fn the_oldest_token_is_removed_when_there_are_too_many() {
        let mut tokens = SimpleTokens::default();
        for index in 0..=MAX_TOKENS as u64 {
            tokens.assign(index, [0; 32], "a".into());
        }
        assert_eq!(tokens.len(), MAX_TOKENS);
        assert!(!tokens.by_index.contains_key(&0) && tokens.by_index.contains_key(&1));
    }
}
