//! Tracks the highest revision that any client or watcher knew at each time.

use super::{RecordedHistory, Time};

/// The highest revision that any client or watcher knew, as a function of time.
#[derive(Debug)]
pub(super) struct KnownRevisions {
    /// Pairs in order of time; the revision is the highest up to that time.
    entries: Vec<(Time, i64)>,
}

impl KnownRevisions {
    /// Collects the revisions from all answers, and from all watch responses.
    pub(super) fn from_history(history: &RecordedHistory) -> Self {
        let answers = history.requests.iter().filter_map(|request| {
            let (_, revision) = request.answer()?;
            Some((request.end()?, revision))
        });
        let streams = history.watchers.iter().flat_map(|watcher| &watcher.streams);
        let watched = streams.flat_map(|stream| &stream.responses).map(|(at, response)| {
            let events = response.events.iter().filter_map(|event| event.kv.as_ref());
            let newest = events.map(|kv| kv.mod_revision).max().unwrap_or(0);
            let header = response.header.as_ref().map_or(0, |header| header.revision);
            (*at, newest.max(header))
        });
        let mut entries: Vec<_> = answers.chain(watched).collect();
        entries.sort_unstable();
        let mut highest = 0;
        for (_, revision) in &mut entries {
            highest = highest.max(*revision);
            *revision = highest;
        }
        Self { entries }
    }

    /// Returns the highest revision that was known before `time`. If none was known, returns 1, the
    /// revision of an empty store.
    pub(super) fn highest_before(&self, time: Time) -> i64 {
        let index = self.entries.partition_point(|(at, _)| *at < time);
        index.checked_sub(1).map_or(1, |last| self.entries[last].1)
    }
}
