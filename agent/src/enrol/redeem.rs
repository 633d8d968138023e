//! Redeems this host's token: boot tokens and join tickets take the same path.
//!
//! - Every redeem is signed once for each pin of the join bundle ([`UnsignedRedeem`]). While the
//!   service changes its key, a bundle has two pins, and a redeem names only one. The client sends
//!   the next redeem if the service refuses the one before.
//! - An answer's statements must begin with the pinned one, and be of the bundle's cluster
//!   ([`verify_statements`]).
//!
//! The protocol requires these differences between the two kinds of token:
//!
//! - A host that redeems a boot token takes part in forming the cluster. Its state machine judges
//!   each refusal, and retries while the service is broken. A redeemed ticket is only carried to
//!   the cluster's agents, so a final refusal or a bad answer ends the agent.
//! - The commit document of a cluster that has just formed must be signed by one of the service's
//!   present keys. The commit document that a newcomer gets may be older than these keys;
//!   statements, records and acks prove it.

use std::sync::Arc;

use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::key::{PublicKey, SigningKey};
use discovery_types::member_proof::{MemberProof, sign_as_node};
use discovery_types::readmission::ReadmitRequest;
use discovery_types::redeem::Redeem;
use discovery_types::statement::{StatementChain, StatementError};

use zeroize::Zeroizing;

use super::protocol::Protocol;
use crate::exit::ExitError;
use crate::host::cloud::{IdentitySource, MetadataError};
use crate::state::journal::{Join, JournalExtras, signed_record};
use crate::state::{self, Layout};

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

/// A redeem that isn't signed yet: one request for each service key that the join bundle pins. Each
/// contains the agent's record from the journal.
pub(super) struct UnsignedRedeem {
    requests: Vec<Redeem>,
    key: Arc<SigningKey>,
}

impl UnsignedRedeem {
    /// Makes one redeem request for each pinned service key, with the boot counter and the nonce of
    /// this run of the agent.
    pub(super) fn new(protocol: &Protocol, join: &Join) -> Result<Self, ExitError> {
        let journal = &protocol.agent.journal;
        let record = journal.record.as_deref().ok_or_else(|| {
            ExitError::Failed(
                "there is no record to redeem: this is a fault of muster-agent".to_owned(),
            )
        })?;
        let request = |service: &Digest| Redeem {
            service: *service,
            cluster: join.cluster,
            statement: join.statement,
            signed: signed_record(record),
            boot: protocol.agent.session.boot,
            nonce: protocol.nonce(),
            highest_epoch: journal.highest_epoch(),
            identity: None,
        };
        let requests = join.pins.iter().map(request).collect();
        Ok(Self { requests, key: Arc::clone(&protocol.key) })
    }

    /// Signs the redeem requests. With a `source`, they contain a new identity document of this
    /// host.
    pub(super) async fn sign(
        mut self,
        source: Option<&IdentitySource>,
    ) -> Result<Vec<Jws>, MetadataError> {
        if let (Some(source), Some(first)) = (source, self.requests.first()) {
            let audience = muster_identity::audience(&first.cluster, &self.key.key_id());
            let document = source.document(&audience).await?;
            for request in &mut self.requests {
                request.identity = Some(document.clone());
            }
        }
        Ok(self.signed())
    }

    /// Signs the redeem requests as they are, and fetches no identity document.
    fn signed(&self) -> Vec<Jws> {
        self.requests.iter().map(|request| request.sign(&self.key)).collect()
    }
}
/// Makes the request with which a member that joined later proves to a restored service how it
/// joined. `None` for a founder, and for a member whose agent kept no ticket.
pub(crate) fn readmission(protocol: &Protocol, join: &Join) -> Option<ReadmitRequest> {
    let extras = &protocol.extras;
    let ticket = extras.admission.as_ref()?.ticket.clone()?;
    let MemberProof { certificate, signature } =
        member_proof(&protocol.layout, &protocol.extras, protocol.key.public(), join)?;
    // The member proves itself by its certificate, so the redeem needs no identity document.
    let redeem = UnsignedRedeem::new(protocol, join).ok()?.signed().into_iter().next()?;
    Some(ReadmitRequest { ticket, redeem, certificate, signature, recoveries: Vec::new() })
}

/// Makes the proof that the agent with the key `own` belongs to its member. `None` if a file with a
/// key or a certificate is missing.
pub(crate) fn member_proof(
    layout: &Layout,
    extras: &JournalExtras,
    own: &PublicKey,
    join: &Join,
) -> Option<MemberProof> {
    let certificate = extras.leaves.as_ref()?.peer.clone();
    let node_key = Zeroizing::new(state::read(&layout.node_key()).ok()??);
    let node_key = std::str::from_utf8(&node_key).ok()?;
    let signature = sign_as_node(node_key, join.cluster, own)?;
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
