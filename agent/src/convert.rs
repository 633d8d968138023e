//! From verified wire types to the plain values of the protocol's machine, and back.
//!
//! Only what has passed verification is converted: each function takes a `Verified…` type, or what
//! this agent itself has signed.

use std::sync::Arc;

use discovery_formation as formation;
use discovery_types::api::ClusterState;
use discovery_types::digest::{Digest, Incarnation};
use discovery_types::document::VerifiedDocument;
use discovery_types::jws::{JwsError, Typ};
use discovery_types::key::PublicKey;
use discovery_types::machine::MachineFacts;
use discovery_types::proposal::VerifiedProposal;
use discovery_types::record::{Record, SignedRecord, VerifiedRecord};
use discovery_types::statement::Permissions;
use discovery_types::url::NodeUrl;
use formation::service::Phase;
use uuid::Uuid;

/// The fact that [`MachineFacts::dmi_uuid`] holds.
pub const DMI_UUID: &str = "dmi-uuid";
/// The fact that [`MachineFacts::machine_id`] holds.
pub const MACHINE_ID: &str = "machine-id";

/// An agent's key as the machine names it.
pub fn key(key: &PublicKey) -> formation::KeyId {
    formation::KeyId(*key.as_bytes())
}

/// The reverse of [`key`].
pub fn public_key(key: formation::KeyId) -> PublicKey {
    PublicKey::from_bytes(key.0)
}

/// A hash.
pub fn hash(digest: &Digest) -> formation::Hash {
    formation::Hash(*digest.as_bytes())
}

/// The reverse of [`hash`].
pub fn digest(hash: formation::Hash) -> Digest {
    Digest(hash.0)
}

/// A cluster's id.
pub fn cluster(id: Uuid) -> formation::ClusterId {
    formation::ClusterId(id.as_u128())
}

/// An incarnation.
pub fn incarnation(incarnation: &Incarnation) -> formation::Incarnation {
    formation::Incarnation(u128::from_be_bytes(*incarnation.as_bytes()))
}

/// The reverse of [`incarnation`].
pub fn wire_incarnation(incarnation: formation::Incarnation) -> Incarnation {
    Incarnation(incarnation.0.to_be_bytes())
}

/// What is known of a machine.
pub fn machine(facts: &MachineFacts) -> formation::Machine {
    let known = [(DMI_UUID, &facts.dmi_uuid), (MACHINE_ID, &facts.machine_id)];
    let fact = |(fact, value): (&str, &Option<String>)| Some((fact.to_owned(), value.clone()?));
    formation::Machine(known.into_iter().filter_map(fact).collect())
}

/// The reverse of [`machine`].
pub fn machine_facts(machine: &formation::Machine) -> MachineFacts {
    MachineFacts {
        dmi_uuid: machine.0.get(DMI_UUID).cloned(),
        machine_id: machine.0.get(MACHINE_ID).cloned(),
    }
}

/// What a statement allows.
pub fn permissions(permissions: &Permissions) -> formation::Permissions {
    formation::Permissions {
        allow_loopback: permissions.loopback,
        allow_shared_host: permissions.shared_host,
        allow_even: permissions.even_size,
        allow_low_ports: permissions.low_ports,
    }
}

/// Where the cluster stands; nothing for a draft, which takes no agents.
pub fn phase(state: ClusterState) -> Option<Phase> {
    Some(match state {
        ClusterState::Draft => return None,
        ClusterState::Open => Phase::Open,
        ClusterState::Preparing => Phase::Preparing,
        ClusterState::Committed => Phase::Committed,
        ClusterState::Formed => Phase::Formed,
        ClusterState::Abandoned => Phase::Abandoned,
        ClusterState::Expired => Phase::Expired,
        ClusterState::Retired => Phase::Retired,
    })
}

/// A record that its agent and its token have signed.
pub fn record(verified: &VerifiedRecord) -> Arc<formation::Record> {
    Arc::new(plain(verified, verified.signed(), hash(verified.node_key())))
}

/// Why a record on this agent's own disk isn't one that it has signed.
#[derive(Debug, thiserror::Error)]
pub enum OwnRecordError {
    /// The signature is not this agent's.
    #[error("the record is not signed by this agent's key")]
    Jws(#[from] JwsError),
    /// The node's key in it.
    #[error("the record's signing request can't be read")]
    Csr(#[from] discovery_types::csr::CsrError),
}

/// A record that this agent has signed itself; nobody else's word is asked for.
pub fn own_record(
    signed: &SignedRecord,
    own: &PublicKey,
) -> Result<Arc<formation::Record>, OwnRecordError> {
    let record: Record = signed.record.verify(Typ::Record, own)?;
    let node_key = record.csr.verify()?.node_key;
    Ok(Arc::new(plain(&record, signed, hash(&node_key))))
}

fn plain(record: &Record, signed: &SignedRecord, node_key: formation::Hash) -> formation::Record {
    let urls = |urls: &[NodeUrl]| urls.iter().map(NodeUrl::to_string).collect();
    formation::Record {
        key: key(&record.agent_key),
        hash: hash(&signed.record.hash()),
        token_hash: hash(&signed.endorsement.hash()),
        node_key,
        machine: machine(&record.machine),
        incarnation: incarnation(&record.incarnation),
        name: record.name.to_string(),
        peer_urls: urls(&record.peer_urls),
        client_urls: urls(&record.client_urls),
        cluster: cluster(record.cluster),
        grant: formation::GrantId(record.grant.to_string().into()),
        jws: signed.record.as_str().into(),
        token_jws: signed.endorsement.as_str().into(),
    }
}

/// A list whose every record is valid.
pub fn proposal(verified: &VerifiedProposal) -> formation::Proposal {
    let proposal = verified.proposal();
    formation::Proposal {
        cluster: cluster(proposal.cluster),
        statement: hash(&proposal.statement),
        epoch: proposal.epoch,
        records: verified.records().iter().map(record).collect(),
    }
}

/// A valid document.
pub fn document(verified: &VerifiedDocument) -> Arc<formation::Document> {
    Arc::new(formation::Document {
        proposal: proposal(verified.proposal()),
        h: hash(&verified.hash()),
        text: verified.jws().as_str().into(),
    })
}
