//! Values.

use std::sync::Arc;

use discovery_formation as formation;
use discovery_types::digest::{Digest, Nonce};
use discovery_types::jws::{Jws, JwsError};
use discovery_types::machine::MachineFacts;
use discovery_types::record::{Record, SignedRecord};
use discovery_types::{proposal, statement};
use uuid::Uuid;

/// The machine's view of a record whose signatures were verified. `node_key` is the hash of the
/// node's key, taken from the verified signing request.
pub fn record_of_verified(
    signed: &SignedRecord,
    record: &Record,
    node_key: Digest,
) -> formation::Record {
    formation::Record {
        key: formation::KeyId(*record.agent_key.as_bytes()),
        hash: formation::Hash(signed.record.hash().0),
        token_hash: formation::Hash(signed.endorsement.hash().0),
        node_key: formation::Hash(node_key.0),
        machine: machine(&record.machine),
        incarnation: formation::Incarnation(u128::from_be_bytes(*record.incarnation.as_bytes())),
        name: record.name.to_string(),
        peer_urls: record.peer_urls.iter().map(ToString::to_string).collect(),
        client_urls: record.client_urls.iter().map(ToString::to_string).collect(),
        cluster: formation::ClusterId(record.cluster.as_u128()),
        grant: formation::GrantId(record.grant.to_string().into()),
        jws: signed.record.as_str().into(),
        token_jws: signed.endorsement.as_str().into(),
    }
}

fn machine(facts: &MachineFacts) -> formation::Machine {
    let facts = [("dmi-uuid", &facts.dmi_uuid), ("machine-id", &facts.machine_id)];
    formation::Machine(
        facts
            .into_iter()
            .filter_map(|(name, fact)| Some((name.to_owned(), fact.clone()?)))
            .collect(),
    )
}

/// What a statement permits.
pub fn permissions(permissions: &statement::Permissions) -> formation::Permissions {
    formation::Permissions {
        allow_loopback: permissions.loopback,
        allow_shared_host: permissions.shared_host,
        allow_even: permissions.even_size,
        allow_low_ports: permissions.low_ports,
    }
}

/// The newest statement of a chain. The machine counts from 1, the wire from 0.
pub fn statement_of(chain: &statement::StatementChain) -> formation::Statement {
    let newest = chain.newest();
    formation::Statement {
        hash: formation::Hash(chain.newest_hash().0),
        sequence: newest.seq + 1,
        cluster: formation::ClusterId(newest.cluster.as_u128()),
        size: newest.size,
        permissions: permissions(&newest.permissions),
    }
}

/// Who holds an agent's key.
pub fn session(boot: u64, nonce: &Nonce) -> formation::Session {
    formation::Session { boot, nonce: u128::from_be_bytes(*nonce.as_bytes()) }
}

/// The protocol's hash of a proposal.
pub fn hash_of(list: &formation::Proposal) -> formation::Hash {
    // As `discovery_types::proposal::Proposal::hash`, over hashes that are known already.
    let mut input = b"muster-proposal-1".to_vec();
    input.extend_from_slice(&list.statement.0);
    input.extend_from_slice(&list.epoch.to_be_bytes());
    for record in &list.records {
        input.extend_from_slice(&record.hash.0);
        input.extend_from_slice(&record.token_hash.0);
    }
    formation::Hash(Digest::of(&input).0)
}

/// The list as it crosses the wire; `grants` are those that its records name.
pub fn wire_proposal(
    list: &formation::Proposal,
    grants: Vec<Jws>,
) -> Result<proposal::Proposal, JwsError> {
    let seat = |record: &Arc<formation::Record>| -> Result<SignedRecord, JwsError> {
        Ok(SignedRecord { record: record.jws.parse()?, endorsement: record.token_jws.parse()? })
    };
    Ok(proposal::Proposal {
        cluster: Uuid::from_u128(list.cluster.0),
        statement: Digest(list.statement.0),
        epoch: list.epoch,
        seats: list.records.iter().map(seat).collect::<Result<_, _>>()?,
        grants,
    })
}

/// A number that no row can hold: it would come back as another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is more than a row can hold")]
pub struct OutOfRange(pub u64);

/// Epochs, counters and times in rows, which are signed there.
pub fn epoch_to_row(number: u64) -> Result<i64, OutOfRange> {
    i64::try_from(number).map_err(|_| OutOfRange(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_would_come_back_as_another_is_an_error() {
        assert_eq!(epoch_to_row(i64::MAX as u64), Ok(i64::MAX));
        assert_eq!(epoch_to_row(1 << 63), Err(OutOfRange(1 << 63)));
    }
}
