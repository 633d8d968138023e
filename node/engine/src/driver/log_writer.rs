//! The part of the driver that owns the log. It writes all queued batches at once, with one sync.
//! Old entries are read in parallel. This module starts no thread.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use node_consensus::FetchRequest;

use super::{DriverMetrics, Notice, QUEUED_JOBS};
use crate::log::{Batch, Log, LogError, LogReader};

/// Time without a job after which the log prepares for later writes.
const IDLE_DELAY: Duration = Duration::from_millis(20);

/// Interval at which the log's free space is checked.
pub(super) const SPACE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Job for the log.
#[derive(Debug)]
pub enum LogJob {
    /// Make this batch durable. The number identifies the batch.
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

/// Collects the jobs for one call of [`LogWriter::run`]: `first`, and the jobs queued behind it.
pub fn collect_log_jobs(first: LogJob, more: impl Iterator<Item = LogJob>) -> Vec<LogJob> {
    let mut group = vec![first];
    group.extend(more.take(QUEUED_JOBS));
    group
}

/// The only writer of the log. It runs on the wal thread in production, and on simulated events in
/// the simulation. It reads the clock only for its counters.
#[derive(Debug)]
pub struct LogWriter {
    log: Log,
    metrics: Arc<DriverMetrics>,
    is_short: bool,
    /// Whether the log may have work to do while no job waits.
    idle_work: bool,
}

impl LogWriter {
    /// Takes ownership of the log.
    pub fn new(mut log: Log, metrics: Arc<DriverMetrics>) -> Self {
        let is_short = log.is_short_of_space();
        Self { log, metrics, is_short, idle_work: true }
    }

    /// Runs jobs that [`collect_log_jobs`] collected. The writes come first, as one group; then the
    /// compaction with the highest index. After an error the log must not be used again.
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
        if self.idle_work { IDLE_DELAY } else { SPACE_CHECK_INTERVAL }
    }

    /// Does one step of preparation for later writes. The caller runs it when no job waits. If the
    /// disk is full, the step also checks whether space is available again.
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

    /// Checks the free space of the disk. Returns whether [`is_short`](Self::is_short) has changed.
    pub fn check_space(&mut self) -> bool {
        let short = self.log.is_short_of_space();
        self.metrics.log_bytes_left.store(self.log.bytes_before_new_segment(), Relaxed);
        std::mem::replace(&mut self.is_short, short) != short
    }

    /// Returns how many bytes can be written before the log must create a new segment file.
    pub fn bytes_before_new_segment(&self) -> u64 {
        self.log.bytes_before_new_segment()
    }

    /// Seals the last record by writing an empty record after it. Later damage to a sealed record
    /// can't be mistaken for an incomplete write.
    pub fn finish(mut self) -> Result<(), LogError> {
        self.log.write(&[Batch::default()])
    }
}

/// Reads old entries without delaying the writer, which may run in parallel. After an error the log
/// must not be used again.
pub fn run_fetch(log: &LogReader, fetch: FetchRequest) -> Result<Notice, LogError> {
    let FetchRequest { id, low, high, max_bytes } = fetch;
    let entries = match log.entries(low, high, max_bytes) {
        // The log has dropped these entries since they were requested. If consensus gets no
        // entries, it sends the follower a snapshot.
        Err(LogError::Compacted { .. }) => Vec::new(),
        other => other?,
    };
    Ok(Notice::Fetched { id, entries })
}
