//! One other member: its record, its queue, its state.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::{Limits, Peer, SendError, frame};

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
    queue: mpsc::Sender<Bytes>,
    queued_bytes: AtomicUsize,
    queue_bytes_max: usize,
    frame_bytes_max: usize,
    connected: Mutex<Option<Instant>>,
    /// The stream that it sends on; a newer one replaces it.
    inbound: Mutex<CancellationToken>,
}

impl PeerHandle {
    pub(super) fn new(
        record: Peer,
        limits: &Limits,
        gone: CancellationToken,
    ) -> (Self, mpsc::Receiver<Bytes>) {
        let (queue, receiver) = mpsc::channel(limits.queue_messages);
        let inbound = Mutex::new(gone.child_token());
        let handle = Self {
            record,
            gone,
            wake: Notify::new(),
            snapshot_out: Arc::new(Semaphore::new(1)),
            snapshot_in: Arc::new(Semaphore::new(1)),
            queue,
            queued_bytes: AtomicUsize::new(0),
            queue_bytes_max: limits.queue_bytes,
            frame_bytes_max: limits.frame_bytes,
            connected: Mutex::new(None),
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
        let taken = before + cost <= self.queue_bytes_max && self.queue.try_send(message).is_ok();
        if !taken {
            self.queued_bytes.fetch_sub(cost, Ordering::Relaxed);
            return Err(SendError::Full);
        }
        Ok(())
    }

    /// `message` has left the queue.
    pub(super) fn taken(&self, message: &Bytes) {
        self.queued_bytes.fetch_sub(cost(message), Ordering::Relaxed);
    }

    pub(super) fn connected_since(&self) -> Option<Instant> {
        *self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_connected(&self, since: Option<Instant>) {
        *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// A new inbound stream: ends the one before, and returns what ends this one.
    pub(super) fn replace_inbound(&self) -> CancellationToken {
        let new = self.gone.child_token();
        let mut current = self.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *current, new.clone()).cancel();
        new
    }
}

fn cost(message: &Bytes) -> usize {
    message.len() + frame::HEADER_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::MemberId;

    fn handle(limits: &Limits) -> (PeerHandle, mpsc::Receiver<Bytes>) {
        let record = Peer { id: MemberId(1), urls: Vec::new(), incarnation: None, node_key: None };
        let (handle, receiver) = PeerHandle::new(record, limits, CancellationToken::new());
        handle.set_connected(Some(Instant::now()));
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
        handle.taken(&receiver.try_recv().unwrap());
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
        handle.set_connected(None);
        assert_eq!(handle.push(Bytes::new()), Err(SendError::Away));
    }
}
