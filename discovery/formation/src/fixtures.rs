//! Test fixtures: hosts, records and lists for this crate's unit tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::values::{
    AgentKey, AgentRecord, ClusterId, GrantId, Hash, Incarnation, MachineIdentity, Millis,
    Permissions, ProposedList, Statement, UnixMicros,
};

pub(crate) const CLUSTER: ClusterId = ClusterId(7);
pub(crate) const START: UnixMicros = UnixMicros(1_000_000_000);

pub(crate) fn key(host: u8) -> AgentKey {
    AgentKey([host; 32])
}

pub(crate) fn machine(host: u8) -> MachineIdentity {
    MachineIdentity(BTreeMap::from([("id".to_owned(), host.to_string())]))
}

pub(crate) fn plain_record(host: u8) -> AgentRecord {
    AgentRecord {
        key: key(host),
        hash: Hash([host; 32]),
        token_hash: Hash([host; 32]),
        node_key: Hash([host; 32]),
        machine: machine(host),
        incarnation: Incarnation(u128::from(host)),
        name: format!("host-{host}"),
        zone: None,
        peer_urls: vec![format!("https://10.0.0.{host}:2380")],
        client_urls: vec![format!("https://10.0.0.{host}:2379")],
        cluster: CLUSTER,
        grant: GrantId(Arc::from("boot")),
        jws: Arc::from("record"),
        token_jws: Arc::from("token"),
    }
}

pub(crate) fn record(host: u8) -> Arc<AgentRecord> {
    Arc::new(plain_record(host))
}

pub(crate) fn statement(size: u8) -> Statement {
    Statement {
        hash: Hash([200; 32]),
        sequence: 1,
        cluster: CLUSTER,
        size,
        permissions: Permissions::default(),
        spreads_zones: false,
        needs_approval: false,
    }
}

pub(crate) fn hash_of(proposal: &ProposedList) -> Hash {
    let mut bytes = [0; 32];
    bytes[24..].copy_from_slice(&proposal.epoch.to_be_bytes());
    for (place, record) in proposal.records.iter().enumerate() {
        bytes[1 + place] = record.hash.0[0];
    }
    Hash(bytes)
}

pub(crate) fn proposal(epoch: u64, hosts: &[u8]) -> ProposedList {
    let records = hosts.iter().map(|&host| record(host)).collect();
    ProposedList { cluster: CLUSTER, statement: statement(3).hash, epoch, records }
}

pub(crate) fn seconds(count: u64) -> Millis {
    Millis(count * 1_000)
}

/// Returns the name of an enum's variant, from its `Debug` text.
pub(crate) fn variant(value: &impl std::fmt::Debug) -> String {
    format!("{value:?}").chars().take_while(|c| c.is_alphanumeric()).collect()
}
