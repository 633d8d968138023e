//! Many watch streams open and close under many writers, and each gets correct events and progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{TestMember, WAIT_LIMIT};
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::watch_client::WatchClient;
use node_proto::etcdserverpb::watch_request::RequestUnion;
use node_proto::etcdserverpb::{
    PutRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use tokio::sync::mpsc;
use tonic::Streaming;
use tonic::transport::Channel;

const WRITERS: usize = 8;
/// Number of watchers at the same time. Each opens `STREAMS_EACH` streams one after the other.
const WATCHERS: usize = 16;
const STREAMS_EACH: usize = 15;
/// Number of events that a stream reads after its first progress notification.
const EVENTS_AFTER: usize = 20;

async fn write(channel: Channel, writer: usize, over: Arc<AtomicBool>) {
    let mut client = KvClient::new(channel);
    while !over.load(Ordering::Relaxed) {
        let key = format!("k{writer}").into();
        client.put(PutRequest { key, ..PutRequest::default() }).await.unwrap();
    }
}

/// State of one stream, against which each response is checked on arrival.
#[derive(Default)]
struct StreamChecker {
    last_event: i64,
    progress: i64,
    events_after: usize,
}

impl StreamChecker {
    fn check(&mut self, response: &WatchResponse) {
        if response.created {
            return;
        }
        let revision = response.header.as_ref().unwrap().revision;
        if response.events.is_empty() {
            assert!(revision >= self.last_event, "progress goes back");
            self.progress = self.progress.max(revision);
        }
        for event in &response.events {
            let at = event.kv.as_ref().unwrap().mod_revision;
            assert!(at > self.progress, "{at} comes after a progress of {}", self.progress);
            let before = std::mem::replace(&mut self.last_event, at);
            assert!(before == 0 || at == before + 1, "{at} comes after {before}");
            self.events_after += usize::from(self.progress > 0);
        }
    }
}

async fn open_watch(channel: Channel) -> (mpsc::Sender<WatchRequest>, Streaming<WatchResponse>) {
    let (requests, receiver) = mpsc::channel(8);
    let create = RequestUnion::CreateRequest(WatchCreateRequest {
        key: "k".into(),
        range_end: "l".into(),
        ..WatchCreateRequest::default()
    });
    let progress = RequestUnion::ProgressRequest(WatchProgressRequest {});
    // The progress request follows the create request at once, so it arrives before the watch
    // exists.
    for union in [create, progress] {
        requests.send(WatchRequest { request_union: Some(union) }).await.unwrap();
    }
    let stream = futures_util::stream::unfold(receiver, async |mut receiver| {
        receiver.recv().await.map(|request| (request, receiver))
    });
    let responses = WatchClient::new(channel).watch(stream).await.unwrap().into_inner();
    (requests, responses)
}

async fn follow_watches(channel: Channel) {
    for _ in 0..STREAMS_EACH {
        let (requests, mut responses) = open_watch(channel.clone()).await;
        let mut told = StreamChecker::default();
        while told.events_after < EVENTS_AFTER {
            told.check(&responses.message().await.unwrap().unwrap());
            if told.progress == 0 && told.last_event > 0 {
                let again = RequestUnion::ProgressRequest(WatchProgressRequest {});
                let request = WatchRequest { request_union: Some(again) };
                let _ = requests.try_send(request);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_is_never_sent_before_the_events_that_it_covers() {
    let root = tempfile::tempdir().unwrap();
    let mut member = TestMember::alone(root.path());
    member.start();
    member.wait_ready();
    let over = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| tokio::spawn(write(member.channel(), writer, over.clone())))
        .collect();
    let watchers: Vec<_> =
        (0..WATCHERS).map(|_| tokio::spawn(follow_watches(member.channel()))).collect();
    for watcher in watchers {
        tokio::time::timeout(WAIT_LIMIT, watcher).await.unwrap().unwrap();
    }
    over.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
}
