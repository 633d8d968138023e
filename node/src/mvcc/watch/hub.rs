//! The one task that knows all attached watchers.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::WatchSpec;
use super::feed::Feed;
use super::matcher::{GroupKey, Matcher, Token};
use super::picked::Picked;
use crate::mvcc::event::EventBatch;
use crate::mvcc::operations::PendingEvents;
use crate::mvcc::store::Store;
use crate::shares::{Account, Charge, Part};

/// What a subscriber asks of the hub.
pub(super) enum Command {
    /// Give `token` every event from `next` on.
    Attach { token: Token, spec: WatchSpec, next: i64, link: Link },
    /// No more for `token`.
    Detach { token: Token },
    /// Say how far everything attached through `link` has been told.
    Progress { link: Link, round: u64 },
}

/// From the hub to a subscriber.
#[derive(Debug)]
pub(super) enum Delivery {
    Events { token: Token, picked: Arc<Picked>, held: Charge, pending: PendingEvents },
    Progress { revision: i64, round: u64 },
}

/// What did not fit into the queue.
#[derive(Debug, Default)]
pub(super) struct Missed {
    /// Watchers that were detached.
    pub(super) lagging: Vec<Lag>,
    /// A progress answer.
    pub(super) progress: bool,
}

/// Everything before `next` that a watcher wants is in the subscriber's queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lag {
    pub(super) token: Token,
    pub(super) next: i64,
}

#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) missed: Mutex<Missed>,
    pub(super) wake: tokio::sync::Notify,
}

impl Shared {
    fn miss(&self, note: impl FnOnce(&mut Missed)) {
        note(&mut self.missed.lock().expect("nothing panics under this lock"));
        self.wake.notify_one();
    }
}

/// The hub's way to one subscriber.
#[derive(Clone)]
pub(super) struct Link {
    pub(super) queue: mpsc::Sender<Delivery>,
    pub(super) shared: Arc<Shared>,
    /// What waits in the queue is charged to it.
    pub(super) account: Arc<Account>,
    /// Events in all queues.
    pub(super) pending: Arc<AtomicI64>,
}

/// What queues may fill of an account: not what is needed to empty them.
const QUEUED: Part = Part(4);

/// Watches of a stream that has ended, which are detached before the hub looks for events again.
const DETACHED_AT_ONCE: usize = 1_024;

enum Sent {
    Yes,
    Full,
    Gone,
}

impl Link {
    fn tell(&self, token: Token, picked: Arc<Picked>) -> Sent {
        let mut held = Charge::new(&self.account);
        if !held.set(picked.weight(), QUEUED) {
            return Sent::Full;
        }
        let pending = PendingEvents::new(&self.pending, picked.len());
        self.send(Delivery::Events { token, picked, held, pending })
    }

    fn send(&self, delivery: Delivery) -> Sent {
        match self.queue.try_send(delivery) {
            Ok(()) => Sent::Yes,
            Err(TrySendError::Full(_)) => Sent::Full,
            Err(TrySendError::Closed(_)) => Sent::Gone,
        }
    }

    fn lag(&self, token: Token, next: i64) {
        self.shared.miss(|missed| missed.lagging.push(Lag { token, next }));
    }
}

struct Watcher {
    group: GroupKey,
    /// Earlier events are not wanted.
    start: i64,
    link: Link,
}

/// What subscribers ask, and who departs.
pub(super) type Orders = (mpsc::Receiver<Command>, mpsc::UnboundedReceiver<Vec<Token>>);

/// What a batch takes in the ring besides its events: four allocations, their headers and rounding, and its
/// place in the ring.
const KEPT_BATCH_BYTES: usize = 192;

fn kept_bytes(batch: &EventBatch) -> usize {
    batch.weight() + KEPT_BATCH_BYTES
}

pub(super) struct Hub {
    feed: Arc<Feed>,
    store: Store,
    commands: mpsc::Receiver<Command>,
    /// The watches of streams that have ended. As long as the watches were, at most.
    departures: mpsc::UnboundedReceiver<Vec<Token>>,
    watchers: HashMap<Token, Watcher>,
    matcher: Matcher,
    /// Everything up to here has been handed out.
    revision: i64,
    ring: VecDeque<Arc<EventBatch>>,
    ring_bytes: usize,
    max_ring_bytes: usize,
    /// The ring has every event after this revision.
    ring_since: i64,
}

impl Hub {
    pub(super) fn new(
        feed: Arc<Feed>,
        store: &Store,
        max_ring_bytes: usize,
        (commands, departures): Orders,
    ) -> Self {
        // First the feed, then the revision: what happens in between comes through the feed twice
        // at worst, and is skipped below.
        feed.open();
        let revision = store.view().revision();
        Self {
            feed,
            store: store.clone(),
            commands,
            departures,
            watchers: HashMap::new(),
            matcher: Matcher::default(),
            revision,
            ring: VecDeque::new(),
            ring_bytes: 0,
            max_ring_bytes,
            ring_since: revision,
        }
    }

    pub(super) async fn run(mut self) {
        let feed = self.feed.clone();
        loop {
            tokio::select! {
                // In order, and not by lot: the same happens again from the same beginning. Each takes
                // the events along, so that none waits for the others; what departs comes first, so that
                // no flood of requests keeps it in memory.
                biased;
                Some(tokens) = self.departures.recv() => {
                    for some in tokens.chunks(DETACHED_AT_ONCE) {
                        some.iter().for_each(|token| self.detach(*token));
                        self.take_events();
                    }
                }
                command = self.commands.recv() => match command {
                    // Events that a command's sender has seen in the store come first.
                    Some(command) => {
                        self.take_events();
                        self.obey(command);
                    }
                    None => return,
                },
                () = feed.arrival.notified() => {}
            }
            self.take_events();
            let attached = i64::try_from(self.watchers.len()).unwrap_or(i64::MAX);
            self.store.operations().attached_watches.store(attached, Ordering::Relaxed);
        }
    }

    pub(super) fn take_events(&mut self) {
        let arrived = self.feed.take();
        if let Some(revision) = arrived.lost {
            self.lose_all(revision);
        }
        for batch in arrived.batches {
            if batch.revision > self.revision {
                self.hand_out(batch.relocate());
            }
        }
    }

    fn lose_all(&mut self, revision: i64) {
        let next = self.revision + 1;
        // The eldest first: what happens again happens in the same order again.
        let mut lost: Vec<_> = self.watchers.drain().collect();
        lost.sort_unstable_by_key(|(token, _)| *token);
        for (token, watcher) in lost {
            watcher.link.lag(token, next.max(watcher.start));
        }
        self.matcher.clear();
        self.revision = self.revision.max(revision);
        self.ring.clear();
        self.ring_bytes = 0;
        self.ring_since = self.revision;
    }

    fn hand_out(&mut self, batch: Arc<EventBatch>) {
        let mut detached: Vec<Token> = Vec::new();
        for (watchers, picks) in self.matcher.pick(&batch.events) {
            let first = picks.first().and_then(|at| batch.events.get(usize::try_from(*at).ok()?));
            let Some(first) = first.map(|event| event.revision.main) else { continue };
            let whole = Arc::new(Picked::new(batch.clone(), picks));
            for token in watchers {
                let Some(watcher) = self.watchers.get(token) else { continue };
                let picked = if watcher.start <= first {
                    whole.clone()
                } else {
                    match pick_since(&watcher.group, &batch, watcher.start) {
                        Some(picked) => picked,
                        None => continue,
                    }
                };
                match watcher.link.tell(*token, picked) {
                    Sent::Yes => {}
                    Sent::Full => {
                        watcher.link.lag(*token, watcher.start.max(self.revision + 1));
                        detached.push(*token);
                    }
                    Sent::Gone => detached.push(*token),
                }
            }
        }
        for token in detached {
            self.detach(token);
        }
        self.revision = batch.revision;
        self.remember(batch);
    }

    fn remember(&mut self, batch: Arc<EventBatch>) {
        self.ring_bytes += kept_bytes(&batch);
        self.ring.push_back(batch);
        while self.ring_bytes > self.max_ring_bytes {
            let Some(oldest) = self.ring.pop_front() else { break };
            self.ring_bytes -= kept_bytes(&oldest);
            self.ring_since = oldest.revision;
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Attach { token, spec, next, link } => self.attach(token, &spec, next, link),
            Command::Detach { token } => self.detach(token),
            Command::Progress { link, round } => {
                let progress = Delivery::Progress { revision: self.revision, round };
                if let Sent::Full = link.send(progress) {
                    link.shared.miss(|missed| missed.progress = true);
                }
            }
        }
    }

    fn attach(&mut self, token: Token, spec: &WatchSpec, next: i64, link: Link) {
        if link.queue.is_closed() {
            return;
        }
        if next <= self.ring_since {
            link.lag(token, next);
            return;
        }
        let group = GroupKey::of(spec);
        let recent = self.ring.partition_point(|batch| batch.revision < next);
        let mut told = next;
        for batch in self.ring.range(recent..) {
            if let Some(picked) = pick_since(&group, batch, next) {
                match link.tell(token, picked) {
                    Sent::Yes => {}
                    Sent::Full => return link.lag(token, told),
                    Sent::Gone => return,
                }
            }
            told = batch.revision + 1;
        }
        self.matcher.add(group.clone(), token);
        self.watchers.insert(token, Watcher { group, start: next, link });
    }

    fn detach(&mut self, token: Token) {
        if let Some(watcher) = self.watchers.remove(&token) {
            self.matcher.remove(&watcher.group, token);
        }
    }
}

/// What a watcher that wants nothing before `start` is told of `batch`.
fn pick_since(group: &GroupKey, batch: &Arc<EventBatch>, start: i64) -> Option<Arc<Picked>> {
    let wanted = (0..).zip(&batch.events).filter(|(_, event)| event.revision.main >= start);
    let picks = group.picks(wanted);
    (!picks.is_empty()).then(|| Arc::new(Picked::new(batch.clone(), picks)))
}
