//! Shared state of all gRPC methods.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLockReadGuard};
use std::time::Duration;

use bytes::Bytes;
use muster_shares::memory::{BudgetShare, MemoryAccount, MemoryCharge};
use node_engine::driver::{Handle, NodeStatus};
use node_engine::transport::Transport;
use node_proto::command::{self, Operation};
use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::{AlarmMember, AlarmRequest, AlarmType, ResponseHeader};
use node_proto::{etcdserverpb as pb, v3electionpb, v3lockpb};
use node_state::apply::{Outcome, Response, may_grow_data};
use node_state::auth::{Caller, RequestedAccess};
use node_state::identity::MemberId;
use node_state::lease::LeaseTable;
use node_state::membership::{ChangeRules, MemberTable};
use node_state::mvcc::watch::WatchHub;
use node_state::mvcc::{ReadError, Store, StoreFile, View};
use node_state::state_machine::RequestId;
use prost::Message as _;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::{Extensions, Request, Status};

use super::access::{Authoriser, Credentials};
use super::error::Error;
use super::lease_clock::LeaseClock;
use super::metrics::{ApiMetrics, Method};
use super::proposal::ReplicatedRequest;
use super::quota::NospaceClaim;
use super::request_ids::RequestIds;
use super::required_access::CheckedRequest;
use super::settings::{ApiLimits, ServerIdentity, Telemetry};

/// Maximum size in bytes of a small answer.
const SMALL_ANSWER_BYTES: usize = 16 << 10;

/// Returns the share of a client's memory bounds that an answer of `bytes` bytes may fill. A large
/// answer may fill only a part of them, so that room for the client's writes is left.
pub(crate) const fn answer_share(bytes: usize) -> BudgetShare {
    if bytes > SMALL_ANSWER_BYTES { BudgetShare(7) } else { BudgetShare::WHOLE }
}

/// Handles, identity and limits that the methods use.
pub struct ApiContext {
    pub(crate) handle: Handle<Outcome>,
    pub(crate) status: watch::Receiver<Arc<NodeStatus>>,
    /// ID of the leader; 0 if there is none.
    pub(crate) leader: watch::Receiver<u64>,
    /// Whether this member's disk is almost full.
    pub(crate) disk_low: watch::Receiver<bool>,
    pub store: Store,
    pub(crate) store_file: StoreFile,
    pub(crate) hub: WatchHub,
    /// Current and removed members of the cluster.
    pub(crate) members: watch::Receiver<Arc<MemberTable>>,
    /// Active alarms of the cluster.
    pub(crate) alarms: watch::Receiver<Vec<AlarmMember>>,
    /// Permit to read the whole store for a comparison of the members' data. There is only one.
    pub(crate) comparison_permit: Arc<Semaphore>,
    /// Permits for clients' requests that hash the whole store. The number of permits limits how
    /// many such requests run at a time.
    pub(crate) hash_permits: Arc<Semaphore>,
    /// Connections to the other members; `None` if there can't be any.
    pub(crate) peers: Option<Transport>,
    /// Rules by which changes of members are judged.
    pub(crate) rules: ChangeRules,
    /// Lock that this member holds, as leader, during a change of members. So there is only one
    /// change at a time.
    pub(crate) change_lock: tokio::sync::Mutex<()>,
    /// State of this member's NOSPACE alarm: whether the quota is a reason for it.
    pub(crate) nospace_claim: NospaceClaim,
    /// Lease clock, in use while this member leads.
    pub(crate) clock: LeaseClock,
    pub(crate) access: Arc<Authoriser>,
    pub identity: ServerIdentity,
    pub(crate) request_ids: RequestIds,
    pub(crate) limits: ApiLimits,
    pub metrics: ApiMetrics,
    pub(crate) telemetry: Telemetry,
    pub(crate) stop: CancellationToken,
}

/// Whether this member's own CORRUPT alarm is among `alarms`.
pub(super) fn has_corrupt_alarm(alarms: &[AlarmMember], member_id: u64) -> bool {
    alarms.iter().any(|alarm| alarm.member_id == member_id && alarm.alarm() == AlarmType::Corrupt)
}

/// Whether the client wants the request refused while there is no leader.
pub(crate) fn requires_leader(metadata: &MetadataMap) -> bool {
    metadata.get("hasleader").is_some_and(|value| value == "true")
}

/// Encodes an operation as the payload of a log entry. Refuses a transaction that is nested too
/// deeply for a member to decode: once committed, it would stop every member at each start. Other
/// operations have no such nesting, so they aren't checked.
pub(super) fn encode(
    id: RequestId,
    caller: Caller,
    operation: Operation,
    max_bytes: usize,
) -> Result<Bytes, Error> {
    let may_be_deep = matches!(operation, Operation::Txn(_));
    let payload = command::encode(id.0, caller.into(), operation);
    if payload.len() > max_bytes {
        return Err(Error::RequestTooLarge);
    }
    if may_be_deep && let Err(error) = command::decode(payload.clone()) {
        tracing::debug!(%error, "refused a request that no member could apply");
        return Err(Error::TooManyOps);
    }
    Ok(payload)
}

/// Name of the metadata in which a client states its version of etcd's API.
const CLIENT_API_VERSION: &str = "client-api-version";

/// Context of a call: its caller, and the charge for the memory of its answer. The charge lasts
/// until the last byte of the answer is sent.
pub(crate) struct CallContext {
    charge: MemoryCharge,
    credentials: Credentials,
    caller: Caller,
}

/// Bytes that a call takes besides the values in its answer.
const CALL_BYTES: usize = 4 << 10;

impl CallContext {
    /// Creates the context of a request. No bytes are charged to the connection's memory account
    /// yet.
    pub(super) fn new<Q>(request: &Request<Q>) -> Self {
        Self::from_parts(request.metadata(), request.extensions())
    }

    fn from_parts(metadata: &MetadataMap, extensions: &Extensions) -> Self {
        let who = Credentials::new(metadata, extensions.get());
        match extensions.get::<Arc<MemoryAccount>>() {
            Some(account) => Self::of(account, who),
            None => Self {
                charge: MemoryCharge::new(&MemoryAccount::unbounded()),
                credentials: who,
                caller: Caller::Unauthenticated,
            },
        }
    }

    /// Creates the context of a call. No bytes are charged to `account` yet.
    pub(crate) fn of(account: &Arc<MemoryAccount>, who: Credentials) -> Self {
        Self {
            charge: MemoryCharge::new(account),
            credentials: who,
            caller: Caller::Unauthenticated,
        }
    }

    /// Makes another context of the same call, for a part of the work that continues after the
    /// client has left.
    pub(super) fn another_of_same_call(&self) -> Self {
        Self {
            charge: self.charge.another_empty(),
            credentials: self.credentials.clone(),
            caller: self.caller.clone(),
        }
    }

    /// Starts the context of a call that this member makes itself.
    pub(crate) fn for_member() -> Self {
        let charge = MemoryCharge::new(&MemoryAccount::unbounded());
        Self { charge, credentials: Credentials::Member, caller: Caller::Member }
    }

    /// Returns the identity presented by the caller.
    pub(super) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Charges `bytes` bytes of values. Returns false if the account has no room for them.
    pub(crate) fn try_charge(&mut self, bytes: usize) -> bool {
        self.charge.try_set(CALL_BYTES + bytes, answer_share(bytes))
    }

    /// Charges `bytes` bytes of values. Returns an error if the account has no room for them.
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        if self.try_charge(bytes) { Ok(()) } else { Err(Error::TooMuchUnread) }
    }
}

/// Response of a unary call. [`ApiContext::call`] fills in its header.
pub(crate) trait Answer: prost::Message {
    /// Returns the response's header, if it has one.
    fn header(&mut self) -> Option<&mut ResponseHeader>;
}

macro_rules! answers {
    ($($name:path)*) => {
        $(impl Answer for $name {
            fn header(&mut self) -> Option<&mut ResponseHeader> {
                self.header.as_mut()
            }
        })*
    };
}

answers! {
    pb::RangeResponse
    pb::PutResponse
    pb::DeleteRangeResponse
    pb::TxnResponse
    pb::CompactionResponse
    pb::MemberListResponse
    pb::MemberAddResponse
    pb::MemberRemoveResponse
    pb::MemberUpdateResponse
    pb::MemberPromoteResponse
    pb::StatusResponse
    pb::AlarmResponse
    pb::DefragmentResponse
    pb::DowngradeResponse
    pb::HashResponse
    pb::HashKvResponse
    pb::MoveLeaderResponse
    pb::LeaseGrantResponse
    pb::LeaseRevokeResponse
    pb::LeaseTimeToLiveResponse
    pb::LeaseLeasesResponse
    pb::AuthEnableResponse
    pb::AuthDisableResponse
    pb::AuthStatusResponse
    pb::AuthenticateResponse
    pb::AuthUserAddResponse
    pb::AuthUserGetResponse
    pb::AuthUserListResponse
    pb::AuthUserDeleteResponse
    pb::AuthUserChangePasswordResponse
    pb::AuthUserGrantRoleResponse
    pb::AuthUserRevokeRoleResponse
    pb::AuthRoleAddResponse
    pb::AuthRoleGetResponse
    pb::AuthRoleListResponse
    pb::AuthRoleDeleteResponse
    pb::AuthRoleGrantPermissionResponse
    pb::AuthRoleRevokePermissionResponse
    v3lockpb::LockResponse
    v3lockpb::UnlockResponse
    v3electionpb::CampaignResponse
    v3electionpb::ProclaimResponse
    v3electionpb::LeaderResponse
    v3electionpb::ResignResponse
}

/// Makes a header with only the revision. [`ApiContext::call`] fills in the rest.
pub(super) fn header(revision: i64) -> Option<ResponseHeader> {
    Some(ResponseHeader { revision, ..ResponseHeader::default() })
}

impl ApiContext {
    /// Makes a complete response header for this member.
    pub(crate) fn header(&self, revision: i64) -> ResponseHeader {
        ResponseHeader {
            cluster_id: self.identity.cluster_id,
            member_id: self.identity.member_id,
            revision,
            raft_term: self.status.borrow().term,
        }
    }

    /// Counts the call by the API version that its client states.
    pub(super) fn count_client(&self, metadata: &MetadataMap, is_stream: bool) {
        let said = metadata.get(CLIENT_API_VERSION).map(|said| said.as_encoded_bytes());
        self.metrics.clients.count(said, is_stream);
    }

    pub(crate) fn has_leader(&self) -> bool {
        *self.leader.borrow() != 0
    }

    /// Checks whether this member serves the call. A learner serves few calls, and a call may
    /// require a leader.
    pub(crate) fn admit(&self, metadata: &MetadataMap, is_for_learners: bool) -> Result<(), Error> {
        let me = MemberId(self.identity.member_id);
        if !is_for_learners && self.members.borrow().serves_as_learner(me) {
            return Err(Error::NotSupportedForLearner);
        }
        if requires_leader(metadata) && !self.has_leader() {
            return Err(Error::NoLeader);
        }
        Ok(())
    }

    /// Whether this member's data was found to differ from the other members'. Such a member serves
    /// no data.
    pub fn is_corrupt(&self) -> bool {
        has_corrupt_alarm(&self.alarms.borrow(), self.identity.member_id)
    }

    /// Returns an error if this member's data was found to be corrupt.
    pub(crate) fn ensure_not_corrupt(&self) -> Result<(), Error> {
        if self.is_corrupt() { Err(Error::Corrupt) } else { Ok(()) }
    }

    /// Runs a unary call that tonic has received. The memory of the answer stays charged until the
    /// answer is sent.
    pub(crate) async fn call<Q: CheckedRequest, T: Answer, E: From<Error> + Into<Status>>(
        &self,
        method: Method,
        request: Request<Q>,
        work: impl AsyncFnOnce(Q, &mut CallContext) -> Result<T, E>,
    ) -> Result<tonic::Response<T>, Status> {
        let (metadata, extensions, asked) = request.into_parts();
        let call = CallContext::from_parts(&metadata, &extensions);
        let (answer, charge) = self.run_call(method, &metadata, call, asked, work).await?;
        let mut answer = tonic::Response::new(answer);
        answer.extensions_mut().insert(Arc::new(charge));
        Ok(answer)
    }

    /// Runs a unary call: counts it, checks it, does `work`, and completes the answer's header.
    /// Returns the answer with the charge for its memory, which must last until the answer is sent.
    pub(super) async fn run_call<Q: CheckedRequest, T: Answer, E: From<Error> + Into<Status>>(
        &self,
        method: Method,
        metadata: &MetadataMap,
        mut call: CallContext,
        asked: Q,
        work: impl AsyncFnOnce(Q, &mut CallContext) -> Result<T, E>,
    ) -> Result<(T, MemoryCharge), Status> {
        let guard = self.metrics.start(method);
        self.count_client(metadata, false);
        let result = match self.begin::<Q, E>(metadata, &asked, &mut call).await {
            Ok(()) => work(asked, &mut call).await.map_err(Into::into),
            Err(status) => Err(status),
        };
        guard.end(result.as_ref().err());
        let mut answer = result?;
        if let Some(header) = answer.header() {
            *header = self.header(header.revision);
        }
        Ok((answer, call.charge))
    }

    /// Makes all checks that can refuse a call before its work begins.
    pub(super) async fn begin<Q: CheckedRequest, E: From<Error> + Into<Status>>(
        &self,
        metadata: &MetadataMap,
        asked: &Q,
        call: &mut CallContext,
    ) -> Result<(), Status> {
        self.admit(metadata, asked.is_for_learners())?;
        if asked.is_about_data() {
            self.ensure_not_corrupt()?;
        }
        call.charge(0)?;
        self.allow(asked, call).await.map_err(|error| E::from(error).into())
    }

    /// Validates one request, and checks that the caller has permission for it. A call that
    /// consists of several requests uses this for each of them.
    pub(super) async fn allow(
        &self,
        asked: &impl CheckedRequest,
        call: &mut CallContext,
    ) -> Result<(), Error> {
        asked.check(&self.limits)?;
        call.caller =
            self.authorise_call(&call.credentials, asked.access(), asked.is_for_learners()).await?;
        Ok(())
    }

    /// Proposes a request, and waits until it is applied. Returns [`Error::AnswerDropped`] if the
    /// account of `call` has no room for the answer.
    pub(crate) async fn propose<P: ReplicatedRequest>(
        &self,
        request: P,
        call: &mut CallContext,
    ) -> Result<P::Answer, Error> {
        let operation = request.operation();
        let grows = may_grow_data(&operation);
        if grows && *self.disk_low.borrow() {
            return Err(Error::NoSpace);
        }
        let id = self.request_ids.next();
        let payload = encode(id, call.caller.clone(), operation, self.limits.max_request_bytes)?;
        if grows && !self.limits.quota.has_room(self.store.record_bytes(), payload.len()) {
            // Boxed, since `raise_quota_alarm` calls this function again to propose the alarm.
            Box::pin(self.raise_quota_alarm()).await;
            return Err(Error::NoSpace);
        }
        let response = match self.propose_payload(payload, id).await? {
            Response::AnswerTooLarge => return Err(Error::AnswerDropped),
            response => response,
        };
        let answer = P::answer(response).expect("apply answers each operation in kind");
        call.charge(answer.encoded_len()).map_err(|_| Error::AnswerDropped)?;
        Ok(answer)
    }

    /// Proposes an operation as this member itself, and waits until it is applied.
    pub(crate) async fn propose_as_member(&self, operation: Operation) -> Result<Response, Error> {
        self.propose_as_caller(&CallContext::for_member(), operation).await
    }

    /// Proposes an operation as the caller of `call`, and waits until it is applied.
    pub(super) async fn propose_as_caller(
        &self,
        call: &CallContext,
        operation: Operation,
    ) -> Result<Response, Error> {
        let id = self.request_ids.next();
        let payload = encode(id, call.caller.clone(), operation, self.limits.max_request_bytes)?;
        self.propose_payload(payload, id).await
    }

    async fn propose_payload(&self, payload: Bytes, id: RequestId) -> Result<Response, Error> {
        let pending = self.metrics.count_pending_write();
        let outcome = self.handle.propose(payload, id).await?;
        pending.end();
        Ok(outcome?)
    }

    /// Waits until this member's store includes every write that was acknowledged before the call.
    /// A serializable request doesn't wait.
    pub(crate) async fn barrier(&self, serializable: bool) -> Result<(), Error> {
        if !serializable {
            self.handle.read_barrier().await?;
        }
        Ok(())
    }

    /// Reads from the newest view. If a compaction removes the data during the read, the read is
    /// repeated on a newer view.
    pub(crate) async fn read<T>(
        &self,
        mut read: impl FnMut(&Store, &View) -> Result<T, ReadError>,
    ) -> Result<T, Error> {
        loop {
            match read(&self.store, &self.store.view()) {
                Err(ReadError::Superseded) => tokio::task::yield_now().await,
                result => return Ok(result?),
            }
        }
    }

    /// Returns the time at which a request that begins now times out, as in etcd.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + Duration::from_secs(5) + self.limits.election_timeout * 2
    }

    /// Returns the leader's ID. Waits until there is a leader.
    pub(super) async fn wait_for_leader(&self, deadline: Instant) -> Result<u64, Error> {
        let mut leader = self.leader.clone();
        let known = async { leader.wait_for(|leader| *leader != 0).await.map(|leader| *leader) };
        let known = timeout_at(deadline, known).await.map_err(|_| Error::NoLeader)?;
        known.map_err(|_| Error::Stopped)
    }

    pub(super) fn leads(&self) -> bool {
        *self.leader.borrow() == self.identity.member_id
    }

    /// Returns the leases as of the last entry applied by this member.
    pub(super) fn leases(&self) -> RwLockReadGuard<'_, LeaseTable> {
        self.store.leases().read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks `access` by the newest view. If the access is refused, it is checked again after a
    /// read barrier, on a view with every write that was acknowledged before the call. A
    /// serializable call gets no second check.
    pub(super) async fn authorise_call(
        &self,
        who: &Credentials,
        access: RequestedAccess<'_>,
        serializable: bool,
    ) -> Result<Caller, Error> {
        if !self.store.is_auth_enabled() {
            return Ok(who.anonymous_caller());
        }
        let refused = match self.access.authorise_on(who, &self.store.view(), access) {
            Err(refused) if !serializable => refused,
            done => return done,
        };
        match self.barrier(false).await {
            Ok(()) => self.access.authorise_on(who, &self.store.view(), access),
            Err(_) => Err(refused),
        }
    }

    /// Raises this member's NOSPACE alarm for a request that exceeds the quota, and returns once
    /// the alarm is active.
    async fn raise_quota_alarm(&self) {
        self.nospace_claim.by_quota.store(true, Ordering::Relaxed);
        let _one = self.nospace_claim.raising.lock().await;
        if self.has_nospace_alarm() {
            return;
        }
        tracing::warn!(
            quota_size_bytes = self.limits.quota.reported_bytes(),
            size_bytes = self.store.record_bytes(),
            "message exceeded backend quota; raising alarm: compact, then disarm it"
        );
        if let Err(error) = self.propose_nospace_alarm(AlarmAction::Activate).await {
            // The error needs no handling: the next request that exceeds the quota tries again to
            // raise the alarm.
            tracing::warn!(error = %error.text(), "cannot raise the alarm yet");
        }
    }

    /// Whether this member's own NOSPACE alarm is active.
    pub(super) fn has_nospace_alarm(&self) -> bool {
        let own = self.identity.member_id;
        let view = self.store.view();
        view.alarms().iter().any(|a| a.member_id == own && a.alarm() == AlarmType::Nospace)
    }

    /// Proposes to raise or lower this member's NOSPACE alarm.
    pub(super) async fn propose_nospace_alarm(&self, action: AlarmAction) -> Result<(), Error> {
        let request = AlarmRequest {
            action: action.into(),
            member_id: self.identity.member_id,
            alarm: AlarmType::Nospace.into(),
        };
        self.propose(request, &mut CallContext::for_member()).await.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use node_proto::etcdserverpb::request_op::Request;
    use node_proto::etcdserverpb::{PutRequest, RequestOp, TxnRequest};

    use super::*;

    fn nested(depth: usize) -> Operation {
        let mut inner = Request::RequestPut(PutRequest::default());
        for _ in 1..depth {
            let success = vec![RequestOp { request: Some(inner) }];
            inner = Request::RequestTxn(TxnRequest { success, ..TxnRequest::default() });
        }
        let success = vec![RequestOp { request: Some(inner) }];
        Operation::Txn(TxnRequest { success, ..TxnRequest::default() })
    }

    #[test]
    fn an_operation_that_cannot_be_decoded_is_never_proposed() {
        for depth in 1..200 {
            if let Ok(payload) =
                encode(RequestId(1), Caller::Unauthenticated, nested(depth), usize::MAX)
            {
                assert!(command::decode(payload).is_ok(), "{depth}");
            }
        }
        assert!(encode(RequestId(1), Caller::Unauthenticated, nested(10), usize::MAX).is_ok());
        assert_eq!(
            encode(RequestId(1), Caller::Unauthenticated, nested(50), usize::MAX),
            Err(Error::TooManyOps)
        );
    }
}
