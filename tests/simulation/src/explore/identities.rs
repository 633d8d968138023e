//! Keys, records and hashes, as small numbers in place of large ones.
//!
//! Hosts are symmetric, so comparing two states relabels everything that names a host. A real hash
//! could not be relabelled. Therefore a hash here is the proposal itself, packed into 32 bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use formation_explored::{
    AgentKey, AgentRecord, ClusterId, Epoch, GrantId, Hash, Incarnation, MachineIdentity,
    Permissions, ProposedList, Statement,
};

/// Maximum number of hosts in a configuration.
pub const MAX_HOSTS: usize = 6;
/// Maximum number of keys that one host can have, one after the other.
pub(super) const MAX_KEYS_PER_HOST: usize = 3;

/// Id of the only cluster.
pub(super) const CLUSTER: ClusterId = ClusterId(7);

/// Returns the key that a host has after it was re-imaged this many times.
#[must_use]
pub fn key(host: usize, reimage_count: u8) -> AgentKey {
    let mut bytes = [0; 32];
    bytes[0] = u8::try_from(host).expect("fewer than 256 hosts");
    bytes[1] = reimage_count;
    AgentKey(bytes)
}

/// Returns the host that has or had this key.
#[must_use]
pub(super) fn host_of(key: AgentKey) -> usize {
    usize::from(key.0[0])
}

/// Returns how often the key's host had been re-imaged when it created the key.
#[must_use]
pub(super) fn reimage_count_of(key: AgentKey) -> u8 {
    key.0[1]
}

/// Returns the incarnation of a key.
#[must_use]
pub(super) fn incarnation(key: AgentKey) -> Incarnation {
    Incarnation(u128::from(key.0[0]) << 8 | u128::from(key.0[1]))
}

/// Returns a host's letter, followed by a number once it was re-imaged: `A`, `A2`.
#[must_use]
pub(super) fn name(key: AgentKey) -> String {
    let letter = char::from(b'A' + key.0[0]);
    if key.0[1] == 0 { letter.to_string() } else { format!("{letter}{}", key.0[1] + 1) }
}

/// Returns the properties by which agents recognise a machine.
#[must_use]
pub(super) fn machine(host: usize) -> MachineIdentity {
    MachineIdentity(BTreeMap::from([("id".to_owned(), host.to_string())]))
}

static RECORDS: LazyLock<Vec<Arc<AgentRecord>>> = LazyLock::new(|| {
    let each =
        |host| (0..MAX_KEYS_PER_HOST).map(move |reimage_count| make_record(host, reimage_count));
    (0..MAX_HOSTS).flat_map(each).collect()
});

fn make_record(host: usize, reimage_count: usize) -> Arc<AgentRecord> {
    let key = key(host, u8::try_from(reimage_count).expect("few re-images"));
    Arc::new(AgentRecord {
        key,
        hash: Hash(key.0),
        token_hash: Hash(key.0),
        node_key: Hash(key.0),
        machine: machine(host),
        incarnation: incarnation(key),
        // A re-imaged host has the same name and addresses as before.
        name: format!("host-{host}"),
        zone: None,
        peer_urls: vec![format!("https://10.0.0.{}:2380", host + 1)],
        client_urls: vec![format!("https://10.0.0.{}:2379", host + 1)],
        cluster: CLUSTER,
        grant: grant(),
        jws: Arc::from(""),
        token_jws: Arc::from(""),
    })
}

/// Returns the record of a key.
#[must_use]
pub(super) fn record(key: AgentKey) -> Arc<AgentRecord> {
    Arc::clone(&RECORDS[host_of(key) * MAX_KEYS_PER_HOST + usize::from(reimage_count_of(key))])
}

static GRANT: LazyLock<GrantId> = LazyLock::new(|| GrantId(Arc::from("boot")));

/// Returns the id of the only grant.
#[must_use]
pub(super) fn grant() -> GrantId {
    GRANT.clone()
}

/// Returns the only statement, for a cluster of `size` seats.
#[must_use]
pub(super) fn statement(size: u8) -> Statement {
    Statement {
        hash: Hash([1; 32]),
        sequence: 1,
        cluster: CLUSTER,
        size,
        permissions: Permissions { allow_even: true, ..Permissions::default() },
        spreads_zones: false,
        needs_approval: false,
    }
}

/// Packs the proposal into a hash: its epoch, its number of seats, then the host and re-image count
/// of each seat.
#[must_use]
pub(super) fn hash_of(proposal: &ProposedList) -> Hash {
    let mut bytes = [0; 32];
    bytes[0] = u8::try_from(proposal.epoch.min(255)).expect("at most 255");
    bytes[1] = u8::try_from(proposal.records.len()).expect("at most 9 records");
    for (place, record) in proposal.records.iter().enumerate() {
        bytes[2 + 2 * place] = record.key.0[0];
        bytes[3 + 2 * place] = record.key.0[1];
    }
    Hash(bytes)
}

/// Returns the hash of the list of members with these keys, in the order of the seats.
#[must_use]
pub(super) fn list_of(epoch: Epoch, keys: &[AgentKey]) -> Hash {
    let size = u8::try_from(keys.len()).expect("at most 9 seats");
    let records = keys.iter().map(|&key| record(key)).collect();
    hash_of(&ProposedList { cluster: CLUSTER, statement: statement(size).hash, epoch, records })
}

/// Returns the members of the proposal that `h` encodes.
pub(super) fn members_of(h: Hash) -> impl Iterator<Item = AgentKey> {
    (0..usize::from(h.0[1]))
        .map(move |place| key(usize::from(h.0[2 + 2 * place]), h.0[3 + 2 * place]))
}

/// Returns the epoch of the proposal that `h` encodes.
#[must_use]
pub(super) fn epoch_of(h: Hash) -> Epoch {
    Epoch::from(h.0[0])
}

/// Returns the proposal that `h` encodes.
#[must_use]
pub(super) fn proposal_of(h: Hash) -> ProposedList {
    let records: Vec<Arc<AgentRecord>> = members_of(h).map(record).collect();
    let size = u8::try_from(records.len()).expect("at most 9 records");
    ProposedList { cluster: CLUSTER, statement: statement(size).hash, epoch: epoch_of(h), records }
}

/// Formats a list of members for a person: `{A,B,C} e1`.
#[must_use]
pub(super) fn format_list(h: Hash) -> String {
    let names: Vec<String> = members_of(h).map(name).collect();
    format!("{{{}}} e{}", names.join(","), epoch_of(h))
}
