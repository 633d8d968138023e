//! Watchers of a recording. A watcher whose member doesn't answer continues at another member.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use bytes::Bytes;
use futures_util::stream::poll_fn;
use node_proto::etcdserverpb::watch_client::WatchClient;
use node_proto::etcdserverpb::watch_create_request::FilterType;
use node_proto::etcdserverpb::watch_request::RequestUnion;
use node_proto::etcdserverpb::{
    WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Streaming;

use super::super::{RecordedStream, Watcher};
use super::generator::{LEASED_PREFIX, LIMITED_PREFIX, PLAIN_PREFIX, range_end_of_prefix};
use super::session::ClientSession;
use super::{LIMIT, RecordingState, users};
use crate::rng::Rng;

/// Time without a response after which a watcher leaves a member. A healthy member answers progress
/// requests earlier.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(1_000);
const PROGRESS: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(50);
/// Range in milliseconds of the time after which a watcher moves to another member, even without a
/// failure.
const STAY_MILLIS: (u64, u64) = (1_000, 6_000);
const REQUEST_QUEUE_LENGTH: usize = 4;

/// Returns the user, the watch request and the start revision of each watcher. Start revision 0
/// means the next revision.
pub(super) fn watcher_requests(has_users: bool) -> Vec<(Option<String>, WatchCreateRequest, i64)> {
    let everything = || WatchCreateRequest {
        key: Bytes::from_static(b"\0"),
        range_end: Bytes::from_static(b"\0"),
        progress_notify: true,
        ..WatchCreateRequest::default()
    };
    let prefix = |prefix: &'static str| WatchCreateRequest {
        key: Bytes::from(prefix),
        range_end: range_end_of_prefix(prefix),
        prev_kv: true,
        ..everything()
    };
    let with_filter = |filter: FilterType, request| WatchCreateRequest {
        filters: vec![filter.into()],
        ..request
    };
    let root = || has_users.then(users::root);
    let mut requests = vec![
        (root(), everything(), 1),
        (root(), WatchCreateRequest { prev_kv: true, ..everything() }, 1),
        (root(), prefix(PLAIN_PREFIX), 0),
        (root(), with_filter(FilterType::Nodelete, everything()), 1),
        (root(), with_filter(FilterType::Noput, prefix(LEASED_PREFIX)), 0),
    ];
    if has_users {
        requests.push((Some(users::limited_user()), prefix(LIMITED_PREFIX), 1));
        // The limited user has no permission to watch all keys.
        requests.push((Some(users::limited_user()), everything(), 1));
    }
    requests
}

fn progress() -> WatchRequest {
    let union = RequestUnion::ProgressRequest(WatchProgressRequest {});
    WatchRequest { request_union: Some(union) }
}

/// A watcher, and the state with which it continues at the next member.
pub(super) struct WatcherTask {
    session: ClientSession,
    /// First revision that the watcher has not received; 0 until the watch is created.
    next: i64,
    rng: Rng,
    shared: Arc<RecordingState>,
    watcher: Watcher,
    is_refused: bool,
}

/// A watch stream, and the sender that keeps it open.
type OpenWatchStream = (mpsc::Sender<WatchRequest>, Streaming<WatchResponse>);

impl WatcherTask {
    pub(super) fn new(
        session: ClientSession,
        request: WatchCreateRequest,
        next: i64,
        rng: Rng,
        shared: Arc<RecordingState>,
    ) -> Self {
        let user = session.user().map(str::to_owned);
        let watcher = Watcher { user, request, streams: Vec::new() };
        Self { session, next, rng, shared, watcher, is_refused: false }
    }

    /// Watches until the watcher has received everything up to the last revision of the recording.
    pub(super) async fn run(mut self) -> Result<Watcher> {
        let mut deadline: Option<Instant> = None;
        while !self.is_done() {
            if self.shared.last().is_some() {
                let deadline = *deadline.get_or_insert(Instant::now() + LIMIT);
                if Instant::now() > deadline {
                    let (request, next) = (&self.watcher.request, self.next);
                    bail!(
                        "the watcher of {request:?} received events up to {next} only: {:?}",
                        self.shared
                    );
                }
            }
            let member = self.rng.pick(self.session.members());
            if self.session.ensure_token(member).await {
                self.watch_at(member).await;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(self.watcher)
    }

    fn is_done(&self) -> bool {
        self.shared.last().is_some_and(|last| self.next > last || self.is_refused)
    }

    /// Watches at this member until there is a reason to leave it.
    async fn watch_at(&mut self, member: usize) {
        let open = tokio::time::timeout(RESPONSE_TIMEOUT, self.open(member)).await;
        let Ok(Ok((sender, mut responses))) = open else {
            // An invalid token may be the reason why the watch wasn't created, so the token is
            // dropped.
            self.session.drop_token();
            return;
        };
        let stream = RecordedStream { member, start_revision: self.next, responses: Vec::new() };
        self.watcher.streams.push(stream);
        let stay_time = Duration::from_millis(self.rng.range(STAY_MILLIS.0, STAY_MILLIS.1));
        let leave_at = Instant::now() + stay_time;
        let mut progress_timer = tokio::time::interval(PROGRESS);
        let mut silent_since = Instant::now();
        while !self.is_done()
            && Instant::now() < leave_at
            && silent_since.elapsed() < RESPONSE_TIMEOUT
        {
            tokio::select! {
                response = responses.message() => {
                    let Ok(Some(response)) = response else { return };
                    silent_since = Instant::now();
                    if !self.record_response(response) {
                        return;
                    }
                }
                _ = progress_timer.tick() => {
                    // If the channel is full, the member has not read earlier requests yet, so this
                    // request is dropped.
                    let _ = sender.try_send(progress());
                }
            }
        }
    }

    async fn open(&self, member: usize) -> Result<OpenWatchStream> {
        let (sender, mut receiver) = mpsc::channel(REQUEST_QUEUE_LENGTH);
        let create =
            WatchCreateRequest { start_revision: self.next, ..self.watcher.request.clone() };
        let union = RequestUnion::CreateRequest(create);
        sender.send(WatchRequest { request_union: Some(union) }).await?;
        // Request progress at once, while the member may still have many events to send.
        sender.send(progress()).await?;
        let requests =
            self.session.authenticated_request(poll_fn(move |context| receiver.poll_recv(context)));
        let responses = WatchClient::new(self.session.channel(member)).watch(requests).await?;
        Ok((sender, responses.into_inner()))
    }

    /// Records a response. Returns whether the stream goes on.
    fn record_response(&mut self, response: WatchResponse) -> bool {
        let header = response.header.as_ref().map_or(0, |header| header.revision);
        if response.canceled {
            self.is_refused |= response.cancel_reason.contains("permission denied");
            if !self.is_refused {
                self.session.drop_token();
            }
        } else if response.created {
            if self.next == 0 {
                self.next = header + 1;
            }
        } else if let Some(last) = response.events.last() {
            self.next = last.kv.as_ref().map_or(0, |kv| kv.mod_revision) + 1;
        } else {
            self.next = self.next.max(header + 1);
        }
        let goes_on = !response.canceled;
        let stream = self.watcher.streams.last_mut().expect("it has just been opened");
        stream.responses.push((self.shared.now(), response));
        goes_on
    }
}
