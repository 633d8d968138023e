//! How the program ends: errors, and the exit codes that init systems understand.

use std::process::ExitCode;

use serde::Serialize;

/// An unsuccessful end of the program. Success is exit code 0.
#[derive(Debug, thiserror::Error)]
pub enum End {
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
    /// The cluster has its members, and this host is not one of them: it needs a join ticket. Exit
    /// code 3.
    #[error("{0}")]
    NoPlace(String),
    /// The cluster didn't do what the command asked for. Exit code 1.
    #[error("{1}")]
    Cluster(Kind, String),
}

/// Why a command failed, for programs: `kind` in an error of `--json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
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

impl End {
    pub fn code(&self) -> u8 {
        match self {
            Self::Failed(_) | Self::Cluster(..) => 1,
            Self::Usage(_) => 2,
            Self::DoNotRestart(_) | Self::NoPlace(_) => 3,
        }
    }

    /// Returns the kind of failure, for programs.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Failed(_) => Kind::Failed,
            Self::Usage(_) => Kind::Usage,
            Self::DoNotRestart(_) | Self::NoPlace(_) => Kind::DoNotRestart,
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

impl From<&End> for ExitCode {
    fn from(end: &End) -> Self {
        Self::from(end.code())
    }
}

/// Formats an error and all its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
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
    fn each_end_has_the_exit_code_that_unit_files_name() {
        assert_eq!(End::Failed(String::new()).code(), 1);
        assert_eq!(End::Usage(String::new()).code(), 2);
        assert_eq!(End::DoNotRestart(String::new()).code(), 3);
        assert_eq!(End::NoPlace(String::new()).code(), 3);
    }

    #[test]
    fn an_error_for_programs_says_what_to_do_about_it() {
        let end = End::Cluster(Kind::Unknown, "the answer was lost".to_owned());
        assert_eq!(
            end.json().to_string(),
            r#"{"error":"the answer was lost","exit_code":1,"kind":"unknown"}"#
        );
        let end = End::DoNotRestart("removed".to_owned());
        assert_eq!(
            end.json().to_string(),
            r#"{"error":"removed","exit_code":3,"kind":"do_not_restart"}"#
        );
    }

    #[test]
    fn a_chain_names_every_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("can't read the journal")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("disk is on fire"));
        assert_eq!(chain(&error), "can't read the journal: disk is on fire");
    }
}
