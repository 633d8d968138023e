//! What every method needs.

use std::sync::Arc;

use bytes::Bytes;
use node_proto::command::{self, Operation};
use node_proto::etcdserverpb::{AlarmMember, AlarmType, ResponseHeader};
use node_proto::{etcdserverpb as pb, v3electionpb, v3lockpb};
use prost::Message as _;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use super::access::{TokenClock, Who};
use super::ask::Ask;
use super::error::Error;
use super::leases::LeaseClock;
use super::metrics::Method;
use super::proposal::Proposal;
use super::space::{self, Claim};
use super::{Identity, Limits, Metrics, RequestIds, Telemetry};
use crate::apply::{Outcome, Response, grows};
use crate::auth::{Caller, Jwt};
use crate::driver::{Handle, NodeStatus};
use crate::identity::MemberId;
use crate::machine::RequestId;
use crate::membership::{MemberTable, Rules};
use crate::mvcc::watch::WatchHub;
use crate::mvcc::{ReadError, Store, StoreFile, View};
use crate::shares::{Account, Charge, Part};
use crate::transport::Transport;

/// Handles, identity and limits.
pub(crate) struct Context {
    pub(crate) handle: Handle<Outcome>,
    pub(crate) status: watch::Receiver<Arc<NodeStatus>>,
    /// Who leads; 0: nobody.
    pub(crate) leader: watch::Receiver<u64>,
    /// Whether this member's disk is almost full.
    pub(crate) space: watch::Receiver<bool>,
    pub(crate) store: Store,
    pub(crate) store_file: StoreFile,
    pub(crate) hub: WatchHub,
    /// Who belongs to the cluster.
    pub(crate) members: watch::Receiver<Arc<MemberTable>>,
    /// Which alarms are raised.
    pub(crate) alarms: watch::Receiver<Vec<AlarmMember>>,
    /// The one place for whoever reads the whole store for a comparison.
    pub(crate) comparing: Arc<Semaphore>,
    /// Clients have checksums of everything made so many at a time.
    pub(crate) hashing: Arc<Semaphore>,
    /// The other members; `None` where there can be none.
    pub(crate) peers: Option<Transport>,
    /// How changes of members are judged.
    pub(crate) rules: Rules,
    /// Held by the one change of members that this member, as leader, has under way.
    pub(crate) changing: tokio::sync::Mutex<()>,
    /// Why this member's NOSPACE alarm is raised.
    pub(crate) claim: Claim,
    /// Leases, while this member leads.
    pub(crate) clock: LeaseClock,
    pub(crate) token_clock: TokenClock,
    /// What signs tokens; `None`: they are simple ones.
    pub(crate) signed_tokens: Option<Arc<Jwt>>,
    pub(crate) identity: Identity,
    pub(crate) request_ids: RequestIds,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    pub(crate) telemetry: Telemetry,
    pub(crate) stop: CancellationToken,
}

/// Whether the CORRUPT alarm of this very member is among these.
pub(super) fn is_marked(alarms: &[AlarmMember], member_id: u64) -> bool {
    alarms.iter().any(|alarm| alarm.member_id == member_id && alarm.alarm() == AlarmType::Corrupt)
}

/// The request asks to be refused while there is no leader.
pub(crate) fn requires_leader(metadata: &MetadataMap) -> bool {
    metadata.get("hasleader").is_some_and(|value| value == "true")
}

/// The bytes to propose. What no member could read back is refused: once committed, it would stop
/// every one of them, at each start. Only transactions can be nested too deep for that.
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

/// Which version of etcd's API a client says to speak.
const CLIENT_API_VERSION: &str = "client-api-version";

/// What belongs to a call: what its answer holds, from before there is one until its client has taken the
/// last byte; and who makes it.
pub(crate) struct Held {
    charge: Charge,
    who: Who,
    caller: Caller,
}

/// What a call keeps beside the values in its answer.
const CALL_BYTES: usize = 4 << 10;

impl Held {
    /// Nothing, charged to whom the extensions name.
    pub(super) fn new<Q>(request: &Request<Q>) -> Self {
        let who = Who::of(request);
        match request.extensions().get::<Arc<Account>>() {
            Some(account) => Self::of(account, who),
            None => {
                Self { charge: Charge::new(&Account::unbounded()), who, caller: Caller::Nobody }
            }
        }
    }

    /// Nothing, charged to this one.
    pub(crate) fn of(account: &Arc<Account>, who: Who) -> Self {
        Self { charge: Charge::new(account), who, caller: Caller::Nobody }
    }

    /// Nothing, of the same call: for a part of it that goes on when its client has left.
    pub(super) fn again(&self) -> Self {
        Self { charge: self.charge.another(), who: self.who.clone(), caller: self.caller.clone() }
    }

    /// Of what this member asks for itself.
    pub(crate) fn by_member() -> Self {
        let charge = Charge::new(&Account::unbounded());
        Self { charge, who: Who::Member, caller: Caller::Member }
    }

    /// Who makes the call.
    pub(super) fn who(&self) -> &Who {
        &self.who
    }

    /// Whether there is room for `bytes` of values.
    pub(crate) fn fits(&mut self, bytes: usize) -> bool {
        self.charge.set(CALL_BYTES + bytes, Part::of_answer(bytes))
    }

    /// The same, as a refusal.
    pub(crate) fn hold(&mut self, bytes: usize) -> Result<(), Error> {
        if self.fits(bytes) { Ok(()) } else { Err(Error::TooMuchUnread) }
    }
}

/// A response that [`Context::call`] can complete.
pub(crate) trait Answer: prost::Message {
    /// Its header, if it has one.
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

/// A header of which only the revision is known so far: [`Context::call`] fills in the rest.
pub(super) fn header(revision: i64) -> Option<ResponseHeader> {
    Some(ResponseHeader { revision, ..ResponseHeader::default() })
}

impl Context {
    /// This member's part of a response header.
    pub(crate) fn header(&self, revision: i64) -> ResponseHeader {
        ResponseHeader {
            cluster_id: self.identity.cluster_id,
            member_id: self.identity.member_id,
            revision,
            raft_term: self.status.borrow().term,
        }
    }

    /// Counts a call by what its client says of itself.
    pub(super) fn count_client(&self, metadata: &MetadataMap, is_stream: bool) {
        let said = metadata.get(CLIENT_API_VERSION).map(|said| said.as_encoded_bytes());
        self.metrics.clients.count(said, is_stream);
    }

    pub(crate) fn has_leader(&self) -> bool {
        *self.leader.borrow() != 0
    }

    /// Whether a call may go ahead, by what came with it.
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

    /// Whether this member was found to hold something else than the others: it serves none of it.
    pub(crate) fn is_corrupt(&self) -> bool {
        is_marked(&self.alarms.borrow(), self.identity.member_id)
    }

    /// Refuses where the data would be read or changed that was found to be wrong.
    pub(crate) fn vouch(&self) -> Result<(), Error> {
        if self.is_corrupt() { Err(Error::Corrupt) } else { Ok(()) }
    }

    /// The way of every unary call: counted, admitted, done, and its header, if it has one, filled
    /// in where only the revision is known so far. What the answer holds stays charged until it has
    /// been taken.
    pub(crate) async fn call<Q: Ask, T: Answer, E: From<Error> + Into<Status>>(
        &self,
        method: Method,
        request: Request<Q>,
        work: impl AsyncFnOnce(Q, &mut Held) -> Result<T, E>,
    ) -> Result<tonic::Response<T>, Status> {
        let call = self.metrics.start(method);
        self.count_client(request.metadata(), false);
        let mut held = Held::new(&request);
        let result = match self.begin::<Q, E>(&request, &mut held).await {
            Ok(()) => work(request.into_inner(), &mut held).await.map_err(Into::into),
            Err(status) => Err(status),
        };
        call.end(result.as_ref().err());
        let mut answer = result?;
        if let Some(header) = answer.header() {
            *header = self.header(header.revision);
        }
        let mut answer = tonic::Response::new(answer);
        answer.extensions_mut().insert(Arc::new(held.charge));
        Ok(answer)
    }

    /// Everything that a call may be refused for before anything is done.
    pub(super) async fn begin<Q: Ask, E: From<Error> + Into<Status>>(
        &self,
        request: &Request<Q>,
        held: &mut Held,
    ) -> Result<(), Status> {
        let asked = request.get_ref();
        self.admit(request.metadata(), asked.is_for_learners())?;
        if asked.is_about_data() {
            self.vouch()?;
        }
        held.hold(0)?;
        self.allow(asked, held).await.map_err(|error| E::from(error).into())
    }

    /// The same of what a call asks in its turn.
    pub(super) async fn allow(&self, asked: &impl Ask, held: &mut Held) -> Result<(), Error> {
        asked.check(&self.limits)?;
        held.caller = self.permit(&held.who, asked.access(), asked.is_for_learners()).await?;
        Ok(())
    }

    /// Puts a request through consensus and waits for what it came to, and for whose answer `held`
    /// has to have room.
    pub(crate) async fn propose<P: Proposal>(
        &self,
        request: P,
        held: &mut Held,
    ) -> Result<P::Answer, Error> {
        let operation = request.operation();
        let grows = grows(&operation);
        if grows && *self.space.borrow() {
            return Err(Error::NoSpace);
        }
        let id = self.request_ids.next();
        let payload = encode(id, held.caller.clone(), operation, self.limits.max_request_bytes)?;
        if grows && !self.limits.quota.has_room(self.store.record_bytes(), payload.len()) {
            // In a box, since it proposes the alarm.
            Box::pin(space::over_quota(self)).await;
            return Err(Error::NoSpace);
        }
        let response = match self.decide(payload, id).await? {
            Response::TooLarge => return Err(Error::AnswerDropped),
            response => response,
        };
        let answer = P::answer(response).expect("apply answers each operation in kind");
        held.hold(answer.encoded_len()).map_err(|_| Error::AnswerDropped)?;
        Ok(answer)
    }

    /// Puts an operation of this member's own through consensus and waits for what it came to.
    pub(crate) async fn carry_out(&self, operation: Operation) -> Result<Response, Error> {
        self.carry_out_for(&Held::by_member(), operation).await
    }

    /// The same for whom `held` names.
    pub(super) async fn carry_out_for(
        &self,
        held: &Held,
        operation: Operation,
    ) -> Result<Response, Error> {
        let id = self.request_ids.next();
        let payload = encode(id, held.caller.clone(), operation, self.limits.max_request_bytes)?;
        self.decide(payload, id).await
    }

    async fn decide(&self, payload: Bytes, id: RequestId) -> Result<Response, Error> {
        let pending = self.metrics.pending();
        let outcome = self.handle.propose(payload, id).await?;
        pending.end();
        Ok(outcome?)
    }

    /// Waits until this member's store shows everything acknowledged before the call, unless the
    /// request is content with what it shows.
    pub(crate) async fn barrier(&self, serializable: bool) -> Result<(), Error> {
        if !serializable {
            self.handle.read_barrier().await?;
        }
        Ok(())
    }

    /// Reads from the newest view; again from a newer one if a compaction overtakes it.
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
    fn what_could_not_be_read_back_is_never_proposed() {
        for depth in 1..200 {
            if let Ok(payload) = encode(RequestId(1), Caller::Nobody, nested(depth), usize::MAX) {
                assert!(command::decode(payload).is_ok(), "{depth}");
            }
        }
        assert!(encode(RequestId(1), Caller::Nobody, nested(10), usize::MAX).is_ok());
        assert_eq!(
            encode(RequestId(1), Caller::Nobody, nested(50), usize::MAX),
            Err(Error::TooManyOps)
        );
    }
}
