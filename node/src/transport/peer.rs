//! One other member: its record, its queue, its state.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::{Limits, Peer, PeerEvents, SendError, frame, metrics::Traffic};

/// Requests of one peer at a time.
const MAX_REQUESTS: usize = 64;

/// What others hold of a peer; its dialling task holds the other end of the queue.
pub(super) struct PeerHandle {
    pub record: Peer,
    /// Ends everything of this peer: its dialler and every stream.
    pub gone: CancellationToken,
    /// The peer showed itself: dial now.
    pub wake: Notify,
    /// One snapshot at a time in each direction.
    pub snapshot_out: Arc<Semaphore>,
    pub snapshot_in: Arc<Semaphore>,
    /// Requests of it that are being answered; more are turned away.
    pub requests: Semaphore,
    /// What went to it and came from it.
    pub traffic: Traffic,
    /// It refused this member for good when it was last dialled.
    pub disowns: AtomicBool,
    queue: mpsc::Sender<Queued>,
    queued_bytes: Arc<AtomicUsize>,
    queue_bytes_max: usize,
    frame_bytes_max: usize,
    state: Mutex<State>,
    /// The stream that it sends on; a newer one replaces it.
    inbound: Mutex<CancellationToken>,
}

impl PeerHandle {
    pub(super) fn new(
        record: Peer,
        limits: &Limits,
        gone: CancellationToken,
    ) -> (Self, mpsc::Receiver<Queued>) {
        let (queue, receiver) = mpsc::channel(limits.queue_messages);
        let inbound = Mutex::new(gone.child_token());
        let handle = Self {
            record,
            gone,
            wake: Notify::new(),
            snapshot_out: Arc::new(Semaphore::new(1)),
            snapshot_in: Arc::new(Semaphore::new(1)),
            requests: Semaphore::new(MAX_REQUESTS),
            traffic: Traffic::default(),
            disowns: AtomicBool::new(false),
            queue,
            queued_bytes: Arc::default(),
            queue_bytes_max: limits.queue_bytes,
            frame_bytes_max: limits.frame_bytes,
            state: Mutex::default(),
            inbound,
        };
        (handle, receiver)
    }

    /// Queues one message, if it is connected and has room.
    pub(super) fn push(&self, message: Bytes) -> Result<(), SendError> {
        if message.len() > self.frame_bytes_max {
            return Err(SendError::TooLong);
        }
        if self.connected_since().is_none() {
            return Err(SendError::Away);
        }
        let cost = cost(&message);
        let before = self.queued_bytes.fetch_add(cost, Ordering::Relaxed);
        let queued = Queued { message, bytes: Arc::clone(&self.queued_bytes) };
        if before + cost > self.queue_bytes_max {
            return Err(SendError::Full);
        }
        self.queue.try_send(queued).map_err(|_| SendError::Full)
    }

    /// Since when it can be sent to.
    pub(super) fn connected_since(&self) -> Option<Instant> {
        self.lock().outbound
    }

    /// The stream to it stands since then, or no longer.
    pub(super) fn set_outbound(&self, since: Option<Instant>, events: &dyn PeerEvents) {
        self.change(events, |state| state.outbound = since);
    }

    /// A stream from it stands, until what this returns is dropped.
    pub(super) fn hold_inbound<'a>(&'a self, events: &'a dyn PeerEvents) -> InboundHeld<'a> {
        self.change(events, |state| state.inbound += 1);
        InboundHeld { peer: self, events }
    }

    /// Tells of a change while the state is held, so that two changes are told in their order.
    fn change(&self, events: &dyn PeerEvents, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let reachable = state.outbound.is_some() && state.inbound > 0;
        if reachable != state.told {
            state.told = reachable;
            events.reachable(self.record.id, reachable);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new inbound stream: ends the one before, and returns what ends this one.
    pub(super) fn replace_inbound(&self) -> CancellationToken {
        let new = self.gone.child_token();
        let mut current = self.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *current, new.clone()).cancel();
        new
    }
}

/// A message that waits for its peer. It is counted until it is dropped: written, or lost with its
/// stream.
#[derive(Debug)]
pub(super) struct Queued {
    message: Bytes,
    bytes: Arc<AtomicUsize>,
}

impl Queued {
    pub(super) fn payload(&self) -> &[u8] {
        &self.message
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.bytes.fetch_sub(cost(&self.message), Ordering::Relaxed);
    }
}

/// Which streams stand. An answer needs both directions, and so does being reachable.
#[derive(Default)]
struct State {
    outbound: Option<Instant>,
    inbound: usize,
    told: bool,
}

/// Keeps an inbound stream counted.
pub(super) struct InboundHeld<'a> {
    peer: &'a PeerHandle,
    events: &'a dyn PeerEvents,
}

impl Drop for InboundHeld<'_> {
    fn drop(&mut self) {
        self.peer.change(self.events, |state| state.inbound -= 1);
    }
}

fn cost(message: &Bytes) -> usize {
    message.len() + frame::HEADER_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::BoxFuture;

    use crate::{
        identity::MemberId,
        transport::{SnapshotReader, SnapshotWriter},
    };

    #[derive(Default)]
    struct Told(Mutex<Vec<bool>>);

    impl PeerEvents for Told {
        fn message(&self, _: MemberId, _: Bytes) -> bool {
            unreachable!("nothing is received here")
        }

        fn snapshot(&self, _: MemberId, _: Bytes, _: SnapshotReader) -> std::io::Result<()> {
            unreachable!("nothing is received here")
        }

        fn reachable(&self, _: MemberId, reachable: bool) {
            self.0.lock().unwrap().push(reachable);
        }

        fn census(&self) -> Option<Bytes> {
            unreachable!("nobody asks here")
        }

        fn request(&self, _: MemberId, _: Bytes) -> BoxFuture<'static, Option<Bytes>> {
            unreachable!("nobody asks here")
        }

        fn state(&self, _: MemberId, _: SnapshotWriter) -> std::io::Result<()> {
            unreachable!("nobody asks here")
        }

        fn removed(&self, _: MemberId) {}

        fn disowned(&self, _: crate::transport::Refusal) {}
    }

    fn handle(limits: &Limits) -> (PeerHandle, mpsc::Receiver<Queued>) {
        let record = Peer { id: MemberId(1), urls: Vec::new(), incarnation: None, node_key: None };
        let (handle, receiver) = PeerHandle::new(record, limits, CancellationToken::new());
        handle.set_outbound(Some(Instant::now()), &Told::default());
        (handle, receiver)
    }

    #[test]
    fn bytes_in_the_queue_are_bounded_and_come_free_again() {
        let limits = Limits { queue_bytes: 100, ..Limits::default() };
        let (handle, mut receiver) = handle(&limits);
        let message = Bytes::from_static(&[0; 40]);
        assert_eq!(handle.push(message.clone()), Ok(()));
        assert_eq!(handle.push(message.clone()), Ok(()));
        assert_eq!(handle.push(message.clone()), Err(SendError::Full));
        drop(receiver.try_recv().unwrap());
        assert_eq!(handle.push(message), Ok(()));
    }

    #[test]
    fn messages_in_the_queue_are_bounded() {
        let limits = Limits { queue_messages: 2, ..Limits::default() };
        let (handle, _receiver) = handle(&limits);
        assert_eq!(handle.push(Bytes::new()), Ok(()));
        assert_eq!(handle.push(Bytes::new()), Ok(()));
        assert_eq!(handle.push(Bytes::new()), Err(SendError::Full));
    }

    #[test]
    fn nothing_is_kept_for_a_peer_that_is_away() {
        let (handle, _receiver) = handle(&Limits::default());
        handle.set_outbound(None, &Told::default());
        assert_eq!(handle.push(Bytes::new()), Err(SendError::Away));
    }

    #[test]
    fn a_peer_is_reachable_while_streams_stand_in_both_directions() {
        let (handle, _receiver) = handle(&Limits::default());
        let told = Told::default();
        let first = handle.hold_inbound(&told);
        assert_eq!(*told.0.lock().unwrap(), [true]);
        let second = handle.hold_inbound(&told);
        drop(first);
        assert_eq!(*told.0.lock().unwrap(), [true], "the newer stream took its place");
        handle.set_outbound(None, &told);
        handle.set_outbound(Some(Instant::now()), &told);
        drop(second);
        assert_eq!(*told.0.lock().unwrap(), [true, false, true, false]);
    }
}
