//! Bounded queue of events from apply to the hub. It never blocks apply.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::mvcc::channels::Wake;
use crate::mvcc::event::EventBatch;

/// Contents of the queue, taken by the hub.
#[derive(Debug, Default)]
pub(super) struct FeedContents {
    /// Highest revision whose events were dropped from the queue, if any were. `batches` has only
    /// newer ones.
    pub(super) lost_up_to: Option<i64>,
    pub(super) batches: VecDeque<Arc<EventBatch>>,
}

#[derive(Debug, Default)]
struct FeedQueue {
    /// Whether the hub has begun to take events. Before that, events are not queued.
    is_open: bool,
    bytes: usize,
    contents: FeedContents,
}

#[derive(Debug)]
pub(super) struct Feed {
    max_bytes: usize,
    queue: Mutex<FeedQueue>,
    pub(super) arrival: Wake,
}

impl Feed {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, queue: Mutex::default(), arrival: Wake::new() }
    }

    fn lock(&self) -> MutexGuard<'_, FeedQueue> {
        self.queue.lock().expect("nothing panics under this lock")
    }

    /// Queues the events that are published from now on.
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
            queue.contents =
                FeedContents { lost_up_to: Some(batch.revision), batches: VecDeque::new() };
            queue.bytes = 0;
        } else {
            queue.bytes += bytes;
            queue.contents.batches.push_back(Arc::new(batch));
        }
        drop(queue);
        self.arrival.notify_one();
    }

    pub(super) fn drop_events(&self, revision: i64) {
        let mut queue = self.lock();
        if !queue.is_open {
            return;
        }
        queue.contents = FeedContents { lost_up_to: Some(revision), batches: VecDeque::new() };
        queue.bytes = 0;
        drop(queue);
        self.arrival.notify_one();
    }

    pub(super) fn take(&self) -> FeedContents {
        let mut queue = self.lock();
        queue.bytes = 0;
        std::mem::take(&mut queue.contents)
    }
}
