//! Queue of reads that wait for a read barrier. One ReadIndex round confirms an index for all
//! waiting reads. This module repeats a round that gets no answer. After the round it waits until
//! the confirmed index is applied.
//!
//! A linearizable read is answered only after a round that a quorum confirmed and that began after
//! the read. No clock is involved.

use std::collections::{BTreeMap, VecDeque};

use node_consensus::{Consensus, Position, ReadContext, ReadState};

use super::mail::{MAX_QUEUED_READS, ReadToken};

/// Maximum number of ReadIndex rounds at a time. Later reads wait until the round ends, and then
/// share the next one. Each round costs a message to each peer and an answer, whatever the number
/// of its reads. So a second round at a time would cost more messages for the same reads.
const MAX_ROUNDS: usize = 1;

/// A waiting read, with the tick at which it was queued.
type QueuedRead = (ReadToken, u64);

#[derive(Debug)]
struct Round {
    context: ReadContext,
    tokens: Vec<QueuedRead>,
    since: u64,
    /// Leader and term to which the round was sent. After a change of leader or term, the round
    /// can't succeed.
    leader: (u64, u64),
}

#[derive(Debug, Default)]
pub(super) struct ReadQueue {
    retry_ticks: u64,
    waiting: Vec<QueuedRead>,
    rounds: VecDeque<Round>,
    /// Reads whose index is confirmed, by their index. A read is answered once its index is
    /// applied.
    confirmed_reads: BTreeMap<u64, Vec<QueuedRead>>,
    /// Maximum number of reads that recently waited at the same time, for a round or in one. About
    /// so many readers are active, and each of them may share the next round.
    concurrent: usize,
    /// Minimum of `concurrent` at which rounds are delayed.
    min_shared: usize,
    /// Whether the next round is delayed until more reads wait.
    is_delayed: bool,
    /// Whether the delay of the next round has ended.
    has_delay_ended: bool,
    /// Total number of reads in `waiting`, `rounds` and `confirmed_reads`.
    tokens: usize,
    /// Number of ReadIndex rounds started so far.
    pub rounds_started: u64,
}

impl ReadQueue {
    pub(super) fn new(retry_ticks: u64, min_shared: usize) -> Self {
        Self { retry_ticks, min_shared, ..Self::default() }
    }

    /// Queues a read. Returns false if too many reads wait already.
    pub(super) fn push(&mut self, token: ReadToken, now: u64) -> bool {
        if self.tokens >= MAX_QUEUED_READS {
            return false;
        }
        self.tokens += 1;
        self.waiting.push((token, now));
        let in_rounds: usize = self.rounds.iter().map(|round| round.tokens.len()).sum();
        self.concurrent = self.concurrent.max(self.waiting.len() + in_rounds);
        true
    }

    /// Drops reads queued before tick `before`, because their callers have given up. Without this,
    /// abandoned reads would fill the queue while there is no leader.
    pub(super) fn expire(&mut self, before: u64) {
        let mut left = 0;
        let mut expire = |tokens: &mut Vec<QueuedRead>| {
            tokens.retain(|(_, since)| *since >= before);
            left += tokens.len();
        };
        expire(&mut self.waiting);
        self.rounds.iter_mut().for_each(|round| expire(&mut round.tokens));
        self.confirmed_reads.values_mut().for_each(&mut expire);
        self.confirmed_reads.retain(|_, tokens| !tokens.is_empty());
        self.tokens = left;
    }

    /// Starts a ReadIndex round for all waiting reads, including those of rounds that got no
    /// answer. A repeated round needs a new ReadIndex context, so that a late answer to the earlier
    /// attempt isn't taken for an answer to this one. Returns whether a round was started.
    ///
    /// Call this again after a round was confirmed. Otherwise the reads that arrived during that
    /// round would wait for the next input.
    pub(super) fn start_round(&mut self, consensus: &mut Consensus, now: u64) -> bool {
        let (_, leader, term) = consensus.leadership();
        let retry_ticks = self.retry_ticks;
        let mut again = Vec::new();
        self.rounds.retain_mut(|round| {
            let over = round.leader != (leader, term) || round.since + retry_ticks <= now;
            if over {
                again.append(&mut round.tokens);
            }
            !over
        });
        let repeats = !again.is_empty();
        self.waiting.append(&mut again);
        self.is_delayed = false;
        if self.waiting.is_empty() || leader == 0 || self.rounds.len() >= MAX_ROUNDS {
            return false;
        }
        if !repeats && self.must_wait_for_more() {
            self.is_delayed = true;
            return false;
        }
        self.has_delay_ended = false;
        let context = consensus.read_index();
        self.rounds_started += 1;
        let tokens = std::mem::take(&mut self.waiting);
        self.rounds.push_back(Round { context, tokens, since: now, leader: (leader, term) });
        true
    }

    /// Returns whether the next round should wait until more reads share it: as many as recently
    /// waited at the same time. If they don't come, fewer are expected the next time.
    fn must_wait_for_more(&mut self) -> bool {
        let missing = self.concurrent.saturating_sub(self.waiting.len());
        if self.concurrent < self.min_shared || missing == 0 {
            return false;
        }
        if self.has_delay_ended {
            self.concurrent -= missing.div_ceil(4);
        }
        !self.has_delay_ended
    }

    /// Lets the next round start, whatever the number of its reads.
    pub(super) fn end_delay(&mut self) {
        self.has_delay_ended = true;
    }

    /// Returns the number of rounds started so far, if the start of the next one is delayed.
    pub(super) fn delayed_round(&self) -> Option<u64> {
        (self.is_delayed && !self.waiting.is_empty()).then_some(self.rounds_started)
    }

    pub(super) fn confirm(&mut self, states: &[ReadState]) {
        for state in states {
            let at = self.rounds.iter().position(|round| round.context == state.context);
            if let Some(round) = at.and_then(|at| self.rounds.remove(at)) {
                self.confirmed_reads.entry(state.index).or_default().extend(round.tokens);
            }
        }
    }

    /// Moves each read whose confirmed index is now applied from the queue to `out`.
    pub(super) fn release(&mut self, applied: Position, out: &mut Vec<(ReadToken, Position)>) {
        while let Some(first) = self.confirmed_reads.first_entry() {
            if *first.key() > applied.index {
                return;
            }
            let tokens = first.remove();
            self.tokens -= tokens.len();
            out.extend(tokens.into_iter().map(|(token, _)| (token, applied)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expired_reads_make_room_wherever_they_waited() {
        let mut reads = ReadQueue::new(2, usize::MAX);
        let context = ReadContext { member: 1, boot: 1, sequence: 1 };
        for token in 0..MAX_QUEUED_READS as u64 {
            assert!(reads.push(token, 1));
            match token {
                0 => {
                    let tokens = std::mem::take(&mut reads.waiting);
                    reads.rounds.push_back(Round { context, tokens, since: 1, leader: (1, 1) });
                    reads.confirm(&[ReadState { index: 9, context }]);
                }
                1 => {
                    let tokens = std::mem::take(&mut reads.waiting);
                    reads.rounds.push_back(Round { context, tokens, since: 1, leader: (1, 1) });
                }
                _ => {}
            }
        }
        assert!(!reads.push(u64::MAX, 5), "dead or not, they are too many");
        reads.expire(5);
        assert_eq!(reads.tokens, 0);
        assert!(reads.waiting.is_empty() && reads.confirmed_reads.is_empty());
        assert!(reads.rounds[0].tokens.is_empty());
        assert!(reads.push(u64::MAX, 5));
        reads.expire(5);
        assert_eq!(reads.tokens, 1, "who waits still does");
    }

    #[test]
    fn released_reads_are_no_longer_counted() {
        let mut reads = ReadQueue::new(2, usize::MAX);
        reads.push(7, 1);
        reads.confirmed_reads.insert(3, std::mem::take(&mut reads.waiting));
        let (mut out, at) = (Vec::new(), Position { index: 3, term: 1 });
        reads.release(at, &mut out);
        assert_eq!((out, reads.tokens), (vec![(7, at)], 0));
    }
}
