//! How a program ends, in the words that init systems understand.

use std::process::ExitCode;

use serde::Serialize;

/// An end that is not success. Success is exit code 0.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// It failed; starting it again may help. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// What was typed can't be carried out. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Starting it again can't help: a person has to decide. Exit code 3, which a unit file names
    /// in `RestartPreventExitStatus=`.
    #[error("{0}")]
    DoNotRestart(String),
    /// The cluster has its members, and this host is none of them: it needs a join ticket. Exit code 3.
    #[error("{0}")]
    NoPlace(String),
    /// The cluster didn't do what it was asked to. Exit code 1.
    #[error("{1}")]
    Cluster(Kind, String),
}

/// Why a command failed, for programs: `kind` in an error of `--json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// None of the others.
    Failed,
    /// What was typed can't be carried out.
    Usage,
    /// A person has to decide.
    DoNotRestart,
    /// The cluster said no; nothing has changed.
    Refused,
    /// The members are others than when it was planned; nothing has changed.
    Stale,
    /// The cluster had done it before.
    CarriedOut,
    /// Nobody could serve it; nothing has changed.
    Unreachable,
    /// The answer was lost: it may have been done.
    Unknown,
}

impl End {
    /// The exit code that init systems see.
    pub fn code(&self) -> u8 {
        match self {
            Self::Failed(_) | Self::Cluster(..) => 1,
            Self::Usage(_) => 2,
            Self::DoNotRestart(_) | Self::NoPlace(_) => 3,
        }
    }

    /// Why, for programs.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Failed(_) => Kind::Failed,
            Self::Usage(_) => Kind::Usage,
            Self::DoNotRestart(_) | Self::NoPlace(_) => Kind::DoNotRestart,
            Self::Cluster(kind, _) => *kind,
        }
    }

    /// As `--json` prints it.
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

/// What went wrong with all its causes, in one line.
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
