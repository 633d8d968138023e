//! Waiting for a condition, with a time limit.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Time between two requests to discovery, which limits the rate of one address.
const ASK_EVERY: Duration = Duration::from_millis(250);

/// Repeats `look` until it returns a value. Fails with `what` after `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, look: impl FnMut() -> Option<T>) -> Result<T> {
    repeat(what, limit, LOOK_EVERY, look)
}

/// Waits as [`wait_for`] does, but more slowly, since `look` sends a request to discovery.
pub fn poll_slowly<T>(what: &str, limit: Duration, look: impl FnMut() -> Option<T>) -> Result<T> {
    repeat(what, limit, ASK_EVERY, look)
}

fn repeat<T>(
    what: &str,
    limit: Duration,
    every: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Result<T> {
    let started = Instant::now();
    loop {
        if let Some(value) = look() {
            return Ok(value);
        }
        if started.elapsed() > limit {
            bail!("waited {} s in vain for: {what}", limit.as_secs());
        }
        std::thread::sleep(every);
    }
}
