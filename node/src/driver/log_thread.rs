//! The thread that owns the log's disk: everything queued becomes one write and one sync.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::fatal::log_failed;
use super::mailbox::{Inlet as _, Mailbox};
use super::{LogJob, Metrics, run_group};
use crate::log::{Batch, Log};

/// With no more work for the log this long, it prepares for later.
const IDLE: Duration = Duration::from_millis(20);

/// How often the free space is looked at.
const LOOK_AT_SPACE: Duration = Duration::from_secs(1);

pub(super) struct WalThread {
    log: Log,
    jobs: Receiver<LogJob>,
    mailbox: Arc<Mailbox>,
    metrics: Arc<Metrics>,
    /// Whether space runs short.
    space: watch::Sender<bool>,
    looked: Instant,
}

impl WalThread {
    /// The second value tells whether the disk's space runs short.
    pub(super) fn new(
        mut log: Log,
        jobs: Receiver<LogJob>,
        mailbox: Arc<Mailbox>,
        metrics: Arc<Metrics>,
    ) -> (Self, watch::Receiver<bool>) {
        let (space, short) = watch::channel(log.is_short_of_space());
        if *short.borrow() {
            say(true, log.bytes_left());
        }
        (Self { log, jobs, mailbox, metrics, space, looked: Instant::now() }, short)
    }

    pub(super) fn run(mut self) {
        let mut idle_work = true;
        loop {
            let patience = if idle_work { IDLE } else { LOOK_AT_SPACE };
            match self.jobs.recv_timeout(patience) {
                Ok(first) => {
                    let mut group = vec![first];
                    group.extend(self.jobs.try_iter());
                    self.group(group);
                    idle_work = true;
                }
                // While the disk is full, to prepare is to see whether it still is.
                Err(RecvTimeoutError::Timeout) if idle_work || *self.space.borrow() => {
                    idle_work = self.log.prepare().unwrap_or_else(|error| log_failed(&error));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.looked.elapsed() >= LOOK_AT_SPACE {
                self.look_at_space();
            }
        }
        // A record after the last one, so that damage to it can be told from a torn end.
        if let Err(error) = self.log.write(&[Batch::default()]) {
            log_failed(&error);
        }
    }

    fn group(&mut self, group: Vec<LogJob>) {
        let entries: usize = group
            .iter()
            .map(|job| if let LogJob::Write(_, batch) = job { batch.entries.len() } else { 0 })
            .sum();
        let (started, bytes) = (Instant::now(), self.log.written_bytes());
        let notices = run_group(&mut self.log, group).unwrap_or_else(|error| log_failed(&error));
        self.metrics.log_groups.fetch_add(1, Relaxed);
        self.metrics.log_entries.fetch_add(entries as u64, Relaxed);
        self.metrics.log_bytes.fetch_add(self.log.written_bytes() - bytes, Relaxed);
        self.metrics.log_durations.record(started.elapsed());
        for notice in notices {
            self.mailbox.notice(notice);
        }
    }

    fn look_at_space(&mut self) {
        self.looked = Instant::now();
        let short = self.log.is_short_of_space();
        let left = self.log.bytes_left();
        self.metrics.log_bytes_left.store(left, Relaxed);
        let changed = self.space.send_if_modified(|now| std::mem::replace(now, short) != short);
        if changed {
            say(short, left);
        }
    }
}

fn say(short: bool, log_bytes_left: u64) {
    if short {
        tracing::error!(
            log_bytes_left,
            next = "free space or enlarge the volume; compact and delete keys only if they are what takes it",
            "the disk is almost full: writes that need space are refused"
        );
    } else {
        tracing::info!(log_bytes_left, "the disk has space again: all writes are taken");
    }
}

pub(super) fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
