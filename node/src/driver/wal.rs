//! The log's side: everything queued becomes one write and one sync; old entries are read beside
//! it. No thread of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use node_consensus::Fetch;

use super::{Metrics, Notice, QUEUED_JOBS};
use crate::log::{Batch, Log, LogError, Reader};

/// With no more work for the log this long, it prepares for later.
const IDLE: Duration = Duration::from_millis(20);

/// How often the free space is looked at.
pub(super) const LOOK_AT_SPACE: Duration = Duration::from_secs(1);

/// Something for the log.
#[derive(Debug)]
pub enum LogJob {
    /// To be made durable.
    Write(u64, Batch),
    /// To be dropped, up to here.
    Compact(u64),
}

impl LogJob {
    /// What is to be written.
    pub fn batch(&self) -> Option<&Batch> {
        match self {
            Self::Write(_, batch) => Some(batch),
            Self::Compact(_) => None,
        }
    }
}

/// What goes to the disk together: the first job, and what has gathered behind it.
pub fn gather(first: LogJob, more: impl Iterator<Item = LogJob>) -> Vec<LogJob> {
    let mut group = vec![first];
    group.extend(more.take(QUEUED_JOBS));
    group
}

/// The only writer of the log: the wal thread in production, events of the simulation. It looks at
/// the clock for its counters only.
#[derive(Debug)]
pub struct LogWriter {
    log: Log,
    metrics: Arc<Metrics>,
    is_short: bool,
    /// Something may have to be prepared.
    idle_work: bool,
}

impl LogWriter {
    /// Takes the log over.
    pub fn new(mut log: Log, metrics: Arc<Metrics>) -> Self {
        let is_short = log.is_short_of_space();
        Self { log, metrics, is_short, idle_work: true }
    }

    /// Does all jobs: first the writes, as one group, then the furthest compaction. An error is final.
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

    /// How long to wait for a job before [`idle`](Self::idle).
    pub fn patience(&self) -> Duration {
        if self.idle_work { IDLE } else { LOOK_AT_SPACE }
    }

    /// Nothing waits: one step of what makes later writes quick. While the disk is full, to prepare
    /// is to see whether it still is.
    pub fn idle(&mut self) -> Result<(), LogError> {
        if self.idle_work || self.is_short {
            self.idle_work = self.log.prepare()?;
        }
        Ok(())
    }

    /// Whether the disk's space runs short, as last looked at.
    pub fn is_short(&self) -> bool {
        self.is_short
    }

    /// Looks at the disk's space; whether that changed [`is_short`](Self::is_short).
    pub fn look_at_space(&mut self) -> bool {
        let short = self.log.is_short_of_space();
        self.metrics.log_bytes_left.store(self.log.bytes_left(), Relaxed);
        std::mem::replace(&mut self.is_short, short) != short
    }

    /// Bytes that can be written before another segment has to be made.
    pub fn bytes_left(&self) -> u64 {
        self.log.bytes_left()
    }

    /// A record after the last one, so that damage to it can be told from a torn end.
    pub fn finish(mut self) -> Result<(), LogError> {
        self.log.write(&[Batch::default()])
    }
}

/// Reads old entries, beside the writer and without holding it up. An error is final.
pub fn run_fetch(log: &Reader, fetch: Fetch) -> Result<Notice, LogError> {
    let Fetch { id, low, high, max_bytes } = fetch;
    let entries = match log.entries(low, high, max_bytes) {
        // Compacted meanwhile: consensus will see that it takes a snapshot.
        Err(LogError::NotThere { .. }) => Vec::new(),
        other => other?,
    };
    Ok(Notice::Fetched { id, entries })
}
