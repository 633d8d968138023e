//! Conversion of verified wire types to the plain values of the state machines, and back.
//!
//! All conversions are in this module, because service and agents must derive the same list from
//! the same bytes. Only verified values are converted. Each function takes a `Verified…` type, or
//! its comment names the check that replaces the verification.

use std::sync::Arc;

use discovery_formation as formation;
use formation::agent::ProposalObjection;
use formation::service::{Phase, RefusalCode};
use uuid::Uuid;

use crate::api::{ClusterState, NackReason};
use crate::digest::{Digest, Incarnation, Nonce};
use crate::document::VerifiedDocument;
use crate::jws::{Jws, JwsError, JwsType};
use crate::key::PublicKey;
use crate::machine::MachineFacts;
use crate::problem::Code;
use crate::proposal::{self, Proposal, VerifiedProposal};
use crate::record::{Record, SignedRecord, VerifiedRecord};
use crate::statement::{Permissions, StatementChain};
use crate::url::NodeUrl;

/// Name of the machine fact in [`MachineFacts::dmi_uuid`].
pub const DMI_UUID: &str = "dmi-uuid";
/// Name of the machine fact in [`MachineFacts::machine_id`].
pub const MACHINE_ID: &str = "machine-id";

/// Converts an agent's key for the state machines.
pub fn key(key: &PublicKey) -> formation::AgentKey {
    formation::AgentKey(*key.as_bytes())
}

/// Converts a key of the state machines to a wire key.
pub fn public_key(key: formation::AgentKey) -> PublicKey {
    PublicKey::from_bytes(key.0)
}

/// Converts a hash for the state machines.
pub fn hash(digest: &Digest) -> formation::Hash {
    formation::Hash(*digest.as_bytes())
}

/// Converts a hash of the state machines to a wire hash.
pub fn digest(hash: formation::Hash) -> Digest {
    Digest(hash.0)
}

/// Converts a cluster's id for the state machines.
pub fn cluster(id: Uuid) -> formation::ClusterId {
    formation::ClusterId(id.as_u128())
}

/// Converts an incarnation for the state machines.
pub fn incarnation(incarnation: &Incarnation) -> formation::Incarnation {
    formation::Incarnation(u128::from_be_bytes(*incarnation.as_bytes()))
}

/// Converts an incarnation of the state machines to the wire type.
pub fn wire_incarnation(incarnation: formation::Incarnation) -> Incarnation {
    Incarnation(incarnation.0.to_be_bytes())
}

/// Converts the known facts of a machine for the state machines.
pub fn machine(facts: &MachineFacts) -> formation::MachineIdentity {
    let known = [(DMI_UUID, &facts.dmi_uuid), (MACHINE_ID, &facts.machine_id)];
    let fact = |(fact, value): (&str, &Option<String>)| Some((fact.to_owned(), value.clone()?));
    formation::MachineIdentity(known.into_iter().filter_map(fact).collect())
}

/// Converts machine facts of the state machines to the wire type.
pub fn machine_facts(machine: &formation::MachineIdentity) -> MachineFacts {
    MachineFacts {
        dmi_uuid: machine.0.get(DMI_UUID).cloned(),
        machine_id: machine.0.get(MACHINE_ID).cloned(),
    }
}

/// Makes the session that identifies one run of an agent from its boot counter and nonce.
pub fn session(boot: u64, nonce: &Nonce) -> formation::AgentSession {
    formation::AgentSession { boot, nonce: u128::from_be_bytes(*nonce.as_bytes()) }
}

/// Converts the newest statement of a chain. The state machines number statements from 1, the wire
/// format from 0.
pub fn statement(chain: &StatementChain) -> formation::Statement {
    let newest = chain.newest();
    formation::Statement {
        hash: hash(&chain.newest_hash()),
        sequence: newest.seq + 1,
        cluster: cluster(newest.cluster),
        size: newest.size,
        permissions: permissions(&newest.permissions),
        spreads_zones: newest.spreads_zones(),
        needs_approval: newest.needs_approval,
    }
}

/// Converts the permissions of a statement.
pub fn permissions(permissions: &Permissions) -> formation::Permissions {
    formation::Permissions {
        allow_loopback: permissions.loopback,
        allow_shared_host: permissions.shared_host,
        allow_even: permissions.even_size,
        allow_low_ports: permissions.low_ports,
    }
}

/// Converts a cluster's state to a phase. Returns `None` for a draft, because no agent can take
/// part in it yet.
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

/// Converts a phase to the cluster's state in the API.
pub fn state(phase: Phase) -> ClusterState {
    match phase {
        Phase::Open => ClusterState::Open,
        Phase::Preparing => ClusterState::Preparing,
        Phase::Committed => ClusterState::Committed,
        Phase::Formed => ClusterState::Formed,
        Phase::Abandoned => ClusterState::Abandoned,
        Phase::Expired => ClusterState::Expired,
        Phase::Retired => ClusterState::Retired,
    }
}

/// Converts an agent's objection to a proposal into the API's nack reason.
pub fn nack_reason(objection: &ProposalObjection) -> NackReason {
    match objection {
        ProposalObjection::InvalidRecord { .. }
        | ProposalObjection::NotMyRecord
        | ProposalObjection::ForeignList
        | ProposalObjection::Unfit { .. }
        | ProposalObjection::Zone { .. } => NackReason::Record,
        ProposalObjection::Duplicate { .. } => NackReason::Duplicate,
        ProposalObjection::Skew { .. } => NackReason::ClockSkew,
        ProposalObjection::OldEpoch { .. } | ProposalObjection::EpochTooFar { .. } => {
            NackReason::Epoch
        }
        ProposalObjection::Unreleased { .. } => NackReason::Unreleased,
        ProposalObjection::Holding { .. } => NackReason::DocumentHeld,
        ProposalObjection::NotBlank { .. } | ProposalObjection::OtherMachine => {
            NackReason::Directory
        }
    }
}

macro_rules! refusal_codes {
    ($($name:ident)*) => {
        /// Converts the protocol's refusal code to the API's problem code.
        pub fn problem_code(refusal: RefusalCode) -> Code {
            match refusal { $(RefusalCode::$name => Code::$name,)* }
        }

        /// Converts the API's problem code to the protocol's refusal code. Returns `None` for
        /// problems outside the protocol, such as a rate limit or a fault of the service.
        pub fn refusal_code(problem: Code) -> Option<RefusalCode> {
            match problem { $(Code::$name => Some(RefusalCode::$name),)* _ => None }
        }
    };
}

refusal_codes! {
    BootClosed Abandoned Expired Retired StaleEpoch KeyElsewhere Split DatabaseChanged UnknownKey
    Conflict RecordRefused GrantUnknown GrantExpired GrantRevoked GrantBinding GrantExhausted
    VoteRefused WrongState Committed StatementRefused DocumentRefused
}

/// Converts a record with verified signatures of its agent and its token.
pub fn record(verified: &VerifiedRecord) -> Arc<formation::AgentRecord> {
    Arc::new(read_record(verified, verified.signed(), verified.node_key()))
}

/// Reason why a record on the agent's own disk isn't a valid record of this agent.
#[derive(Debug, thiserror::Error)]
pub enum OwnRecordError {
    /// The signature is not this agent's.
    #[error("the record is not signed by this agent's key")]
    Jws(#[from] JwsError),
    /// The signing request for the node's key isn't valid.
    #[error("the record's signing request can't be read")]
    Csr(#[from] crate::csr::CsrError),
}

/// Converts a record that this agent itself signed. Of the signatures, only the agent's own is
/// checked.
pub fn own_record(
    signed: &SignedRecord,
    own: &PublicKey,
) -> Result<Arc<formation::AgentRecord>, OwnRecordError> {
    let record: Record = signed.record.verify(JwsType::Record, own)?;
    let node_key = record.csr.verify()?.node_key;
    Ok(Arc::new(read_record(&record, signed, &node_key)))
}

/// Converts a record that the caller has parsed from `signed` and has verified. `node_key` is the
/// hash of the node's key in the signing request.
pub fn read_record(
    record: &Record,
    signed: &SignedRecord,
    node_key: &Digest,
) -> formation::AgentRecord {
    let urls = |urls: &[NodeUrl]| urls.iter().map(NodeUrl::to_string).collect();
    formation::AgentRecord {
        key: key(&record.agent_key),
        hash: hash(&signed.record.hash()),
        token_hash: hash(&signed.endorsement.hash()),
        node_key: hash(node_key),
        machine: machine(&record.machine),
        incarnation: incarnation(&record.incarnation),
        name: record.name.to_string(),
        zone: record.zone.as_ref().map(ToString::to_string),
        peer_urls: urls(&record.peer_urls),
        client_urls: urls(&record.client_urls),
        cluster: cluster(record.cluster),
        grant: formation::GrantId(record.grant.to_string().into()),
        jws: signed.record.as_str().into(),
        token_jws: signed.endorsement.as_str().into(),
    }
}

/// Converts a proposal whose records are all verified.
pub fn proposal(verified: &VerifiedProposal) -> formation::ProposedList {
    let proposal = verified.proposal();
    formation::ProposedList {
        cluster: cluster(proposal.cluster),
        statement: hash(&proposal.statement),
        epoch: proposal.epoch,
        records: verified.records().iter().map(record).collect(),
    }
}

/// Converts a list of members to its wire form. `grants` are the grants that the list's records
/// name.
pub fn wire_proposal(
    list: &formation::ProposedList,
    grants: Vec<Jws>,
) -> Result<Proposal, JwsError> {
    let seat = |record: &Arc<formation::AgentRecord>| -> Result<SignedRecord, JwsError> {
        Ok(SignedRecord { record: record.jws.parse()?, endorsement: record.token_jws.parse()? })
    };
    Ok(Proposal {
        cluster: Uuid::from_u128(list.cluster.0),
        statement: digest(list.statement),
        epoch: list.epoch,
        seats: list.records.iter().map(seat).collect::<Result<_, _>>()?,
        grants,
    })
}

/// Computes the protocol's hash of a list of members. The hashes of the signed records are stored
/// in the list, so none is computed again.
pub fn proposal_hash(list: &formation::ProposedList) -> formation::Hash {
    let seats = list.records.iter().map(|record| [digest(record.hash), digest(record.token_hash)]);
    hash(&proposal::hash(&digest(list.statement), list.epoch, seats))
}

/// Converts a verified commit document.
pub fn document(verified: &VerifiedDocument) -> formation::CommitDocument {
    formation::CommitDocument {
        proposal: proposal(verified.proposal()),
        proposal_hash: hash(&verified.hash()),
        text: verified.jws().as_str().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ClusterFixture;

    #[test]
    fn each_refusal_code_survives_its_conversion() {
        for refusal in RefusalCode::EACH {
            let sent = serde_json::to_string(&problem_code(refusal)).unwrap();
            let heard: Code = serde_json::from_str(&sent).unwrap();
            assert_eq!(refusal_code(heard), Some(refusal));
        }
        let others = Code::ALL.iter().filter(|code| refusal_code(**code).is_none());
        assert!(others.clone().any(|code| *code == Code::RateLimited));
        assert_eq!(others.count() + RefusalCode::EACH.len(), Code::ALL.len());
    }

    #[test]
    fn each_phase_has_one_state() {
        for state in [ClusterState::Open, ClusterState::Retired, ClusterState::Committed] {
            assert_eq!(phase(state).map(super::state), Some(state));
            assert_eq!(phase(state).map(Phase::as_str), Some(state.as_str()));
        }
        assert_eq!(phase(ClusterState::Draft), None);
    }

    #[test]
    fn each_field_of_a_statement_and_a_record_is_converted_from_its_own_field() {
        let world = ClusterFixture::new(1);
        let read = statement(&world.chain());
        assert_eq!((read.sequence, read.size), (1, 1));
        let even = formation::Permissions { allow_even: true, ..Default::default() };
        assert_eq!(read.permissions, even);

        let (written, signed) = (&world.records[0], world.signed(0));
        let node_key = written.csr.verify().unwrap().node_key;
        let read = read_record(written, &signed, &node_key);
        let hashes = [signed.record.hash(), signed.endorsement.hash(), node_key];
        assert_eq!([read.hash, read.token_hash, read.node_key].map(digest), hashes);
        assert_eq!(read.peer_urls, ["https://10.0.0.1:2380"]);
        assert_eq!(read.client_urls, ["https://10.0.0.1:2379"]);
        assert_eq!(public_key(read.key), written.agent_key);
        assert_eq!(wire_incarnation(read.incarnation), written.incarnation);
    }

    #[test]
    fn machine_facts_survive_their_conversion() {
        let facts = MachineFacts { dmi_uuid: Some("d".into()), machine_id: None };
        assert_eq!(machine_facts(&machine(&facts)), facts);
    }
}
