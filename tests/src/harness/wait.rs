//! Waiting for something to become true, with an end.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How long the harness waits between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long between two questions to the service, which limits what one address may ask.
const ASK_EVERY: Duration = Duration::from_millis(250);

/// Looks until `look` gives a value or `limit` has passed; then fails, naming what was waited for.
pub fn until<T>(what: &str, limit: Duration, look: impl FnMut() -> Option<T>) -> Result<T> {
    repeat(what, limit, LOOK_EVERY, look)
}

/// As [`until`], for a look that asks the service.
pub fn until_told<T>(what: &str, limit: Duration, look: impl FnMut() -> Option<T>) -> Result<T> {
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
