//! Results of `--check`: which parts of a program's set-up work, before the program runs.
//!
//! A report is printed as lines (`ok …`, `warn …`, `FAIL …`) or as one JSON document. The programs
//! make the checks; this crate knows only their results.

use std::error::Error;
use std::fmt;

use serde::Serialize;

/// Result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckResult {
    /// The checked part of the set-up is as the program needs it.
    Ok,
    /// The program would start, but a person should look at the checked part.
    Warn,
    /// The program would not start, or would not do its work.
    Fail,
}

impl CheckResult {
    fn as_str(self) -> &'static str {
        match self {
            CheckResult::Ok => "ok",
            CheckResult::Warn => "warn",
            CheckResult::Fail => "FAIL",
        }
    }
}

/// One checked part of the set-up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SetupCheck {
    /// Name of the checked part, such as `keys`.
    pub check: &'static str,
    pub result: CheckResult,
    /// Result of the check, in one line of text.
    pub text: String,
    /// Advice on what to do next, if the finding needs any.
    pub next: Option<String>,
}

impl fmt::Display for SetupCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.result.as_str(), self.check, self.text)?;
        match &self.next {
            Some(next) => write!(f, ": {next}"),
            None => Ok(()),
        }
    }
}

/// All checked parts of a set-up, in the order of the checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    checks: Vec<SetupCheck>,
}

impl CheckReport {
    /// Adds a check that passed.
    pub fn ok(&mut self, check: &'static str, text: impl Into<String>) {
        self.add(check, CheckResult::Ok, text.into(), None);
    }

    /// Adds a check that passed with a warning, for a person to look at.
    pub fn warn(&mut self, check: &'static str, text: impl Into<String>, next: &str) {
        self.add(check, CheckResult::Warn, text.into(), Some(next));
    }

    /// Adds a failed check: with this fault the program can't do its work.
    pub fn fail(&mut self, check: &'static str, text: impl Into<String>, next: &str) {
        self.add(check, CheckResult::Fail, text.into(), Some(next));
    }

    /// Adds a failed check. The text is the error with its causes; there is no separate advice.
    pub fn fail_with(&mut self, check: &'static str, error: &(dyn Error + 'static)) {
        self.add(check, CheckResult::Fail, error_chain(error), None);
    }

    fn add(&mut self, check: &'static str, result: CheckResult, text: String, next: Option<&str>) {
        let (text, next) = (one_line(&text), next.map(one_line));
        self.checks.push(SetupCheck { check, result, text, next });
    }

    /// Returns the number of failed checks.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.checks.iter().filter(|check| check.result == CheckResult::Fail).count()
    }

    /// Returns all checks in their order.
    #[must_use]
    pub fn checks(&self) -> &[SetupCheck] {
        &self.checks
    }

    /// Returns the report as text, with a line for each check.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.checks.iter().map(|check| format!("{check}\n")).collect()
    }

    /// Returns the report as a value that serialises to the JSON document.
    #[must_use]
    pub fn document(&self) -> CheckDocument<'_> {
        CheckDocument { failures: self.failures(), checks: &self.checks }
    }
}

/// JSON document of a report.
#[derive(Debug, Serialize)]
pub struct CheckDocument<'a> {
    /// Number of failed checks. With 0 the exit code is 0, otherwise 1.
    failures: usize,
    checks: &'a [SetupCheck],
}

/// Formats an error and all its causes in one line.
fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        // Skip a cause if the text ends with it already: a transparent error has the same text as
        // its source.
        if !text.ends_with(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

/// Replaces each control character, such as a line break in a path, by a space.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_a_line_for_each_check_and_counts_the_failures() {
        let mut report = CheckReport::default();
        report.ok("keys", "/etc/keys");
        report.warn("clock", "5 s behind", "set the clock");
        assert_eq!(report.failures(), 0);
        report.fail("listen", "0.0.0.0:1\nis in use", "stop the other process");
        let lines = "ok keys: /etc/keys\nwarn clock: 5 s behind: set the clock\n\
            FAIL listen: 0.0.0.0:1 is in use: stop the other process\n";
        assert_eq!((report.to_text().as_str(), report.failures()), (lines, 1));
        let json = serde_json::to_value(report.document()).unwrap();
        assert_eq!((&json["failures"], json["checks"].as_array().unwrap().len()), (&1.into(), 3));
        assert_eq!(json["checks"][0]["result"], "ok");
        assert_eq!(json["checks"][0]["next"], serde_json::Value::Null);
        assert_eq!(
            (&json["checks"][2]["result"], &json["checks"][2]["check"]),
            (&"fail".into(), &"listen".into())
        );
    }

    #[test]
    fn a_failure_shows_the_error_with_its_causes_once() {
        let inner = std::io::Error::other("no such host");
        let mut report = CheckReport::default();
        report.fail_with("database", &std::io::Error::other(inner));
        assert_eq!(report.to_text(), "FAIL database: no such host\n");
    }
}
