//! Hashing of passwords, on threads that may block, a bounded number at a time. So hashing delays
//! only the callers whose passwords are hashed.

use std::sync::Arc;

use bcrypt::{BcryptError, Version};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use zeroize::Zeroizing;

use super::blocking::run_blocking;
use super::error::Error;

/// Maximum number of passwords hashed at a time. Each takes a core for about 50 ms at etcd's cost
/// of 10.
const MAX_CONCURRENT_HASHES: usize = 2;
/// Maximum number of passwords that wait to be hashed. A further one is refused.
const MAX_WAITING_PASSWORDS: usize = 64;
/// Salt used if the user doesn't exist, so that the answer takes equally long.
const DUMMY_SALT: [u8; 16] = [0; 16];
/// Maximum length of a password, since bcrypt ignores further bytes. A longer one can't be set.
const MAX_PASSWORD_BYTES: usize = 72;

/// Hashes and verifies passwords.
pub(crate) struct PasswordHasher {
    /// Cost of new hashes: `--bcrypt-cost`.
    cost: u32,
    queue_permits: Arc<Semaphore>,
    hash_permits: Arc<Semaphore>,
}

/// Permits for one password: one to be in the queue, and one to be hashed.
struct HashPermits {
    _queue: OwnedSemaphorePermit,
    _hashing: OwnedSemaphorePermit,
}

impl PasswordHasher {
    pub(super) fn new(cost: u32) -> Self {
        let line = Arc::new(Semaphore::new(MAX_CONCURRENT_HASHES + MAX_WAITING_PASSWORDS));
        Self {
            cost,
            queue_permits: line,
            hash_permits: Arc::new(Semaphore::new(MAX_CONCURRENT_HASHES)),
        }
    }

    /// Returns the hash to store, in etcd's format.
    pub(super) async fn hash(&self, password: Zeroizing<String>) -> Result<String, Error> {
        if password.len() > MAX_PASSWORD_BYTES {
            return Err(Error::PasswordTooLong);
        }
        let cost = self.cost;
        let hashed = self.work(move || {
            let hashed = bcrypt::hash_with_result(password.as_bytes(), cost);
            hashed.map(|parts| parts.format_for_version(Version::TwoA))
        });
        hashed.await?.map_err(|error| hash_error(&error))
    }

    /// Whether `hash` is the hash of this password. Returns false if there is no hash, or an empty
    /// one.
    pub(super) async fn verify(
        &self,
        password: Zeroizing<String>,
        hash: Option<Bytes>,
    ) -> Result<bool, Error> {
        let cost = self.cost;
        self.work(move || match hash.filter(|hash| !hash.is_empty()) {
            Some(hash) => {
                let hash = std::str::from_utf8(&hash).unwrap_or_default();
                // As in etcd, only the first 72 bytes of a password count. bcrypt adds a
                // terminating zero only to a shorter password.
                bcrypt::verify(password.as_bytes(), hash).unwrap_or(false)
            }
            None => {
                let hashed = bcrypt::hash_with_salt(password.as_bytes(), cost, DUMMY_SALT);
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
        let line =
            self.queue_permits.clone().try_acquire_owned().map_err(|_| Error::TooManyRequests)?;
        let place = self.hash_permits.clone().acquire_owned().await.map_err(|_| Error::Stopped)?;
        run_blocking(HashPermits { _queue: line, _hashing: place }, work).await
    }
}

fn hash_error(error: &BcryptError) -> Error {
    tracing::error!(%error, "a password was not hashed");
    Error::StoreFailed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lowest cost that bcrypt allows, to keep the tests fast.
    const COST: u32 = 4;

    fn password(text: &str) -> Zeroizing<String> {
        Zeroizing::new(text.to_owned())
    }

    #[tokio::test]
    async fn a_hash_has_etcds_format_and_matches_only_its_password() {
        let passwords = PasswordHasher::new(COST);
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
    async fn a_hash_made_by_etcd_matches_its_password() {
        // Made with `golang.org/x/crypto/bcrypt` from the password `r`.
        let etcds = "$2a$10$YNOWTowaZNX0FTrZtdwAFuZT8mJkX1hxAtV/QgIqXC7GN4rIfWMqm";
        let passwords = PasswordHasher::new(COST);
        assert_eq!(passwords.verify(password("r"), Some(etcds.into())).await, Ok(true));
    }

    #[tokio::test]
    async fn a_password_that_is_longer_than_bcrypt_reads_is_refused() {
        let passwords = PasswordHasher::new(COST);
        let longest = password(&"x".repeat(72));
        let hash = Some(Bytes::from(passwords.hash(longest.clone()).await.unwrap()));
        assert_eq!(passwords.verify(longest, hash.clone()).await, Ok(true));
        assert_eq!(passwords.verify(password(&"x".repeat(71)), hash).await, Ok(false));
        assert_eq!(passwords.hash(password(&"x".repeat(73))).await, Err(Error::PasswordTooLong));
    }

    #[tokio::test]
    async fn a_password_is_refused_while_the_queue_is_full() {
        let passwords = PasswordHasher::new(COST);
        let all = u32::try_from(MAX_CONCURRENT_HASHES + MAX_WAITING_PASSWORDS).unwrap();
        let full = passwords.queue_permits.clone().acquire_many_owned(all).await.unwrap();
        assert_eq!(passwords.hash(password("x")).await, Err(Error::TooManyRequests));
        drop(full);
        assert!(passwords.hash(password("x")).await.is_ok());
    }
}
