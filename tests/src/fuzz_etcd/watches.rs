//! A watch stream and the events it has received.
//!
//! Servers may distribute events over responses as they like, and may serve several watches in any
//! order. So only the sequence of events of each watch is compared.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use node_proto::etcdserverpb::watch_client::WatchClient;
use node_proto::etcdserverpb::watch_request::RequestUnion;
use node_proto::etcdserverpb::{
    WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use super::requests::EtcdCall;
use super::server::TokenChannel;

/// Maximum number of queued requests on the stream.
const MAX_QUEUED_REQUESTS: usize = 16;
/// Watch id of responses that concern no single watch. A client may also choose this id for a
/// watch.
const NO_WATCH_ID: i64 = -1;
/// Key of [`EventsByWatch`] under which the progress notifications of the whole stream are
/// recorded.
const PROGRESS: i64 = -2;
/// Key of [`EventsByWatch`] under which refused create requests are recorded.
const REFUSED: i64 = -3;

/// Events and notices that each watch has received, by its id.
pub(super) type EventsByWatch = BTreeMap<i64, Vec<String>>;

#[derive(Default)]
struct ReceivedEvents {
    events: EventsByWatch,
    /// Ids of the watches whose create requests asked for previous values.
    previous: BTreeSet<i64>,
    /// Create requests without an answer yet, in order. The value tells whether the request asked
    /// for previous values. It is `None` for a request whose answer only shows that the server has
    /// read all earlier requests.
    unanswered_creates: std::collections::VecDeque<Option<bool>>,
}

pub(super) struct WatchConnection {
    requests: mpsc::Sender<WatchRequest>,
    received: Arc<Mutex<ReceivedEvents>>,
    /// Notified when a create request was answered or the stream has ended.
    answered: Arc<Notify>,
    listener: JoinHandle<()>,
}

impl Drop for WatchConnection {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl WatchConnection {
    pub(super) fn open(service: TokenChannel) -> Self {
        let (requests, receiver) = mpsc::channel(MAX_QUEUED_REQUESTS);
        let stream = futures_util::stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|request| (request, receiver))
        });
        let received = Arc::new(Mutex::new(ReceivedEvents::default()));
        let answered = Arc::new(Notify::new());
        let (log, tell) = (received.clone(), answered.clone());
        let listener = tokio::spawn(async move {
            // etcd sends nothing on a stream, not even response headers, before it has a first
            // response.
            let mut responses = match WatchClient::new(service).watch(stream).await {
                Ok(responses) => responses.into_inner(),
                Err(error) => {
                    let mut received = log.lock().expect("nothing panics under this lock");
                    received
                        .events
                        .entry(NO_WATCH_ID)
                        .or_default()
                        .push(format!("refused: {error:?}"));
                    tell.notify_one();
                    return;
                }
            };
            loop {
                let response = responses.message().await;
                let mut received = log.lock().expect("nothing panics under this lock");
                match response {
                    Ok(Some(response)) => {
                        if response.created {
                            tell.notify_one();
                        }
                        received.record(response);
                    }
                    end => {
                        received
                            .events
                            .entry(NO_WATCH_ID)
                            .or_default()
                            .push(format!("the end: {end:?}"));
                        tell.notify_one();
                        return;
                    }
                }
            }
        });
        Self { requests, received, answered, listener }
    }

    /// Sends a request, and returns once the server has read it. Later writes therefore come after
    /// the request.
    pub(super) async fn send_and_wait(&self, call: &EtcdCall) -> Result<()> {
        let union = match call {
            EtcdCall::Watch(create) => {
                return self.create((**create).clone(), Some(create.prev_kv)).await;
            }
            EtcdCall::CancelWatch(watch_id) => {
                RequestUnion::CancelRequest(WatchCancelRequest { watch_id: *watch_id })
            }
            EtcdCall::WatchProgress => RequestUnion::ProgressRequest(WatchProgressRequest {}),
            other => bail!("not for a watch stream: {other:?}"),
        };
        self.send(union).await?;
        // The server may leave a cancel or progress request unanswered. It reads requests in order,
        // and always answers the following create request, which it refuses.
        let refused = WatchCreateRequest {
            key: Bytes::from_static(b"b"),
            range_end: Bytes::from_static(b"a"),
            ..WatchCreateRequest::default()
        };
        self.create(refused, None).await
    }

    async fn create(&self, create: WatchCreateRequest, previous: Option<bool>) -> Result<()> {
        {
            let mut received = self.received.lock().expect("nothing panics under this lock");
            received.unanswered_creates.push_back(previous);
        }
        self.send(RequestUnion::CreateRequest(create)).await?;
        self.answered.notified().await;
        Ok(())
    }

    async fn send(&self, union: RequestUnion) -> Result<()> {
        let request = WatchRequest { request_union: Some(union) };
        self.requests.send(request).await.context("the stream is open")
    }

    /// Returns what was received since [`Self::clear_events`].
    pub(super) fn events(&self) -> EventsByWatch {
        self.received.lock().expect("nothing panics under this lock").events.clone()
    }

    pub(super) fn clear_events(&self) {
        self.received.lock().expect("nothing panics under this lock").events.clear();
    }
}

impl ReceivedEvents {
    fn record(&mut self, response: WatchResponse) {
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        let is_progress = !response.created && !response.canceled && response.events.is_empty();
        // A progress notification for the whole stream has the same watch id as a refused create
        // request.
        let of_all = is_progress && response.watch_id == NO_WATCH_ID;
        let id = match response.created && response.canceled {
            true => REFUSED,
            false if of_all => PROGRESS,
            false => response.watch_id,
        };
        let previous_values =
            if response.created { self.unanswered_creates.pop_front() } else { None };
        if previous_values == Some(None) {
            return;
        }
        let list = self.events.entry(id).or_default();
        if is_progress {
            list.push(format!("progress {revision}"));
        }
        if response.created {
            if previous_values == Some(Some(true)) {
                self.previous.insert(id);
            } else {
                self.previous.remove(&id);
            }
            list.push(format!("created at {revision}"));
        }
        if response.canceled {
            let (compacted, why) = (response.compact_revision, &response.cancel_reason);
            list.push(format!("canceled at {revision}, compacted {compacted}: {why}"));
        }
        for mut event in response.events {
            // etcd shares events between watches. So an event may contain a previous value that
            // only another watch asked for.
            if !self.previous.contains(&id) {
                event.prev_kv = None;
            }
            list.push(format!("{event:?}"));
        }
    }
}
