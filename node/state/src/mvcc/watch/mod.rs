//! Watches of keys and key ranges, each from some revision on.
//!
//! ```text
//! apply ── Publisher ─► feed ─► hub (one task): matches, hands out ─► queue ─► Subscriber (one per
//!                                ▲  keeps the last batches in a ring            client stream)
//!                                └────── attach, detach, progress ◄─────────────┘
//! ```
//!
//! A watcher is in one of two states:
//!
//! - *Attached*: the hub gives it each event as it happens.
//! - *Catching up*: its subscriber reads the store by revision until the watcher can be attached.
//!
//! A slow client delays nobody. If a subscriber's queue is full, its watcher is detached, and
//! catches up once the client reads again. If the hub falls behind, its feed is dropped and every
//! watcher catches up. Each queue is bounded, so memory is bounded too.
//!
//! The queue of one stream is short, but a client may have thousands of streams. So the memory that
//! their queues hold is charged to the account of the connection. A full account counts as a full
//! queue.
//!
//! Each watcher gets every event exactly once, in order, and only whole revisions. A progress
//! notification passes through the same queue as the events, so that it can't overtake one.

mod catch_up;
mod feed;
mod hub;
mod matcher;
mod picked;
mod ranges;
mod subscriber;

use std::sync::Arc;

use super::event::EventBatch;
use super::revision::KeyRange;
use super::store::Store;
use feed::Feed;
use hub::{Hub, HubReceiver, HubSender, hub_channels};
use muster_shares::memory::MemoryAccount;
pub use picked::EventSelection;
pub use subscriber::{Notice, Subscriber};

/// Limits on the memory of watches, and on the work that they do at a time.
#[derive(Clone, Copy, Debug)]
pub struct WatchOptions {
    /// Maximum number of messages from the hub in a stream's queue. A watcher that finds the queue
    /// full catches up from the store later. etcd's value by default.
    pub queued_deliveries: usize,
    /// Maximum bytes of recent events that the hub keeps, for watchers that are about to be
    /// attached.
    pub ring_bytes: usize,
    /// Maximum number of bytes of events that wait for the hub. If there are more, they are
    /// dropped, and watchers read the store.
    pub feed_bytes: usize,
    /// Number of records that a watcher reads at a time while it catches up. All records of one
    /// revision are read together.
    pub records_per_piece: usize,
    /// Bytes of records after which a watcher that catches up stops reading, even before it has
    /// read [`Self::records_per_piece`] records.
    pub bytes_per_piece: usize,
}

impl Default for WatchOptions {
    fn default() -> Self {
        Self {
            queued_deliveries: 128,
            ring_bytes: 4 * 1024 * 1024,
            feed_bytes: 16 * 1024 * 1024,
            records_per_piece: 1_000,
            bytes_per_piece: 1 << 20,
        }
    }
}

/// Description of a watch, as a client requests it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchSpec {
    /// Range of keys to watch.
    pub range: KeyRange,
    /// First wanted revision; 0 means the next one.
    pub start_revision: i64,
    /// Whether puts are left out.
    pub no_put: bool,
    /// Whether deletes are left out.
    pub no_delete: bool,
    /// Whether the client wants progress notifications when there are no events.
    pub progress_notify: bool,
}

/// Sending end of the watches, for the code that applies entries. It never blocks.
pub struct Publisher {
    feed: Arc<Feed>,
    store: Store,
    options: WatchOptions,
    hub: HubSender,
    hub_receiver: Arc<std::sync::Mutex<Option<HubReceiver>>>,
}

impl Publisher {
    pub(crate) fn new(store: Store, options: WatchOptions) -> Self {
        let (hub, receiver) = hub_channels();
        Self {
            feed: Arc::new(Feed::new(options.feed_bytes)),
            store,
            options,
            hub,
            hub_receiver: Arc::new(std::sync::Mutex::new(Some(receiver))),
        }
    }

    /// Publishes the events of one applied batch. The store must show the batch already.
    pub(crate) fn publish(&self, batch: EventBatch) {
        if !batch.events.is_empty() {
            self.feed.push(batch);
        }
    }

    /// Reports that the store was replaced by one at `revision`. Events up to that revision can't
    /// be sent one by one.
    pub(crate) fn publish_replacement(&self, revision: i64) {
        self.feed.drop_events(revision);
    }

    pub(crate) fn watch_hub(&self) -> WatchHub {
        WatchHub {
            feed: self.feed.clone(),
            store: self.store.clone(),
            options: self.options,
            hub: self.hub.clone(),
            hub_receiver: self.hub_receiver.clone(),
        }
    }
}

/// Receiving end of the watches, where client streams subscribe.
#[derive(Clone)]
pub struct WatchHub {
    feed: Arc<Feed>,
    store: Store,
    options: WatchOptions,
    hub: HubSender,
    hub_receiver: Arc<std::sync::Mutex<Option<HubReceiver>>>,
}

impl WatchHub {
    /// Runs the hub for as long as the future is polled. Call it once per hub, in a task of its
    /// own. Watches get nothing until it runs.
    pub async fn run(self) {
        let receiver = self.hub_receiver.lock().expect("nothing panics under this lock").take();
        if let Some(receiver) = receiver {
            Hub::new(self.feed, &self.store, self.options.ring_bytes, receiver).run().await;
        }
    }

    /// Returns a subscriber without watches and without a limit on its memory.
    #[must_use]
    pub fn subscribe(&self) -> Subscriber {
        self.subscribe_for(MemoryAccount::unbounded())
    }

    /// Returns a subscriber without watches. The memory of its queued events is charged to
    /// `account`.
    pub fn subscribe_for(&self, account: Arc<MemoryAccount>) -> Subscriber {
        Subscriber::new(self.store.clone(), self.options, self.hub.clone(), account)
    }
}

#[cfg(test)]
mod tests;
