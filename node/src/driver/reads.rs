//! Read barriers: one ReadIndex round for all who wait, a retry of our own, and the wait for the
//! confirmed index to be applied.

use std::collections::{BTreeMap, VecDeque};

use node_consensus::{Consensus, Position, ReadContext, ReadState};

use super::mailbox::{MAX_QUEUED_READS, ReadToken};

/// Rounds on their way at once. Who comes later waits for one to end, and shares the next.
const MAX_ROUNDS: usize = 4;

#[derive(Debug)]
struct Round {
    context: ReadContext,
    tokens: Vec<ReadToken>,
    since: u64,
    /// Whom it was put to, and when: another leader or term never heard of it.
    leader: (u64, u64),
}

#[derive(Debug, Default)]
pub(super) struct Reads {
    retry_ticks: u64,
    waiting: Vec<ReadToken>,
    rounds: VecDeque<Round>,
    /// Confirmed, by the index that must be applied.
    confirmed: BTreeMap<u64, Vec<ReadToken>>,
    /// ReadIndex rounds so far.
    pub asked: u64,
}

impl Reads {
    pub fn new(retry_ticks: u64) -> Self {
        Self { retry_ticks, ..Self::default() }
    }

    /// False if there are too many.
    pub fn push(&mut self, token: ReadToken) -> bool {
        if self.waiting.len() >= MAX_QUEUED_READS {
            return false;
        }
        self.waiting.push(token);
        true
    }

    /// Asks for all who wait, and again for those whose round got no answer: under a new context,
    /// since an old one may still be acknowledged.
    pub fn ask(&mut self, consensus: &mut Consensus, now: u64) {
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

    pub fn confirmed(&mut self, states: &[ReadState]) {
        for state in states {
            let at = self.rounds.iter().position(|round| round.context == state.context);
            if let Some(round) = at.and_then(|at| self.rounds.remove(at)) {
                self.confirmed.entry(state.index).or_default().extend(round.tokens);
            }
        }
    }

    /// Those whose index is applied.
    pub fn release(&mut self, applied: Position, out: &mut Vec<(ReadToken, Position)>) {
        while let Some(first) = self.confirmed.first_entry() {
            if *first.key() > applied.index {
                return;
            }
            out.extend(first.remove().into_iter().map(|token| (token, applied)));
        }
    }
}
