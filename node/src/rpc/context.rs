//! What every method needs.

use std::sync::Arc;

use bytes::Bytes;
use node_proto::command::{self, Operation};
use node_proto::etcdserverpb::{
    AlarmMember, AlarmType, RangeRequest, ResponseHeader, StatusRequest,
};
use node_proto::{etcdserverpb as pb, v3electionpb, v3lockpb};
use prost::Message as _;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use super::error::Error;
use super::leases::LeaseClock;
use super::metrics::Method;
use super::proposal::Proposal;
use super::space::{self, Claim};
use super::{Identity, Limits, Metrics, RequestIds, Telemetry};
use crate::apply::{Outcome, Response, grows};
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
    operation: Operation,
    max_bytes: usize,
) -> Result<Bytes, Error> {
    let may_be_deep = matches!(operation, Operation::Txn(_));
    let payload = command::encode(id.0, operation);
    if payload.len() > max_bytes {
        return Err(Error::RequestTooLarge);
    }
    if may_be_deep && let Err(error) = command::decode(payload.clone()) {
        tracing::debug!(%error, "refused a request that no member could apply");
        return Err(Error::TooManyOps);
    }
    Ok(payload)
}

/// What a call's answer holds, from before there is one until its client has taken the last byte.
pub(crate) struct Held(Charge);

/// What a call keeps beside the values in its answer.
const CALL_BYTES: usize = 4 << 10;

impl Held {
    /// Nothing, charged to whom the extensions name.
    fn new(extensions: &http::Extensions) -> Self {
        match extensions.get::<Arc<Account>>() {
            Some(account) => Self::of(account),
            None => Self::by_nobody(),
        }
    }

    /// Nothing, charged to this one.
    pub(crate) fn of(account: &Arc<Account>) -> Self {
        Self(Charge::new(account))
    }

    /// Of a call that comes over no connection.
    pub(crate) fn by_nobody() -> Self {
        Self(Charge::new(&Account::unbounded()))
    }

    /// Whether there is room for `bytes` of values.
    pub(crate) fn fits(&mut self, bytes: usize) -> bool {
        self.0.set(CALL_BYTES + bytes, Part::of_answer(bytes))
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
    v3lockpb::LockResponse
    v3lockpb::UnlockResponse
    v3electionpb::CampaignResponse
    v3electionpb::ProclaimResponse
    v3electionpb::LeaderResponse
    v3electionpb::ResignResponse
}

/// A request, as two kinds of members see it that don't answer all of them.
pub(crate) trait Ask {
    /// Whether learners answer it: most of them they could only give old answers to.
    fn is_for_learners(&self) -> bool {
        false
    }

    /// Whether it is about the data, which a member serves only as long as it holds the same as the
    /// others.
    fn is_about_data(&self) -> bool {
        true
    }
}

impl Ask for RangeRequest {
    fn is_for_learners(&self) -> bool {
        self.serializable
    }
}

impl Ask for StatusRequest {
    fn is_for_learners(&self) -> bool {
        true
    }

    fn is_about_data(&self) -> bool {
        false
    }
}

macro_rules! asks {
    ($is_about_data:literal: $($name:path)*) => {
        $(impl Ask for $name {
            fn is_about_data(&self) -> bool {
                $is_about_data
            }
        })*
    };
}

asks! { true:
    pb::PutRequest
    pb::DeleteRangeRequest
    pb::TxnRequest
    pb::CompactionRequest
    pb::LeaseGrantRequest
    pb::LeaseRevokeRequest
    pb::LeaseTimeToLiveRequest
    pb::LeaseLeasesRequest
    v3lockpb::LockRequest
    v3lockpb::UnlockRequest
    v3electionpb::CampaignRequest
    v3electionpb::ProclaimRequest
    v3electionpb::LeaderRequest
    v3electionpb::ResignRequest
}

asks! { false:
    pb::MemberListRequest
    pb::MemberAddRequest
    pb::MemberRemoveRequest
    pb::MemberUpdateRequest
    pb::MemberPromoteRequest
    pb::AlarmRequest
    pb::DefragmentRequest
    pb::DowngradeRequest
    pb::HashRequest
    pb::HashKvRequest
    pb::MoveLeaderRequest
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

    pub(crate) fn has_leader(&self) -> bool {
        *self.leader.borrow() != 0
    }

    /// Whether a call may go ahead, by what came with it.
    pub(crate) fn admit(&self, metadata: &MetadataMap, is_for_learners: bool) -> Result<(), Error> {
        let me = MemberId(self.identity.member_id);
        if !is_for_learners && self.members.borrow().is_learner(me) {
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
    pub(crate) async fn call<Q: Ask, T: Answer, E: Into<Status>>(
        &self,
        method: Method,
        request: Request<Q>,
        work: impl AsyncFnOnce(Q, &mut Held) -> Result<T, E>,
    ) -> Result<tonic::Response<T>, Status> {
        let call = self.metrics.start(method);
        let mut held = Held::new(request.extensions());
        let asked = request.get_ref();
        let admitted = self.admit(request.metadata(), asked.is_for_learners());
        let vouched = if asked.is_about_data() { self.vouch() } else { Ok(()) };
        let result = match admitted.and(vouched).and_then(|()| held.hold(0)) {
            Ok(()) => work(request.into_inner(), &mut held).await.map_err(Into::into),
            Err(error) => Err(error.into()),
        };
        call.end(result.as_ref().err());
        let mut answer = result?;
        if let Some(header) = answer.header() {
            *header = self.header(header.revision);
        }
        let mut answer = tonic::Response::new(answer);
        answer.extensions_mut().insert(Arc::new(held.0));
        Ok(answer)
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
        let payload = encode(id, operation, self.limits.max_request_bytes)?;
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

    /// Puts an operation through consensus and waits for what it came to.
    pub(crate) async fn carry_out(&self, operation: Operation) -> Result<Response, Error> {
        let id = self.request_ids.next();
        let payload = encode(id, operation, self.limits.max_request_bytes)?;
        self.decide(payload, id).await
    }

    async fn decide(&self, payload: Bytes, id: RequestId) -> Result<Response, Error> {
        let _pending = self.metrics.pending();
        Ok(self.handle.propose(payload, id).await??)
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
            if let Ok(payload) = encode(RequestId(1), nested(depth), usize::MAX) {
                assert!(command::decode(payload).is_ok(), "{depth}");
            }
        }
        assert!(encode(RequestId(1), nested(10), usize::MAX).is_ok());
        assert_eq!(encode(RequestId(1), nested(50), usize::MAX), Err(Error::TooManyOps));
    }
}
