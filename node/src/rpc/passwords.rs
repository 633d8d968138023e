//! Passwords are hashed where that keeps nobody waiting but who said them: on threads that may block, so
//! many at a time.

use std::sync::Arc;

use bcrypt::{BcryptError, Version};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use zeroize::Zeroizing;

use super::apart::apart;
use super::error::Error;

/// Passwords that are hashed at a time: each takes a core for some 50 ms at etcd's cost of 10.
const AT_ONCE: usize = 2;
/// More that wait for it; the next one is refused.
const WAITING: usize = 64;
/// What a password is compared with whose user there is not, so that it takes as long.
const NOBODYS_SALT: [u8; 16] = [0; 16];
/// A longer password is refused where it is set: bcrypt reads no more of it.
const MAX_PASSWORD_BYTES: usize = 72;

/// Hashes passwords.
pub(crate) struct Passwords {
    /// `--bcrypt-cost`.
    cost: u32,
    line: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

/// A place in the line, and then one at the work.
struct Turn {
    _line: OwnedSemaphorePermit,
    _place: OwnedSemaphorePermit,
}

impl Passwords {
    pub(super) fn new(cost: u32) -> Self {
        let line = Arc::new(Semaphore::new(AT_ONCE + WAITING));
        Self { cost, line, places: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// The hash to keep, as etcd writes it.
    pub(super) async fn hash(&self, password: Zeroizing<String>) -> Result<String, Error> {
        if password.len() > MAX_PASSWORD_BYTES {
            return Err(Error::PasswordTooLong);
        }
        let cost = self.cost;
        let hashed = self.work(move || {
            let hashed = bcrypt::hash_with_result(password.as_bytes(), cost);
            hashed.map(|parts| parts.format_for_version(Version::TwoA))
        });
        hashed.await?.map_err(|error| failed(&error))
    }

    /// Whether this is the password that `hash` was made of; without one, or of an empty one, it is not.
    pub(super) async fn verify(
        &self,
        password: Zeroizing<String>,
        hash: Option<Bytes>,
    ) -> Result<bool, Error> {
        let cost = self.cost;
        self.work(move || match hash.filter(|hash| !hash.is_empty()) {
            Some(hash) => {
                let hash = std::str::from_utf8(&hash).unwrap_or_default();
                // As etcd it looks at 72 bytes, and at no zero behind so many.
                bcrypt::verify(password.as_bytes(), hash).unwrap_or(false)
            }
            None => {
                let hashed = bcrypt::hash_with_salt(password.as_bytes(), cost, NOBODYS_SALT);
                std::hint::black_box(hashed.is_ok());
                false
            }
        })
        .await
    }

    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let line = self.line.clone().try_acquire_owned().map_err(|_| Error::TooManyRequests)?;
        let place = self.places.clone().acquire_owned().await.map_err(|_| Error::Stopped)?;
        apart(Turn { _line: line, _place: place }, work).await
    }
}

fn failed(error: &BcryptError) -> Error {
    tracing::error!(%error, "a password was not hashed");
    Error::StoreFailed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lowest: tests need no more.
    const COST: u32 = 4;

    fn password(text: &str) -> Zeroizing<String> {
        Zeroizing::new(text.to_owned())
    }

    #[tokio::test]
    async fn a_hash_is_of_its_password_alone_and_as_etcd_writes_it() {
        let passwords = Passwords::new(COST);
        let hash = passwords.hash(password("secret")).await.unwrap();
        assert!(hash.starts_with("$2a$04$"), "{hash}");
        let hash = Some(Bytes::from(hash));
        assert_eq!(passwords.verify(password("secret"), hash.clone()).await, Ok(true));
        assert_eq!(passwords.verify(password("Secret"), hash.clone()).await, Ok(false));
        assert_eq!(passwords.verify(password(""), hash).await, Ok(false));
        assert_eq!(passwords.verify(password("secret"), None).await, Ok(false));
        assert_eq!(passwords.verify(password(""), Some(Bytes::new())).await, Ok(false));
        assert_eq!(passwords.verify(password("secret"), Some("none".into())).await, Ok(false));
    }

    #[tokio::test]
    async fn a_hash_that_etcd_made_is_known() {
        // Of `golang.org/x/crypto/bcrypt`, with the password `r`.
        let etcds = "$2a$10$YNOWTowaZNX0FTrZtdwAFuZT8mJkX1hxAtV/QgIqXC7GN4rIfWMqm";
        let passwords = Passwords::new(COST);
        assert_eq!(passwords.verify(password("r"), Some(etcds.into())).await, Ok(true));
    }

    #[tokio::test]
    async fn what_bcrypt_would_not_read_is_refused() {
        let passwords = Passwords::new(COST);
        let longest = password(&"x".repeat(72));
        let hash = Some(Bytes::from(passwords.hash(longest.clone()).await.unwrap()));
        assert_eq!(passwords.verify(longest, hash.clone()).await, Ok(true));
        assert_eq!(passwords.verify(password(&"x".repeat(71)), hash).await, Ok(false));
        assert_eq!(passwords.hash(password(&"x".repeat(73))).await, Err(Error::PasswordTooLong));
    }

    #[tokio::test]
    async fn a_line_that_is_full_is_told_so() {
        let passwords = Passwords::new(COST);
        let all = u32::try_from(AT_ONCE + WAITING).unwrap();
        let full = passwords.line.clone().acquire_many_owned(all).await.unwrap();
        assert_eq!(passwords.hash(password("x")).await, Err(Error::TooManyRequests));
        drop(full);
        assert!(passwords.hash(password("x")).await.is_ok());
    }
}
