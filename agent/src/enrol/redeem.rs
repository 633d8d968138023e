//! Redeems this host's token: boot tokens and join tickets take the same path.
//!
//! - Every redeem is signed once for each pin of the join bundle ([`sign`]). While the service
//!   changes its key, a bundle has two pins, and a redeem names only one. The client sends the next
//!   redeem if the service refuses the one before.
//! - An answer's statements must begin with the pinned one, and be of the bundle's cluster
//!   ([`verify_statements`]).
//!
//! The protocol requires these differences between the two kinds of token:
//!
//! - A host that redeems a boot token takes part in forming the cluster. Its state machine judges
//!   each refusal, and retries while the service is broken. A redeemed ticket is only carried to
//!   the cluster's agents, so a final refusal or a bad answer ends the agent.
//! - The document of a cluster that has just formed must be signed by one of the service's present
//!   keys. The document that a newcomer gets may be older than these keys; statements, records and
//!   acks prove it.

use discovery_types::jws::Jws;
use discovery_types::member_proof::{MemberProof, sign_as_node};
use discovery_types::readmission::ReadmitRequest;
use discovery_types::redeem::Redeem;
use discovery_types::statement::{StatementChain, StatementError};

use zeroize::Zeroizing;

use super::protocol::Protocol;
use crate::exit::ExitError;
use crate::state;
use crate::state::journal::{Join, signed_record};

/// Why the statements in an answer of the service can't be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChainError {
    /// The statement chain is invalid, or lacks the pinned statement.
    #[error("the statement chain is not valid: {0}")]
    Invalid(#[from] StatementError),
    /// The statement chain is of another cluster than the bundle's.
    #[error("the statement chain is another cluster's")]
    OtherCluster,
}

/// Signs one redeem request for each service key that the join bundle pins. Each request contains
/// the agent's record from the journal.
pub(super) fn sign(protocol: &Protocol, join: &Join) -> Result<Vec<Jws>, ExitError> {
    let journal = &protocol.agent.journal;
    let record = journal.record.as_deref().ok_or_else(|| {
        ExitError::Failed(
            "there is no record to redeem: this is a fault of muster-agent".to_owned(),
        )
    })?;
    let redeem = |service| Redeem {
        service,
        cluster: join.cluster,
        statement: join.statement,
        signed: signed_record(record),
        boot: protocol.agent.session.boot,
        nonce: protocol.nonce(),
        highest_epoch: journal.highest_epoch(),
    };
    Ok(join.pins.iter().map(|pin| redeem(*pin).sign(&protocol.key)).collect())
}

/// Makes the request by which an added member shows a restored service how it joined. `None` for a
/// founder, and for a member whose agent kept no ticket.
pub(crate) fn readmission(protocol: &Protocol, join: &Join) -> Option<ReadmitRequest> {
    let extras = &protocol.extras;
    let ticket = extras.admission.as_ref()?.ticket.clone()?;
    let MemberProof { certificate, signature } = member_proof(protocol, join)?;
    let redeem = sign(protocol, join).ok()?.into_iter().next()?;
    Some(ReadmitRequest { ticket, redeem, certificate, signature })
}

/// Makes the proof that this host's agent belongs to its member. `None` if a file with a key or a
/// certificate is missing.
pub(crate) fn member_proof(protocol: &Protocol, join: &Join) -> Option<MemberProof> {
    let certificate = protocol.extras.leaves.as_ref()?.peer.clone();
    let node_key = Zeroizing::new(state::read(&protocol.layout.node_key()).ok()??);
    let node_key = std::str::from_utf8(&node_key).ok()?;
    let signature = sign_as_node(node_key, join.cluster, protocol.key.public())?;
    Some(MemberProof { certificate, signature })
}

/// Verifies the statements in an answer of the service, from the pinned one on.
pub(super) fn verify_statements(
    statements: &[Jws],
    join: &Join,
) -> Result<StatementChain, ChainError> {
    let chain = StatementChain::verify_from_pin(statements, &join.statement)?;
    if chain.newest().cluster != join.cluster {
        return Err(ChainError::OtherCluster);
    }
    Ok(chain)
}
