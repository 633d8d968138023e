//! Watchers. Each continues at another member if its member is lost.

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

use super::super::{Stream, Watcher};
use super::draw::{LEASED, PART, PLAIN, end_of};
use super::link::Link;
use super::{LIMIT, Shared, users};
use crate::rng::Rng;

/// Time without a response after which a watcher leaves a member. A healthy one answers progress
/// requests.
const SILENCE: Duration = Duration::from_millis(1_000);
const PROGRESS: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(50);
/// Range in milliseconds of the time after which a watcher changes members without a reason.
const STAYS: (u64, u64) = (1_000, 6_000);
const ASKING: usize = 4;

/// Returns the user, the watch request and the start revision of each watcher. Start revision 0
/// means the next revision.
pub(super) fn all(has_users: bool) -> Vec<(Option<String>, WatchCreateRequest, i64)> {
    let everything = || WatchCreateRequest {
        key: Bytes::from_static(b"\0"),
        range_end: Bytes::from_static(b"\0"),
        progress_notify: true,
        ..WatchCreateRequest::default()
    };
    let prefix = |prefix: &'static str| WatchCreateRequest {
        key: Bytes::from(prefix),
        range_end: end_of(prefix),
        prev_kv: true,
        ..everything()
    };
    let but =
        |filter: FilterType, wants| WatchCreateRequest { filters: vec![filter.into()], ..wants };
    let root = || has_users.then(users::root);
    let mut all = vec![
        (root(), everything(), 1),
        (root(), WatchCreateRequest { prev_kv: true, ..everything() }, 1),
        (root(), prefix(PLAIN), 0),
        (root(), but(FilterType::Nodelete, everything()), 1),
        (root(), but(FilterType::Noput, prefix(LEASED)), 0),
    ];
    if has_users {
        all.push((Some(users::part()), prefix(PART), 1));
        // This user may not watch all keys.
        all.push((Some(users::part()), everything(), 1));
    }
    all
}

fn progress() -> WatchRequest {
    let asked = RequestUnion::ProgressRequest(WatchProgressRequest {});
    WatchRequest { request_union: Some(asked) }
}

/// A watcher, and the state that it continues with at the next member.
pub(super) struct Watching {
    link: Link,
    /// First revision that it has not received; 0 until the watch is created.
    next: i64,
    rng: Rng,
    shared: Arc<Shared>,
    watcher: Watcher,
    is_refused: bool,
}

/// A watch stream, and the sender that keeps it open.
type Open = (mpsc::Sender<WatchRequest>, Streaming<WatchResponse>);

impl Watching {
    pub(super) fn new(
        link: Link,
        wants: WatchCreateRequest,
        next: i64,
        rng: Rng,
        shared: Arc<Shared>,
    ) -> Self {
        let user = link.user().map(str::to_owned);
        let watcher = Watcher { user, wants, streams: Vec::new() };
        Self { link, next, rng, shared, watcher, is_refused: false }
    }

    /// Watches until it has received everything up to the last revision of the recording.
    pub(super) async fn run(mut self) -> Result<Watcher> {
        let mut deadline: Option<Instant> = None;
        while !self.is_done() {
            if self.shared.last().is_some() {
                let deadline = *deadline.get_or_insert(Instant::now() + LIMIT);
                if Instant::now() > deadline {
                    let (wants, next) = (&self.watcher.wants, self.next);
                    bail!("who wants {wants:?} was told up to {next} only: {:?}", self.shared);
                }
            }
            let member = self.rng.pick(self.link.members());
            if self.link.is_known(member).await {
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
        let open = tokio::time::timeout(SILENCE, self.open(member)).await;
        let Ok(Ok((ask, mut heard))) = open else {
            // The token may have caused the failure.
            self.link.forget();
            return;
        };
        let stream = Stream { member, start_revision: self.next, heard: Vec::new() };
        self.watcher.streams.push(stream);
        let stays = Duration::from_millis(self.rng.range(STAYS.0, STAYS.1));
        let leaves = Instant::now() + stays;
        let mut asks = tokio::time::interval(PROGRESS);
        let mut silent_since = Instant::now();
        while !self.is_done() && Instant::now() < leaves && silent_since.elapsed() < SILENCE {
            tokio::select! {
                response = heard.message() => {
                    let Ok(Some(response)) = response else { return };
                    silent_since = Instant::now();
                    if !self.heard(response) {
                        return;
                    }
                }
                _ = asks.tick() => {
                    // If the channel is full, the member has not read earlier requests yet, so this
                    // one is skipped.
                    let _ = ask.try_send(progress());
                }
            }
        }
    }

    async fn open(&self, member: usize) -> Result<Open> {
        let (ask, mut asked) = mpsc::channel(ASKING);
        let create = WatchCreateRequest { start_revision: self.next, ..self.watcher.wants.clone() };
        let union = RequestUnion::CreateRequest(create);
        ask.send(WatchRequest { request_union: Some(union) }).await?;
        // At once, while many events may not have been received yet.
        ask.send(progress()).await?;
        let requests = self.link.say(poll_fn(move |context| asked.poll_recv(context)));
        let heard = WatchClient::new(self.link.channel(member)).watch(requests).await?;
        Ok((ask, heard.into_inner()))
    }

    /// Records a response. Returns whether the stream goes on.
    fn heard(&mut self, response: WatchResponse) -> bool {
        let header = response.header.as_ref().map_or(0, |header| header.revision);
        if response.canceled {
            self.is_refused |= response.cancel_reason.contains("permission denied");
            if !self.is_refused {
                self.link.forget();
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
        let more = !response.canceled;
        let stream = self.watcher.streams.last_mut().expect("it has just been opened");
        stream.heard.push((self.shared.now(), response));
        more
    }
}
