//! The channels of the store and its watches: `mvcc` uses tokio's in this file only.
//!
//! Entries are applied by a thread that never waits here: it replaces values and wakes tasks. A
//! queue has a bound. Whoever finds it full waits, or leaves a mark from which the receiver learns
//! what it missed.

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};

/// Wakes a task. A task that is woken many times before it runs, runs once.
pub(crate) type Wake = Notify;

/// The newest value of something, for tasks that follow its changes.
pub(crate) type FollowedValue<T> = watch::Sender<T>;

/// Receiving end of a [`FollowedValue`].
pub type ValueFollower<T> = watch::Receiver<T>;

/// Sending end of a bounded queue.
pub(super) type QueueSender<T> = mpsc::Sender<T>;

/// Receiving end of a bounded queue.
pub(super) type QueueReceiver<T> = mpsc::Receiver<T>;

/// Makes a queue of at most `max` messages.
pub(super) fn queue<T>(max: usize) -> (QueueSender<T>, QueueReceiver<T>) {
    mpsc::channel(max)
}

/// Outcome of sending with [`send_now`].
pub(super) enum SendResult {
    Queued,
    Full,
    Closed,
}

/// Sends a message if the queue has room, and drops it otherwise.
pub(super) fn send_now<T>(queue: &QueueSender<T>, message: T) -> SendResult {
    match queue.try_send(message) {
        Ok(()) => SendResult::Queued,
        Err(TrySendError::Full(_)) => SendResult::Full,
        Err(TrySendError::Closed(_)) => SendResult::Closed,
    }
}
