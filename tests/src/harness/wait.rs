//! Waiting for a condition, with a time limit.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Pauses between polls that start a program: the first one, and the longest one. Each poll costs
/// tens of milliseconds of processor time, and most of the time passes in long waits.
const FIRST_PROGRAM_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PROGRAM_PAUSE: Duration = Duration::from_millis(600);

/// Repeats `poll` until it returns a value. Fails with `what` after `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, poll: impl FnMut() -> Option<T>) -> Result<T> {
    repeat(what, limit, (POLL_INTERVAL, POLL_INTERVAL), poll)
}

/// Waits as [`wait_for`] does, but with growing pauses, because `poll` starts a program, such as the
/// admin's command line or `etcdctl`.
pub fn poll_slowly<T>(what: &str, limit: Duration, poll: impl FnMut() -> Option<T>) -> Result<T> {
    repeat(what, limit, (FIRST_PROGRAM_PAUSE, LONGEST_PROGRAM_PAUSE), poll)
}

fn repeat<T>(
    what: &str,
    limit: Duration,
    (first, longest): (Duration, Duration),
    mut poll: impl FnMut() -> Option<T>,
) -> Result<T> {
    let started = Instant::now();
    let mut pause = first;
    loop {
        if let Some(value) = poll() {
            return Ok(value);
        }
        if started.elapsed() > limit {
            bail!("waited {} s in vain for: {what}", limit.as_secs());
        }
        std::thread::sleep(pause);
        pause = (pause * 3 / 2).min(longest);
    }
}
