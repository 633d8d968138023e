//! The log's side: everything queued becomes one write and one sync. No thread of its own.

use node_consensus::Fetch;

use super::Notice;
use crate::log::{Batch, Log, LogError};

/// Something for the log.
#[derive(Debug)]
pub enum LogJob {
    /// To be made durable.
    Write(u64, Batch),
    /// To be read.
    Fetch(Fetch),
    /// To be dropped, up to here.
    Compact(u64),
}

/// Does all jobs: first the writes, as one group, then the rest. An error is final.
pub fn run_group(log: &mut Log, jobs: Vec<LogJob>) -> Result<Vec<Notice>, LogError> {
    let mut notices = Vec::new();
    let mut batches = Vec::new();
    let mut durable = None;
    let mut others = Vec::new();
    for job in jobs {
        match job {
            LogJob::Write(number, batch) => {
                durable = Some(number);
                batches.push(batch);
            }
            other => others.push(other),
        }
    }
    if let Some(number) = durable {
        log.write(&batches)?;
        notices.push(Notice::Persisted(number));
        log.keep_spare()?;
    }
    for job in others {
        match job {
            LogJob::Write(..) => {}
            LogJob::Fetch(Fetch { id, low, high, max_bytes }) => {
                let entries = match log.read(low, high, max_bytes) {
                    // Compacted meanwhile: consensus will see that it takes a snapshot.
                    Err(LogError::NotThere { .. }) => Vec::new(),
                    other => other?,
                };
                notices.push(Notice::Fetched { id, entries });
            }
            LogJob::Compact(through) => notices.push(Notice::Compacted(log.compact(through)?)),
        }
    }
    Ok(notices)
}
