//! Watches of one client stream.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::catch_up::{CatchUpPiece, PieceSize, read_piece};
use super::hub::{
    Delivery, HubCommand, HubSender, LaggingWatcher, MissedDeliveries, MissedDeliveryMailbox,
    SubscriberLink,
};
use super::matcher::WatcherId;
use super::picked::EventSelection;
use super::{WatchOptions, WatchSpec};
use crate::mvcc::channels::{QueueReceiver, queue};
use crate::mvcc::error::StoreError;
use crate::mvcc::store::Store;
use muster_shares::memory::{MemoryAccount, MemoryCharge};

static NEXT_WATCHER_ID: AtomicU64 = AtomicU64::new(1);

/// Message for the client of a watch stream.
#[derive(Debug)]
pub enum Notice {
    /// Events of one watch, in order.
    Events {
        /// ID of the watch.
        watch_id: i64,
        /// Events to send to the client.
        selection: Arc<EventSelection>,
        /// Charge to the client's account for the events' memory.
        held: MemoryCharge,
    },
    /// The watch gets no more events, because its next revision is compacted. The watch keeps its
    /// ID until it is removed.
    Compacted {
        /// ID of the watch.
        watch_id: i64,
        /// Lowest revision from which a watch can still start.
        compact_revision: i64,
    },
    /// All watches of the stream have got every event up to `revision`.
    Progress {
        /// Revision up to which all events were sent.
        revision: i64,
    },
    /// One watch has got every event up to `revision`. Sent if the watch wants progress
    /// notifications and had no events recently.
    WatchProgress {
        /// ID of the watch.
        watch_id: i64,
        /// Revision up to which all events were sent.
        revision: i64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The watch has got all events before revision `next`, and reads the later ones from the
    /// store.
    CatchingUp { next: i64 },
    /// The hub sends the watch each event. `round` is the number of the stream's last progress
    /// request before the attachment. The hub's answers up to that round don't cover this watch.
    Attached { round: u64 },
    /// The next revision for this watch is compacted.
    Compacted,
}

#[derive(Debug)]
struct ClientWatch {
    watch_id: i64,
    spec: WatchSpec,
    state: State,
    /// Whether the watch got events since the last periodic progress notification.
    is_busy: bool,
}

impl ClientWatch {
    /// Whether the hub's answer to the progress request number `round` covers this watch.
    fn is_covered_by(&self, round: u64) -> bool {
        matches!(self.state, State::Attached { round: before } if before < round)
    }

    /// Whether the watch's start revision has been reached. Before that, the watch gets no progress
    /// notifications (etcd #20221).
    fn has_begun(&self, revision: i64) -> bool {
        self.spec.start_revision <= revision
    }

    fn is_attached(&self) -> bool {
        matches!(self.state, State::Attached { .. })
    }
}

/// State of a progress request to the hub.
#[derive(Clone, Copy, Debug, Default)]
struct ProgressRequest {
    /// Whether the client has sent a progress request that isn't answered yet.
    by_client: bool,
    /// Whether the timer for periodic progress notifications waits for the answer.
    by_timer: bool,
    /// Number of the progress request whose answer is awaited; other answers are ignored. 0 means
    /// that the request must be sent again.
    round: u64,
}

/// Watches of one client stream, and the receiving end of its queue from the hub.
pub struct Subscriber {
    store: Store,
    piece: PieceSize,
    /// Whether past events were read since `next` last let other tasks run.
    has_read: bool,
    hub: HubSender,
    queue: QueueReceiver<Delivery>,
    link: SubscriberLink,
    watches: BTreeMap<WatcherId, ClientWatch>,
    by_id: BTreeMap<i64, WatcherId>,
    /// Watches that catch up. They take turns: each reads one piece of its past events from the
    /// store, then the next watch does.
    behind: VecDeque<WatcherId>,
    progress_request: ProgressRequest,
    last_round: u64,
    ready: VecDeque<Notice>,
}

impl Subscriber {
    pub(super) fn new(
        store: Store,
        options: WatchOptions,
        hub: HubSender,
        account: Arc<MemoryAccount>,
    ) -> Self {
        let (sender, queue) = queue(options.queued_deliveries);
        let pending = Arc::clone(&store.operations().pending_events);
        Self {
            store,
            piece: PieceSize { records: options.records_per_piece, bytes: options.bytes_per_piece },
            has_read: false,
            hub,
            queue,
            link: SubscriberLink {
                queue: sender,
                overflow: Arc::new(MissedDeliveryMailbox::default()),
                account,
                pending,
            },
            watches: BTreeMap::new(),
            by_id: BTreeMap::new(),
            behind: VecDeque::new(),
            progress_request: ProgressRequest::default(),
            last_round: 0,
            ready: VecDeque::new(),
        }
    }

    /// Whether the stream has a watch with this ID.
    #[must_use]
    pub fn has(&self, watch_id: i64) -> bool {
        self.by_id.contains_key(&watch_id)
    }

    /// Adds a watch under an ID that is not in use on this stream. Returns the store's revision. A
    /// watch without a start revision begins after that revision.
    pub fn add(&mut self, watch_id: i64, spec: WatchSpec) -> i64 {
        let token = NEXT_WATCHER_ID.fetch_add(1, Ordering::Relaxed);
        let newest = self.store.view().revision();
        let next = if spec.start_revision == 0 { newest + 1 } else { spec.start_revision };
        let mut state = State::CatchingUp { next };
        // If the watch starts after the newest revision, nothing has to be read from the store
        // first.
        if next > newest
            && let Ok(permit) = self.hub.commands.try_reserve()
        {
            state = State::Attached { round: self.last_round };
            let (spec, link) = (spec.clone(), self.link.clone());
            permit.send(HubCommand::Attach { token, spec, next, link });
        } else {
            self.behind.push_back(token);
        }
        self.watches.insert(token, ClientWatch { watch_id, spec, state, is_busy: false });
        self.by_id.insert(watch_id, token);
        newest
    }

    /// Ends a watch. Returns `false` if the stream has none with this ID.
    pub async fn remove(&mut self, watch_id: i64) -> bool {
        let Some(token) = self.by_id.get(&watch_id).copied() else { return false };
        // A slot in the hub's command queue is reserved before anything is changed. If this future
        // is dropped while it waits, the watch still belongs to the stream. If the hub has ended,
        // no event can arrive any more.
        let permit = self.hub.commands.reserve().await;
        self.by_id.remove(&watch_id);
        self.watches.remove(&token);
        if let Ok(permit) = permit {
            permit.send(HubCommand::Detach { token });
        }
        true
    }

    /// Requests a [`Notice::Progress`]. As in etcd, no such notice comes while the stream has no
    /// watches, or while a watch catches up. Nor does one come before the start revision of each
    /// watch is reached.
    pub async fn request_progress(&mut self) {
        self.take_missed();
        if !self.watches.is_empty() && self.watches.values().all(ClientWatch::is_attached) {
            self.progress_request.by_client = true;
            self.send_progress_request().await;
        }
    }

    /// Requests a [`Notice::WatchProgress`] for each watch that wants such notices and got no
    /// events since the last one.
    pub async fn request_periodic_progress(&mut self) {
        if self.watches.values().any(|watch| watch.spec.progress_notify) {
            self.progress_request.by_timer = true;
            self.send_progress_request().await;
        }
    }

    async fn send_progress_request(&mut self) {
        // A slot in the hub's command queue is reserved before anything is changed, so this future
        // may be dropped while it waits for the slot.
        let Ok(permit) = self.hub.commands.reserve().await else { return };
        self.last_round += 1;
        self.progress_request.round = self.last_round;
        permit.send(HubCommand::Progress { link: self.link.clone(), round: self.last_round });
    }

    /// Returns the next message for the client. The future may be dropped before it is ready;
    /// nothing is lost then.
    pub async fn next(&mut self) -> Result<Notice, StoreError> {
        loop {
            self.take_missed();
            if let Some(notice) = self.ready.pop_front() {
                return Ok(notice);
            }
            // The queue is emptied before the store is read, because it can still hold the last
            // events that a detached watcher got from the hub.
            if let Ok(delivery) = self.queue.try_recv() {
                self.handle_delivery(delivery);
                continue;
            }
            if let Some(token) = self.behind.front().copied() {
                // After each piece of past events, other tasks on this thread may run, even during
                // a long catch-up. The client has already got the earlier pieces, so it waits for
                // none of them here.
                if std::mem::take(&mut self.has_read) {
                    tokio::task::yield_now().await;
                }
                self.catch_up(token).await?;
                self.has_read = true;
                continue;
            }
            if self.progress_request.round == 0
                && (self.progress_request.by_client || self.progress_request.by_timer)
            {
                self.send_progress_request().await;
            }
            tokio::select! {
                // `biased` makes the order fixed instead of random, so that a simulation can be
                // repeated.
                biased;
                delivery = self.queue.recv() => {
                    // `None` can't occur: the subscriber holds a sender itself, so the queue never
                    // closes.
                    if let Some(delivery) = delivery {
                        self.handle_delivery(delivery);
                    }
                }
                () = self.link.overflow.wake.notified() => {}
            }
        }
    }

    fn handle_delivery(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Events { token, picked, held, pending } => {
                drop(pending);
                if let Some(watch) = self.watches.get_mut(&token) {
                    watch.is_busy = true;
                    let watch_id = watch.watch_id;
                    self.ready.push_back(Notice::Events { watch_id, selection: picked, held });
                }
            }
            Delivery::Progress { revision, round } if round == self.progress_request.round => {
                // The hub may have detached watchers before it sent this answer. They must be known
                // before the answer is handled.
                self.take_missed();
                self.handle_progress(revision, round);
            }
            Delivery::Progress { .. } => {}
        }
    }

    fn handle_progress(&mut self, revision: i64, round: u64) {
        if self.progress_request.by_timer {
            self.progress_request.by_timer = false;
            for watch in self.watches.values_mut() {
                let quiet = !std::mem::take(&mut watch.is_busy);
                let told = watch.has_begun(revision) && watch.is_covered_by(round);
                if watch.spec.progress_notify && quiet && told {
                    let watch_id = watch.watch_id;
                    self.ready.push_back(Notice::WatchProgress { watch_id, revision });
                }
            }
        }
        if self.progress_request.by_client {
            let attached = self.watches.values().all(ClientWatch::is_attached);
            if attached && !self.watches.values().all(|watch| watch.is_covered_by(round)) {
                // A watch was attached since the request. The request is repeated, so that the
                // answer covers that watch.
                self.progress_request.round = 0;
                return;
            }
            self.progress_request.by_client = false;
            if attached && self.watches.values().all(|watch| watch.has_begun(revision)) {
                self.ready.push_back(Notice::Progress { revision });
            }
        }
    }

    fn take_missed(&mut self) {
        let missed = {
            let mut missed =
                self.link.overflow.missed.lock().expect("nothing panics under this lock");
            std::mem::take::<MissedDeliveries>(&mut missed)
        };
        for LaggingWatcher { token, next } in missed.lagging {
            if let Some(watch) = self.watches.get_mut(&token) {
                watch.state = State::CatchingUp { next };
                self.behind.push_back(token);
            }
        }
        if missed.progress {
            self.progress_request.round = 0;
        }
    }

    /// Reads one piece of past events for the watch at the front of the queue `behind`. Nothing
    /// changes before the last await, so the future may be dropped.
    async fn catch_up(&mut self, token: WatcherId) -> Result<(), StoreError> {
        let Some(watch) = self.watches.get_mut(&token) else {
            self.behind.pop_front();
            return Ok(());
        };
        let State::CatchingUp { next } = watch.state else {
            self.behind.pop_front();
            return Ok(());
        };
        match read_piece(&self.store, &self.store.view(), &watch.spec, next, self.piece)? {
            CatchUpPiece::Read { events, next } => {
                self.behind.rotate_left(1);
                watch.state = State::CatchingUp { next };
                if let Some(picked) = events {
                    watch.is_busy = true;
                    let watch_id = watch.watch_id;
                    let mut held = MemoryCharge::new(&self.link.account);
                    held.force(picked.weight());
                    self.ready.push_back(Notice::Events { watch_id, selection: picked, held });
                }
            }
            CatchUpPiece::UpToDate => {
                let Ok(permit) = self.hub.commands.reserve().await else {
                    // The hub has ended, and this stream will end soon.
                    self.behind.pop_front();
                    return Ok(());
                };
                self.behind.pop_front();
                watch.state = State::Attached { round: self.last_round };
                let (spec, link) = (watch.spec.clone(), self.link.clone());
                permit.send(HubCommand::Attach { token, spec, next, link });
            }
            CatchUpPiece::Compacted { compacted } => {
                self.behind.pop_front();
                watch.state = State::Compacted;
                let watch_id = watch.watch_id;
                self.ready.push_back(Notice::Compacted { watch_id, compact_revision: compacted });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
impl Subscriber {
    /// Whether the hub has handled all commands of streams, and every watch of this stream is
    /// attached.
    pub(super) fn is_settled(&self) -> bool {
        let obeyed = self.hub.commands.capacity() == self.hub.commands.max_capacity();
        obeyed && self.watches.values().all(ClientWatch::is_attached)
    }

    /// Whether some watch of this stream catches up from the store.
    pub(super) fn is_detached(&self) -> bool {
        !self.behind.is_empty()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        // The queue is closed first, so that the hub attaches no more watches of this stream. Then
        // this stream's attached watches are reported to the hub, which detaches them.
        self.queue.close();
        let attached = self.watches.iter().filter(|(_, watch)| watch.is_attached());
        let attached: Vec<WatcherId> = attached.map(|(token, _)| *token).collect();
        if !attached.is_empty() {
            self.hub.depart(attached);
        }
    }
}
