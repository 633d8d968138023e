//! Waiting for a condition, with a time limit.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time between two polls of discovery, which limits the request rate of each address.
const DISCOVERY_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Repeats `poll` until it returns a value. Fails with `what` after `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, poll: impl FnMut() -> Option<T>) -> Result<T> {
    repeat(what, limit, POLL_INTERVAL, poll)
}

/// Waits as [`wait_for`] does, but polls more slowly, because `poll` sends a request to discovery.
pub fn poll_slowly<T>(what: &str, limit: Duration, poll: impl FnMut() -> Option<T>) -> Result<T> {
    repeat(what, limit, DISCOVERY_POLL_INTERVAL, poll)
}

fn repeat<T>(
    what: &str,
    limit: Duration,
    every: Duration,
    mut poll: impl FnMut() -> Option<T>,
) -> Result<T> {
    let started = Instant::now();
    loop {
        if let Some(value) = poll() {
            return Ok(value);
        }
        if started.elapsed() > limit {
            bail!("waited {} s in vain for: {what}", limit.as_secs());
        }
        std::thread::sleep(every);
    }
}
