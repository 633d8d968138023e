//! The Election service: clients elect a leader among them, which publishes a value
//! (server/etcdserver/api/v3election in etcd).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::stream;
use muster_shares::memory::MemoryAccount;
use node_proto::etcdserverpb::ResponseHeader;
use node_proto::mvccpb::KeyValue;
use node_proto::v3electionpb::{
    CampaignRequest, CampaignResponse, LeaderKey, LeaderRequest, LeaderResponse, ProclaimRequest,
    ProclaimResponse, ResignRequest, ResignResponse, election_server,
};
use node_state::mvcc::watch::{Notice, Subscriber, WatchSpec};
use node_state::mvcc::{Event, EventKind, KeyRange};
use prost::Message as _;
use tonic::codegen::BoxStream;
use tonic::{Request, Status};

use super::access::Credentials;
use super::context::{CallContext, header, requires_leader};
use super::error::Error;
use super::lock_queue::{
    LockQueueError, LockQueues, delete_if_created_at, put_if_created_at, queue_range, revision,
    watch_after,
};
use super::metrics::Method;
use super::watch::{RefusalFuture, watch_for_refusal};

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct ElectionService(pub(super) LockQueues);

impl ElectionService {
    async fn campaign(
        &self,
        request: CampaignRequest,
        call: &mut CallContext,
    ) -> Result<CampaignResponse, LockQueueError> {
        let CampaignRequest { name, lease, value } = request;
        let lease = self.0.lease_or_grant(lease, call).await?;
        let mut place = self.0.enter(&name, lease, value.clone(), call).await?;
        if place.value().is_some_and(|before| *before != value) {
            let (key, created) = (place.key().clone(), place.created());
            if let Err(refused) = self.set_value(key.clone(), created, value, lease, call).await {
                // As in etcd, a candidate whose campaign fails leaves the queue.
                let _ = self.0.txn(delete_if_created_at(key, created), call).await;
                return Err(refused.into());
            }
        }
        place.wait_for_turn(call).await?.ok_or(Error::NotElected)?;
        let (key, rev) = (place.key().clone(), place.created());
        let leader = LeaderKey { name, key, rev, lease };
        Ok(CampaignResponse { header: header(place.entry_revision()), leader: Some(leader) })
    }

    /// Changes the value of a candidate's key. Fails if the key no longer exists.
    async fn set_value(
        &self,
        key: Bytes,
        created: i64,
        value: Bytes,
        lease: i64,
        call: &mut CallContext,
    ) -> Result<Option<ResponseHeader>, Error> {
        let said = self.0.txn(put_if_created_at(key, created, value, lease), call).await?;
        if said.succeeded { Ok(said.header) } else { Err(Error::NotElected) }
    }

    async fn proclaim(
        &self,
        request: ProclaimRequest,
        call: &mut CallContext,
    ) -> Result<ProclaimResponse, LockQueueError> {
        let LeaderKey { key, rev, lease, .. } = request.leader.ok_or(Error::NoLeaderKey)?;
        let lease = self.0.lease_or_grant(lease, call).await?;
        let header = self.set_value(key, rev, request.value, lease, call).await?;
        Ok(ProclaimResponse { header })
    }

    async fn leader(
        &self,
        request: LeaderRequest,
        call: &mut CallContext,
    ) -> Result<LeaderResponse, LockQueueError> {
        let mut found = self.0.read_first_entry(&request.name, call).await?;
        let kv = found.kvs.pop().ok_or(Error::NobodyElected)?;
        Ok(LeaderResponse { header: found.header, kv: Some(kv) })
    }

    async fn resign(
        &self,
        request: ResignRequest,
        call: &mut CallContext,
    ) -> Result<ResignResponse, LockQueueError> {
        let LeaderKey { key, rev, .. } = request.leader.ok_or(Error::NoLeaderKey)?;
        let resigned = self.0.txn(delete_if_created_at(key, rev), call).await?;
        Ok(ResignResponse { header: resigned.header })
    }
}

/// Subject of an observer's current watch.
enum ObservedSubject {
    /// No watch: the leader has to be looked up.
    Unknown,
    /// There is no leader. The watch waits for the first candidate.
    FirstCandidate(Subscriber),
    /// There is a leader. The watch follows the leader's key until that key is deleted.
    Leader(Subscriber),
}

/// Stream of an election's leaders and their values. An intermediate value may be left out, but the
/// newest is always sent.
struct Observer {
    queues: LockQueues,
    name: Bytes,
    account: Arc<MemoryAccount>,
    credentials: Credentials,
    subject: ObservedSubject,
    ready: VecDeque<LeaderResponse>,
    code: tonic::Code,
    began: Instant,
}

impl Observer {
    fn follow(&mut self, key: Bytes, seen_at: i64) {
        let spec = watch_after(seen_at, KeyRange::new(key, Bytes::new()));
        self.subject = ObservedSubject::Leader(self.queues.watch(self.account.clone(), spec));
    }

    fn push_answer(&mut self, revision: i64, kv: KeyValue) {
        let header = Some(self.queues.context.header(revision));
        self.ready.push_back(LeaderResponse { header, kv: Some(kv) });
    }

    async fn look_up_leader(&mut self) -> Result<(), Error> {
        let mut call = CallContext::of(&self.account, self.credentials.clone());
        let mut found = self.queues.read_first_entry(&self.name, &mut call).await?;
        let seen_at = revision(found.header.as_ref());
        if let Some(kv) = found.kvs.pop() {
            self.follow(kv.key.clone(), seen_at);
            self.push_answer(seen_at, kv);
        } else {
            let (key, range_end) = queue_range(&self.name);
            let all = watch_after(seen_at, KeyRange::new(key, range_end));
            let spec = WatchSpec { no_delete: true, ..all };
            self.subject =
                ObservedSubject::FirstCandidate(self.queues.watch(self.account.clone(), spec));
        }
        Ok(())
    }

    /// Does one step towards the next answer: looks the leader up, or handles a watch message.
    async fn step(&mut self) -> Result<(), Error> {
        let (notice, is_leader) = match &mut self.subject {
            ObservedSubject::Unknown => return self.look_up_leader().await,
            ObservedSubject::FirstCandidate(watch) => (watch.next().await?, false),
            ObservedSubject::Leader(watch) => (watch.next().await?, true),
        };
        match notice {
            Notice::Events { selection: picked, .. } => {
                for event in picked.events() {
                    if event.kind == EventKind::Delete {
                        self.subject = ObservedSubject::Unknown;
                        break;
                    }
                    let kv = decode_event(event)?;
                    if !is_leader {
                        self.follow(kv.key.clone(), kv.mod_revision);
                        self.push_answer(kv.mod_revision, kv);
                        break;
                    }
                    self.push_answer(picked.revision(), kv);
                }
            }
            // The leader may have changed in the compacted revisions, so it is looked up again.
            Notice::Compacted { .. } => self.subject = ObservedSubject::Unknown,
            Notice::Progress { .. } | Notice::WatchProgress { .. } => {}
        }
        Ok(())
    }

    /// Returns the next answer, or the status that ends the stream.
    async fn next(&mut self, refused: &mut RefusalFuture) -> Result<LeaderResponse, Status> {
        let stop = self.queues.context.stop.clone();
        loop {
            if let Some(answer) = self.ready.pop_front() {
                return Ok(answer);
            }
            tokio::select! {
                went = self.step() => went.map_err(LockQueueError::from)?,
                why = &mut *refused => return Err(why.into()),
                () = stop.cancelled() => return Err(Error::Stopped.into()),
            }
        }
    }
}

fn decode_event(event: &Event) -> Result<KeyValue, Error> {
    KeyValue::decode(event.kv.clone()).map_err(|error| {
        tracing::error!(%error, "an event's key and value can't be read");
        Error::StoreFailed
    })
}

impl Drop for Observer {
    fn drop(&mut self) {
        let calls = self.queues.context.metrics.calls(Method::Observe);
        calls.end(self.code, self.began);
    }
}

#[tonic::async_trait]
impl election_server::Election for ElectionService {
    async fn campaign(&self, request: Request<CampaignRequest>) -> Answer<CampaignResponse> {
        let work = async |request, call: &mut CallContext| self.campaign(request, call).await;
        self.0.context.call(Method::Campaign, request, work).await
    }

    async fn proclaim(&self, request: Request<ProclaimRequest>) -> Answer<ProclaimResponse> {
        let work = async |request, call: &mut CallContext| self.proclaim(request, call).await;
        self.0.context.call(Method::Proclaim, request, work).await
    }

    async fn leader(&self, request: Request<LeaderRequest>) -> Answer<LeaderResponse> {
        let work = async |request, call: &mut CallContext| self.leader(request, call).await;
        self.0.context.call(Method::Leader, request, work).await
    }

    async fn observe(&self, request: Request<LeaderRequest>) -> Answer<BoxStream<LeaderResponse>> {
        let context = &self.0.context;
        context.count_client(request.metadata(), true);
        context.admit(request.metadata(), false)?;
        context.ensure_not_corrupt()?;
        let account = request.extensions().get::<Arc<MemoryAccount>>().cloned();
        let refused = watch_for_refusal(context, requires_leader(request.metadata()));
        let observer = Observer {
            queues: self.0.clone(),
            account: account.unwrap_or_else(MemoryAccount::unbounded),
            credentials: Credentials::of(&request),
            subject: ObservedSubject::Unknown,
            ready: VecDeque::new(),
            name: request.into_inner().name,
            code: tonic::Code::Cancelled,
            began: context.metrics.calls(Method::Observe).begin(),
        };
        let answers = stream::unfold(Some((observer, refused)), async |state| {
            let (mut observer, mut refused) = state?;
            match observer.next(&mut refused).await {
                Ok(answer) => {
                    observer.queues.context.metrics.calls(Method::Observe).count_out(1);
                    Some((Ok(answer), Some((observer, refused))))
                }
                Err(status) => {
                    observer.code = status.code();
                    Some((Err(status), None))
                }
            }
        });
        Ok(tonic::Response::new(Box::pin(answers)))
    }

    async fn resign(&self, request: Request<ResignRequest>) -> Answer<ResignResponse> {
        let work = async |request, call: &mut CallContext| self.resign(request, call).await;
        self.0.context.call(Method::Resign, request, work).await
    }
}
