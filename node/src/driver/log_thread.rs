//! The thread that owns the log's disk: it waits for jobs, and reports when space runs short.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use tokio::sync::watch;

use super::fatal::log_failed;
use super::mailbox::{Inlet as _, Mailbox};
use super::wal::{LOOK_AT_SPACE, LogJob, LogWriter, gather};

pub(super) struct WalThread {
    writer: LogWriter,
    jobs: Receiver<LogJob>,
    mailbox: Arc<Mailbox>,
    /// Sends whether the disk is short of space.
    space: watch::Sender<bool>,
    looked: Instant,
}

impl WalThread {
    /// Returns the thread's state, and a receiver of whether the disk is short of space.
    pub(super) fn new(
        writer: LogWriter,
        jobs: Receiver<LogJob>,
        mailbox: Arc<Mailbox>,
    ) -> (Self, watch::Receiver<bool>) {
        let (space, short) = watch::channel(writer.is_short());
        if *short.borrow() {
            say(true, writer.bytes_left());
        }
        (Self { writer, jobs, mailbox, space, looked: Instant::now() }, short)
    }

    pub(super) fn run(mut self) {
        loop {
            match self.jobs.recv_timeout(self.writer.patience()) {
                Ok(first) => {
                    let group = gather(first, self.jobs.try_iter());
                    let notices = self.writer.run(group);
                    for notice in notices.unwrap_or_else(|error| log_failed(&error)) {
                        self.mailbox.notice(notice);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.writer.idle().unwrap_or_else(|error| log_failed(&error));
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.looked.elapsed() >= LOOK_AT_SPACE {
                self.looked = Instant::now();
                if self.writer.look_at_space() {
                    let short = self.writer.is_short();
                    self.space.send_replace(short);
                    say(short, self.writer.bytes_left());
                }
            }
        }
        self.writer.finish().unwrap_or_else(|error| log_failed(&error));
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
