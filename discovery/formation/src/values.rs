//! Values that both state machines take: verified, normalised, plain data.
//!
//! The caller has checked signatures, parsed addresses and computed hashes; nothing here does.
//! Signed texts (`Arc<str>`) are carried as received and never parsed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// A point in time on the service's database clock: microseconds since the Unix epoch.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixMicros(pub u64);

/// A length of time in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millis(pub u64);

impl UnixMicros {
    /// Returns the point `length` later; saturates instead of wrapping.
    #[must_use]
    pub fn after(self, length: Millis) -> UnixMicros {
        UnixMicros(self.0.saturating_add(length.0.saturating_mul(1_000)))
    }

    /// Returns the time from here to `later`, rounded up; zero if `later` has passed.
    #[must_use]
    pub fn until(self, later: UnixMicros) -> Millis {
        Millis(later.0.saturating_sub(self.0).div_ceil(1_000))
    }
}

impl fmt::Debug for UnixMicros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}us", self.0)
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 >= 10_000 {
            write!(f, "{} s", self.0.div_ceil(1_000))
        } else if self.0 >= 1_000 {
            write!(f, "{}.{} s", self.0 / 1_000, self.0 % 1_000 / 100)
        } else {
            write!(f, "{} ms", self.0)
        }
    }
}

/// Writes the first four bytes in hex: enough to tell keys and hashes apart in a sentence.
fn write_short_hex(bytes: &[u8; 32], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().take(4).try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// An agent's Ed25519 public key. It names the agent everywhere.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentKey(pub [u8; 32]);

impl fmt::Debug for AgentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_short_hex(&self.0, f)
    }
}

impl fmt::Display for AgentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_short_hex(&self.0, f)
    }
}

/// SHA-256 value that the caller has computed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hash(pub [u8; 32]);

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_short_hex(&self.0, f)
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_short_hex(&self.0, f)
    }
}

/// UUID of a cluster, as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u128);

/// Random id of one incarnation of a member, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u128);

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Id of a grant, as text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantId(pub Arc<str>);

/// Number of one attempt to agree on a list of members, counted from 1; 0 means none yet.
pub type Epoch = u64;

/// Number of a seat in the list of members, counted from 1.
pub type Seat = u8;

/// Known facts about the machine under an agent, by name: for instance `dmi-uuid` and `machine-id`.
/// Every fact is optional, so [`MachineIdentity::differs_from`] and [`MachineIdentity::is_same_as`]
/// are not opposites.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MachineIdentity(pub BTreeMap<String, String>);

impl MachineIdentity {
    /// Whether the identities are of different machines: at least one fact has a different value in
    /// each of them.
    #[must_use]
    pub fn differs_from(&self, other: &MachineIdentity) -> bool {
        self.0.iter().any(|(fact, value)| other.0.get(fact).is_some_and(|theirs| theirs != value))
    }

    /// Whether the identities are of one machine, as far as the facts tell. They have at least one
    /// fact in common, and no common fact differs.
    #[must_use]
    pub fn is_same_as(&self, other: &MachineIdentity) -> bool {
        self.0.keys().any(|fact| other.0.contains_key(fact)) && !self.differs_from(other)
    }
}

/// Verified self-description of one agent. The agent's key has signed the record, and the token's
/// key has signed the record's hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentRecord {
    /// Public key of the agent.
    pub key: AgentKey,
    /// SHA-256 of `jws`. Records with equal hashes are equal.
    pub hash: Hash,
    /// SHA-256 of the bytes of `token_jws`.
    pub token_hash: Hash,
    /// SHA-256 of the node's public key (SPKI DER).
    pub node_key: Hash,
    /// Machine that the agent runs on.
    pub machine: MachineIdentity,
    /// Incarnation of the agent's node.
    pub incarnation: Incarnation,
    /// Name of the member in its cluster.
    pub name: String,
    /// Zone of the host, as its agent says.
    pub zone: Option<String>,
    /// Peer URLs, normalised: `https://host:port`, lower case, port always given, no path.
    pub peer_urls: Vec<String>,
    /// Client URLs, normalised like the peer URLs.
    pub client_urls: Vec<String>,
    /// Cluster that the agent asks to be a member of.
    pub cluster: ClusterId,
    /// Grant that the agent redeems.
    pub grant: GrantId,
    /// The record as received: a compact JWS by `key`.
    pub jws: Arc<str>,
    /// The token key's signature over the record's hash, as received.
    pub token_jws: Arc<str>,
}

/// Permissions that a cluster's creator gave beyond the defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Permissions {
    /// Loopback addresses may be advertised.
    pub allow_loopback: bool,
    /// Two members may share a machine.
    pub allow_shared_host: bool,
    /// The size may be even.
    pub allow_even: bool,
    /// Ports below 1024 may be advertised.
    pub allow_low_ports: bool,
}

/// Newest verified statement of a cluster, in which an owner has signed the cluster's size and
/// rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// SHA-256 of the statement's JWS.
    pub hash: Hash,
    /// Number of the statement in its chain, counted from 1.
    pub sequence: u64,
    /// Cluster that the statement is about.
    pub cluster: ClusterId,
    /// Number of members: 1 to 9. Never changes.
    pub size: u8,
    pub permissions: Permissions,
    /// Whether the members are spread over zones, so that no zone has a majority of them.
    pub spreads_zones: bool,
    /// Whether no list of members is frozen before an issuer has approved each of its agents.
    pub needs_approval: bool,
}

/// Returns the smallest majority of `size` members.
#[must_use]
pub fn quorum(size: usize) -> usize {
    size / 2 + 1
}

/// List of members to be signed, with the epoch in which it was frozen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProposedList {
    /// Cluster that the list is for.
    pub cluster: ClusterId,
    /// Hash of the newest statement when the list was frozen.
    pub statement: Hash,
    pub epoch: Epoch,
    /// Records of the members, seat 1 first.
    pub records: Vec<Arc<AgentRecord>>,
}

impl ProposedList {
    /// Returns the seat of `key` in the list, if it has one.
    #[must_use]
    pub fn seat_of(&self, key: AgentKey) -> Option<Seat> {
        (1..).zip(&self.records).find(|(_, record)| record.key == key).map(|(seat, _)| seat)
    }

    /// Returns the record of `key` in the list, if it has one.
    #[must_use]
    pub fn record_of(&self, key: AgentKey) -> Option<&Arc<AgentRecord>> {
        self.records.iter().find(|record| record.key == key)
    }
}

/// A whole commit document, verified by statement chain, records and acks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitDocument {
    /// List of members that every member signed.
    pub proposal: ProposedList,
    /// Hash of the proposal, which every ack is signed over.
    pub proposal_hash: Hash,
    /// The commit document as received.
    pub text: Arc<str>,
}

/// One run of one agent. It distinguishes two processes that use one agent key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentSession {
    /// Number of times that this agent has started; durable before it is sent.
    pub boot: u64,
    /// Random number, chosen at the start and never written down.
    pub nonce: u128,
}

/// Signed promise never to be in a list of members of an epoch ≤ `epoch`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// Highest epoch that the release covers.
    pub epoch: Epoch,
    /// The release as received, for other agents to verify.
    pub jws: Arc<str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(facts: &[(&str, &str)]) -> MachineIdentity {
        MachineIdentity(facts.iter().map(|&(fact, value)| (fact.into(), value.into())).collect())
    }

    #[test]
    fn machines_differ_if_a_fact_that_both_have_differs() {
        let here = machine(&[("dmi", "1"), ("id", "a")]);
        assert!(here.differs_from(&machine(&[("dmi", "2"), ("id", "a")])));
        assert!(!here.differs_from(&machine(&[("dmi", "1")])));
        assert!(
            !here.differs_from(&machine(&[("other", "2")])),
            "nothing in common proves nothing"
        );
    }

    #[test]
    fn machines_are_the_same_if_they_share_a_fact_and_none_differs() {
        let here = machine(&[("dmi", "1"), ("id", "a")]);
        assert!(here.is_same_as(&machine(&[("dmi", "1")])));
        assert!(!here.is_same_as(&machine(&[("dmi", "1"), ("id", "b")])));
        assert!(!here.is_same_as(&machine(&[("other", "1")])));
    }

    #[test]
    fn quorum_is_more_than_half() {
        let quorums: Vec<usize> = (1..=9).map(quorum).collect();
        assert_eq!(quorums, [1, 2, 2, 3, 3, 4, 4, 5, 5]);
    }
}
