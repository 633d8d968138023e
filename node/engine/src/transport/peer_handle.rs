//! State of one peer: its record, its queue and its streams.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use node_state::identity::MemberId;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::{
    PeerEvents, PeerRecord, SendError, StreamRefusal, TransportLimits,
    invitations::Invitations,
    links::{Links, Opener, ReachabilityChanges},
    metrics::{Connections, Traffic},
    process_liveness::ProcessLiveness,
    registry::Registry,
    wire::frame::{self, FrameKind},
};

/// Maximum number of requests of one peer that are being answered at a time.
const MAX_REQUESTS: usize = 64;

/// State of one peer. All tasks of the transport share it.
pub(super) struct PeerHandle {
    pub id: MemberId,
    /// The peer's record and registered streams.
    pub registry: Registry,
    /// Token that ends all tasks of this peer: the task that dials it, and all its streams.
    pub cancellation: CancellationToken,
    /// Wakes the task that dials the peer, because the peer has connected.
    pub wake: Notify,
    /// Wakes the task that dials the peer, because the peer's record has changed. The address may
    /// be another one now.
    pub updated: Notify,
    /// Permit to send the peer a snapshot. At most one is sent at a time.
    pub snapshot_out: Arc<Semaphore>,
    /// Permit to receive a snapshot from the peer. At most one is received at a time.
    pub snapshot_in: Arc<Semaphore>,
    /// Permits for the peer's requests that are being answered; more are refused.
    pub requests: Semaphore,
    pub traffic: Traffic,
    /// Whether the peer refused this member's data directory at the last attempt to connect to it.
    pub has_refused_for_good: AtomicBool,
    /// Open invitations: streams that this member has asked the peer to open.
    pub invitations: Invitations,
    /// Permits for opening streams on invitation of the peer.
    pub invited: Arc<Semaphore>,
    queue: mpsc::Sender<QueuedFrame>,
    /// Receiving end of the queue. The stream whose task holds this lock is the carrier: it sends
    /// everything that is queued for the peer.
    outgoing: tokio::sync::Mutex<mpsc::Receiver<QueuedFrame>>,
    queued_bytes: Arc<AtomicUsize>,
    queue_bytes_max: usize,
    frame_bytes_max: usize,
    links: Mutex<Links>,
}

impl PeerHandle {
    pub(super) fn new(
        record: PeerRecord,
        limits: &TransportLimits,
        gone: CancellationToken,
    ) -> Self {
        let (queue, outgoing) = mpsc::channel(limits.queue_messages);
        Self {
            id: record.id,
            registry: Registry::new(record, gone.clone()),
            cancellation: gone,
            wake: Notify::new(),
            updated: Notify::new(),
            snapshot_out: Arc::new(Semaphore::new(1)),
            snapshot_in: Arc::new(Semaphore::new(1)),
            requests: Semaphore::new(MAX_REQUESTS),
            traffic: Traffic::default(),
            has_refused_for_good: AtomicBool::new(false),
            invitations: Invitations::default(),
            invited: Arc::new(Semaphore::new(MAX_REQUESTS + 1)),
            queue,
            outgoing: tokio::sync::Mutex::new(outgoing),
            queued_bytes: Arc::default(),
            queue_bytes_max: limits.queue_bytes,
            frame_bytes_max: limits.frame_bytes,
            links: Mutex::default(),
        }
    }

    /// Replaces the record. Streams whose process fits the new record stay open.
    pub(super) fn update(&self, record: PeerRecord) {
        if self.registry.update(record) {
            tracing::info!(peer.member.id = %self.id, "the record of a peer has changed");
            self.updated.notify_one();
        }
    }

    /// Queues one frame. Fails if the peer isn't connected, or its queue is full.
    pub(super) fn push(&self, kind: FrameKind, message: Bytes) -> Result<(), SendError> {
        if message.len() > self.frame_bytes_max {
            return Err(SendError::TooLong);
        }
        if self.connected_since().is_none() {
            return Err(SendError::NotConnected);
        }
        let cost = cost(&message);
        let before = self.queued_bytes.fetch_add(cost, Ordering::Relaxed);
        let queued = QueuedFrame { kind, message, bytes: Arc::clone(&self.queued_bytes) };
        if before + cost > self.queue_bytes_max {
            return Err(SendError::Full);
        }
        self.queue.try_send(queued).map_err(|_| SendError::Full)
    }

    /// Waits until no other stream sends the queued frames, and makes the caller's stream the one
    /// that does: the carrier. The stream stops being the carrier when the guard is dropped.
    pub(super) async fn take_queue(
        &self,
    ) -> tokio::sync::MutexGuard<'_, mpsc::Receiver<QueuedFrame>> {
        self.outgoing.lock().await
    }

    /// Locks the queue of frames for the peer. Returns `None` if a stream is sending them.
    pub(super) fn try_take_queue(
        &self,
    ) -> Option<tokio::sync::MutexGuard<'_, mpsc::Receiver<QueuedFrame>>> {
        self.outgoing.try_lock().ok()
    }

    /// Adds a message stream. It is removed when the returned guard is dropped.
    pub(super) fn add_link<'a>(
        &'a self,
        number: u64,
        opener: Opener,
        run: u64,
        ends: &CancellationToken,
        events: &'a dyn PeerEvents,
    ) -> LinkGuard<'a> {
        let of = (run, ends.clone());
        self.change(events, |links| links.add(number, opener, of, Instant::now()));
        LinkGuard { peer: self, number, events }
    }

    /// Records that both ends may send messages on the stream `number`.
    pub(super) fn make_two_way(&self, number: u64, events: &dyn PeerEvents) {
        self.change(events, |links| links.make_two_way(number, Instant::now()));
    }

    /// Records that the stream `number` is the carrier, which sends everything that is queued for
    /// the peer.
    pub(super) fn make_carrier(&self, number: u64) {
        self.lock().make_carrier(number);
    }

    /// Records that a message was received on the stream `number`.
    pub(super) fn receive_on(&self, number: u64) {
        self.lock().receive_on(number);
    }

    /// Records that this member failed to open a stream. Returns whether that is news: the error
    /// differs from the last one, or the peer has become connected or disconnected since.
    pub(super) fn dial_failed(&self, why: &str) -> bool {
        self.lock().dial_failed(why)
    }

    /// Records that the peer's host refused the connections to all its URLs.
    pub(super) fn connections_refused(&self, events: &dyn PeerEvents) {
        self.change(events, |links| {
            links.connections_refused(Instant::now());
            ReachabilityChanges::new()
        });
    }

    /// Returns since when this member has been able to send to the peer; `None` if it can't send
    /// now.
    pub(super) fn connected_since(&self) -> Option<Instant> {
        self.lock().connected_since()
    }

    /// Returns whether a message stream exists that the side `opener` has opened.
    pub(super) fn has_link(&self, opener: Opener) -> bool {
        self.lock().has(opener)
    }

    /// Returns whether a two-way stream exists. If so, the peer's build knows invitations.
    pub(super) fn is_two_way(&self) -> bool {
        self.lock().is_two_way()
    }

    /// Returns why the process `run` of the peer can't be accepted now. There is a reason only
    /// while this member sends messages, and therefore pings, on a stream of another process of the
    /// peer.
    pub(super) fn objection_to(&self, run: u64) -> Option<StreamRefusal> {
        self.lock().objection_to(run, Instant::now())
    }

    /// Calls `ask` with the liveness record of the stream `number`. Returns `None` if the stream
    /// has ended.
    pub(super) fn with_liveness<T>(
        &self,
        number: u64,
        ask: impl FnOnce(&mut ProcessLiveness) -> T,
    ) -> Option<T> {
        self.lock().liveness(number).map(ask)
    }

    /// Returns which streams are connected, for operators.
    pub(super) fn connections(&self) -> Connections {
        let links = self.lock();
        Connections {
            since: links.connected_since(),
            outbound: links.has(Opener::Local),
            inbound: links.has(Opener::Remote),
            outbound_missing_since: links.missing_since(Opener::Local),
            inbound_missing_since: links.missing_since(Opener::Remote),
            dial_failure: links.dial_failure().map(str::to_owned),
        }
    }

    /// Changes the streams and reports the resulting changes of reachability, while holding the
    /// lock. So these changes are reported in order.
    fn change(
        &self,
        events: &dyn PeerEvents,
        change: impl FnOnce(&mut Links) -> ReachabilityChanges,
    ) {
        let mut links = self.lock();
        for reachable in change(&mut links) {
            events.reachable(self.id, reachable);
        }
        if links.take_process_end(Instant::now()) {
            events.process_ended(self.id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A frame in the peer's queue. Its bytes count towards the queue's limit until it is dropped,
/// whether it was sent or lost.
#[derive(Debug)]
pub(super) struct QueuedFrame {
    pub kind: FrameKind,
    message: Bytes,
    bytes: Arc<AtomicUsize>,
}

impl QueuedFrame {
    pub(super) fn payload(&self) -> &[u8] {
        &self.message
    }
}

impl Drop for QueuedFrame {
    fn drop(&mut self) {
        self.bytes.fetch_sub(cost(&self.message), Ordering::Relaxed);
    }
}

/// Guard that removes a message stream when it is dropped.
pub(super) struct LinkGuard<'a> {
    peer: &'a PeerHandle,
    number: u64,
    events: &'a dyn PeerEvents,
}

impl Drop for LinkGuard<'_> {
    fn drop(&mut self) {
        self.peer.change(self.events, |links| links.remove(self.number, Instant::now()));
        if self.peer.connected_since().is_none() {
            self.peer.traffic.disconnects.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn cost(message: &Bytes) -> usize {
    message.len() + frame::HEADER_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::BoxFuture;

    use crate::transport::{SnapshotReader, SnapshotWriter};

    #[derive(Default)]
    struct ReachabilityRecorder(Mutex<Vec<bool>>);

    impl PeerEvents for ReachabilityRecorder {
        fn receive_message(&self, _: MemberId, _: Bytes) -> bool {
            unreachable!("nothing is received here")
        }

        fn receive_snapshot(
            &self,
            _: MemberId,
            _: Bytes,
            _: SnapshotReader,
        ) -> std::io::Result<()> {
            unreachable!("nothing is received here")
        }

        fn reachable(&self, _: MemberId, reachable: bool) {
            self.0.lock().unwrap().push(reachable);
        }

        fn process_ended(&self, _: MemberId) {}

        fn member_list(&self) -> Option<Bytes> {
            unreachable!("nobody asks here")
        }

        fn member_list_received(&self, _: MemberId, _: Bytes) {
            unreachable!("nothing is received here")
        }

        fn request(&self, _: MemberId, _: Bytes) -> BoxFuture<'static, Option<Bytes>> {
            unreachable!("nobody asks here")
        }

        fn state(&self, _: MemberId, _: SnapshotWriter) -> std::io::Result<()> {
            unreachable!("nobody asks here")
        }

        fn promised(&self) -> crate::witness::Promise {
            unreachable!("nothing is told here")
        }

        fn removal_reported(&self, _: MemberId) {}

        fn refused_by_quorum(&self, _: crate::transport::StreamRefusal) {}
    }

    fn handle(limits: &TransportLimits) -> PeerHandle {
        let record =
            PeerRecord { id: MemberId(1), urls: Vec::new(), incarnation: None, node_key: None };
        PeerHandle::new(record, limits, CancellationToken::new())
    }

    fn connect<'a>(handle: &'a PeerHandle, told: &'a ReachabilityRecorder) -> LinkGuard<'a> {
        handle.add_link(0, Opener::Local, 1, &CancellationToken::new(), told)
    }

    #[test]
    fn queued_bytes_are_bounded_until_their_frames_are_dropped() {
        let limits = TransportLimits { queue_bytes: 100, ..TransportLimits::default() };
        let (handle, told) = (handle(&limits), ReachabilityRecorder::default());
        let _standing = connect(&handle, &told);
        let message = Bytes::from_static(&[0; 40]);
        assert_eq!(handle.push(FrameKind::Message, message.clone()), Ok(()));
        assert_eq!(handle.push(FrameKind::Message, message.clone()), Ok(()));
        assert_eq!(handle.push(FrameKind::Message, message.clone()), Err(SendError::Full));
        drop(handle.try_take_queue().unwrap().try_recv().unwrap());
        assert_eq!(handle.push(FrameKind::Message, message), Ok(()));
    }

    #[test]
    fn messages_in_the_queue_are_bounded() {
        let limits = TransportLimits { queue_messages: 2, ..TransportLimits::default() };
        let (handle, told) = (handle(&limits), ReachabilityRecorder::default());
        let _standing = connect(&handle, &told);
        assert_eq!(handle.push(FrameKind::Message, Bytes::new()), Ok(()));
        assert_eq!(handle.push(FrameKind::Message, Bytes::new()), Ok(()));
        assert_eq!(handle.push(FrameKind::Message, Bytes::new()), Err(SendError::Full));
    }

    #[test]
    fn nothing_is_queued_for_an_unconnected_peer() {
        let handle = handle(&TransportLimits::default());
        assert_eq!(handle.push(FrameKind::Message, Bytes::new()), Err(SendError::NotConnected));
        drop(connect(&handle, &ReachabilityRecorder::default()));
        assert_eq!(handle.push(FrameKind::Message, Bytes::new()), Err(SendError::NotConnected));
    }

    #[test]
    fn a_change_of_reachability_is_reported_once() {
        let (handle, told) = (handle(&TransportLimits::default()), ReachabilityRecorder::default());
        let standing = connect(&handle, &told);
        assert!(told.0.lock().unwrap().is_empty());
        handle.make_two_way(0, &told);
        handle.make_two_way(0, &told);
        drop(standing);
        assert_eq!(*told.0.lock().unwrap(), [true, false]);
    }
}
