//! Clients with one watch each, on a stream to some member. Some clients read slowly. All clients
//! move to another member now and then, or when they have to.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use node_state::mvcc::KeyRange;
use node_state::mvcc::watch::{Notice, Subscriber};

use super::InvariantViolation;
use super::clients::ClientRequestGenerator;
use super::invariants::watch::ExpectedWatch;
use super::simulation::{ScheduledEvent, Simulation};

/// Number of streams in each history.
pub(super) const STREAM_COUNT: usize = 3;

/// Id of each stream's only watch.
const WATCH_ID: i64 = 1;

/// Maximum number of polls of a stream's subscriber in one of the stream's turns, if the stream
/// reads everything available.
pub(super) const MAX_POLLS_PER_TURN: usize = 64;

/// A stream ends its turn after this number of polls of its subscriber that returned no message. A
/// poll that reads old changes may find no matching event, so one such poll isn't enough.
pub(super) const MAX_EMPTY_POLLS: usize = 4;

/// Future of a member's watch hub, polled by the simulation.
pub(super) type HubFuture = Pin<Box<dyn Future<Output = ()>>>;

/// A stream with one watch.
pub(super) struct SingleWatchStream {
    pub watch: ExpectedWatch,
    subscriber: Option<Subscriber>,
    /// Machine that the stream is connected to.
    node: u64,
    /// Maximum virtual microseconds between two turns of the stream. In a turn, the stream polls
    /// its subscriber.
    pace: u64,
    /// Maximum number of times that the stream polls its subscriber in one turn.
    max_polls: usize,
}

impl SingleWatchStream {
    pub(super) fn new(draw: &mut ClientRequestGenerator<'_>) -> Self {
        let (key, end) = draw.keys();
        let is_slow = draw.rng.chance(300);
        let (no_put, no_delete) = (draw.rng.chance(100), draw.rng.chance(100));
        Self {
            watch: ExpectedWatch::new(KeyRange::new(key, end), no_put, no_delete, 1),
            subscriber: None,
            node: 0,
            pace: if is_slow { 200_000 } else { 8_000 },
            max_polls: if is_slow { 2 } else { MAX_POLLS_PER_TURN },
        }
    }

    /// Drops the connection if it leads to this machine, whose member is gone.
    pub(super) fn disconnect(&mut self, node: u64) {
        if self.node == node {
            self.subscriber = None;
        }
    }

    /// Makes the stream read everything available from now on.
    pub(super) fn read_without_delay(&mut self) {
        (self.pace, self.max_polls) = (8_000, MAX_POLLS_PER_TURN);
    }
}

/// Polls a future once and drops it. Returns `None` if it isn't ready; a later turn tries again.
pub(super) fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

impl Simulation {
    /// Lets a stream poll its subscriber, and schedules the stream's next turn.
    pub(super) fn run_watch_stream(&mut self, number: usize) -> Result<(), InvariantViolation> {
        let delay = self.rng.range(200, self.streams[number].pace);
        self.schedule(delay, ScheduledEvent::Stream { stream: number });
        let moves = self.rng.chance(20);
        let requests_progress = self.rng.chance(150);
        if moves {
            self.streams[number].subscriber = None;
        }
        if self.streams[number].subscriber.is_none() {
            self.connect(number);
        }
        let Self { streams, invariants, report, .. } = self;
        let stream = &mut streams[number];
        let Some(subscriber) = &mut stream.subscriber else { return Ok(()) };
        if requests_progress {
            let answer = if delay.is_multiple_of(2) {
                poll_once(subscriber.request_progress())
            } else {
                poll_once(subscriber.request_periodic_progress())
            };
            report.progress_requests += u64::from(answer.is_some());
        }
        let model = &invariants.stores.model;
        let mut empty_polls = 0;
        for _ in 0..stream.max_polls {
            let Some(notice) = poll_once(subscriber.next()) else {
                empty_polls += 1;
                if empty_polls == MAX_EMPTY_POLLS {
                    break;
                }
                continue;
            };
            let Ok(notice) = notice else {
                // The member's store can't be read any more, so the member's process will end in a
                // moment.
                stream.subscriber = None;
                break;
            };
            report.notices += 1;
            match notice {
                Notice::Events { selection, .. } => stream.watch.check_events(model, &selection)?,
                Notice::Progress { revision } | Notice::WatchProgress { revision, .. } => {
                    stream.watch.check_progress(model, revision)?;
                }
                Notice::Compacted { compact_revision, .. } => {
                    stream.watch.continue_after_compaction(compact_revision)?;
                    stream.subscriber = None;
                    break;
                }
            }
        }
        let node = stream.node;
        self.wake_hub(node);
        Ok(())
    }

    fn connect(&mut self, number: usize) {
        let node = self.random_voter();
        let Some(process) = self.node(node).process.as_ref() else { return };
        let mut subscriber = process.watches.subscribe();
        let stream = &mut self.streams[number];
        subscriber.add(WATCH_ID, stream.watch.spec());
        stream.subscriber = Some(subscriber);
        stream.node = node;
    }

    /// Schedules a run of a member's watch hub, unless one is scheduled already.
    pub(super) fn wake_hub(&mut self, node: u64) {
        let generation = self.node(node).generation;
        let Some(process) = self.running_process(node, generation) else { return };
        if !std::mem::replace(&mut process.hub_is_due, true) {
            let is_slow = self.rng.chance(100);
            let delay =
                if is_slow { self.rng.range(5_000, 60_000) } else { self.rng.range(20, 3_000) };
            self.schedule(delay, ScheduledEvent::Hub { node, generation });
        }
    }

    pub(super) fn run_hub(&mut self, node: u64, generation: u64) {
        let Some(process) = self.running_process(node, generation) else { return };
        process.hub_is_due = false;
        let hub_end = poll_once(process.hub.as_mut());
        assert!(hub_end.is_none(), "a hub ends only with its machine");
    }
}
