//! The log's side: everything queued becomes one write and one sync; old entries are read beside
//! it. No thread of its own.

use node_consensus::Fetch;

use super::Notice;
use crate::log::{Batch, Log, LogError, Reader};

/// Something for the log.
#[derive(Debug)]
pub enum LogJob {
    /// To be made durable.
    Write(u64, Batch),
    /// To be dropped, up to here.
    Compact(u64),
}

/// Does all jobs: first the writes, as one group, then the furthest compaction. An error is final.
pub fn run_group(log: &mut Log, jobs: Vec<LogJob>) -> Result<Vec<Notice>, LogError> {
    let mut notices = Vec::new();
    let mut batches = Vec::new();
    let mut durable = None;
    let mut compact = None;
    for job in jobs {
        match job {
            LogJob::Write(number, batch) => {
                durable = Some(number);
                batches.push(batch);
            }
            LogJob::Compact(through) => compact = compact.max(Some(through)),
        }
    }
    if let Some(number) = durable {
        log.write(&batches)?;
        notices.push(Notice::Persisted(number));
        log.keep_spare()?;
    }
    if let Some(through) = compact {
        notices.push(Notice::Compacted(log.compact(through)?));
    }
    Ok(notices)
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
