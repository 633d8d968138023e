//! Watches: who wants to hear of which keys, from which revision on.
//!
//! ```text
//! apply ── Publisher ─► feed ─► hub (one task): matches, hands out ─► queue ─► Subscriber (one per
//!                                ▲  keeps the last batches in a ring            client stream)
//!                                └────── attach, detach, progress ◄─────────────┘
//! ```
//!
//! A watcher is either *attached*, and the hub gives it each event as it happens, or it *catches
//! up*: its subscriber reads the store by revision until it is near enough to be attached. Nobody
//! waits for a slow client: a subscriber whose queue is full has its watcher detached, and catches
//! up when its client reads again; a hub that falls behind loses its feed, and every watcher
//! catches up. Each queue is bounded, so memory is.
//!
//! One stream's queue is short, but a client may have thousands of streams: so what they keep from
//! being freed is charged to their connection's account, and an account that is full is a full
//! queue.
//!
//! What each watcher is told is exactly once, in order, and whole revisions only. A progress
//! notice passes through the same queue as the events, so that it can't overtake one.

mod catch_up;
mod feed;
mod hub;
mod matcher;
mod picked;
mod ranges;
mod subscriber;

use std::sync::Arc;

use tokio::sync::mpsc;

use super::event::EventBatch;
use super::revision::KeyRange;
use super::store::Store;
use crate::shares::Account;
use feed::Feed;
use hub::{Command, Hub, Orders};
use matcher::Token;
pub use picked::Picked;
pub use subscriber::{Notice, Subscriber};

/// Attaches, detaches and progress requests that wait for the hub; more make their streams wait.
const MAX_QUEUED_COMMANDS: usize = 1_024;

/// How much is kept, and done at a time.
#[derive(Clone, Copy, Debug)]
pub struct WatchOptions {
    /// Deliveries that wait for one client to read; a watcher that finds the queue full catches up
    /// from the store later. etcd's number by default.
    pub queued_deliveries: usize,
    /// Recent events kept for watchers that are about to be attached.
    pub ring_bytes: usize,
    /// Events that wait for the hub; beyond it they are forgotten, and watchers read the store.
    pub feed_bytes: usize,
    /// Records that a watcher reads at a time while it catches up. A revision is never cut.
    pub records_per_piece: usize,
    /// Bytes of these, at which a piece ends early.
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

/// What to watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchSpec {
    /// The keys.
    pub range: KeyRange,
    /// The first revision of interest; 0: whatever comes next.
    pub start_revision: i64,
    /// Leave out puts.
    pub no_put: bool,
    /// Leave out deletes.
    pub no_delete: bool,
    /// Tell the revision now and then, when there are no events.
    pub progress_notify: bool,
}

/// The applier's end: tells what has happened. Never waits.
pub struct Publisher {
    feed: Arc<Feed>,
    store: Store,
    options: WatchOptions,
    commands: mpsc::Sender<Command>,
    departures: mpsc::UnboundedSender<Vec<Token>>,
    unstarted: Arc<std::sync::Mutex<Option<Orders>>>,
}

impl Publisher {
    pub(crate) fn new(store: Store, options: WatchOptions) -> Self {
        let (commands, asked) = mpsc::channel(MAX_QUEUED_COMMANDS);
        let (departures, departed) = mpsc::unbounded_channel();
        Self {
            feed: Arc::new(Feed::new(options.feed_bytes)),
            store,
            options,
            commands,
            departures,
            unstarted: Arc::new(std::sync::Mutex::new(Some((asked, departed)))),
        }
    }

    /// Tells the events of one applied batch, after the store shows them.
    pub(crate) fn publish(&self, batch: EventBatch) {
        if !batch.events.is_empty() {
            self.feed.push(batch);
        }
    }

    /// The store was replaced by one at `revision`: the events up to there can't be told one by one.
    pub(crate) fn jump(&self, revision: i64) {
        self.feed.lose(revision);
    }

    pub(crate) fn hub(&self) -> WatchHub {
        WatchHub {
            feed: self.feed.clone(),
            store: self.store.clone(),
            options: self.options,
            commands: self.commands.clone(),
            departures: self.departures.clone(),
            unstarted: self.unstarted.clone(),
        }
    }
}

/// The streams' end: where to subscribe.
#[derive(Clone)]
pub struct WatchHub {
    feed: Arc<Feed>,
    store: Store,
    options: WatchOptions,
    commands: mpsc::Sender<Command>,
    departures: mpsc::UnboundedSender<Vec<Token>>,
    unstarted: Arc<std::sync::Mutex<Option<Orders>>>,
}

impl WatchHub {
    /// Runs the hub for as long as the future is polled: once per hub, as a task of its own.
    /// Watches stand still until it runs.
    pub async fn run(self) {
        let orders = self.unstarted.lock().expect("nothing panics under this lock").take();
        if let Some(orders) = orders {
            Hub::new(self.feed, &self.store, self.options.ring_bytes, orders).run().await;
        }
    }

    /// A subscriber without watches, whose client nobody bounds.
    #[must_use]
    pub fn subscribe(&self) -> Subscriber {
        self.subscribe_for(Account::unbounded())
    }

    /// A subscriber without watches; what waits for it is charged to `account`.
    pub(crate) fn subscribe_for(&self, account: Arc<Account>) -> Subscriber {
        let (commands, departures) = (self.commands.clone(), self.departures.clone());
        Subscriber::new(self.store.clone(), self.options, commands, departures, account)
    }
}

#[cfg(test)]
mod tests;
