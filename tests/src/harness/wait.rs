//! Waiting for something to become true, with an end.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How long the harness waits between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Looks until `look` gives a value or `limit` has passed; then fails, naming what was waited for.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let started = Instant::now();
    loop {
        if let Some(value) = look() {
            return Ok(value);
        }
        if started.elapsed() > limit {
            bail!("waited {} s in vain for: {what}", limit.as_secs());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
