//! Liveness of the process at the other end of a stream.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use super::StreamRefusal;

/// Liveness of the process at the other end of a stream. Also remembers the newcomer: a second
/// process that claims to be the same member.
///
/// A member's new process starts only after its old one has ended. So if the old process answers a
/// ping that was sent *after* the newcomer appeared, two processes run. They run on copies of one
/// data directory, and the newcomer is refused.
#[derive(Debug)]
pub(super) struct ProcessLiveness {
    run: u64,
    /// Times at which unanswered pings were sent, oldest first. The process answers pings in order.
    asked: VecDeque<Instant>,
    /// Time at which the last answered ping was sent.
    answered: Option<Instant>,
    /// Run number of a second process that claims to be the same member (the newcomer), and the
    /// time at which that process first appeared.
    newcomer: Option<(u64, Instant)>,
}

impl ProcessLiveness {
    /// Starts without any knowledge of the process `run`.
    pub(super) fn of(run: u64) -> Self {
        Self { run, asked: VecDeque::new(), answered: None, newcomer: None }
    }

    /// Records that a ping is sent to the process.
    pub(super) fn record_ping(&mut self, now: Instant) {
        self.asked.push_back(now);
    }

    /// Records an answer to the oldest unanswered ping. Returns the round-trip time, or `None` if
    /// there was no unanswered ping.
    pub(super) fn record_pong(&mut self, now: Instant) -> Option<Duration> {
        let asked = self.asked.pop_front();
        self.answered = asked.or(self.answered);
        asked.map(|asked| now.saturating_duration_since(asked))
    }

    /// Returns the reason to refuse the process `run`, which also claims to be the member at the
    /// other end of this stream. Returns `None` if it is the process of this stream.
    pub(super) fn refusal_of(&mut self, run: u64, now: Instant) -> Option<StreamRefusal> {
        if run == self.run {
            return None;
        }
        let since = match self.newcomer {
            Some((known, since)) if known == run => since,
            _ => now,
        };
        self.newcomer = Some((run, since));
        let lives = self.answered.is_some_and(|answered| answered > since);
        Some(if lives { StreamRefusal::Boot } else { StreamRefusal::AnotherProcess })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newcomer_is_refused_while_the_earlier_process_may_live() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut liveness = ProcessLiveness::of(1);
        liveness.record_ping(at(1));
        liveness.record_ping(at(2));
        assert_eq!(liveness.refusal_of(2, at(3)), Some(StreamRefusal::AnotherProcess));
        assert_eq!(liveness.record_pong(at(3)), Some(Duration::from_secs(2)));
        assert_eq!(liveness.record_pong(at(3)), Some(Duration::from_secs(1)));
        assert_eq!(
            liveness.refusal_of(2, at(4)),
            Some(StreamRefusal::AnotherProcess),
            "it may have died since"
        );
        assert_eq!(liveness.refusal_of(1, at(4)), None, "a reconnect");
        liveness.record_ping(at(5));
        assert_eq!(liveness.refusal_of(2, at(6)), Some(StreamRefusal::AnotherProcess));
        liveness.record_pong(at(6));
        assert_eq!(liveness.refusal_of(2, at(6)), Some(StreamRefusal::Boot));
        assert_eq!(
            liveness.refusal_of(3, at(6)),
            Some(StreamRefusal::AnotherProcess),
            "one after the other"
        );
        assert_eq!(liveness.record_pong(at(7)), None);
        assert_eq!(
            liveness.refusal_of(3, at(7)),
            Some(StreamRefusal::AnotherProcess),
            "nothing was asked"
        );
    }
}
