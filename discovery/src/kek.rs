//! The key-encryption key (KEK), without which a stolen database doesn't reveal the clusters' CA
//! keys.
//!
//! Keys are wrapped with AES-256-GCM. A wrapped key is `1 | key version (u32, big endian) | nonce
//! (12) | ciphertext and tag`. The associated data binds a wrapped key to its cluster and purpose,
//! so a row that was copied to another cluster can't be decrypted. Nonces are random, which is safe
//! for 2³² wraps under one key (NIST SP 800-38D).

use std::collections::BTreeMap;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use uuid::Uuid;
use zeroize::Zeroizing;

const FORMAT: u8 = 1;
const HEADER: usize = 1 + 4;
/// Length of a key-encryption key, in bytes.
pub(crate) const KEK_LEN: usize = 32;

/// Plaintext of a database seal.
const SEAL_PLAINTEXT: &[u8] = b"muster-database-1";

/// Purpose of a wrapped key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyPurpose {
    /// Key of the CA for the certificates of connections between members.
    PeerCa,
    /// Key of the CA for members' and clients' certificates on the client port.
    ClientCa,
    /// Seal that tells which key directory a database belongs to.
    Database,
}

impl KeyPurpose {
    fn label(self) -> &'static [u8] {
        match self {
            KeyPurpose::PeerCa => b"peer-ca",
            KeyPurpose::ClientCa => b"client-ca",
            KeyPurpose::Database => b"database",
        }
    }
}

/// Reason why a wrapped key can't be decrypted.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum KekError {
    /// The wrapped key names a version that the key directory lacks. The directory is an older
    /// copy, or another service's.
    #[error("the key directory has no key-encryption key of version {0}")]
    UnknownVersion(u32),
    /// The wrapped key is truncated, changed, of another format, or from another cluster or
    /// purpose.
    #[error("the wrapped key is damaged, or belongs to another cluster or purpose")]
    Damaged,
    /// The system's random source failed.
    #[error("the system's random source failed")]
    Random,
}

/// All versions of the key-encryption key. New secrets are encrypted with the highest version.
pub(crate) struct Kek {
    keys: BTreeMap<u32, LessSafeKey>,
}

impl std::fmt::Debug for Kek {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kek").field("versions", &self.keys.keys().collect::<Vec<_>>()).finish()
    }
}

impl Kek {
    /// Builds the KEK from `keys` and their versions. Returns `None` if there are no keys.
    pub(crate) fn new(
        keys: impl IntoIterator<Item = (u32, Zeroizing<[u8; KEK_LEN]>)>,
    ) -> Option<Self> {
        let keys: BTreeMap<_, _> = keys
            .into_iter()
            .map(|(version, bytes)| {
                let key = UnboundKey::new(&AES_256_GCM, &bytes[..]).expect("32 bytes fit AES-256");
                (version, LessSafeKey::new(key))
            })
            .collect();
        (!keys.is_empty()).then_some(Kek { keys })
    }

    /// Returns the version with which new secrets are encrypted.
    pub(crate) fn newest_version(&self) -> u32 {
        *self.keys.last_key_value().expect("a Kek holds at least one key").0
    }

    /// Wraps a secret: encrypts it with the newest key, for this cluster and purpose only.
    pub(crate) fn wrap(
        &self,
        cluster: Uuid,
        purpose: KeyPurpose,
        secret: &[u8],
    ) -> Result<Vec<u8>, KekError> {
        let (version, key) = self.keys.last_key_value().expect("a Kek holds at least one key");
        let mut nonce = [0_u8; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| KekError::Random)?;
        let mut sealed = Zeroizing::new(secret.to_vec());
        let tag = key
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                associated_data(*version, cluster, purpose),
                &mut sealed,
            )
            .map_err(|_| KekError::Damaged)?;
        let mut wrapped = vec![FORMAT];
        wrapped.extend_from_slice(&version.to_be_bytes());
        wrapped.extend_from_slice(&nonce);
        wrapped.extend_from_slice(&sealed);
        wrapped.extend_from_slice(tag.as_ref());
        Ok(wrapped)
    }

    /// Makes a seal, which only this key directory's keys open. It tells which directory a database
    /// belongs to.
    pub(crate) fn seal(&self) -> Result<Vec<u8>, KekError> {
        self.wrap(Uuid::nil(), KeyPurpose::Database, SEAL_PLAINTEXT)
    }

    /// Whether the seal was made with one of this directory's keys, older versions included.
    pub(crate) fn opens(&self, sealed: &[u8]) -> bool {
        self.unwrap(Uuid::nil(), KeyPurpose::Database, sealed)
            .is_ok_and(|text| text[..] == *SEAL_PLAINTEXT)
    }

    /// Whether a wrapped key was encrypted with the newest version, as its header says.
    pub(crate) fn is_newest(&self, wrapped: &[u8]) -> bool {
        wrapped.get(1..HEADER) == Some(&self.newest_version().to_be_bytes()[..])
    }

    /// Decrypts a key that `wrap` made for the same cluster and purpose.
    pub(crate) fn unwrap(
        &self,
        cluster: Uuid,
        purpose: KeyPurpose,
        wrapped: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, KekError> {
        let (header, rest) = wrapped.split_at_checked(HEADER).ok_or(KekError::Damaged)?;
        let (nonce, sealed) = rest.split_at_checked(NONCE_LEN).ok_or(KekError::Damaged)?;
        if header[0] != FORMAT {
            return Err(KekError::Damaged);
        }
        let version = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
        let key = self.keys.get(&version).ok_or(KekError::UnknownVersion(version))?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| KekError::Damaged)?;
        let mut buffer = Zeroizing::new(sealed.to_vec());
        let length = key
            .open_in_place(nonce, associated_data(version, cluster, purpose), &mut buffer)
            .map_err(|_| KekError::Damaged)?
            .len();
        buffer.truncate(length);
        Ok(buffer)
    }
}

fn associated_data(version: u32, cluster: Uuid, purpose: KeyPurpose) -> Aad<Vec<u8>> {
    let mut data = b"muster-kek-1\0".to_vec();
    data.extend_from_slice(&version.to_be_bytes());
    data.extend_from_slice(cluster.as_bytes());
    data.extend_from_slice(purpose.label());
    Aad::from(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kek(versions: &[u32]) -> Kek {
        Kek::new(versions.iter().map(|v| (*v, Zeroizing::new([*v as u8; KEK_LEN])))).unwrap()
    }

    #[test]
    fn a_wrapped_key_is_unwrapped_again() {
        let id = Uuid::now_v7();
        let wrapped = kek(&[1]).wrap(id, KeyPurpose::PeerCa, b"secret").unwrap();
        assert_eq!(&kek(&[1]).unwrap(id, KeyPurpose::PeerCa, &wrapped).unwrap()[..], b"secret");
    }

    #[test]
    fn a_key_moved_to_another_cluster_or_purpose_does_not_open() {
        let (id, other) = (Uuid::now_v7(), Uuid::now_v7());
        let wrapped = kek(&[1]).wrap(id, KeyPurpose::PeerCa, b"secret").unwrap();
        assert_eq!(kek(&[1]).unwrap(other, KeyPurpose::PeerCa, &wrapped), Err(KekError::Damaged));
        assert_eq!(kek(&[1]).unwrap(id, KeyPurpose::ClientCa, &wrapped), Err(KekError::Damaged));
    }

    #[test]
    fn every_changed_or_missing_byte_is_noticed() {
        let id = Uuid::now_v7();
        let wrapped = kek(&[1]).wrap(id, KeyPurpose::PeerCa, b"secret").unwrap();
        for at in 0..wrapped.len() {
            let mut changed = wrapped.clone();
            changed[at] ^= 1;
            assert!(kek(&[1]).unwrap(id, KeyPurpose::PeerCa, &changed).is_err(), "byte {at}");
            assert!(
                kek(&[1]).unwrap(id, KeyPurpose::PeerCa, &wrapped[..at]).is_err(),
                "cut at {at}"
            );
        }
    }

    #[test]
    fn a_seal_opens_with_the_keys_of_its_directory_alone() {
        let sealed = kek(&[1]).seal().unwrap();
        assert!(kek(&[1]).opens(&sealed));
        assert!(kek(&[1, 2]).opens(&sealed), "after a rotation");
        assert!(!kek(&[2]).opens(&sealed));
        let other = Kek::new([(1, Zeroizing::new([9; KEK_LEN]))]).unwrap();
        assert!(!other.opens(&sealed), "another directory's version 1");
        let id = Uuid::nil();
        let wrapped = kek(&[1]).wrap(id, KeyPurpose::PeerCa, SEAL_PLAINTEXT).unwrap();
        assert!(!kek(&[1]).opens(&wrapped));
    }

    #[test]
    fn the_newest_version_wraps_and_older_ones_still_open() {
        let id = Uuid::now_v7();
        let old = kek(&[1]).wrap(id, KeyPurpose::PeerCa, b"secret").unwrap();
        let both = kek(&[1, 2]);
        assert!(both.unwrap(id, KeyPurpose::PeerCa, &old).is_ok());
        let new = both.wrap(id, KeyPurpose::PeerCa, b"secret").unwrap();
        let refused = kek(&[1]).unwrap(id, KeyPurpose::PeerCa, &new);
        assert_eq!(refused, Err(KekError::UnknownVersion(2)));
    }
}
