//! Reports of tests that can't run on this machine.

use std::fmt::Display;
use std::io::Write as _;

/// Reports that a test was skipped. Writes to standard error directly, because the test runner
/// hides the output of tests that pass.
pub fn report_skip(why: impl Display) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Reports that a test was skipped because a program of `scripts/setup tests` is missing.
///
/// # Panics
/// If the variable `CI` is set: under CI a missing program is a failure.
pub fn report_missing_program(what: impl Display) {
    assert!(std::env::var_os("CI").is_none(), "no {what}, under CI");
    report_skip(format_args!("no {what} (scripts/setup tests installs it)"));
}
