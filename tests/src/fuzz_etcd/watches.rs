//! A watch stream, and what it has been told.
//!
//! How events are spread over responses is the server's affair, and so is the order in which
//! several watches are told: what is compared is what each watch was told, in order.

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

use super::requests::Call;
use super::server::Service;

/// Requests on their way to the server.
const QUEUED: usize = 16;
/// What a refused watch is called, and all of a stream's together; a watch may be called so, too.
const NOBODY: i64 = -1;
/// Where progress of all is listed.
const PROGRESS: i64 = -2;
/// Where refusals are.
const REFUSED: i64 = -3;

/// What each watch was told, by its id.
pub(super) type Told = BTreeMap<i64, Vec<String>>;

#[derive(Default)]
struct Heard {
    told: Told,
    /// Watches that asked for previous values.
    previous: BTreeSet<i64>,
    /// Whether each create that is still to be answered asks for them, in order; `None` of one that is made
    /// for its answer alone.
    asked: std::collections::VecDeque<Option<bool>>,
}

pub(super) struct Watches {
    requests: mpsc::Sender<WatchRequest>,
    heard: Arc<Mutex<Heard>>,
    /// A create has been answered, or the stream is over.
    answered: Arc<Notify>,
    listener: JoinHandle<()>,
}

impl Drop for Watches {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl Watches {
    pub(super) fn open(service: Service) -> Self {
        let (requests, receiver) = mpsc::channel(QUEUED);
        let stream = futures_util::stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|request| (request, receiver))
        });
        let heard = Arc::new(Mutex::new(Heard::default()));
        let answered = Arc::new(Notify::new());
        let (log, tell) = (heard.clone(), answered.clone());
        let listener = tokio::spawn(async move {
            // etcd answers a stream with nothing, not even its head, before it has something to say.
            let mut responses = match WatchClient::new(service).watch(stream).await {
                Ok(responses) => responses.into_inner(),
                Err(error) => {
                    let mut heard = log.lock().expect("nothing panics under this lock");
                    heard.told.entry(NOBODY).or_default().push(format!("refused: {error:?}"));
                    tell.notify_one();
                    return;
                }
            };
            loop {
                let response = responses.message().await;
                let mut heard = log.lock().expect("nothing panics under this lock");
                match response {
                    Ok(Some(response)) => {
                        if response.created {
                            tell.notify_one();
                        }
                        heard.take(response);
                    }
                    end => {
                        heard.told.entry(NOBODY).or_default().push(format!("the end: {end:?}"));
                        tell.notify_one();
                        return;
                    }
                }
            }
        });
        Self { requests, heard, answered, listener }
    }

    /// Returns once the server has read the request: what is written after it comes after it.
    pub(super) async fn ask(&self, call: &Call) -> Result<()> {
        let union = match call {
            Call::Watch(create) => {
                return self.create((**create).clone(), Some(create.prev_kv)).await;
            }
            Call::CancelWatch(watch_id) => {
                RequestUnion::CancelRequest(WatchCancelRequest { watch_id: *watch_id })
            }
            Call::WatchProgress => RequestUnion::ProgressRequest(WatchProgressRequest {}),
            other => bail!("not for a watch stream: {other:?}"),
        };
        self.send(union).await?;
        // Neither must be answered. Requests are read in order, and this one always is.
        let refused = WatchCreateRequest {
            key: Bytes::from_static(b"b"),
            range_end: Bytes::from_static(b"a"),
            ..WatchCreateRequest::default()
        };
        self.create(refused, None).await
    }

    async fn create(&self, create: WatchCreateRequest, previous: Option<bool>) -> Result<()> {
        {
            let mut heard = self.heard.lock().expect("nothing panics under this lock");
            heard.asked.push_back(previous);
        }
        self.send(RequestUnion::CreateRequest(create)).await?;
        self.answered.notified().await;
        Ok(())
    }

    async fn send(&self, union: RequestUnion) -> Result<()> {
        let request = WatchRequest { request_union: Some(union) };
        self.requests.send(request).await.context("the stream is open")
    }

    /// What has been told since [`Self::forget`].
    pub(super) fn told(&self) -> Told {
        self.heard.lock().expect("nothing panics under this lock").told.clone()
    }

    pub(super) fn forget(&self) {
        self.heard.lock().expect("nothing panics under this lock").told.clear();
    }
}

impl Heard {
    fn take(&mut self, response: WatchResponse) {
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        let is_progress = !response.created && !response.canceled && response.events.is_empty();
        // Progress of the whole stream is no refusal of a watch, though both name none.
        let of_all = is_progress && response.watch_id == NOBODY;
        let id = match response.created && response.canceled {
            true => REFUSED,
            false if of_all => PROGRESS,
            false => response.watch_id,
        };
        let asked = if response.created { self.asked.pop_front() } else { None };
        if asked == Some(None) {
            return;
        }
        let list = self.told.entry(id).or_default();
        if is_progress {
            list.push(format!("progress {revision}"));
        }
        if response.created {
            if asked == Some(Some(true)) {
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
            // etcd shares events between watches, and a previous value with them.
            if !self.previous.contains(&id) {
                event.prev_kv = None;
            }
            list.push(format!("{event:?}"));
        }
    }
}
