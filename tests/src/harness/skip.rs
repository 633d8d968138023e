//! Tests that can't run where they are.

use std::fmt::Display;
use std::io::Write as _;

/// Says that a test was skipped, and why: straight to standard error, since the test runner keeps
/// what a test that passes has printed.
pub fn skipped(why: impl Display) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// As [`skipped`], for want of what `scripts/setup tests` installs: under CI that is a failure.
///
/// # Panics
/// Where `CI` is set.
pub fn not_installed(what: impl Display) {
    assert!(std::env::var_os("CI").is_none(), "no {what}, under CI");
    skipped(format_args!("no {what} (scripts/setup tests installs it)"));
}
