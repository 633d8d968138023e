//! The log's side of the driver: all queued batches become one write and one sync, and old entries
//! are read in parallel. It has no thread of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use node_consensus::FetchRequest;

use super::{DriverMetrics, Notice, QUEUED_JOBS};
use crate::log::{Batch, Log, LogError, LogReader};

/// Time without work after which the log prepares for later writes.
const IDLE: Duration = Duration::from_millis(20);

/// Interval at which the log's free space is checked.
pub(super) const SPACE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Job for the log.
#[derive(Debug)]
pub enum LogJob {
    /// Make this batch, with its number, durable.
    Write(u64, Batch),
    /// Drop entries up to and including this index.
    Compact(u64),
}

impl LogJob {
    /// Returns the batch of a write.
    pub fn batch(&self) -> Option<&Batch> {
        match self {
            Self::Write(_, batch) => Some(batch),
            Self::Compact(_) => None,
        }
    }
}

/// Collects the jobs that are done together: `first`, and those that queued behind it.
pub fn collect_log_jobs(first: LogJob, more: impl Iterator<Item = LogJob>) -> Vec<LogJob> {
    let mut group = vec![first];
    group.extend(more.take(QUEUED_JOBS));
    group
}

/// The only writer of the log: the wal thread in production, events in the simulation. It reads the
/// clock for its counters only.
#[derive(Debug)]
pub struct LogWriter {
    log: Log,
    metrics: Arc<DriverMetrics>,
    is_short: bool,
    /// Whether there may be something to prepare.
    idle_work: bool,
}

impl LogWriter {
    /// Takes ownership of the log.
    pub fn new(mut log: Log, metrics: Arc<DriverMetrics>) -> Self {
        let is_short = log.is_short_of_space();
        Self { log, metrics, is_short, idle_work: true }
    }

    /// Does all jobs: first the writes, as one group, then the furthest compaction. After an error
    /// the log must not be used again.
    pub fn run(&mut self, group: Vec<LogJob>) -> Result<Vec<Notice>, LogError> {
        let (started, bytes) = (Instant::now(), self.log.written_bytes());
        let mut notices = Vec::new();
        let mut batches = Vec::new();
        let mut durable = None;
        let mut compact = None;
        for job in group {
            match job {
                LogJob::Write(number, batch) => {
                    durable = Some(number);
                    batches.push(batch);
                }
                LogJob::Compact(through) => compact = compact.max(Some(through)),
            }
        }
        let entries: usize = batches.iter().map(|batch| batch.entries.len()).sum();
        if let Some(number) = durable {
            self.log.write(&batches)?;
            notices.push(Notice::Persisted(number));
            self.log.keep_spare()?;
        }
        if let Some(through) = compact {
            notices.push(Notice::Compacted(self.log.compact(through)?));
        }
        self.idle_work = true;
        self.metrics.log_groups.fetch_add(1, Relaxed);
        self.metrics.log_entries.fetch_add(entries as u64, Relaxed);
        self.metrics.log_bytes.fetch_add(self.log.written_bytes() - bytes, Relaxed);
        self.metrics.log_durations.record(started.elapsed());
        Ok(notices)
    }

    /// Returns how long to wait for a job before calling [`idle`](Self::idle).
    pub fn idle_wait(&self) -> Duration {
        if self.idle_work { IDLE } else { SPACE_CHECK_INTERVAL }
    }

    /// Does one step of the work that makes later writes fast, because no job waits. While the disk
    /// is full, such a step also finds out whether space is available again.
    pub fn idle(&mut self) -> Result<(), LogError> {
        if self.idle_work || self.is_short {
            self.idle_work = self.log.prepare()?;
        }
        Ok(())
    }

    /// Returns whether the disk was short of space at the last check.
    pub fn is_short(&self) -> bool {
        self.is_short
    }

    /// Checks the disk's space. Returns whether [`is_short`](Self::is_short) has changed.
    pub fn check_space(&mut self) -> bool {
        let short = self.log.is_short_of_space();
        self.metrics.log_bytes_left.store(self.log.bytes_left(), Relaxed);
        std::mem::replace(&mut self.is_short, short) != short
    }

    /// Returns how many bytes can be written before another segment must be created.
    pub fn bytes_left(&self) -> u64 {
        self.log.bytes_left()
    }

    /// Writes an empty record after the last one. With it, damage to that last one can be told from
    /// a torn end.
    pub fn finish(mut self) -> Result<(), LogError> {
        self.log.write(&[Batch::default()])
    }
}

/// Reads old entries in parallel with the writer, without delaying it. An error is final.
pub fn run_fetch(log: &LogReader, fetch: FetchRequest) -> Result<Notice, LogError> {
    let FetchRequest { id, low, high, max_bytes } = fetch;
    let entries = match log.entries(low, high, max_bytes) {
        // The entries were compacted meanwhile. Consensus will find that the peer needs a snapshot.
        Err(LogError::Compacted { .. }) => Vec::new(),
        other => other?,
    };
    Ok(Notice::Fetched { id, entries })
}
