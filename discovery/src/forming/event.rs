//! Requests, verified under the cluster's lock and turned into events of the state machine.

use std::collections::BTreeMap;
use std::time::Duration;

use discovery_formation as formation;
use discovery_formation::service::{
    Cluster, ClusterEvent, Grant, Phase, Poll, ProbeOutcome, Refusal,
};
use discovery_types::api::{ProbeResult, Session};
use discovery_types::approval::Approval;
use discovery_types::convert;
use discovery_types::digest::Digest;
use discovery_types::document::VerifiedDocument;
use discovery_types::grant::{GrantId, GrantTimeError, VerifiedGrant};
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::proposal::{Ack, Release};
use discovery_types::retire::{Retire, Unretire};
use discovery_types::statement::StatementChain;

use crate::app::App;
use crate::ca_rotation::check_statement;
use crate::error::ApiError;
use crate::host_identity::{check_free_for_seat, check_host};
use crate::members::refuse_if_reporting;
use crate::redeem::{RedeemRequest, TokenUse, VerifiedRedeem};
use crate::store::cluster::{ClusterTransaction, LoadedCluster, Revocation};

/// Maximum total size in bytes of one seat's record, endorsement and grant. `MAX_ACK_BYTES` limits
/// the seat's ack. A commit document contains these four texts for each of up to nine seats, and
/// has at most [`MAX_JWS`] bytes in base64. A larger document could be committed, but nobody could
/// read it.
///
/// [`MAX_JWS`]: discovery_types::jws::MAX_JWS
const MAX_SEAT_BYTES: usize = 7_000;
const MAX_ACK_BYTES: usize = 1_024;

/// A request. Handlers have opened its envelope; the rest is verified here.
#[derive(Debug)]
pub(crate) enum ClusterRequest {
    /// Time has passed. The state machine takes every step that is due.
    Tick,
    /// An opened redeem of a boot token.
    Redeem(Box<RedeemRequest>),
    /// An agent's poll, which renews its lease.
    Poll { key: PublicKey, session: Session, highest_epoch: u64 },
    /// An agent's signed ack of the proposal.
    Ack { key: PublicKey, jws: Jws },
    /// An agent's refusal to sign the proposal.
    Nack { key: PublicKey, session: Session, epoch: u64, h: Digest, reason: String },
    /// An agent's row of the connectivity matrix: which peers it reached.
    Probes { key: PublicKey, session: Session, epoch: u64, h: Digest, results: Vec<ProbeResult> },
    /// An agent's signed release of an epoch.
    Release { key: PublicKey, jws: Jws },
    /// A member's report of the Raft cluster id that its node sees.
    Report { key: PublicKey, session: Session, h: Digest, raft_cluster: u64 },
    /// A member's report of why its node finds no leader.
    Trouble { key: PublicKey, session: Session, h: Digest, text: String },
    /// The next statement of the chain. If `is_new`, an owner has just signed it. Otherwise a
    /// member's agent has sent it, because this database has lost it.
    Restate { jws: Jws, is_new: bool },
    /// Revocation of a grant by the admin `by`. With `frees_seats`, the seats that the grant gave
    /// become free.
    RevokeGrant { id: GrantId, by: String, frees_seats: bool },
    /// An issuer's signed approval of an agent.
    Approve { jws: Jws },
    /// A commit document that an agent sent or a ledger holds, with its statement chain.
    Adopt { document: Jws, statements: Vec<Jws> },
    /// An operator abandons the cluster.
    Abandon { by: String },
    /// An owner's signed retirement of the cluster.
    Retire { jws: Jws },
    /// An owner's signed statement that undoes the last retirement.
    Unretire { jws: Jws },
    /// An owner reopens an expired cluster.
    Reopen { by: String },
    /// An owner accepts the database as it is.
    DatabaseAccepted { by: String },
}

/// An event for the state machine, and the data to store with it.
pub(super) struct PreparedEvent {
    pub(super) event: ClusterEvent,
    /// Statement to append to the chain, unless the event is refused.
    pub(super) statement: Option<Jws>,
    /// Commit document to adopt.
    pub(super) document: Option<Jws>,
    /// Event that checks the sender's session. It is applied before the event itself.
    pub(super) session_event: Option<ClusterEvent>,
    /// Revocation to store, unless the event is refused.
    pub(super) revocation: Option<Revocation>,
    /// Virtual machine of an agent that is new to its token, if the token requires an identity
    /// document.
    pub(super) instance: Option<String>,
}

impl From<ClusterEvent> for PreparedEvent {
    fn from(event: ClusterEvent) -> Self {
        PreparedEvent {
            event,
            statement: None,
            document: None,
            session_event: None,
            revocation: None,
            instance: None,
        }
    }
}

impl ClusterRequest {
    /// Whether the request can be applied in one transaction with others: it comes from an agent
    /// of a cluster that forms.
    pub(super) fn may_share_transaction(&self) -> bool {
        matches!(
            self,
            ClusterRequest::Redeem(_)
                | ClusterRequest::Poll { .. }
                | ClusterRequest::Ack { .. }
                | ClusterRequest::Nack { .. }
                | ClusterRequest::Probes { .. }
                | ClusterRequest::Release { .. }
        )
    }

    /// Id of the grant that a redeem request names.
    pub(super) fn grant_id(&self) -> Option<String> {
        match self {
            ClusterRequest::Redeem(request) => Some(request.grant().to_string()),
            _ => None,
        }
    }

    /// Source address of a redeem request.
    pub(super) fn address(&self) -> Option<String> {
        match self {
            ClusterRequest::Redeem(request) => Some(request.address.to_string()),
            _ => None,
        }
    }

    /// Key of the agent that sent the request.
    pub(super) fn agent_key(&self) -> Option<formation::AgentKey> {
        let key = match self {
            ClusterRequest::Redeem(request) => request.key,
            ClusterRequest::Poll { key, .. }
            | ClusterRequest::Ack { key, .. }
            | ClusterRequest::Nack { key, .. }
            | ClusterRequest::Probes { key, .. }
            | ClusterRequest::Release { key, .. }
            | ClusterRequest::Report { key, .. }
            | ClusterRequest::Trouble { key, .. } => *key,
            ClusterRequest::Tick
            | ClusterRequest::Restate { .. }
            | ClusterRequest::RevokeGrant { .. }
            | ClusterRequest::Approve { .. }
            | ClusterRequest::Adopt { .. }
            | ClusterRequest::Abandon { .. }
            | ClusterRequest::Retire { .. }
            | ClusterRequest::Unretire { .. }
            | ClusterRequest::Reopen { .. }
            | ClusterRequest::DatabaseAccepted { .. } => return None,
        };
        Some(convert::key(&key))
    }
}

async fn prepare_retire(
    transaction: &mut ClusterTransaction,
    chain: &StatementChain,
    jws: &Jws,
    listening_for: Duration,
) -> Result<ClusterEvent, ApiError> {
    let retire = Retire::verify(jws, chain)?;
    if !retire.force && is_running(&transaction.cluster) {
        refuse_if_reporting(transaction, listening_for).await?;
    }
    Ok(ClusterEvent::Retire { by: format!("{}: {}", signer(chain, jws), retire.reason) })
}

fn prepare_revocation(grant: GrantId, by: &str, frees_seats: bool) -> PreparedEvent {
    let id = formation::GrantId(grant.to_string().into());
    let event = ClusterEvent::GrantRevoked { grant: id, frees_seats };
    let revocation = Revocation { grant, by: by.to_owned(), frees_seats };
    PreparedEvent { revocation: Some(revocation), ..event.into() }
}

fn prepare_approval(chain: &StatementChain, jws: &Jws) -> Result<ClusterEvent, ApiError> {
    let approval = Approval::verify(jws, chain)?;
    Ok(ClusterEvent::Approve { key: convert::key(&approval.agent), jws: jws.as_str().into() })
}

/// Prepares the reopening of a cluster. Its new deadline is the newest statement's
/// `deadline_seconds` from now.
fn prepare_reopen(
    transaction: &ClusterTransaction,
    chain: &StatementChain,
    by: &str,
) -> ClusterEvent {
    let time = formation::Millis(chain.newest().deadline_seconds.saturating_mul(1_000));
    ClusterEvent::Reopen { by: by.to_owned(), deadline: transaction.now.after(time) }
}

impl App {
    /// Verifies a request of an agent in a cluster that forms, if that takes no SQL statement.
    /// Returns `None` for all other requests.
    pub(super) fn prepare_loaded(
        &self,
        loaded: &LoadedCluster,
        incoming: &ClusterRequest,
    ) -> Result<Option<PreparedEvent>, ApiError> {
        Ok(Some(match incoming {
            ClusterRequest::Redeem(request) => {
                let redeem = verify_redeem(self, loaded, request)?;
                if redeem.must_check_host {
                    return Ok(None);
                }
                redeem_event(&redeem.verified, request).into()
            }
            ClusterRequest::Poll { key, session, highest_epoch } => ClusterEvent::Poll(Poll {
                key: convert::key(key),
                session: convert::session(session.boot, &session.nonce),
                highest_epoch: *highest_epoch,
            })
            .into(),
            ClusterRequest::Ack { key, jws } => prepare_ack(loaded, key, jws)?.into(),
            ClusterRequest::Nack { key, session, epoch, h, reason } => {
                check_current_list(&loaded.cluster, *epoch, h)?;
                let reason = reason.clone();
                with_session(
                    key,
                    session,
                    ClusterEvent::Nack { key: convert::key(key), epoch: *epoch, reason },
                )
            }
            ClusterRequest::Probes { key, session, epoch, h, results } => {
                check_current_list(&loaded.cluster, *epoch, h)?;
                let row = matrix_row(&loaded.cluster, results);
                with_session(
                    key,
                    session,
                    ClusterEvent::Probes { key: convert::key(key), epoch: *epoch, row },
                )
            }
            ClusterRequest::Release { key, jws } => prepare_release(loaded, key, jws)?.into(),
            _ => return Ok(None),
        }))
    }

    /// Verifies `incoming` against the locked cluster.
    pub(super) async fn prepare(
        &self,
        transaction: &mut ClusterTransaction,
        incoming: &ClusterRequest,
    ) -> Result<PreparedEvent, ApiError> {
        let chain = transaction.chain.clone();
        Ok(match incoming {
            ClusterRequest::Tick => ClusterEvent::Tick.into(),
            ClusterRequest::Redeem(request) => prepare_redeem(self, transaction, request).await?,
            ClusterRequest::Poll { .. }
            | ClusterRequest::Ack { .. }
            | ClusterRequest::Nack { .. }
            | ClusterRequest::Probes { .. }
            | ClusterRequest::Release { .. } => {
                let prepared = self.prepare_loaded(transaction, incoming)?;
                prepared.expect("these requests take no SQL statement")
            }
            ClusterRequest::Report { key, session, h, raft_cluster } => {
                check_decided_list(&transaction.cluster, h)?;
                let raft_cluster = *raft_cluster;
                with_session(
                    key,
                    session,
                    ClusterEvent::Report { key: convert::key(key), raft_cluster },
                )
            }
            ClusterRequest::Trouble { key, session, h, text } => {
                check_decided_list(&transaction.cluster, h)?;
                let text = text.clone();
                with_session(key, session, ClusterEvent::Trouble { key: convert::key(key), text })
            }
            ClusterRequest::Restate { jws, is_new } => restate(transaction, jws, *is_new).await?,
            ClusterRequest::RevokeGrant { id, by, frees_seats } => {
                prepare_revocation(*id, by, *frees_seats)
            }
            ClusterRequest::Approve { jws } => prepare_approval(&chain, jws)?.into(),
            ClusterRequest::Adopt { document, statements } => {
                prepare_adopt(transaction, document, statements).await?
            }
            ClusterRequest::Abandon { by } => ClusterEvent::Abandon { by: by.clone() }.into(),
            ClusterRequest::Retire { jws } => {
                let listening_for = self.clock.listening_for();
                prepare_retire(transaction, &chain, jws, listening_for).await?.into()
            }
            ClusterRequest::Unretire { jws } => {
                let unretire = Unretire::verify(jws, &chain)?;
                check_same_retirement(&transaction.cluster, &unretire)?;
                ClusterEvent::Unretire { by: signer(&chain, jws) }.into()
            }
            ClusterRequest::Reopen { by } => prepare_reopen(transaction, &chain, by).into(),
            ClusterRequest::DatabaseAccepted { by } => {
                ClusterEvent::DatabaseAccepted { by: by.clone() }.into()
            }
        })
    }
}

/// Appends the next statement. A new statement may name only CAs whose keys this service has. This
/// restriction does not apply to a statement that the database has lost.
async fn restate(
    transaction: &mut ClusterTransaction,
    jws: &Jws,
    is_new: bool,
) -> Result<PreparedEvent, ApiError> {
    let mut chain = StatementChain::clone(&transaction.chain);
    if jws.hash() == chain.newest_hash() {
        return Ok(ClusterEvent::StatementAdded(convert::statement(&chain)).into());
    }
    chain.append(jws)?;
    if is_new {
        check_statement(transaction, chain.newest()).await?;
    }
    let event = ClusterEvent::StatementAdded(convert::statement(&chain));
    Ok(PreparedEvent { statement: Some(jws.clone()), ..event.into() })
}

fn is_running(cluster: &Cluster) -> bool {
    matches!(cluster.phase, Phase::Committed | Phase::Formed)
}

/// Returns the name of the admin who signed `jws`, or an empty string.
fn signer(chain: &StatementChain, jws: &Jws) -> String {
    let admin = chain.newest().admin(jws.kid()).map(|admin| admin.name.to_string());
    admin.unwrap_or_default()
}

/// Checks that `unretire` was signed for the cluster's last retirement, not for an earlier one. A
/// cluster that is no longer retired passes: its retirement was undone already.
fn check_same_retirement(cluster: &Cluster, unretire: &Unretire) -> Result<(), ApiError> {
    let ended = cluster.ended.as_ref().filter(|_| cluster.phase == Phase::Retired);
    let at = ended.map(|ended| (ended.at.0 / 1_000) as i64);
    if at.is_none_or(|at| at == unretire.retired_at_ms) {
        return Ok(());
    }
    let detail = "The signature takes back another retirement than the last one.";
    let next = "Run `muster-discovery cluster unretire` again.";
    Err(ApiError::new(Code::Conflict, detail, next))
}

/// A redeem of a boot token that may give its key a seat.
struct SeatRedeem {
    verified: VerifiedRedeem,
    /// Whether the host's identity must be checked before the key gets a seat. It needs no check if
    /// the key has redeemed the token before, or if the token requires nothing of hosts.
    must_check_host: bool,
}

/// Verifies a redeem of a boot token, apart from the host's identity.
fn verify_redeem(
    app: &App,
    loaded: &LoadedCluster,
    request: &RedeemRequest,
) -> Result<SeatRedeem, ApiError> {
    let verified = request.verify(app, loaded, TokenUse::Seat)?;
    let (grant, redeem) = (&verified.grant, &request.redeem);
    let signed = [&redeem.signed.record, &redeem.signed.endorsement, grant.jws()];
    let length: usize = signed.iter().map(|jws| jws.as_str().len()).sum();
    if length > MAX_SEAT_BYTES {
        let next = "Give the agent shorter names and fewer URLs.";
        let detail =
            format!("The record and what goes with it has {length} bytes, {MAX_SEAT_BYTES} fit.");
        return Err(ApiError::new(Code::RecordRefused, detail, next));
    }
    verified.check_address(request.address)?;
    let cluster = &loaded.cluster;
    let is_forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    // A known key that redeems another token than its own is judged like a new key.
    let key = convert::key(&request.key);
    let is_known =
        cluster.agents.get(&key).is_some_and(|agent| *agent.record.grant.0 == grant.id.to_string());
    if !cluster.phase.has_ended() && !is_known {
        verified.check_issue(loaded)?;
        // Demand a confirmation only while the cluster forms. After the commit the host needs a
        // join ticket, so a confirmation of this token wouldn't help it.
        if is_forming {
            verified.check_confirmed()?;
        }
    }
    if is_forming {
        check_token_is_young(loaded, grant)?;
        check_founder(loaded, &verified)?;
    }
    let must_check_host = is_forming && !is_known && !grant.require.is_empty();
    Ok(SeatRedeem { verified, must_check_host })
}

/// Checks that the host can have a seat. In a cluster that is being adopted, only its signed
/// members can. A host with a policy's token is told to come back, because it can be a standby
/// later.
fn check_founder(loaded: &LoadedCluster, verified: &VerifiedRedeem) -> Result<(), ApiError> {
    match verified.record.check_founder(loaded.chain.newest()) {
        Err(error) if verified.grant.admits_newcomers() => {
            let next = "Wait: the host can be a standby once the members' agents are enrolled.";
            let detail = format!("The cluster is being adopted: {error}.");
            Err(ApiError::new(Code::WrongState, detail, next).mark_retryable())
        }
        checked => Ok(checked?),
    }
}

fn redeem_event(verified: &VerifiedRedeem, request: &RedeemRequest) -> ClusterEvent {
    let (grant, redeem) = (&verified.grant, &request.redeem);
    ClusterEvent::Redeem(formation::service::Redeem {
        record: convert::record(&verified.record),
        session: convert::session(redeem.boot, &redeem.nonce),
        highest_epoch: redeem.highest_epoch,
        grant: Grant {
            // Use what the issuer signed. Anybody who can write to the database could change the
            // row's other columns.
            id: formation::GrantId(grant.id.to_string().into()),
            uses: u32::from(grant.uses),
            expires: formation::UnixMicros(grant.expires_at.saturating_mul(1_000_000)),
            revoked: verified.is_revoked || verified.is_void,
        },
    })
}

async fn prepare_redeem(
    app: &App,
    transaction: &mut ClusterTransaction,
    request: &RedeemRequest,
) -> Result<PreparedEvent, ApiError> {
    let redeem = verify_redeem(app, transaction, request)?;
    let instance = match redeem.must_check_host {
        true => check_machine(app, transaction, request, &redeem.verified.grant).await?,
        false => None,
    };
    Ok(PreparedEvent { instance, ..redeem_event(&redeem.verified, request).into() })
}

/// Checks the identity document of a new agent's host, if its token requires one. Returns the name
/// of the host's virtual machine.
async fn check_machine(
    app: &App,
    transaction: &mut ClusterTransaction,
    request: &RedeemRequest,
    grant: &VerifiedGrant,
) -> Result<Option<String>, ApiError> {
    let keys = app.identity_keys.trusted();
    let instance = check_host(&request.redeem, grant, &keys, transaction.now)?;
    if let Some(instance) = &instance {
        check_free_for_seat(transaction, instance, &request.key).await?;
    }
    Ok(instance)
}

/// Checks that the cluster's other agents will accept the token in a list. A token that ended long
/// ago is possible only after an owner reopened the cluster.
fn check_token_is_young(loaded: &LoadedCluster, grant: &VerifiedGrant) -> Result<(), ApiError> {
    let now = loaded.now.0 / 1_000_000;
    match grant.time_error(now, loaded.chain.newest().deadline_seconds) {
        Some(error @ GrantTimeError::LongOver) => {
            let detail = format!("The other agents would not sign for this host: {error}.");
            let next = "Mint a new token with `muster-discovery token create`, and hand out its \
                        bundle.";
            Err(ApiError::new(Code::GrantExpired, detail, next))
        }
        _ => Ok(()),
    }
}

fn vote_error(error: impl ToString) -> ApiError {
    ApiError::new(Code::VoteRefused, error.to_string(), "Poll for the present proposal.")
}

fn prepare_ack(
    loaded: &LoadedCluster,
    key: &PublicKey,
    jws: &Jws,
) -> Result<ClusterEvent, ApiError> {
    if jws.as_str().len() > MAX_ACK_BYTES {
        return Err(vote_error(format!("An ack has at most {MAX_ACK_BYTES} bytes.")));
    }
    let ack = Ack::verify(jws, key).map_err(vote_error)?;
    if ack.cluster != loaded.id() {
        return Err(vote_error("The ack is of another cluster."));
    }
    Ok(ClusterEvent::Ack {
        key: convert::key(key),
        epoch: ack.epoch,
        h: convert::hash(&ack.h),
        jws: jws.as_str().into(),
    })
}

fn prepare_release(
    loaded: &LoadedCluster,
    key: &PublicKey,
    jws: &Jws,
) -> Result<ClusterEvent, ApiError> {
    let release = Release::verify(jws, key).map_err(vote_error)?;
    if release.cluster != loaded.id() {
        return Err(vote_error("The release is of another cluster."));
    }
    let release = formation::Release { epoch: release.epoch, jws: jws.as_str().into() };
    Ok(ClusterEvent::Release { key: convert::key(key), release })
}

/// Prepares an event together with the check of its sender's session, which is applied first.
fn with_session(key: &PublicKey, sent: &Session, event: ClusterEvent) -> PreparedEvent {
    let session = convert::session(sent.boot, &sent.nonce);
    PreparedEvent {
        session_event: Some(ClusterEvent::SessionSeen { key: convert::key(key), session }),
        ..event.into()
    }
}

/// Refuses a request about the list with the hash `h` if the frozen list has the same epoch but
/// another hash. If the epoch differs, the state machine refuses the request.
fn check_current_list(cluster: &Cluster, epoch: u64, h: &Digest) -> Result<(), ApiError> {
    match &cluster.frozen {
        Some(frozen) if frozen.proposal.epoch == epoch && frozen.proposal_hash.0 != h.0 => {
            let sent = convert::hash(h);
            Err(Refusal::OtherProposal { sent, h: frozen.proposal_hash, epoch }.into())
        }
        _ => Ok(()),
    }
}

fn check_decided_list(cluster: &Cluster, h: &Digest) -> Result<(), ApiError> {
    match &cluster.frozen {
        Some(frozen) if frozen.proposal_hash.0 != h.0 => {
            let (sent, epoch) = (convert::hash(h), frozen.proposal.epoch);
            Err(Refusal::OtherProposal { sent, h: frozen.proposal_hash, epoch }.into())
        }
        _ => Ok(()),
    }
}

fn matrix_row(
    cluster: &Cluster,
    results: &[ProbeResult],
) -> BTreeMap<formation::AgentKey, ProbeOutcome> {
    let Some(frozen) = &cluster.frozen else { return BTreeMap::new() };
    let peer = |seat: u8| {
        let index = usize::from(seat).checked_sub(1)?;
        Some(frozen.proposal.records.get(index)?.key)
    };
    results
        .iter()
        .filter_map(|result| {
            let found = match result.reached {
                true => ProbeOutcome::Reached,
                false => ProbeOutcome::Failed(result.error.clone().unwrap_or_default()),
            };
            Some((peer(result.seat)?, found))
        })
        .collect()
}

/// Verifies a commit document that an agent sent or a ledger holds: statement chain, records and
/// acks. Stores the statements and grants that this database lacks.
async fn prepare_adopt(
    transaction: &mut ClusterTransaction,
    document: &Jws,
    statements: &[Jws],
) -> Result<PreparedEvent, ApiError> {
    let chain = transaction.chain.clone();
    let shown = StatementChain::verify_links(statements)?;
    // Verify the document with the longer of the two statement chains, which must extend the
    // shorter chain.
    let (short, long) =
        if shown.jws().len() > chain.jws().len() { (&*chain, &shown) } else { (&shown, &*chain) };
    if long.position(&short.newest_hash()).is_none() {
        let detail = "The document's statements are not this cluster's.";
        let next = "Look who signed them: two statement chains of one cluster can't both be right.";
        return Err(ApiError::new(Code::DocumentRefused, detail, next));
    }
    let verified = VerifiedDocument::verify(document, long)?;
    if verified.proposal().proposal().cluster != transaction.id() {
        return Err(Refusal::ForeignDocument.into());
    }
    for statement in long.jws().iter().skip(chain.jws().len()) {
        transaction.add_statement(statement).await?;
    }
    let proposal = verified.proposal().proposal();
    for grant in &proposal.grants {
        let grant = VerifiedGrant::verify(grant, long)?;
        transaction.add_grant(&grant, "a document that was shown").await?;
    }
    let event = ClusterEvent::Adopt(convert::document(&verified));
    Ok(PreparedEvent { document: Some(document.clone()), ..event.into() })
}

#[cfg(test)]
mod tests {
    use discovery_types::SIZES;
    use discovery_types::document::Document;
    use discovery_types::jws::{JwsType, MAX_JWS};
    use discovery_types::key::SigningKey;
    use discovery_types::proposal::Proposal;
    use discovery_types::record::SignedRecord;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_document_with_seats_of_maximum_length_can_be_parsed() {
        let key = SigningKey::generate();
        let long = |typ, length: usize| {
            let jws = |text: usize| Jws::sign(typ, &key, &"x".repeat(text));
            // Base64 encodes three bytes as four characters. So this text gives a JWS of about the
            // wanted length.
            jws(jws(0).as_str().len().abs_diff(length) * 3 / 4)
        };
        let (record, rest) = (long(JwsType::Record, 4_000), MAX_SEAT_BYTES - 4_000);
        let seat = SignedRecord { record, endorsement: long(JwsType::Endorsement, rest / 2) };
        let seats = usize::from(*SIZES.end());
        let proposal = Proposal {
            cluster: Uuid::nil(),
            statement: Digest::of(b"x"),
            epoch: u64::MAX,
            seats: vec![seat; seats],
            grants: vec![long(JwsType::Grant, rest / 2); seats],
        };
        let acks = vec![long(JwsType::Ack, MAX_ACK_BYTES); seats];
        let document = Document { version: 1, proposal, acks }.sign(&key);
        let length = document.as_str().len();
        assert!(length > MAX_JWS * 9 / 10 && length <= MAX_JWS, "{length}");
    }
}
