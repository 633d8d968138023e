//! The Watch service: many watches on one stream.
//!
//! The service is written by hand instead of generated because of its codec. A stream is not a task
//! of its own. It only works when the connection wants the next response, so a client that doesn't
//! read costs no work.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use muster_shares::memory::{BudgetShare, MemoryAccount, MemoryCharge};
use node_proto::etcdserverpb::watch_create_request::FilterType;
use node_proto::etcdserverpb::watch_request::RequestUnion;
use node_proto::etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse};
use node_state::auth::RequestedAccess;
use node_state::mvcc::KeyRange;
use node_state::mvcc::watch::{EventSelection, Notice, Subscriber, WatchSpec};
use prost::Message as _;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::{Code, Request, Response, Status, Streaming};

use super::access::Credentials;
use super::codec::{Frame, FrameEvents, WatchCodec};
use super::context::{ApiContext, has_corrupt_alarm, requires_leader};
use super::error::Error;
use super::metrics::Method;
use super::status_texts;

/// Watch ID in a response that belongs to no watch.
const NO_WATCH: i64 = -1;
/// A stream that requires a leader ends after this number of election timeouts without one.
const LEADERLESS_ELECTIONS: u32 = 3;

/// Maximum number of watches of one stream.
const MAX_WATCHES: usize = 100_000;
/// Maximum total length of the keys of a stream's watches, in bytes.
const MAX_KEY_BYTES: usize = 16 << 20;
/// Approximate memory of a watch besides its keys: here, at its subscriber and in the hub.
const WATCH_BYTES: usize = 768;
/// Share of the connection's memory account that watches may fill, in eighths. Answers need the
/// rest.
const WATCHES_PART: BudgetShare = BudgetShare(4);

const DUPLICATE_ID: &str = "mvcc: duplicate watch ID provided on the WatchStream";
const EMPTY_RANGE: &str = "mvcc: watcher range is empty";
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";

#[derive(Clone)]
pub(super) struct WatchService {
    context: Arc<ApiContext>,
    max_request: usize,
}

impl WatchService {
    pub(super) fn new(context: Arc<ApiContext>, max_request: usize) -> Self {
        Self { context, max_request }
    }
}

/// Path of the service's only method, whose requests are a stream.
pub(crate) const PATH: &str = "/etcdserverpb.Watch/Watch";

impl NamedService for WatchService {
    const NAME: &'static str = "etcdserverpb.Watch";
}

impl Service<http::Request<tonic::body::Body>> for WatchService {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        if request.uri().path() != PATH {
            return Box::pin(async { Ok(Status::unimplemented("").into_http()) });
        }
        let this = self.clone();
        Box::pin(async move {
            let mut grpc =
                Grpc::new(WatchCodec).apply_max_message_size_config(Some(this.max_request), None);
            Ok(grpc.streaming(this, request).await)
        })
    }
}

type Frames = BoxStream<'static, Result<Frame, Status>>;

impl StreamingService<WatchRequest> for WatchService {
    type Response = Frame;
    type ResponseStream = Frames;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Frames>, Status>> + Send>>;

    fn call(&mut self, request: Request<Streaming<WatchRequest>>) -> Self::Future {
        let context = self.context.clone();
        let max_response = self.max_request;
        Box::pin(async move {
            context.count_client(request.metadata(), true);
            context.admit(request.metadata(), false)?;
            context.ensure_not_corrupt()?;
            let needs_leader = requires_leader(request.metadata());
            let who = Credentials::of(&request);
            let account = request.extensions().get::<Arc<MemoryAccount>>().cloned();
            let account = account.unwrap_or_else(MemoryAccount::unbounded);
            let kept = MemoryCharge::new(&account);
            let subscriber = context.hub.subscribe_for(account);
            let requests = request.into_inner();
            let stream = WatchStream::new(
                context,
                who,
                subscriber,
                kept,
                requests,
                needs_leader,
                max_response,
            );
            let frames = stream::unfold(Some(stream), async |state| {
                let mut stream = state?;
                match stream.next().await {
                    Ok(frame) => Some((Ok(frame), Some(stream))),
                    Err(StreamEnd::ClientLeft) => None,
                    Err(StreamEnd::InvalidRequest(status)) => {
                        stream.end_code = status.code();
                        Some((Err(status), None))
                    }
                    Err(StreamEnd::Refused(error)) => {
                        stream.end_code = error.code();
                        Some((Err(error.into()), None))
                    }
                }
            });
            Ok(Response::new(frames.boxed()))
        })
    }
}

/// Reason why a stream ends.
enum StreamEnd {
    /// The client has left, so no status is sent.
    ClientLeft,
    /// The client's data can't be read, or is too large.
    InvalidRequest(Status),
    Refused(Error),
}

impl StreamEnd {
    /// Returns the reason why the stream ends, after receiving a request has failed with `status`.
    fn of(status: Status, max_request: usize) -> Self {
        match status_texts::reword_status(status, max_request) {
            told if matches!(told.code(), Code::ResourceExhausted | Code::Internal) => {
                Self::InvalidRequest(told)
            }
            _ => Self::ClientLeft,
        }
    }
}

impl From<Error> for StreamEnd {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// A watch's options for its responses, and the length of its keys.
#[derive(Clone, Copy)]
struct ResponseOptions {
    with_previous: bool,
    fragment: bool,
    key_bytes: usize,
}

struct WatchStream {
    context: Arc<ApiContext>,
    credentials: Credentials,
    /// Stream of requests; `None` once the client has closed its half.
    requests: Option<Streaming<WatchRequest>>,
    subscriber: Subscriber,
    response_options: BTreeMap<i64, ResponseOptions>,
    /// Charge for the memory of all watches.
    watch_charge: MemoryCharge,
    next_id: i64,
    refusal: RefusalFuture,
    max_response: usize,
    ready: VecDeque<Frame>,
    timer: tokio::time::Interval,
    end_code: Code,
    began: Instant,
}

impl WatchStream {
    fn new(
        context: Arc<ApiContext>,
        who: Credentials,
        subscriber: Subscriber,
        kept: MemoryCharge,
        requests: Streaming<WatchRequest>,
        needs_leader: bool,
        max_response: usize,
    ) -> Self {
        let every = context.limits.watch_progress_interval;
        let mut timer = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let refused = watch_for_refusal(&context, needs_leader);
        let metrics = &context.metrics;
        let began = metrics.calls(Method::Watch).begin();
        metrics.watch_streams.fetch_add(1, Ordering::Relaxed);
        Self {
            subscriber,
            context,
            credentials: who,
            requests: Some(requests),
            response_options: BTreeMap::new(),
            watch_charge: kept,
            next_id: 0,
            refusal: refused,
            max_response,
            ready: VecDeque::new(),
            timer,
            end_code: Code::Cancelled,
            began,
        }
    }

    /// Returns the next response, or the reason why the stream ends.
    async fn next(&mut self) -> Result<Frame, StreamEnd> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                self.context.metrics.calls(Method::Watch).count_out(1);
                return Ok(frame);
            }
            let context = self.context.clone();
            tokio::select! {
                request = next_request(&mut self.requests) => match request {
                    Ok(Some(request)) => {
                        context.metrics.calls(Method::Watch).count_in(1);
                        self.handle_request(request).await;
                    }
                    Ok(None) => self.requests = None,
                    // The stream's maximum response size is also the maximum size of its requests.
                    Err(status) => return Err(StreamEnd::of(status, self.max_response)),
                },
                notice = self.subscriber.next() => {
                    self.handle_notice(notice.map_err(Error::from)?);
                }
                _ = self.timer.tick() => self.subscriber.request_periodic_progress().await,
                why = &mut self.refusal => return Err(why.into()),
                () = context.stop.cancelled() => return Err(Error::Stopped.into()),
            }
        }
    }

    fn push(&mut self, head: WatchResponse) {
        self.ready.push_back(head.into());
    }

    fn revision(&self) -> i64 {
        self.context.store.view().revision()
    }

    fn head(&self, watch_id: i64, revision: i64) -> WatchResponse {
        WatchResponse {
            header: Some(self.context.header(revision)),
            watch_id,
            ..WatchResponse::default()
        }
    }

    async fn handle_request(&mut self, request: WatchRequest) {
        match request.request_union {
            Some(RequestUnion::CreateRequest(create)) => self.create(create).await,
            Some(RequestUnion::CancelRequest(cancel)) => self.cancel(cancel.watch_id).await,
            Some(RequestUnion::ProgressRequest(_)) => self.subscriber.request_progress().await,
            None => {}
        }
    }

    /// Cancels a watch and responds. As in etcd, cancelling an unknown watch has no response.
    async fn cancel(&mut self, watch_id: i64) {
        if self.subscriber.remove(watch_id).await {
            self.forget(watch_id);
            let head = self.head(watch_id, self.revision());
            self.push(WatchResponse { canceled: true, ..head });
        }
    }

    fn forget(&mut self, watch_id: i64) {
        if let Some(shape) = self.response_options.remove(&watch_id) {
            self.watch_charge.force(self.watch_charge.bytes() - WATCH_BYTES - shape.key_bytes);
            self.context.metrics.watchers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    async fn create(&mut self, mut request: WatchCreateRequest) {
        if request.key.is_empty() {
            // An empty key means the smallest possible key, as in etcd.
            request.key = Bytes::from_static(b"\0");
        }
        let range = KeyRange::new(request.key.clone(), request.range_end.clone());
        let key_bytes = request.key.len() + request.range_end.len();
        let all = self.watch_charge.bytes() + WATCH_BYTES + key_bytes;
        let all_keys = all - WATCH_BYTES * (self.response_options.len() + 1);
        let is_full = self.response_options.len() >= MAX_WATCHES || all_keys > MAX_KEY_BYTES;
        let refused = if request.start_revision < 0 {
            Some(COMPACTED.into())
        } else if let Err(refused) = may_watch(&self.context, &self.credentials, &request).await {
            // etcd sends this error in the format in which Go prints a gRPC error.
            Some(format!("rpc error: code = {:?} desc = {}", refused.code(), refused.text()).into())
        } else if range.is_empty() {
            Some(EMPTY_RANGE.into())
        } else if request.watch_id != 0 && self.subscriber.has(request.watch_id) {
            Some(DUPLICATE_ID.into())
        } else if is_full || !self.watch_charge.try_set(all, WATCHES_PART) {
            Some(Error::TooManyRequests.text())
        } else {
            None
        };
        if let Some(why) = refused {
            let head = self.head(NO_WATCH, self.revision());
            let cancel_reason = why.into_owned();
            self.push(WatchResponse { created: true, canceled: true, cancel_reason, ..head });
            return;
        }
        let watch_id = self.choose_id(request.watch_id);
        let shape = ResponseOptions {
            with_previous: request.prev_kv,
            fragment: request.fragment,
            key_bytes,
        };
        self.response_options.insert(watch_id, shape);
        self.context.metrics.watchers.fetch_add(1, Ordering::Relaxed);
        let filtered = |filter: FilterType| request.filters().any(|f| f == filter);
        let spec = WatchSpec {
            range,
            start_revision: request.start_revision,
            no_put: filtered(FilterType::Noput),
            no_delete: filtered(FilterType::Nodelete),
            progress_notify: request.progress_notify,
        };
        let revision = self.subscriber.add(watch_id, spec);
        self.push(WatchResponse { created: true, ..self.head(watch_id, revision) });
    }

    /// Returns the watch ID that the client wants, or the next free ID if `wanted` is 0.
    fn choose_id(&mut self, wanted: i64) -> i64 {
        if wanted != 0 {
            return wanted;
        }
        while self.subscriber.has(self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        self.next_id - 1
    }

    fn handle_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Events { watch_id, selection: picked, held } => {
                self.push_events(watch_id, &picked, held);
            }
            Notice::Compacted { watch_id, compact_revision } => {
                // The watch's ID stays in use until the client cancels the watch.
                let head = self.head(watch_id, 0);
                self.push(WatchResponse { canceled: true, compact_revision, ..head });
            }
            Notice::Progress { revision } => self.push(self.head(NO_WATCH, revision)),
            Notice::WatchProgress { watch_id, revision } => {
                self.push(self.head(watch_id, revision));
            }
        }
    }

    fn push_events(&mut self, watch_id: i64, picked: &Arc<EventSelection>, held: MemoryCharge) {
        let Some(shape) = self.response_options.get(&watch_id).copied() else { return };
        let head = self.head(watch_id, picked.revision());
        let events = FrameEvents {
            selection: picked.clone(),
            part: 0..picked.len(),
            previous: shape.with_previous.then(|| self.context.store.clone()),
            _held: Arc::new(held),
        };
        self.context.metrics.events.fetch_add(picked.len() as u64, Ordering::Relaxed);
        if shape.fragment {
            let sizes: Vec<usize> = events.pieces().iter().map(Bytes::len).collect();
            let parts = fragments(head.encoded_len(), &sizes, self.max_response);
            let last = parts.len().saturating_sub(1);
            for (at, part) in parts.into_iter().enumerate() {
                let head = WatchResponse { fragment: at != last, ..head.clone() };
                let events = FrameEvents { part, ..events.clone() };
                self.ready.push_back(Frame { head, events: Some(events) });
            }
        } else {
            self.ready.push_back(Frame { head, events: Some(events) });
        }
    }
}

impl Drop for WatchStream {
    fn drop(&mut self) {
        let metrics = &self.context.metrics;
        metrics.calls(Method::Watch).end(self.end_code, self.began);
        metrics.watch_streams.fetch_sub(1, Ordering::Relaxed);
        let open = i64::try_from(self.response_options.len()).unwrap_or(i64::MAX);
        metrics.watchers.fetch_sub(open, Ordering::Relaxed);
    }
}

/// Splits a response that is too large. Each part is below `max` bytes, or has a single event.
fn fragments(head: usize, sizes: &[usize], max: usize) -> Vec<std::ops::Range<usize>> {
    let mut parts = Vec::new();
    let (mut start, mut bytes) = (0, head);
    for (at, size) in sizes.iter().enumerate() {
        if at > start && bytes + size >= max {
            parts.push(start..at);
            start = at;
            bytes = head;
        }
        bytes += size;
    }
    parts.push(start..sizes.len());
    parts
}

/// Checks the permission to watch. As in etcd, it is checked only when the watch is created.
async fn may_watch(
    context: &ApiContext,
    who: &Credentials,
    request: &WatchCreateRequest,
) -> Result<(), Error> {
    context.authorise_call(who, RequestedAccess::Watch(request), false).await.map(|_| ())
}

async fn next_request(
    requests: &mut Option<Streaming<WatchRequest>>,
) -> Result<Option<WatchRequest>, Status> {
    match requests {
        Some(requests) => requests.message().await,
        // The client has closed its half of the stream, but its watches continue.
        None => std::future::pending().await,
    }
}

/// Future that completes with the reason why a stream can't continue.
pub(super) type RefusalFuture = Pin<Box<dyn Future<Output = Error> + Send>>;

/// Returns a future that completes when the stream must end. This is so once this member's data is
/// known to be corrupt. If the stream requires a leader, it also ends after too long a time without
/// one.
pub(super) fn watch_for_refusal(context: &ApiContext, needs_leader: bool) -> RefusalFuture {
    let patience = context.limits.election_timeout * LEADERLESS_ELECTIONS;
    let (leader, mut alarms) = (context.leader.clone(), context.alarms.clone());
    let own = context.identity.member_id;
    let leader_lost = async move {
        if needs_leader {
            wait_for_leader_loss(leader, patience).await;
        } else {
            std::future::pending().await
        }
    };
    let found_corrupt = async move {
        if alarms.wait_for(|alarms| has_corrupt_alarm(alarms, own)).await.is_err() {
            // The store was dropped, since the node is stopping.
            std::future::pending::<()>().await;
        }
    };
    Box::pin(async move {
        tokio::select! {
            () = leader_lost => Error::NoLeader,
            () = found_corrupt => Error::Corrupt,
        }
    })
}

/// Returns once there has been no leader for `patience` without interruption.
pub(super) async fn wait_for_leader_loss(
    mut leader: tokio::sync::watch::Receiver<u64>,
    patience: Duration,
) {
    loop {
        if leader.wait_for(|leader| *leader == 0).await.is_err() {
            return;
        }
        let back = leader.wait_for(|leader| *leader != 0);
        match tokio::time::timeout(patience, back).await {
            Ok(Ok(_)) => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fragments;

    #[test]
    fn a_small_response_has_one_part() {
        assert_eq!(fragments(10, &[20, 20], 100), vec![0..2; 1]);
    }

    #[test]
    fn each_part_stays_below_the_limit() {
        assert_eq!(fragments(10, &[40, 40, 40, 40], 100), [0..2, 2..4]);
    }

    #[test]
    fn each_part_has_a_head_and_ends_before_the_limit() {
        assert_eq!(fragments(10, &[80, 45, 45, 44], 100), [0..1, 1..2, 2..4]);
    }

    #[test]
    fn an_event_above_the_limit_gets_its_own_part() {
        assert_eq!(fragments(10, &[500, 20, 500], 100), [0..1, 1..2, 2..3]);
    }
}
