//! The hub: the one task that knows all attached watchers.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use super::WatchSpec;
use super::feed::Feed;
use super::matcher::{GroupKey, Matcher, WatcherId};
use super::picked::EventSelection;
use crate::mvcc::channels::{QueueReceiver, QueueSender, SendResult, Wake, queue, send_now};
use crate::mvcc::event::EventBatch;
use crate::mvcc::operation_counters::PendingEventsGuard;
use crate::mvcc::store::Store;
use muster_shares::memory::{BudgetShare, MemoryAccount, MemoryCharge};

/// Maximum number of commands queued for the hub. A stream whose command finds the queue full
/// waits.
pub(super) const MAX_QUEUED_COMMANDS: usize = 1_024;
/// Maximum number of ended streams queued for the hub. If the queue is full, the hub is woken to
/// search all watches for ended streams instead. That takes longer.
pub(super) const MAX_QUEUED_DEPARTURES: usize = 1_024;

/// Request of a subscriber to the hub.
pub(super) enum HubCommand {
    /// Attach the watcher `token`: send it every matching event from revision `next` on.
    Attach { token: WatcherId, spec: WatchSpec, next: i64, link: SubscriberLink },
    /// Detach the watcher `token`: send it nothing more.
    Detach { token: WatcherId },
    /// Report the revision up to which all watchers attached through `link` have got their events.
    Progress { link: SubscriberLink, round: u64 },
}

/// Message from the hub to a subscriber.
#[derive(Debug)]
pub(super) enum Delivery {
    Events {
        token: WatcherId,
        picked: Arc<EventSelection>,
        held: MemoryCharge,
        pending: PendingEventsGuard,
    },
    Progress {
        revision: i64,
        round: u64,
    },
}

/// Messages to a subscriber that were dropped because its queue was full.
#[derive(Debug, Default)]
pub(super) struct MissedDeliveries {
    /// Watchers that were detached because an event didn't fit into the queue.
    pub(super) lagging: Vec<LaggingWatcher>,
    /// Whether the answer to a progress request was dropped.
    pub(super) progress: bool,
}

/// A watcher that was detached. All its events of revisions below `next` are already in the
/// subscriber's queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaggingWatcher {
    pub(super) token: WatcherId,
    pub(super) next: i64,
}

#[derive(Debug, Default)]
pub(super) struct MissedDeliveryMailbox {
    pub(super) missed: Mutex<MissedDeliveries>,
    pub(super) wake: Wake,
}

impl MissedDeliveryMailbox {
    fn record(&self, note: impl FnOnce(&mut MissedDeliveries)) {
        note(&mut self.missed.lock().expect("nothing panics under this lock"));
        self.wake.notify_one();
    }
}

/// The hub's connection to one subscriber.
#[derive(Clone)]
pub(super) struct SubscriberLink {
    pub(super) queue: QueueSender<Delivery>,
    pub(super) overflow: Arc<MissedDeliveryMailbox>,
    /// Account that is charged for the memory of queued events.
    pub(super) account: Arc<MemoryAccount>,
    /// Number of events in all queues of the process, for the metrics.
    pub(super) pending: Arc<AtomicI64>,
}

/// Part of an account's memory that queued events may fill: four eighths. The rest stays free, so
/// that queues can always be emptied.
const QUEUE_PART: BudgetShare = BudgetShare(4);

/// Number of watches of an ended stream that are detached before the hub looks for events again.
const MAX_DETACHED_AT_ONCE: usize = 1_024;

impl SubscriberLink {
    fn send_events(&self, token: WatcherId, picked: Arc<EventSelection>) -> SendResult {
        let mut held = MemoryCharge::new(&self.account);
        if !held.try_set(picked.weight(), QUEUE_PART) {
            return SendResult::Full;
        }
        let pending = PendingEventsGuard::new(&self.pending, picked.len());
        self.send(Delivery::Events { token, picked, held, pending })
    }

    fn send(&self, delivery: Delivery) -> SendResult {
        send_now(&self.queue, delivery)
    }

    fn mark_lagging(&self, token: WatcherId, next: i64) {
        self.overflow.record(|missed| missed.lagging.push(LaggingWatcher { token, next }));
    }
}

struct Watcher {
    group: GroupKey,
    /// First revision whose events the watcher wants.
    start: i64,
    link: SubscriberLink,
}

/// Sending end of the hub's incoming channels.
#[derive(Clone)]
pub(super) struct HubSender {
    pub(super) commands: QueueSender<HubCommand>,
    departures: QueueSender<Vec<WatcherId>>,
    missed_departure: Arc<Wake>,
}

/// The hub's incoming channels.
pub(super) struct HubReceiver {
    pub(super) commands: QueueReceiver<HubCommand>,
    /// Attached watches of each stream that has ended.
    pub(super) departures: QueueReceiver<Vec<WatcherId>>,
    /// Wakes the hub if the watches of an ended stream didn't fit into the queue `departures`.
    pub(super) missed_departure: Arc<Wake>,
}

/// Makes the hub's incoming channels.
pub(super) fn hub_channels() -> (HubSender, HubReceiver) {
    let (commands, received_commands) = queue(MAX_QUEUED_COMMANDS);
    let (departures, received_departures) = queue(MAX_QUEUED_DEPARTURES);
    let missed_departure = Arc::new(Wake::new());
    let receiver = HubReceiver {
        commands: received_commands,
        departures: received_departures,
        missed_departure: Arc::clone(&missed_departure),
    };
    (HubSender { commands, departures, missed_departure }, receiver)
}

impl HubSender {
    /// Reports the attached watches of a stream that has ended. Close the stream's queue first: if
    /// this report can't be queued, the hub finds the watches by their closed queue.
    pub(super) fn depart(&self, attached: Vec<WatcherId>) {
        if let SendResult::Full = send_now(&self.departures, attached) {
            self.missed_departure.notify_one();
        }
    }
}

/// Bytes that a batch takes in the ring of recent events besides its events. These are four
/// allocations with headers and rounding, and its slot in the ring.
const RING_ENTRY_OVERHEAD_BYTES: usize = 192;

fn ring_entry_bytes(batch: &EventBatch) -> usize {
    batch.weight() + RING_ENTRY_OVERHEAD_BYTES
}

pub(super) struct Hub {
    feed: Arc<Feed>,
    store: Store,
    receiver: HubReceiver,
    watchers: HashMap<WatcherId, Watcher>,
    matcher: Matcher,
    /// Revision up to which all events have been given to the watchers.
    revision: i64,
    ring: VecDeque<Arc<EventBatch>>,
    ring_bytes: usize,
    max_ring_bytes: usize,
    /// Revision after which the ring of recent events contains every event.
    ring_since: i64,
}

impl Hub {
    pub(super) fn new(
        feed: Arc<Feed>,
        store: &Store,
        max_ring_bytes: usize,
        receiver: HubReceiver,
    ) -> Self {
        // The feed is opened before the store's revision is read. An event published between these
        // two steps arrives by the feed, although the revision includes it. `take_events` skips
        // such an event.
        feed.open();
        let revision = store.view().revision();
        Self {
            feed,
            store: store.clone(),
            receiver,
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
        let (feed, missed) = (self.feed.clone(), self.receiver.missed_departure.clone());
        loop {
            tokio::select! {
                // `biased` makes the order fixed instead of random, so that a simulation can be
                // repeated. Each branch also takes the new events from the feed, so that a busy
                // branch never delays events. The branches for departures come first, so that a
                // flood of requests doesn't keep ended streams in memory.
                biased;
                Some(tokens) = self.receiver.departures.recv() => self.detach_each(&tokens),
                () = missed.notified() => {
                    let closed = self.find_closed();
                    self.detach_each(&closed);
                }
                command = self.receiver.commands.recv() => match command {
                    // The command's sender has possibly read events from the store that the hub has
                    // not handled yet. So the hub handles all new events before the command.
                    Some(command) => {
                        self.take_events();
                        self.handle_command(command);
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

    /// Detaches watchers in chunks, and handles new events after each chunk.
    fn detach_each(&mut self, tokens: &[WatcherId]) {
        for some in tokens.chunks(MAX_DETACHED_AT_ONCE) {
            some.iter().for_each(|token| self.detach(*token));
            self.take_events();
        }
    }

    /// Returns the watchers whose streams have ended, oldest first.
    fn find_closed(&self) -> Vec<WatcherId> {
        let closed = self.watchers.iter().filter(|(_, watcher)| watcher.link.queue.is_closed());
        let mut closed: Vec<WatcherId> = closed.map(|(token, _)| *token).collect();
        // Sorted, since the map's order is random and a simulation must be repeatable.
        closed.sort_unstable();
        closed
    }

    pub(super) fn take_events(&mut self) {
        let arrived = self.feed.take();
        if let Some(revision) = arrived.lost_up_to {
            self.detach_all(revision);
        }
        for batch in arrived.batches {
            if batch.revision > self.revision {
                self.dispatch(batch);
            }
        }
    }

    fn detach_all(&mut self, revision: i64) {
        let next = self.revision + 1;
        // Sorted by age, since the map's order is random and a simulation must be repeatable.
        let mut lost: Vec<_> = self.watchers.drain().collect();
        lost.sort_unstable_by_key(|(token, _)| *token);
        for (token, watcher) in lost {
            watcher.link.mark_lagging(token, next.max(watcher.start));
        }
        self.matcher.clear();
        self.revision = self.revision.max(revision);
        self.ring.clear();
        self.ring_bytes = 0;
        self.ring_since = self.revision;
    }

    fn dispatch(&mut self, batch: Arc<EventBatch>) {
        let mut detached: Vec<WatcherId> = Vec::new();
        for (watchers, picks) in self.matcher.pick(&batch.events) {
            let first = picks.first().and_then(|at| batch.events.get(usize::try_from(*at).ok()?));
            let Some(first) = first.map(|event| event.revision.main) else { continue };
            let whole = Arc::new(EventSelection::new(batch.clone(), picks));
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
                match watcher.link.send_events(*token, picked) {
                    SendResult::Queued => {}
                    SendResult::Full => {
                        watcher.link.mark_lagging(*token, watcher.start.max(self.revision + 1));
                        detached.push(*token);
                    }
                    SendResult::Closed => detached.push(*token),
                }
            }
        }
        for token in detached {
            self.detach(token);
        }
        self.revision = batch.revision;
        self.add_to_ring(batch);
    }

    fn add_to_ring(&mut self, batch: Arc<EventBatch>) {
        self.ring_bytes += ring_entry_bytes(&batch);
        self.ring.push_back(batch);
        while self.ring_bytes > self.max_ring_bytes {
            let Some(oldest) = self.ring.pop_front() else { break };
            self.ring_bytes -= ring_entry_bytes(&oldest);
            self.ring_since = oldest.revision;
        }
    }

    fn handle_command(&mut self, command: HubCommand) {
        match command {
            HubCommand::Attach { token, spec, next, link } => self.attach(token, &spec, next, link),
            HubCommand::Detach { token } => self.detach(token),
            HubCommand::Progress { link, round } => {
                let progress = Delivery::Progress { revision: self.revision, round };
                if let SendResult::Full = link.send(progress) {
                    link.overflow.record(|missed| missed.progress = true);
                }
            }
        }
    }

    fn attach(&mut self, token: WatcherId, spec: &WatchSpec, next: i64, link: SubscriberLink) {
        // This stream has ended already. If its watcher were attached now, nothing would detach it
        // later.
        if link.queue.is_closed() {
            return;
        }
        if next <= self.ring_since {
            link.mark_lagging(token, next);
            return;
        }
        let group = GroupKey::of(spec);
        let recent = self.ring.partition_point(|batch| batch.revision < next);
        let mut told = next;
        for batch in self.ring.range(recent..) {
            if let Some(picked) = pick_since(&group, batch, next) {
                match link.send_events(token, picked) {
                    SendResult::Queued => {}
                    SendResult::Full => return link.mark_lagging(token, told),
                    SendResult::Closed => return,
                }
            }
            told = batch.revision + 1;
        }
        self.matcher.add(group.clone(), token);
        self.watchers.insert(token, Watcher { group, start: next, link });
    }

    fn detach(&mut self, token: WatcherId) {
        if let Some(watcher) = self.watchers.remove(&token) {
            self.matcher.remove(&watcher.group, token);
        }
    }
}

/// Selects the events of `batch` that match `group` and have at least the revision `start`.
fn pick_since(
    group: &GroupKey,
    batch: &Arc<EventBatch>,
    start: i64,
) -> Option<Arc<EventSelection>> {
    let wanted = (0..).zip(&batch.events).filter(|(_, event)| event.revision.main >= start);
    let picks = group.picks(wanted);
    (!picks.is_empty()).then(|| Arc::new(EventSelection::new(batch.clone(), picks)))
}
