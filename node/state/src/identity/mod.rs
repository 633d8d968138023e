//! The identity of a member: its ids, incarnation and node key, and the data directory that belongs
//! to them.
//!
//! Three things of a member must agree. Its *member id* is how Raft and clients refer to it. Its
//! *incarnation* is a random number that exists exactly as long as its data directory. Its *node
//! key* is the key of its TLS certificate. After a disk was wiped or a machine cloned, names and
//! addresses are the same, but these three are not. So such a machine is never mistaken for the old
//! voter.

mod data_dir;
mod document;
mod forced;
mod initial;
mod start_evidence;

use std::{fmt, str::FromStr};

use data_encoding::HEXLOWER;
use ring::{
    digest,
    rand::{SecureRandom, SystemRandom},
};

pub use self::{
    data_dir::{DataDir, DataDirError, Tombstone},
    document::{DocumentError, DocumentMember, MemberDocument},
    forced::{DroppedMember, ForcedCluster, MemberIdentity},
    initial::{InitialCluster, InitialMember},
    start_evidence::{StartEvidence, StartKind, StartRefusal},
};

/// A member's id, by which Raft, clients and operators refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// A cluster's id, which is fixed when the cluster is formed and different for every cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u64);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl MemberId {
    /// Computes the id of a member of the first configuration. It is the first eight bytes of a
    /// SHA-1 hash over the member's sorted peer URLs and the cluster token (etcd
    /// `membership.NewMember`).
    #[must_use]
    pub fn at_bootstrap(peer_urls: &[String], cluster_token: &str) -> Self {
        let mut urls: Vec<&str> = peer_urls.iter().map(String::as_str).collect();
        urls.sort_unstable();
        Self(first_eight_of_sha1(
            urls.iter().map(|url| url.as_bytes()).chain([cluster_token.as_bytes()]),
        ))
    }
}

impl MemberId {
    /// Computes the id of a member that is added to a running cluster. It is the hash of
    /// [`Self::at_bootstrap`], with the present time in place of the cluster token.
    ///
    /// etcd uses the time in seconds. Here it is in nanoseconds, so that two members that are added
    /// with the same URL within a second have different ids.
    #[must_use]
    pub fn added_at(peer_urls: &[String], since_epoch: std::time::Duration) -> Self {
        Self::at_bootstrap(peer_urls, &since_epoch.as_nanos().to_string())
    }
}

impl ClusterId {
    /// Computes the id of a cluster that begins with `members`. It is the first eight bytes of a
    /// SHA-1 hash over their ids, in ascending order and big-endian (etcd `RaftCluster.genID`).
    #[must_use]
    pub fn of(members: &[MemberId]) -> Self {
        let mut ids: Vec<u64> = members.iter().map(|id| id.0).collect();
        ids.sort_unstable();
        let bytes: Vec<[u8; 8]> = ids.iter().map(|id| id.to_be_bytes()).collect();
        Self(first_eight_of_sha1(bytes.iter().map(<[u8; 8]>::as_slice)))
    }
}

/// Returns the first eight bytes of a SHA-1 hash, which etcd's id formula uses. Nothing here relies
/// on collision resistance.
fn first_eight_of_sha1<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    for part in parts {
        context.update(part);
    }
    let digest = context.finish();
    let mut first = [0; 8];
    first.copy_from_slice(&digest.as_ref()[..8]);
    u64::from_be_bytes(first)
}

/// Random number that is drawn when a data directory is created, and identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incarnation(pub [u8; 16]);

impl Incarnation {
    /// Draws a new incarnation from the system's random source.
    ///
    /// # Panics
    /// Panics if the operating system has no randomness, in which case no key could be trusted
    /// either.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        SystemRandom::new().fill(&mut bytes).expect("the operating system gives random bytes");
        Self(bytes)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&HEXLOWER.encode(&self.0))
    }
}

impl FromStr for Incarnation {
    type Err = InvalidHex;

    fn from_str(text: &str) -> Result<Self, InvalidHex> {
        decode_hex(text).map(Self)
    }
}

/// Id of a change of members, chosen by the client. A change with the same id is carried out at
/// most once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperationId(pub [u8; 16]);

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&HEXLOWER.encode(&self.0))
    }
}

impl FromStr for OperationId {
    type Err = InvalidHex;

    fn from_str(text: &str) -> Result<Self, InvalidHex> {
        decode_hex(text).map(Self)
    }
}

/// SHA-256 hash of a member's public key (SPKI, DER). The member table can bind a member to this
/// key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeKey(pub [u8; 32]);

impl NodeKey {
    /// Computes the hash of a public key's SubjectPublicKeyInfo in DER encoding.
    #[must_use]
    pub fn of_spki(spki: &[u8]) -> Self {
        let digest = digest::digest(&digest::SHA256, spki);
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest.as_ref());
        Self(bytes)
    }
}

impl fmt::Display for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&HEXLOWER.encode(&self.0))
    }
}

impl FromStr for NodeKey {
    type Err = InvalidHex;

    fn from_str(text: &str) -> Result<Self, InvalidHex> {
        decode_hex(text).map(Self)
    }
}

/// Error for text that is not the expected number of lower-case hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected} lower-case hex digits")]
pub struct InvalidHex {
    /// Number of digits that were expected.
    pub expected: usize,
}

fn decode_hex<const N: usize>(text: &str) -> Result<[u8; N], InvalidHex> {
    HEXLOWER
        .decode(text.as_bytes())
        .ok()
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or(InvalidHex { expected: 2 * N })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_etcds_formula() {
        let member = MemberId::at_bootstrap(&["http://127.0.0.1:23201".to_owned()], "etcd-cluster");
        assert_eq!(member.to_string(), "c8d9246ced7969c0");
        assert_eq!(ClusterId::of(&[member]).to_string(), "29f4f851847d2427");
    }

    #[test]
    fn the_order_of_urls_and_members_does_not_change_ids() {
        let urls = ["http://b:1".to_owned(), "http://a:1".to_owned()];
        let turned = [urls[1].clone(), urls[0].clone()];
        let token = "t";
        assert_eq!(MemberId::at_bootstrap(&urls, token), MemberId::at_bootstrap(&turned, token));
        let (a, b) = (MemberId(7), MemberId(9));
        assert_eq!(ClusterId::of(&[a, b]), ClusterId::of(&[b, a]));
    }

    #[test]
    fn two_members_added_with_one_url_within_a_second_have_different_ids() {
        let urls = ["http://a:1".to_owned()];
        let at = |nanos| MemberId::added_at(&urls, std::time::Duration::new(1_700_000_000, nanos));
        assert_ne!(at(1), at(2));
    }

    #[test]
    fn another_cluster_token_gives_another_member_id() {
        let urls = ["http://a:1".to_owned()];
        assert_ne!(MemberId::at_bootstrap(&urls, "one"), MemberId::at_bootstrap(&urls, "two"));
    }

    #[test]
    fn an_incarnation_is_32_lower_case_hex_digits() {
        let incarnation = Incarnation::random();
        assert_eq!(incarnation.to_string().parse(), Ok(incarnation));
        for wrong in ["", "00", &"A".repeat(32), &"0".repeat(34), &"g".repeat(32)] {
            assert_eq!(wrong.parse::<Incarnation>(), Err(InvalidHex { expected: 32 }));
        }
    }
}
