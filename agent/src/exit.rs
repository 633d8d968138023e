//! How a program ends, in the words that init systems understand.

use std::process::ExitCode;

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
}

impl End {
    /// The exit code that init systems see.
    pub fn code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::DoNotRestart(_) => 3,
        }
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
