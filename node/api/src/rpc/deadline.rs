//! Deadline of a call: `grpc-timeout`, up to eight digits and a unit (gRPC over HTTP/2,
//! "Requests").
//!
//! At its deadline a call ends, and no longer waits for anything. A proposal that the call has made
//! may still be committed.

use std::time::Duration;

use axum::http::HeaderMap;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

const HEADER: &str = "grpc-timeout";
const DIGITS: usize = 8;

/// Time at which the client stops waiting; `None` means never.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

/// Value of a `grpc-timeout` header that is malformed.
pub(crate) struct MalformedTimeout(pub(crate) String);

/// Returns the status for a call whose deadline has passed.
pub(crate) fn deadline_exceeded() -> Status {
    Status::deadline_exceeded("context deadline exceeded")
}

impl Deadline {
    /// Reads the deadline from a request's headers.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Self, MalformedTimeout> {
        let Some(value) = headers.get(HEADER) else { return Ok(Self(None)) };
        let value = String::from_utf8_lossy(value.as_bytes());
        match parse(&value) {
            // A time too far in the future to be represented counts as no deadline.
            Some(wait) => Ok(Self(Instant::now().checked_add(wait))),
            None => Err(MalformedTimeout(value.into_owned())),
        }
    }

    /// Returns the time of the deadline; `None` means never.
    pub(crate) fn end(self) -> Option<Instant> {
        self.0
    }

    /// Awaits `work` until the deadline. After the deadline, `work` is dropped.
    pub(crate) async fn bound<T>(self, work: impl Future<Output = T>) -> Result<T, Status> {
        let Some(end) = self.0 else { return Ok(work.await) };
        if Instant::now() >= end {
            return Err(deadline_exceeded());
        }
        timeout_at(end, work).await.map_err(|_| deadline_exceeded())
    }
}

fn parse(value: &str) -> Option<Duration> {
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > DIGITS || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3_600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_has_up_to_eight_digits_and_a_unit() {
        assert_eq!(parse("1n"), Some(Duration::from_nanos(1)));
        assert_eq!(parse("20u"), Some(Duration::from_micros(20)));
        assert_eq!(parse("0m"), Some(Duration::ZERO));
        assert_eq!(parse("3S"), Some(Duration::from_secs(3)));
        assert_eq!(parse("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse("99999999H"), Some(Duration::from_secs(99_999_999 * 3_600)));
        for bad in ["", "S", "1", "1s", "1x", "-1S", "1.5S", "999999999S", " 1S", "1é"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
