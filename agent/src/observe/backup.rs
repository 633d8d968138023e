//! The part of the agent's status about backups.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The newest backup in the store, whoever saved it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NewestBackup {
    pub name: String,
    /// When the backup was begun.
    pub at: Timestamp,
    /// Size in bytes in the store.
    pub bytes: u64,
    /// Newest revision in the backup.
    pub revision: u64,
}

/// A backup that this agent is saving.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunningBackup {
    pub since: Timestamp,
    /// The current step, as words.
    pub step: String,
    /// Number of bytes that this step has processed so far.
    pub bytes: u64,
}

/// A backup that failed, or a store that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupFailure {
    pub at: Timestamp,
    /// Kind of the failure, for instance `store` or `damaged`. The metrics of failed backups and
    /// verifications use it as the label `reason`.
    pub reason: String,
    /// Text of the error, with its causes.
    pub text: String,
}

/// Why a verification of stored backups failed, as a label of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VerificationFailureReason {
    /// A stored backup is damaged.
    Damaged,
    /// The backups could not be examined, and may be good.
    NotDone,
}

impl VerificationFailureReason {
    /// All reasons, for metrics.
    pub(crate) const ALL: [Self; 2] = [Self::Damaged, Self::NotDone];

    /// Returns the name of the reason in JSON and metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Damaged => "damaged",
            Self::NotDone => "not_done",
        }
    }
}

/// State of the scheduled verification of stored backups, as this agent does it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VerificationStatus {
    /// Seconds from one verification to the next.
    pub every_seconds: u64,
    /// End of the last verification that had a result: the backups were whole, or one was damaged.
    pub at: Option<Timestamp>,
    /// Names of the backups that the last verification found whole.
    pub whole: Vec<String>,
    /// Names of the stored backups that this agent has found damaged. Later verifications examine
    /// them again.
    pub damaged: Vec<String>,
    /// Why the last attempt failed; `None` if it did not.
    pub failure: Option<BackupFailure>,
}

impl VerificationStatus {
    /// Returns the line for people; `None` before the first result.
    fn to_line(&self) -> Option<String> {
        if let Some(BackupFailure { at, reason, text }) = &self.failure {
            return Some(format!("the verification at {at} failed ({reason}): {text}"));
        }
        let at = self.at?;
        Some(format!("verified at {at} and found whole: {}", self.whole.join(", ")))
    }
}

/// State of the scheduled backups, as this agent sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupStatus {
    /// Location of the store of backups: a directory, or the URL of bucket and prefix.
    pub store: String,
    /// Seconds from the beginning of one backup to the next.
    pub every_seconds: u64,
    pub newest: Option<NewestBackup>,
    /// When the store was last read.
    pub seen_at: Option<Timestamp>,
    pub running: Option<RunningBackup>,
    /// Duration of the last backup that this agent published.
    pub last_duration_ms: Option<u64>,
    /// Number of backups that this process has published.
    pub published: u64,
    /// Number of failures since this process began, by their reason.
    pub failures: BTreeMap<String, u64>,
    pub last_failure: Option<BackupFailure>,
    /// Verification of stored backups, if the schedule has one.
    pub verification: Option<VerificationStatus>,
}

impl BackupStatus {
    /// Returns the lines for people: the newest backup, the running one, and the last failure.
    pub(crate) fn to_lines(&self, now: Timestamp) -> Vec<String> {
        let newest = match (&self.newest, self.seen_at) {
            (Some(newest), _) => {
                let age = format_age(now.duration_since(newest.at).as_secs());
                format!("{} is the newest, {age} old, of revision {}", newest.name, newest.revision)
            }
            (None, Some(_)) => "none yet".to_owned(),
            (None, None) => "not known yet".to_owned(),
        };
        let every = format_age(i64::try_from(self.every_seconds).unwrap_or(i64::MAX));
        let mut lines = vec![format!("{newest} (every {every} to {})", self.store)];
        lines.extend(self.running.as_ref().map(|running| {
            format!(
                "one is being saved since {}: {}, {} bytes",
                running.since, running.step, running.bytes
            )
        }));
        lines.extend(self.last_failure.as_ref().map(|failure| {
            format!("last failure at {} ({}): {}", failure.at, failure.reason, failure.text)
        }));
        lines.extend(self.verification.as_ref().and_then(VerificationStatus::to_line));
        lines
    }
}

/// Formats an age for people, with at most two units.
pub(crate) fn format_age(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds % 60, "s")];
    let first = parts.iter().position(|(number, _)| *number > 0).unwrap_or(3);
    let shown = parts[first..].iter().take(2).filter(|(number, _)| *number > 0);
    let shown: Vec<String> = shown.map(|(number, unit)| format!("{number} {unit}")).collect();
    if shown.is_empty() { "0 s".to_owned() } else { shown.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_two_units_at_most() {
        for (seconds, text) in [
            (-5, "0 s"),
            (0, "0 s"),
            (59, "59 s"),
            (90, "1 min 30 s"),
            (21_600, "6 h"),
            (90_061, "1 d 1 h"),
            (86_400 + 60, "1 d"),
        ] {
            assert_eq!(format_age(seconds), text);
        }
    }

    #[test]
    fn the_lines_show_age_progress_and_the_last_failure() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let mut status = BackupStatus {
            store: "s3://b/p".to_owned(),
            every_seconds: 21_600,
            ..BackupStatus::default()
        };
        assert_eq!(status.to_lines(at(0)), ["not known yet (every 6 h to s3://b/p)"]);
        status.newest =
            Some(NewestBackup { name: "N".to_owned(), at: at(0), bytes: 7, revision: 9 });
        status.running =
            Some(RunningBackup { since: at(7200), step: "storing".to_owned(), bytes: 5 });
        let (reason, text) = ("store".to_owned(), "no answer".to_owned());
        status.last_failure = Some(BackupFailure { at: at(60), reason, text });
        assert_eq!(
            status.to_lines(at(7260)),
            [
                "N is the newest, 2 h 1 min old, of revision 9 (every 6 h to s3://b/p)",
                "one is being saved since 1970-01-01T02:00:00Z: storing, 5 bytes",
                "last failure at 1970-01-01T00:01:00Z (store): no answer",
            ]
        );
    }

    #[test]
    fn the_lines_show_the_last_verification_or_its_failure() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let mut verification = VerificationStatus { every_seconds: 86_400, ..Default::default() };
        assert_eq!(verification.to_line(), None);
        verification.at = Some(at(60));
        verification.whole = vec!["B".to_owned(), "A".to_owned()];
        let whole = "verified at 1970-01-01T00:01:00Z and found whole: B, A";
        assert_eq!(verification.to_line().as_deref(), Some(whole));
        let (reason, text) = ("damaged".to_owned(), "A is damaged".to_owned());
        verification.failure = Some(BackupFailure { at: at(120), reason, text });
        let status = BackupStatus { verification: Some(verification), ..BackupStatus::default() };
        let failed = "the verification at 1970-01-01T00:02:00Z failed (damaged): A is damaged";
        assert_eq!(status.to_lines(at(0)).last().map(String::as_str), Some(failed));
    }
}
