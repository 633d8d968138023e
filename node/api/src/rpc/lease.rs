//! The Lease service: grant, revoke, keep-alive, time to live, list.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, ReadyChunks, StreamExt as _};
use node_proto::etcdserverpb::lease_server;
use node_proto::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse,
    LeaseLeasesRequest, LeaseLeasesResponse, LeaseRevokeRequest, LeaseRevokeResponse, LeaseStatus,
    LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
};
use node_proto::musterpb::LeaseQuestion;
use node_state::auth::RequestedAccess;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::TaskTracker;
use tonic::{Request, Status, Streaming};

use super::access::Credentials;
use super::context::{ApiContext, CallContext, header, requires_leader};
use super::error::Error;
use super::lease_questions::{LEASE_BUSY, LEASE_UNKNOWN, ask_leader_about_leases};
use super::metrics::Method;
use super::reconfigure::LEADER_POLL_INTERVAL;
use super::status_texts;
use super::watch::{RefusalFuture, watch_for_refusal};

type Answer<T> = Result<tonic::Response<T>, Status>;

/// HTTP path of `LeaseKeepAlive`, whose requests are a stream.
pub(crate) const KEEP_ALIVE_PATH: &str = "/etcdserverpb.Lease/LeaseKeepAlive";

/// Maximum number of requests of one stream that are served together.
const MAX_REQUESTS_AT_ONCE: usize = 256;
/// Length of the queue of renewals for the leader. A stream waits while the queue is full.
const RENEW_QUEUE_LENGTH: usize = 1024;
/// Maximum number of queued renewals that are sent to the leader in one message.
const MAX_RENEWALS_PER_MESSAGE: usize = 128;

/// Leases that one stream wants to renew, queued for the leader.
struct RenewRequest {
    ids: Vec<i64>,
    deadline: Instant,
    answer: oneshot::Sender<Result<Vec<i64>, Error>>,
}

#[derive(Clone)]
pub(super) struct LeaseService {
    context: Arc<ApiContext>,
    renew_queue: mpsc::Sender<RenewRequest>,
}

impl LeaseService {
    pub(super) fn new(context: Arc<ApiContext>, tasks: &TaskTracker) -> Self {
        let (passed_on, wishes) = mpsc::channel(RENEW_QUEUE_LENGTH);
        let stop = context.stop.clone();
        tasks.spawn(stop.run_until_cancelled_owned(forward_renewals(context.clone(), wishes)));
        Self { context, renew_queue: passed_on }
    }

    pub(super) async fn grant(
        &self,
        mut request: LeaseGrantRequest,
        call: &mut CallContext,
    ) -> Result<LeaseGrantResponse, Error> {
        request.ttl = request.ttl.max(self.context.limits.min_lease_ttl);
        if request.id != 0 {
            return self.context.propose(request, call).await;
        }
        loop {
            // As in etcd, a generated ID is positive.
            request.id = (self.context.request_ids.next().0 & i64::MAX as u64).cast_signed().max(1);
            match self.context.propose(request, call).await {
                Err(Error::LeaseExists) => {}
                done => return done,
            }
        }
    }

    async fn time_to_live(
        &self,
        request: LeaseTimeToLiveRequest,
        call: &mut CallContext,
    ) -> Result<LeaseTimeToLiveResponse, Error> {
        let LeaseTimeToLiveRequest { id, keys } = request;
        let deadline = self.context.deadline();
        let seconds = loop {
            self.context.barrier(false).await?;
            if !self.context.leases().has(id) {
                break LEASE_UNKNOWN;
            }
            let question = LeaseQuestion { renew: false, ids: vec![id] };
            match ask_leader_about_leases(&self.context, question, deadline).await {
                Ok(seconds) if seconds[0] != LEASE_UNKNOWN => break seconds[0],
                // Either the lease was revoked meanwhile, or the leader changed. In both cases the
                // loop tries again: after the next barrier, this member's store shows a revocation.
                Ok(_) | Err(Error::NotLeader) if Instant::now() < deadline => {
                    sleep(LEADER_POLL_INTERVAL).await;
                }
                Ok(_) | Err(Error::NotLeader) => return Err(Error::Timeout),
                Err(error) => return Err(error),
            }
        };
        let revision = self.context.store.view().revision();
        let leases = self.context.leases();
        let mut answer = LeaseTimeToLiveResponse {
            header: header(revision),
            id,
            ttl: LEASE_UNKNOWN,
            ..LeaseTimeToLiveResponse::default()
        };
        if keys {
            self.context.access.authorise_with_leases(
                call.credentials(),
                &self.context.store.view(),
                RequestedAccess::LeaseKeys(id),
                &leases,
            )?;
        }
        if let Some(lease) = leases.get(id).filter(|_| seconds != LEASE_UNKNOWN) {
            answer.ttl = seconds;
            answer.granted_ttl = lease.ttl;
            if keys {
                call.charge(leases.keys(id).map(|key| key.len() + size_of::<Bytes>()).sum())?;
                answer.keys = leases.keys(id).map(|key| Bytes::copy_from_slice(key)).collect();
            }
        }
        Ok(answer)
    }

    async fn leases(&self, call: &mut CallContext) -> Result<LeaseLeasesResponse, Error> {
        self.context.barrier(false).await?;
        let revision = self.context.store.view().revision();
        let table = self.context.leases();
        self.context.access.authorise_with_leases(
            call.credentials(),
            &self.context.store.view(),
            RequestedAccess::ListLeases,
            &table,
        )?;
        call.charge(table.len() * size_of::<LeaseStatus>())?;
        let leases = table.iter().map(|lease| LeaseStatus { id: lease.id }).collect();
        Ok(LeaseLeasesResponse { header: header(revision), leases })
    }

    /// Renews leases. Returns the TTL of each lease, or 0 for a lease that doesn't exist.
    async fn renew(&self, ids: &[i64]) -> Result<Vec<i64>, Error> {
        let deadline = self.context.deadline();
        let mut ttls = vec![LEASE_BUSY; ids.len()];
        loop {
            let left: Vec<usize> = (0..ids.len()).filter(|at| ttls[*at] == LEASE_BUSY).collect();
            if left.is_empty() {
                return Ok(ttls);
            }
            match self.renew_once(left.iter().map(|at| ids[*at]).collect(), deadline).await {
                Ok(seconds) => left.iter().zip(seconds).for_each(|(at, ttl)| ttls[*at] = ttl),
                Err(Error::NotLeader) => {}
                Err(error) => return Err(error),
            }
            if ttls.contains(&LEASE_BUSY) {
                if Instant::now() >= deadline {
                    return Err(Error::Timeout);
                }
                sleep(LEADER_POLL_INTERVAL).await;
            }
        }
    }

    /// Renews leases once. If this member leads, it uses its own lease clock. Otherwise the request
    /// is queued for the leader.
    async fn renew_once(&self, ids: Vec<i64>, deadline: Instant) -> Result<Vec<i64>, Error> {
        if self.context.leads() {
            let question = LeaseQuestion { renew: true, ids };
            return ask_leader_about_leases(&self.context, question, deadline).await;
        }
        let (answer, answered) = oneshot::channel();
        let wish = RenewRequest { ids, deadline, answer };
        self.renew_queue.send(wish).await.map_err(|_| Error::Stopped)?;
        // The wait has a time limit, since earlier requests in the queue may wait for a leader that
        // is unreachable.
        let answered = timeout_at(deadline, answered).await.map_err(|_| Error::Timeout)?;
        answered.map_err(|_| Error::Stopped)?
    }
}

/// Sends the queued renewals to the leader. Each message needs its own connection, so queued
/// renewals are gathered into one message, up to a limit.
async fn forward_renewals(context: Arc<ApiContext>, mut wishes: mpsc::Receiver<RenewRequest>) {
    let mut together = Vec::new();
    while wishes.recv_many(&mut together, MAX_RENEWALS_PER_MESSAGE).await > 0 {
        let ids = together.iter().flat_map(|wish| &wish.ids).copied().collect();
        let last = together.iter().map(|wish| wish.deadline).max().unwrap_or_else(Instant::now);
        let question = LeaseQuestion { renew: true, ids };
        let mut answer =
            ask_leader_about_leases(&context, question, last).await.map(Vec::into_iter);
        for RenewRequest { ids, answer: told, .. } in together.drain(..) {
            let own = match &mut answer {
                Ok(seconds) => Ok(seconds.by_ref().take(ids.len()).collect()),
                Err(error) => Err(*error),
            };
            // Sending fails if the stream has given up meanwhile, which needs no handling.
            let _ = told.send(own);
        }
    }
}

type KeepAliveAnswers = tonic::codegen::BoxStream<LeaseKeepAliveResponse>;

/// A keep-alive stream: its requests and their answers.
struct KeepAliveStream {
    lease: LeaseService,
    credentials: Credentials,
    requests: ReadyChunks<Streaming<LeaseKeepAliveRequest>>,
    refusal: RefusalFuture,
    ready: VecDeque<LeaseKeepAliveResponse>,
    /// Result with which the client's half of the stream ended; `None` while it is open.
    ended: Option<Result<(), Status>>,
    code: tonic::Code,
    began: std::time::Instant,
}

impl KeepAliveStream {
    /// Returns the next answer; `None` after the last.
    async fn next(&mut self) -> Result<Option<LeaseKeepAliveResponse>, Status> {
        loop {
            if let Some(answer) = self.ready.pop_front() {
                return Ok(Some(answer));
            }
            if let Some(ended) = self.ended.take() {
                self.code = ended.as_ref().map_or_else(Status::code, |()| tonic::Code::Ok);
                return ended.map(|()| None);
            }
            let stop = self.lease.context.stop.clone();
            tokio::select! {
                served = serve(&self.lease, &self.credentials, &mut self.requests) => {
                    let (answers, ended) = served?;
                    self.ready.extend(answers);
                    self.ended = ended;
                }
                why = &mut self.refusal => return Err(why.into()),
                () = stop.cancelled() => return Err(Error::Stopped.into()),
            }
        }
    }
}

/// Serves the requests that have arrived. Also returns the result with which the client's half of
/// the stream ended, if it ended.
async fn serve(
    lease: &LeaseService,
    who: &Credentials,
    requests: &mut ReadyChunks<Streaming<LeaseKeepAliveRequest>>,
) -> Result<(Vec<LeaseKeepAliveResponse>, Option<Result<(), Status>>), Status> {
    let Some(come) = requests.next().await else { return Ok((Vec::new(), Some(Ok(())))) };
    let mut ids = Vec::with_capacity(come.len());
    let mut ended = None;
    for request in come {
        match request {
            Ok(request) => ids.push(request.id),
            Err(status) => {
                let max = super::largest_message(lease.context.limits.max_request_bytes);
                ended = Some(Err(status_texts::reword_status(status, max)));
                break;
            }
        }
    }
    lease.context.metrics.calls(Method::LeaseKeepAlive).count_in(ids.len() as u64);
    for id in &ids {
        lease.context.authorise_call(who, RequestedAccess::LeaseKeepAlive(*id), false).await?;
    }
    // The header is made before any renewal. So if a lease's keys are deleted after its renewal,
    // the deletion has a higher revision than this answer.
    let header = lease.context.header(lease.context.store.view().revision());
    let ttls = lease.renew(&ids).await?;
    let answer = |(id, ttl)| LeaseKeepAliveResponse { header: Some(header), id, ttl };
    Ok((ids.into_iter().zip(ttls).map(answer).collect(), ended))
}

impl Drop for KeepAliveStream {
    fn drop(&mut self) {
        let calls = self.lease.context.metrics.calls(Method::LeaseKeepAlive);
        calls.end(self.code, self.began);
    }
}

#[tonic::async_trait]
impl lease_server::Lease for LeaseService {
    async fn lease_grant(&self, request: Request<LeaseGrantRequest>) -> Answer<LeaseGrantResponse> {
        let work = async |request, call: &mut CallContext| self.grant(request, call).await;
        self.context.call(Method::LeaseGrant, request, work).await
    }

    async fn lease_revoke(
        &self,
        request: Request<LeaseRevokeRequest>,
    ) -> Answer<LeaseRevokeResponse> {
        let work = async |request: LeaseRevokeRequest, call: &mut CallContext| {
            self.context.propose(request, call).await
        };
        self.context.call(Method::LeaseRevoke, request, work).await
    }

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<LeaseKeepAliveRequest>>,
    ) -> Answer<KeepAliveAnswers> {
        self.context.count_client(request.metadata(), true);
        self.context.admit(request.metadata(), false)?;
        self.context.ensure_not_corrupt()?;
        let needs_leader = requires_leader(request.metadata());
        let keeping = KeepAliveStream {
            lease: self.clone(),
            credentials: Credentials::of(&request),
            refusal: watch_for_refusal(&self.context, needs_leader),
            requests: request.into_inner().ready_chunks(MAX_REQUESTS_AT_ONCE),
            ready: VecDeque::new(),
            ended: None,
            code: tonic::Code::Cancelled,
            began: self.context.metrics.calls(Method::LeaseKeepAlive).begin(),
        };
        let answers = stream::unfold(Some(keeping), async |keeping| {
            let mut keeping = keeping?;
            match keeping.next().await {
                Ok(Some(answer)) => {
                    keeping.lease.context.metrics.calls(Method::LeaseKeepAlive).count_out(1);
                    Some((Ok(answer), Some(keeping)))
                }
                Ok(None) => None,
                Err(status) => {
                    keeping.code = status.code();
                    Some((Err(status), None))
                }
            }
        });
        Ok(tonic::Response::new(Box::pin(answers)))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<LeaseTimeToLiveRequest>,
    ) -> Answer<LeaseTimeToLiveResponse> {
        let work = async |request, call: &mut CallContext| self.time_to_live(request, call).await;
        self.context.call(Method::LeaseTimeToLive, request, work).await
    }

    async fn lease_leases(
        &self,
        request: Request<LeaseLeasesRequest>,
    ) -> Answer<LeaseLeasesResponse> {
        let work = async |_: LeaseLeasesRequest, call: &mut CallContext| self.leases(call).await;
        self.context.call(Method::LeaseLeases, request, work).await
    }
}
