//! One client stream's watches.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;

use super::catch_up::{Piece, PieceSize, read_piece};
use super::hub::{Command, Delivery, Lag, Link, Missed, Shared};
use super::matcher::Token;
use super::picked::Picked;
use super::{WatchOptions, WatchSpec};
use crate::mvcc::error::StoreError;
use crate::mvcc::store::Store;
use crate::shares::{Account, Charge};

static NEXT_TOKEN: AtomicU64 = AtomicU64::new(1);

/// What a stream has to tell its client.
#[derive(Debug)]
pub enum Notice {
    /// Events, in order.
    Events {
        /// The watch.
        watch_id: i64,
        /// What happened.
        picked: Arc<Picked>,
        /// What it keeps in memory, charged to the client.
        held: Charge,
    },
    /// The watch is told no more: its next revision is no longer there. It keeps its id until it
    /// is removed.
    Compacted {
        /// The watch.
        watch_id: i64,
        /// The first revision that could be watched from.
        compact_revision: i64,
    },
    /// Everything up to `revision` has been told to all of the stream's watches.
    Progress {
        /// How far.
        revision: i64,
    },
    /// The same for one watch that asked for it and has been quiet.
    WatchProgress {
        /// The watch.
        watch_id: i64,
        /// How far.
        revision: i64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Told everything before `next`; reads the store from there.
    CatchesUp { next: i64 },
    /// The hub gives it each event. It knows the watch only after it has answered the rounds up to
    /// `round`, so that their answers say nothing of this watch.
    Attached { round: u64 },
    /// What it should have been told next is gone.
    Compacted,
}

#[derive(Debug)]
struct Watch {
    watch_id: i64,
    spec: WatchSpec,
    state: State,
    /// Told something since the last periodic progress.
    is_busy: bool,
}

impl Watch {
    /// Whether the hub's answer to `round` covers this watch.
    fn answered(&self, round: u64) -> bool {
        matches!(self.state, State::Attached { round: before } if before < round)
    }

    /// Whether it has been told of its beginning: a watch of the future has not (etcd #20221).
    fn has_begun(&self, revision: i64) -> bool {
        self.spec.start_revision <= revision
    }

    fn is_attached(&self) -> bool {
        matches!(self.state, State::Attached { .. })
    }
}

/// A progress answer that is under way.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    /// The client asked.
    by_client: bool,
    /// The timer did.
    by_timer: bool,
    /// Answers to other rounds don't count; 0: to be asked again.
    round: u64,
}

/// One client stream's watches, and its end of the hub's queue.
pub struct Subscriber {
    store: Store,
    piece: PieceSize,
    /// The last thing that was done was to read a piece.
    has_read: bool,
    commands: mpsc::Sender<Command>,
    departures: mpsc::UnboundedSender<Vec<Token>>,
    queue: mpsc::Receiver<Delivery>,
    link: Link,
    watches: BTreeMap<Token, Watch>,
    by_id: BTreeMap<i64, Token>,
    /// Those that catch up, in turn.
    behind: VecDeque<Token>,
    asked: Asked,
    last_round: u64,
    ready: VecDeque<Notice>,
}

impl Subscriber {
    pub(super) fn new(
        store: Store,
        options: WatchOptions,
        commands: mpsc::Sender<Command>,
        departures: mpsc::UnboundedSender<Vec<Token>>,
        account: Arc<Account>,
    ) -> Self {
        let (sender, queue) = mpsc::channel(options.queued_deliveries);
        let pending = Arc::clone(&store.operations().pending_events);
        Self {
            store,
            piece: PieceSize { records: options.records_per_piece, bytes: options.bytes_per_piece },
            has_read: false,
            commands,
            departures,
            queue,
            link: Link { queue: sender, shared: Arc::new(Shared::default()), account, pending },
            watches: BTreeMap::new(),
            by_id: BTreeMap::new(),
            behind: VecDeque::new(),
            asked: Asked::default(),
            last_round: 0,
            ready: VecDeque::new(),
        }
    }

    /// Whether the stream has a watch of this id.
    #[must_use]
    pub fn has(&self, watch_id: i64) -> bool {
        self.by_id.contains_key(&watch_id)
    }

    /// Adds a watch whose id is not in use on this stream. Returns the store's revision: a watch of
    /// whatever comes next begins after it.
    pub fn add(&mut self, watch_id: i64, spec: WatchSpec) -> i64 {
        let token = NEXT_TOKEN.fetch_add(1, Ordering::Relaxed);
        let newest = self.store.view().revision();
        let next = if spec.start_revision == 0 { newest + 1 } else { spec.start_revision };
        let mut state = State::CatchesUp { next };
        // Without a past there is nothing to catch up with.
        if next > newest
            && let Ok(permit) = self.commands.try_reserve()
        {
            state = State::Attached { round: self.last_round };
            let (spec, link) = (spec.clone(), self.link.clone());
            permit.send(Command::Attach { token, spec, next, link });
        } else {
            self.behind.push_back(token);
        }
        self.watches.insert(token, Watch { watch_id, spec, state, is_busy: false });
        self.by_id.insert(watch_id, token);
        newest
    }

    /// Ends a watch; `false` if there is none of this id.
    pub async fn remove(&mut self, watch_id: i64) -> bool {
        let Some(token) = self.by_id.get(&watch_id).copied() else { return false };
        // A place first: dropped before it is there, the watch is still one of this stream's. A hub
        // that is gone tells nobody anything.
        let permit = self.commands.reserve().await;
        self.by_id.remove(&watch_id);
        self.watches.remove(&token);
        if let Ok(permit) = permit {
            permit.send(Command::Detach { token });
        }
        true
    }

    /// Asks for [`Notice::Progress`]. As in etcd there is none for a stream without watches, while
    /// one of them still catches up, or before one of them begins.
    pub async fn request_progress(&mut self) {
        self.take_missed();
        if !self.watches.is_empty() && self.watches.values().all(Watch::is_attached) {
            self.asked.by_client = true;
            self.ask().await;
        }
    }

    /// Asks for a [`Notice::WatchProgress`] for each watch that wants it and has been quiet since
    /// the last time.
    pub async fn request_periodic_progress(&mut self) {
        if self.watches.values().any(|watch| watch.spec.progress_notify) {
            self.asked.by_timer = true;
            self.ask().await;
        }
    }

    async fn ask(&mut self) {
        // A place first: dropped before it is there, nothing has been asked.
        let Ok(permit) = self.commands.reserve().await else { return };
        self.last_round += 1;
        self.asked.round = self.last_round;
        permit.send(Command::Progress { link: self.link.clone(), round: self.last_round });
    }

    /// The next thing to tell. Safe to drop before it is ready: nothing is lost.
    pub async fn next(&mut self) -> Result<Notice, StoreError> {
        loop {
            self.take_missed();
            if let Some(notice) = self.ready.pop_front() {
                return Ok(notice);
            }
            // Before anything is read from the store: what a watcher that has been detached was
            // given last is still in here.
            if let Ok(delivery) = self.queue.try_recv() {
                self.take(delivery);
                continue;
            }
            if let Some(token) = self.behind.front().copied() {
                // Others on this thread are not kept waiting by a long way back. What has been read
                // was told before that: it is not to lie here.
                if std::mem::take(&mut self.has_read) {
                    tokio::task::yield_now().await;
                }
                self.catch_up(token).await?;
                self.has_read = true;
                continue;
            }
            if self.asked.round == 0 && (self.asked.by_client || self.asked.by_timer) {
                self.ask().await;
            }
            tokio::select! {
                // In order, and not by lot: the same happens again from the same beginning.
                biased;
                delivery = self.queue.recv() => {
                    // The subscriber holds a sender itself: the queue does not end.
                    if let Some(delivery) = delivery {
                        self.take(delivery);
                    }
                }
                () = self.link.shared.wake.notified() => {}
            }
        }
    }

    fn take(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Events { token, picked, held, pending } => {
                drop(pending);
                if let Some(watch) = self.watches.get_mut(&token) {
                    watch.is_busy = true;
                    let watch_id = watch.watch_id;
                    self.ready.push_back(Notice::Events { watch_id, picked, held });
                }
            }
            Delivery::Progress { revision, round } if round == self.asked.round => {
                // What the hub has detached before it answered is known only now.
                self.take_missed();
                self.tell_progress(revision, round);
            }
            Delivery::Progress { .. } => {}
        }
    }

    fn tell_progress(&mut self, revision: i64, round: u64) {
        if self.asked.by_timer {
            self.asked.by_timer = false;
            for watch in self.watches.values_mut() {
                let quiet = !std::mem::take(&mut watch.is_busy);
                let told = watch.has_begun(revision) && watch.answered(round);
                if watch.spec.progress_notify && quiet && told {
                    let watch_id = watch.watch_id;
                    self.ready.push_back(Notice::WatchProgress { watch_id, revision });
                }
            }
        }
        if self.asked.by_client {
            let attached = self.watches.values().all(Watch::is_attached);
            if attached && !self.watches.values().all(|watch| watch.answered(round)) {
                // A watch has come since: the next answer covers it too.
                self.asked.round = 0;
                return;
            }
            self.asked.by_client = false;
            if attached && self.watches.values().all(|watch| watch.has_begun(revision)) {
                self.ready.push_back(Notice::Progress { revision });
            }
        }
    }

    fn take_missed(&mut self) {
        let missed = {
            let mut missed =
                self.link.shared.missed.lock().expect("nothing panics under this lock");
            std::mem::take::<Missed>(&mut missed)
        };
        for Lag { token, next } in missed.lagging {
            if let Some(watch) = self.watches.get_mut(&token) {
                watch.state = State::CatchesUp { next };
                self.behind.push_back(token);
            }
        }
        if missed.progress {
            self.asked.round = 0;
        }
    }

    /// Takes the watcher at the head of the line one piece further. Nothing changes until its last
    /// await is over.
    async fn catch_up(&mut self, token: Token) -> Result<(), StoreError> {
        let Some(watch) = self.watches.get_mut(&token) else {
            self.behind.pop_front();
            return Ok(());
        };
        let State::CatchesUp { next } = watch.state else {
            self.behind.pop_front();
            return Ok(());
        };
        match read_piece(&self.store, &self.store.view(), &watch.spec, next, self.piece)? {
            Piece::Read { events, next } => {
                self.behind.rotate_left(1);
                watch.state = State::CatchesUp { next };
                if let Some(picked) = events {
                    watch.is_busy = true;
                    let watch_id = watch.watch_id;
                    let mut held = Charge::new(&self.link.account);
                    held.force(picked.weight());
                    self.ready.push_back(Notice::Events { watch_id, picked, held });
                }
            }
            Piece::UpToDate => {
                let Ok(permit) = self.commands.reserve().await else {
                    // The hub is gone; this stream is about to be.
                    self.behind.pop_front();
                    return Ok(());
                };
                self.behind.pop_front();
                watch.state = State::Attached { round: self.last_round };
                let (spec, link) = (watch.spec.clone(), self.link.clone());
                permit.send(Command::Attach { token, spec, next, link });
            }
            Piece::Compacted { compacted } => {
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
    /// Whether the hub gives every watch its events from here on.
    pub(super) fn is_settled(&self) -> bool {
        let obeyed = self.commands.capacity() == self.commands.max_capacity();
        obeyed && self.watches.values().all(Watch::is_attached)
    }

    /// Whether a watch is to be read from the store.
    pub(super) fn is_detached(&self) -> bool {
        !self.behind.is_empty()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        // In this order: the hub attaches nothing to a closed queue, and what it has attached before is
        // among those that depart.
        self.queue.close();
        let attached = self.watches.iter().filter(|(_, watch)| watch.is_attached());
        let attached: Vec<Token> = attached.map(|(token, _)| *token).collect();
        if !attached.is_empty() {
            let _ = self.departures.send(attached);
        }
    }
}
