//! Which revision was known to somebody, and since when.

use super::{History, Time};

/// See the module.
#[derive(Debug)]
pub(super) struct Known {
    /// By time, the highest so far.
    since: Vec<(Time, i64)>,
}

impl Known {
    /// From all answers, and all that watchers were told.
    pub(super) fn of(history: &History) -> Self {
        let answers = history.requests.iter().filter_map(|request| {
            let (_, revision) = request.answer()?;
            Some((request.end()?, revision))
        });
        let streams = history.watchers.iter().flat_map(|watcher| &watcher.streams);
        let told = streams.flat_map(|stream| &stream.heard).map(|(at, response)| {
            let events = response.events.iter().filter_map(|event| event.kv.as_ref());
            let newest = events.map(|kv| kv.mod_revision).max().unwrap_or(0);
            let header = response.header.as_ref().map_or(0, |header| header.revision);
            (*at, newest.max(header))
        });
        let mut since: Vec<_> = answers.chain(told).collect();
        since.sort_unstable();
        let mut highest = 0;
        for (_, revision) in &mut since {
            highest = highest.max(*revision);
            *revision = highest;
        }
        Self { since }
    }

    /// What was known to anybody before then.
    pub(super) fn before(&self, time: Time) -> i64 {
        let after = self.since.partition_point(|(at, _)| *at < time);
        after.checked_sub(1).map_or(1, |last| self.since[last].1)
    }
}
