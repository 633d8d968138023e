//! Durations in Go's syntax: `1h15m30.5s`, `100ms`, `0`.

use std::time::Duration;

/// Parses a Go duration. Returns `None` if it is invalid or above Go's maximum of about 290 years.
/// A negative duration becomes zero, because etcd's settings treat both alike.
pub(super) fn parse(text: &str) -> Option<Duration> {
    if let Some(negative) = text.strip_prefix('-').filter(|rest| !rest.starts_with(['+', '-'])) {
        return parse(negative).map(|_| Duration::ZERO);
    }
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest.is_empty() {
        return None;
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(digits);
        let unit_end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, next) = after.split_at(unit_end);
        let nanos = match unit {
            "ns" => 1.0,
            "us" | "µs" | "μs" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            "m" => 60e9,
            "h" => 3600e9,
            _ => return None,
        };
        let number: f64 = number.parse().ok()?;
        total = total.checked_add(Duration::try_from_secs_f64(number * nanos / 1e9).ok()?)?;
        rest = next;
    }
    (total.as_nanos() <= i64::MAX as u128).then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_in_gos_syntax_are_parsed() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("10ms", 10),
            ("1m30s", 90_000),
            ("2h", 7_200_000),
            ("1.5s", 1_500),
            ("+3s", 3_000),
            ("-1m30s", 0),
        ] {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn durations_that_go_refuses_are_refused() {
        for text in ["", "1", "s", "1x", "-1", "--1s", "-+1s", "1 s", ".s", "1..5s", "99999999h"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
