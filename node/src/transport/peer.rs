//! One other member: its record, its queue, its state.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::{
    Limits, Peer, PeerEvents, Refusal, SendError, frame, metrics::Traffic, registry::Registry,
};
use crate::identity::MemberId;

/// Requests of one peer at a time.
const MAX_REQUESTS: usize = 64;

/// The process at the other end of the stream that was dialled, and one that wants to take its place.
///
/// A member's process begins when the one before it has ended. So a process that answers what it was
/// asked *after* another one had shown itself is alive beside that one: they run on copies of one
/// directory, and the newcomer is not let in.
#[derive(Debug)]
pub(super) struct Vitals {
    run: u64,
    /// When it was asked, oldest first; answers come in that order.
    asked: VecDeque<Instant>,
    /// When the last question was asked that it has answered.
    answered: Option<Instant>,
    /// Another process, and when it was first seen.
    newcomer: Option<(u64, Instant)>,
}

impl Vitals {
    /// A stream to the process `run` stands.
    pub(super) fn of(run: u64) -> Self {
        Self { run, asked: VecDeque::new(), answered: None, newcomer: None }
    }

    /// It is asked whether it lives.
    pub(super) fn asks(&mut self, now: Instant) {
        self.asked.push_back(now);
    }

    /// It has answered, and took so long; `None` if nothing was asked.
    pub(super) fn answers(&mut self, now: Instant) -> Option<Duration> {
        let asked = self.asked.pop_front();
        self.answered = asked.or(self.answered);
        asked.map(|asked| now.saturating_duration_since(asked))
    }

    /// Why the process `run` can't be let in now, if it is another one.
    pub(super) fn objects_to(&mut self, run: u64, now: Instant) -> Option<Refusal> {
        if run == self.run {
            return None;
        }
        let since = match self.newcomer {
            Some((known, since)) if known == run => since,
            _ => now,
        };
        self.newcomer = Some((run, since));
        let lives = self.answered.is_some_and(|answered| answered > since);
        Some(if lives { Refusal::Boot } else { Refusal::Another })
    }
}

/// What others hold of a peer; its dialling task holds the other end of the queue.
pub(super) struct PeerHandle {
    pub id: MemberId,
    /// Its record and its streams.
    pub registry: Registry,
    /// Ends everything of this peer: its dialler and every stream.
    pub gone: CancellationToken,
    /// The peer showed itself: dial now.
    pub wake: Notify,
    /// Its record has changed: what is being dialled may be out of date.
    pub updated: Notify,
    /// One snapshot at a time in each direction.
    pub snapshot_out: Arc<Semaphore>,
    pub snapshot_in: Arc<Semaphore>,
    /// Requests of it that are being answered; more are turned away.
    pub requests: Semaphore,
    /// What went to it and came from it.
    pub traffic: Traffic,
    /// It refused this member for good when it was last dialled.
    pub disowns: AtomicBool,
    /// Of the process that it is dialled as, while that stream stands.
    vitals: Mutex<Option<Vitals>>,
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
            id: record.id,
            registry: Registry::new(record, gone.clone()),
            gone,
            wake: Notify::new(),
            updated: Notify::new(),
            snapshot_out: Arc::new(Semaphore::new(1)),
            snapshot_in: Arc::new(Semaphore::new(1)),
            requests: Semaphore::new(MAX_REQUESTS),
            traffic: Traffic::default(),
            disowns: AtomicBool::new(false),
            vitals: Mutex::new(None),
            queue,
            queued_bytes: Arc::default(),
            queue_bytes_max: limits.queue_bytes,
            frame_bytes_max: limits.frame_bytes,
            state: Mutex::default(),
            inbound,
        };
        (handle, receiver)
    }

    /// Its record has changed. Streams that fit the new one go on.
    pub(super) fn update(&self, record: Peer) {
        if self.registry.update(record) {
            tracing::info!(peer.member.id = %self.id, "the record of a peer has changed");
            self.updated.notify_one();
        }
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

    /// A stream to a process of it stands, or no longer.
    pub(super) fn set_vitals(&self, vitals: Option<Vitals>) {
        *self.vitals.lock().unwrap_or_else(PoisonError::into_inner) = vitals;
    }

    /// With what is known of the process at the other end of the stream to it, if that stands.
    pub(super) fn with_vitals<T>(&self, ask: impl FnOnce(&mut Vitals) -> T) -> Option<T> {
        self.vitals.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(ask)
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
            events.reachable(self.id, reachable);
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

    use crate::transport::{SnapshotReader, SnapshotWriter};

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

        fn counted(&self, _: MemberId, _: Bytes) {
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
    fn a_newcomer_waits_until_the_process_before_it_is_seen_to_live_or_gone() {
        let start = Instant::now();
        let at = |seconds| start + std::time::Duration::from_secs(seconds);
        let mut vitals = Vitals::of(1);
        vitals.asks(at(1));
        vitals.asks(at(2));
        assert_eq!(vitals.objects_to(2, at(3)), Some(Refusal::Another));
        assert_eq!(vitals.answers(at(3)), Some(Duration::from_secs(2)));
        assert_eq!(vitals.answers(at(3)), Some(Duration::from_secs(1)));
        assert_eq!(vitals.objects_to(2, at(4)), Some(Refusal::Another), "it may have died since");
        assert_eq!(vitals.objects_to(1, at(4)), None, "a reconnect");
        vitals.asks(at(5));
        assert_eq!(vitals.objects_to(2, at(6)), Some(Refusal::Another));
        vitals.answers(at(6));
        assert_eq!(vitals.objects_to(2, at(6)), Some(Refusal::Boot));
        assert_eq!(vitals.objects_to(3, at(6)), Some(Refusal::Another), "one after the other");
        assert_eq!(vitals.answers(at(7)), None);
        assert_eq!(vitals.objects_to(3, at(7)), Some(Refusal::Another), "nothing was asked");
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
