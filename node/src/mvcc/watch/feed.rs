//! Bounded queue of events from apply to the hub. It never blocks apply.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

use crate::mvcc::event::EventBatch;

/// Contents of the queue, taken by the hub.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    /// Last revision of the batches that were dropped before `batches`, if any were.
    pub(super) lost: Option<i64>,
    pub(super) batches: VecDeque<Arc<EventBatch>>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Whether the hub listens. Until then nothing is queued.
    is_open: bool,
    bytes: usize,
    arrived: Arrived,
}

#[derive(Debug)]
pub(super) struct Feed {
    max_bytes: usize,
    queue: Mutex<Queue>,
    pub(super) arrival: Notify,
}

impl Feed {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, queue: Mutex::default(), arrival: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics under this lock")
    }

    /// Starts to queue events.
    pub(super) fn open(&self) {
        self.lock().is_open = true;
    }

    pub(super) fn push(&self, batch: EventBatch) {
        let mut queue = self.lock();
        if !queue.is_open {
            return;
        }
        let bytes = batch.weight();
        if queue.bytes + bytes > self.max_bytes {
            queue.arrived = Arrived { lost: Some(batch.revision), batches: VecDeque::new() };
            queue.bytes = 0;
        } else {
            queue.bytes += bytes;
            queue.arrived.batches.push_back(Arc::new(batch));
        }
        drop(queue);
        self.arrival.notify_one();
    }

    pub(super) fn lose(&self, revision: i64) {
        let mut queue = self.lock();
        if !queue.is_open {
            return;
        }
        queue.arrived = Arrived { lost: Some(revision), batches: VecDeque::new() };
        queue.bytes = 0;
        drop(queue);
        self.arrival.notify_one();
    }

    pub(super) fn take(&self) -> Arrived {
        let mut queue = self.lock();
        queue.bytes = 0;
        std::mem::take(&mut queue.arrived)
    }
}
