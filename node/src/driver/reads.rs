//! Read barriers: one ReadIndex round for all who wait, a retry of our own, and the wait for the
//! confirmed index to be applied.

use std::collections::{BTreeMap, VecDeque};

use node_consensus::{Consensus, Position, ReadContext, ReadState};

use super::mail::{MAX_QUEUED_READS, ReadToken};

/// Rounds on their way at once. Who comes later waits for one to end, and shares the next.
const MAX_ROUNDS: usize = 4;

/// Who waits, and since which tick.
type Waiting = (ReadToken, u64);

#[derive(Debug)]
struct Round {
    context: ReadContext,
    tokens: Vec<Waiting>,
    since: u64,
    /// Whom it was put to, and when: another leader or term never heard of it.
    leader: (u64, u64),
}

#[derive(Debug, Default)]
pub(super) struct Reads {
    retry_ticks: u64,
    waiting: Vec<Waiting>,
    rounds: VecDeque<Round>,
    /// Confirmed, by the index that must be applied.
    confirmed: BTreeMap<u64, Vec<Waiting>>,
    /// All tokens in here.
    tokens: usize,
    /// ReadIndex rounds so far.
    pub asked: u64,
}

impl Reads {
    pub(super) fn new(retry_ticks: u64) -> Self {
        Self { retry_ticks, ..Self::default() }
    }

    /// False if there are too many.
    pub(super) fn push(&mut self, token: ReadToken, now: u64) -> bool {
        if self.tokens >= MAX_QUEUED_READS {
            return false;
        }
        self.tokens += 1;
        self.waiting.push((token, now));
        true
    }

    /// Forgets who came before tick `before`, and has given up: else the dead would take the place
    /// of the living while nobody leads or nothing is applied.
    pub(super) fn expire(&mut self, before: u64) {
        let mut left = 0;
        let mut expire = |tokens: &mut Vec<Waiting>| {
            tokens.retain(|(_, since)| *since >= before);
            left += tokens.len();
        };
        expire(&mut self.waiting);
        self.rounds.iter_mut().for_each(|round| expire(&mut round.tokens));
        self.confirmed.values_mut().for_each(&mut expire);
        self.confirmed.retain(|_, tokens| !tokens.is_empty());
        self.tokens = left;
    }

    /// Asks for all who wait, and again for those whose round got no answer: under a new context,
    /// since an old one may still be acknowledged.
    pub(super) fn ask(&mut self, consensus: &mut Consensus, now: u64) {
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
        self.waiting.append(&mut again);
        if self.waiting.is_empty() || leader == 0 || self.rounds.len() >= MAX_ROUNDS {
            return;
        }
        let context = consensus.read_index();
        self.asked += 1;
        let tokens = std::mem::take(&mut self.waiting);
        self.rounds.push_back(Round { context, tokens, since: now, leader: (leader, term) });
    }

    pub(super) fn confirmed(&mut self, states: &[ReadState]) {
        for state in states {
            let at = self.rounds.iter().position(|round| round.context == state.context);
            if let Some(round) = at.and_then(|at| self.rounds.remove(at)) {
                self.confirmed.entry(state.index).or_default().extend(round.tokens);
            }
        }
    }

    /// Those whose index is applied.
    pub(super) fn release(&mut self, applied: Position, out: &mut Vec<(ReadToken, Position)>) {
        while let Some(first) = self.confirmed.first_entry() {
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
    fn who_gave_up_makes_room_wherever_it_waited() {
        let mut reads = Reads::new(2);
        let context = ReadContext { member: 1, boot: 1, sequence: 1 };
        for token in 0..MAX_QUEUED_READS as u64 {
            assert!(reads.push(token, 1));
            match token {
                0 => {
                    let tokens = std::mem::take(&mut reads.waiting);
                    reads.rounds.push_back(Round { context, tokens, since: 1, leader: (1, 1) });
                    reads.confirmed(&[ReadState { index: 9, context }]);
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
        assert!(reads.waiting.is_empty() && reads.confirmed.is_empty());
        assert!(reads.rounds[0].tokens.is_empty());
        assert!(reads.push(u64::MAX, 5));
        reads.expire(5);
        assert_eq!(reads.tokens, 1, "who waits still does");
    }

    #[test]
    fn tokens_that_are_released_are_counted_no_more() {
        let mut reads = Reads::new(2);
        reads.push(7, 1);
        reads.confirmed.insert(3, std::mem::take(&mut reads.waiting));
        let (mut out, at) = (Vec::new(), Position { index: 3, term: 1 });
        reads.release(at, &mut out);
        assert_eq!((out, reads.tokens), (vec![(7, at)], 0));
    }
}
