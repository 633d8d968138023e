//! Whether the process at the other end of a stream lives.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use super::Refusal;

/// The process at the other end of a stream that is pinged, and one that wants to take its place.
///
/// A member's process begins when the one before it has ended. So a process that answers what it was
/// asked *after* another one had shown itself is alive beside that one: they run on copies of one
/// directory, and the newcomer is not let in.
#[derive(Debug)]
pub(super) struct Vitals {
    run: u64,
    /// When it was asked, oldest first; answers come in that order.
    asked: VecDeque<Instant>,
    /// When the last question was asked that it has answered.
    answered: Option<Instant>,
    /// Another process, and when it was first seen.
    newcomer: Option<(u64, Instant)>,
}

impl Vitals {
    /// Nothing is known yet of the process `run`.
    pub(super) fn of(run: u64) -> Self {
        Self { run, asked: VecDeque::new(), answered: None, newcomer: None }
    }

    /// It is asked whether it lives.
    pub(super) fn asks(&mut self, now: Instant) {
        self.asked.push_back(now);
    }

    /// It has answered, and took so long; `None` if nothing was asked.
    pub(super) fn answers(&mut self, now: Instant) -> Option<Duration> {
        let asked = self.asked.pop_front();
        self.answered = asked.or(self.answered);
        asked.map(|asked| now.saturating_duration_since(asked))
    }

    /// Why the process `run` can't be let in now, if it is another one.
    pub(super) fn objects_to(&mut self, run: u64, now: Instant) -> Option<Refusal> {
        if run == self.run {
            return None;
        }
        let since = match self.newcomer {
            Some((known, since)) if known == run => since,
            _ => now,
        };
        self.newcomer = Some((run, since));
        let lives = self.answered.is_some_and(|answered| answered > since);
        Some(if lives { Refusal::Boot } else { Refusal::Another })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newcomer_waits_until_the_process_before_it_is_seen_to_live_or_gone() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut vitals = Vitals::of(1);
        vitals.asks(at(1));
        vitals.asks(at(2));
        assert_eq!(vitals.objects_to(2, at(3)), Some(Refusal::Another));
        assert_eq!(vitals.answers(at(3)), Some(Duration::from_secs(2)));
        assert_eq!(vitals.answers(at(3)), Some(Duration::from_secs(1)));
        assert_eq!(vitals.objects_to(2, at(4)), Some(Refusal::Another), "it may have died since");
        assert_eq!(vitals.objects_to(1, at(4)), None, "a reconnect");
        vitals.asks(at(5));
        assert_eq!(vitals.objects_to(2, at(6)), Some(Refusal::Another));
        vitals.answers(at(6));
        assert_eq!(vitals.objects_to(2, at(6)), Some(Refusal::Boot));
        assert_eq!(vitals.objects_to(3, at(6)), Some(Refusal::Another), "one after the other");
        assert_eq!(vitals.answers(at(7)), None);
        assert_eq!(vitals.objects_to(3, at(7)), Some(Refusal::Another), "nothing was asked");
    }
}
