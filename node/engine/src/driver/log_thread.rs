//! The log thread, the only one that writes the log. It waits for jobs, and reports when the disk
//! runs out of space.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use tokio::sync::watch;

use super::fatal::exit_on_log_failure;
use super::log_writer::{LogJob, LogWriter, SPACE_CHECK_INTERVAL, collect_log_jobs};
use super::mailbox::{CoreInbox as _, Mailbox};

pub(super) struct WalThread {
    writer: LogWriter,
    jobs: Receiver<LogJob>,
    mailbox: Arc<Mailbox>,
    /// Publishes whether the disk is short of space.
    space: watch::Sender<bool>,
    last_space_check: Instant,
}

impl WalThread {
    /// Returns the state of the log thread, and a watch channel that says whether the disk is short
    /// of space.
    pub(super) fn new(
        writer: LogWriter,
        jobs: Receiver<LogJob>,
        mailbox: Arc<Mailbox>,
    ) -> (Self, watch::Receiver<bool>) {
        let (space, short) = watch::channel(writer.is_short());
        if *short.borrow() {
            log_space_change(true, writer.bytes_before_new_segment());
        }
        (Self { writer, jobs, mailbox, space, last_space_check: Instant::now() }, short)
    }

    pub(super) fn run(mut self) {
        loop {
            match self.jobs.recv_timeout(self.writer.idle_wait()) {
                Ok(first) => {
                    let group = collect_log_jobs(first, self.jobs.try_iter());
                    let notices = self.writer.run(group);
                    for notice in notices.unwrap_or_else(|error| exit_on_log_failure(&error)) {
                        self.mailbox.notice(notice);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.writer.idle().unwrap_or_else(|error| exit_on_log_failure(&error));
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.last_space_check.elapsed() >= SPACE_CHECK_INTERVAL {
                self.last_space_check = Instant::now();
                if self.writer.check_space() {
                    let short = self.writer.is_short();
                    self.space.send_replace(short);
                    log_space_change(short, self.writer.bytes_before_new_segment());
                }
            }
        }
        self.writer.finish().unwrap_or_else(|error| exit_on_log_failure(&error));
    }
}

fn log_space_change(short: bool, log_bytes_left: u64) {
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
