//! How the program ends: errors, and the exit codes that init systems understand.

use std::process::ExitCode;

use serde::Serialize;

/// An unsuccessful end of the program. Success is exit code 0.
#[derive(Debug, thiserror::Error)]
pub enum ExitError {
    /// The program failed, and starting it again may help. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// The command line can't be carried out. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Starting the program again can't help: a person has to decide. Exit code 3, which a unit
    /// file lists in `RestartPreventExitStatus=`.
    #[error("{0}")]
    DoNotRestart(String),
    /// The cluster has its members, and this host is not one of them and needs a join ticket; or
    /// the bundle file with the ticket can't be read yet. Exit code 3.
    #[error("{0}")]
    NeedsTicket(String),
    /// The cluster didn't do what the command asked for. Exit code 1.
    #[error("{1}")]
    Cluster(FailureKind, String),
}

/// Why a command failed, for programs: `kind` in an error of `--json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The failure has no more specific kind.
    Failed,
    /// The command line can't be carried out.
    Usage,
    /// A retry can't help: a person has to decide.
    DoNotRestart,
    /// The cluster refused; nothing has changed.
    Refused,
    /// The members have changed since the plan was made; nothing was done.
    Stale,
    /// The cluster had carried the change out before.
    CarriedOut,
    /// No member could serve the request; nothing has changed.
    Unreachable,
    /// The answer was lost: the change may have been made.
    Unknown,
}

impl ExitError {
    pub fn code(&self) -> u8 {
        match self {
            Self::Failed(_) | Self::Cluster(..) => 1,
            Self::Usage(_) => 2,
            Self::DoNotRestart(_) | Self::NeedsTicket(_) => 3,
        }
    }

    /// Returns the kind of failure, for programs.
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Failed(_) => FailureKind::Failed,
            Self::Usage(_) => FailureKind::Usage,
            Self::DoNotRestart(_) | Self::NeedsTicket(_) => FailureKind::DoNotRestart,
            Self::Cluster(kind, _) => *kind,
        }
    }

    /// Returns the error object that `--json` prints.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "error": self.to_string(), "exit_code": self.code(), "kind": self.kind()
        })
    }
}

impl From<&ExitError> for ExitCode {
    fn from(end: &ExitError) -> Self {
        Self::from(end.code())
    }
}

/// Formats an error and all its causes in one line.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.ends_with(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_exit_error_has_the_exit_code_that_unit_files_name() {
        assert_eq!(ExitError::Failed(String::new()).code(), 1);
        assert_eq!(ExitError::Usage(String::new()).code(), 2);
        assert_eq!(ExitError::DoNotRestart(String::new()).code(), 3);
        assert_eq!(ExitError::NeedsTicket(String::new()).code(), 3);
    }

    #[test]
    fn the_json_of_an_error_contains_its_exit_code_and_kind() {
        let end = ExitError::Cluster(FailureKind::Unknown, "the answer was lost".to_owned());
        assert_eq!(
            end.json().to_string(),
            r#"{"error":"the answer was lost","exit_code":1,"kind":"unknown"}"#
        );
        let end = ExitError::DoNotRestart("removed".to_owned());
        assert_eq!(
            end.json().to_string(),
            r#"{"error":"removed","exit_code":3,"kind":"do_not_restart"}"#
        );
    }

    #[test]
    fn a_chain_names_every_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("can't read the journal")]
        struct WrappedError(#[source] std::io::Error);
        let error = WrappedError(std::io::Error::other("disk is on fire"));
        assert_eq!(error_chain(&error), "can't read the journal: disk is on fire");
    }
}
