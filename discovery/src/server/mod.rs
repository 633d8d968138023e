//! The server: arguments, start, stop, and backups of its data and keys.

mod accept;
mod args;
mod backup;
mod backup_keys;
mod check;
mod console;
mod rewrap_keys;
mod rotate_keys;
mod run;
pub(crate) mod tls;
mod unread;

use discovery_types::context::Context;
use discovery_types::name::Name;
use discovery_types::url::ServiceUrl;

use crate::keydir::{KeyDirectory, KeyDirectoryError, ServiceSettings};

pub(crate) use args::{
    BackupArgs, BackupKeysArgs, ConsoleArgs, DatabaseArgs, InitArgs, RestoreArgs, RestoreKeysArgs,
    RewrapKeysArgs, RotateKeysArgs, ServeArgs, TimeArgs, parse_duration, read_public_key,
};
pub(crate) use backup::{BackupList, back_up, restore};
pub(crate) use backup_keys::{KeyBackup, back_up_keys, restore_keys};
pub(crate) use check::check;
pub(crate) use rewrap_keys::rewrap_keys;
pub(crate) use rotate_keys::rotate_keys;
pub(crate) use run::serve;
pub(crate) use tls::ConnectionPeer;

#[cfg(test)]
pub(crate) use args::LimitArgs;
#[cfg(test)]
pub(crate) use run::{RunningService, start};

/// Why a server command ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The arguments contradict each other, or don't fit the files and folders that they name. Exit
    /// code 2.
    #[error("{0}")]
    Usage(String),
    /// No restart can help: a person has to decide. Exit code 3.
    #[error("{message}")]
    DoNotRestart {
        /// The operation that failed.
        message: String,
        /// The problem that was found, and what to do about it.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A failure that a second try or an operator can fix. Exit code 1.
    #[error("{message}")]
    Failed {
        /// The failed operation, and what to do about it.
        message: String,
        /// The error that the system reported.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
}

impl ServerError {
    /// The program's exit code for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            ServerError::Usage(_) => 2,
            ServerError::Failed { .. } => 1,
            ServerError::DoNotRestart { .. } => 3,
        }
    }

    /// Makes an error for a failed operation. With `forever`, the error is
    /// [`ServerError::DoNotRestart`].
    pub(crate) fn permanent_if(
        forever: bool,
        message: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        match forever {
            true => ServerError::DoNotRestart { message: message.into(), source: source.into() },
            false => ServerError::failed(message, source),
        }
    }

    /// Makes the error of `--check`, which ends with exit code 1.
    pub(crate) fn failed_checks(failures: usize, checks: usize) -> Self {
        let message = format!("{failures} of {checks} checks failed: see the lines with FAIL");
        ServerError::Failed { message, source: None }
    }

    pub(crate) fn failed(
        message: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        ServerError::Failed { message: message.into(), source: Some(source.into()) }
    }
}

/// Makes the service's key directory. Returns the context line for the operator. The line is ready
/// to be printed to stdout.
pub(crate) fn init(args: &InitArgs) -> Result<String, ServerError> {
    let usage = |error: &dyn std::fmt::Display| ServerError::Usage(error.to_string());
    let owner = args.owner;
    let urls = args
        .urls
        .iter()
        .map(|url| url.parse().map_err(|error| usage(&format!("--url {url}: {error}"))))
        .collect::<Result<Vec<ServiceUrl>, _>>()?;
    for label in args.trust_domain.split('.') {
        label.parse::<Name>().map_err(|error| usage(&format!("--trust-domain: {error}")))?;
    }
    let settings = ServiceSettings::new(urls.clone(), args.trust_domain.clone());
    let made = KeyDirectory::create(&args.dir, &settings, &owner)
        .and_then(|()| KeyDirectory::load(&args.dir));
    let keys = made.map_err(|error| match error {
        KeyDirectoryError::NotEmpty(_) => usage(&error),
        other => ServerError::failed("can't make the key directory", other),
    })?;
    let context = Context { urls, pins: vec![keys.pin()], owners: vec![owner] };
    Ok(context.to_string())
}
