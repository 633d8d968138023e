//! Automatic compaction: `--auto-compaction-mode` and `--auto-compaction-retention`, by etcd's
//! rules (`server/etcdserver/api/v3compactor`).
//!
//! Every member records past revisions, so that a new leader continues where the last leader
//! stopped. Only the leader compacts.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use node_proto::etcdserverpb::CompactionRequest;
use tokio::time::{Instant, sleep};

use super::ApiContext;
use super::context::CallContext;
use super::error::Error;

/// Automatic compaction by the leader: `--auto-compaction-mode`, `--auto-compaction-retention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoCompaction {
    /// No automatic compaction takes place.
    Never,
    /// Compact revisions older than this time, which is never zero.
    Periodic(Duration),
    /// Keep this number of revisions, which is above zero, and compact older ones.
    Revisions(i64),
}

const HOUR: Duration = Duration::from_secs(60 * 60);
/// Number of revision samples that are taken per period. For a period above one hour, the number
/// that is taken per hour.
const SAMPLES_PER_PERIOD: u32 = 10;
/// Minimum time between samples, even for the shortest period.
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(10);
/// Time between two compactions in the mode that keeps a number of revisions.
const REVISION_MODE_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// Recorded revisions and the last compaction. Times are counted from the start of the task.
#[derive(Debug)]
struct RevisionHistory {
    rule: AutoCompaction,
    /// Newest revision at each sample, oldest sample first. In periodic mode, the samples of one
    /// period are kept, and the sample before them.
    samples: VecDeque<i64>,
    /// Time of the last compaction.
    last_compaction: Duration,
    /// Minimum time from `last_compaction` to the next compaction, in periodic mode. Before the
    /// first compaction it is a whole period.
    pause: Duration,
    /// Revision of the last compaction.
    last: i64,
}

impl RevisionHistory {
    fn new(rule: AutoCompaction) -> Self {
        let pause = match rule {
            AutoCompaction::Periodic(period) => period,
            AutoCompaction::Never | AutoCompaction::Revisions(_) => Duration::ZERO,
        };
        Self { rule, samples: VecDeque::new(), last_compaction: Duration::ZERO, pause, last: 0 }
    }

    /// Returns the time between samples; `None` if nothing is compacted automatically.
    fn sample_interval(&self) -> Option<Duration> {
        match self.rule {
            AutoCompaction::Never => None,
            AutoCompaction::Periodic(period) => Some(every_tenth(period)),
            AutoCompaction::Revisions(_) => Some(REVISION_MODE_INTERVAL),
        }
    }

    /// Returns the revision to compact now, if any. Called on the leader after each wait, with the
    /// newest revision.
    fn revision_to_compact(&mut self, now: Duration, newest: i64) -> Option<i64> {
        let revision = match self.rule {
            AutoCompaction::Never => return None,
            AutoCompaction::Revisions(keep) => newest.saturating_sub(keep),
            AutoCompaction::Periodic(_)
                if now.saturating_sub(self.last_compaction) < self.pause =>
            {
                return None;
            }
            AutoCompaction::Periodic(period) => {
                self.pause = period.min(HOUR);
                *self.samples.front()?
            }
        };
        (revision > 0 && revision != self.last).then_some(revision)
    }

    fn record_compaction(&mut self, now: Duration, revision: i64) {
        (self.last_compaction, self.last) = (now, revision);
    }

    /// Records the newest revision. Called before each wait.
    fn record_sample(&mut self, newest: i64) {
        let AutoCompaction::Periodic(period) = self.rule else { return };
        self.samples.push_back(newest);
        let held = period.as_nanos() / every_tenth(period).as_nanos() + 1;
        if self.samples.len() as u128 > held {
            self.samples.pop_front();
        }
    }
}

fn every_tenth(period: Duration) -> Duration {
    (period.min(HOUR) / SAMPLES_PER_PERIOD).max(MIN_SAMPLE_INTERVAL)
}

/// Runs automatic compaction, for as long as the member runs.
pub(super) async fn run(context: Arc<ApiContext>) {
    let mut past = RevisionHistory::new(context.limits.auto_compaction);
    let Some(every) = past.sample_interval() else { return };
    let began = Instant::now();
    let newest = || context.store.view().revision();
    loop {
        past.record_sample(newest());
        sleep(every).await;
        if !context.leads() {
            continue;
        }
        let Some(revision) = past.revision_to_compact(began.elapsed(), newest()) else { continue };
        let request = CompactionRequest { revision, physical: false };
        match context.propose(request, &mut CallContext::for_member()).await {
            Ok(_) | Err(Error::Compacted) => {
                tracing::info!(revision, "completed auto compaction");
                past.record_compaction(began.elapsed(), revision);
            }
            Err(error) => {
                tracing::warn!(revision, error = %error.text(), "failed auto compaction; it is tried again");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// Returns the minute and revision of each compaction, if there is one new revision per second.
    fn compactions(
        rule: AutoCompaction,
        minutes: u32,
        leads: impl Fn(u32) -> bool,
    ) -> Vec<(u32, i64)> {
        let mut past = RevisionHistory::new(rule);
        let every = past.sample_interval().unwrap();
        let mut done = Vec::new();
        let (mut now, newest) = (Duration::ZERO, |now: Duration| now.as_secs() as i64 + 1);
        while now < MINUTE * minutes {
            past.record_sample(newest(now));
            now += every;
            let minute = u32::try_from(now.as_secs() / 60).unwrap();
            if !leads(minute) {
                continue;
            }
            if let Some(due) = past.revision_to_compact(now, newest(now)) {
                past.record_compaction(now, due);
                done.push((minute, due));
            }
        }
        done
    }

    #[test]
    fn periodic_compaction_begins_after_a_period_and_repeats_at_least_hourly() {
        let minutes = |of: u32| AutoCompaction::Periodic(of * MINUTE);
        // As in etcd, the first compaction uses the sample from one period ago. Each later
        // compaction uses the sample from one period and one sample interval ago.
        let ten = compactions(minutes(10), 31, |_| true);
        assert_eq!(ten, [(10, 1), (20, 9 * 60 + 1), (30, 19 * 60 + 1)]);
        let day = compactions(minutes(24 * 60), 26 * 60 + 1, |_| true);
        assert_eq!(day, [(24 * 60, 1), (25 * 60, 54 * 60 + 1), (26 * 60, 114 * 60 + 1)]);
    }

    #[test]
    fn the_revision_mode_keeps_the_given_number_of_revisions() {
        let kept = compactions(AutoCompaction::Revisions(400), 15, |_| true);
        assert_eq!(kept, [(10, 201), (15, 501)]);
    }

    #[test]
    fn a_new_leader_compacts_with_the_revisions_that_it_recorded_before() {
        let ten = AutoCompaction::Periodic(10 * MINUTE);
        assert_eq!(compactions(ten, 26, |minute| minute >= 25), [(25, 14 * 60 + 1)]);
    }

    #[test]
    fn the_same_revision_is_compacted_again_only_after_a_failure() {
        let mut past = RevisionHistory::new(AutoCompaction::Periodic(10 * MINUTE));
        for minute in 0..10 {
            past.record_sample(7);
            assert_eq!(past.revision_to_compact(minute * MINUTE, 7), None, "{minute}");
        }
        assert_eq!(past.revision_to_compact(10 * MINUTE, 7), Some(7));
        assert_eq!(past.revision_to_compact(11 * MINUTE, 7), Some(7), "it was not done");
        past.record_compaction(11 * MINUTE, 7);
        for minute in 12..40 {
            past.record_sample(7);
            assert_eq!(past.revision_to_compact(minute * MINUTE, 7), None);
        }
        past.record_sample(8);
        (0..10).for_each(|_| past.record_sample(9));
        assert_eq!(past.revision_to_compact(40 * MINUTE, 9), Some(8));
    }

    #[test]
    fn the_sampling_rate_and_the_number_of_samples_are_limited() {
        let mut past = RevisionHistory::new(AutoCompaction::Periodic(Duration::from_nanos(1)));
        assert_eq!(past.sample_interval(), Some(MIN_SAMPLE_INTERVAL));
        (0..5).for_each(|revision| past.record_sample(revision));
        assert_eq!(past.samples, [4]);
        assert_eq!(RevisionHistory::new(AutoCompaction::Never).sample_interval(), None);
        let mut past = RevisionHistory::new(AutoCompaction::Periodic(2 * HOUR));
        (0..99).for_each(|revision| past.record_sample(revision));
        assert_eq!(past.samples.len(), 21);
    }
}
