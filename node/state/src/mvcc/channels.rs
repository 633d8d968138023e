//! The channels of the store and its watches. Only this file of `mvcc` uses tokio's channels.
//!
//! The thread that applies entries never waits for a channel: it only replaces values and wakes
//! tasks. Queues are bounded. A sender that finds a queue full waits, or records for the receiver
//! what the receiver missed.

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};

/// Wakes a task. A task that is woken many times before it runs, runs once.
pub(crate) type Wake = Notify;

/// The newest value of something, for tasks that follow its changes.
pub(crate) type FollowedValue<T> = watch::Sender<T>;

/// Receiving end of a `FollowedValue`.
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
