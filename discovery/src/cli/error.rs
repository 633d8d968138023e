//! How a command can fail, and the sentence that says what to do next.

use std::path::{Path, PathBuf};

use discovery_types::admin::AdminError;
use discovery_types::bundle::LineError;
use discovery_types::client::ClientError;
use discovery_types::grant::GrantError;
use discovery_types::key::KeyFileError;
use discovery_types::name::Name;
use discovery_types::problem::Code;
use discovery_types::statement::StatementError;

use crate::server::ServerError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// What was typed can't be done. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// The service, or `init`.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The service refused or can't be reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A key can't be read.
    #[error(transparent)]
    Key(#[from] KeyFileError),
    /// A file or folder can't be written, or isn't ours to take.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// The system refused.
    #[error("{action}")]
    Io {
        /// What was tried.
        action: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// There is no context of this name, or none at all.
    #[error("there is no context `{name}` in {}", home.display())]
    NoContext {
        /// Its name.
        name: String,
        /// Where it would be.
        home: PathBuf,
    },
    /// There are contexts, and none of them is the current one.
    #[error("no context is current")]
    NoCurrentContext,
    /// Another context has the name.
    #[error("there is another context `{name}` already, for {url}")]
    ContextTaken {
        /// The name.
        name: Name,
        /// Where that one's service is.
        url: String,
    },
    /// A context can't be read.
    #[error("{place}")]
    Context {
        /// Where it was read from.
        place: String,
        /// What is wrong with it.
        #[source]
        source: LineError,
    },
    /// There is no key file.
    #[error("there is no key at {}", .0.display())]
    NoKey(PathBuf),
    /// No cluster has this name or id.
    #[error("there is no cluster `{0}`")]
    NoCluster(String),
    /// A change that was waited for ended otherwise.
    #[error("it was not done: it is {0}")]
    NotDone(discovery_types::api::IntentState),
    /// Members of a cluster that is to be retired still report.
    #[error("agents of these members reported within the last five minutes: {members}")]
    MembersReport {
        /// Their names.
        members: String,
    },
    /// No admin has this name or key id.
    #[error("there is no admin `{0}`")]
    NoAdmin(String),
    /// The statement chain that the service showed is not to be trusted.
    #[error("the statements that the service shows for this cluster are refused")]
    Statements(#[source] StatementError),
    /// What was asked for would make a statement that nobody takes.
    #[error("{0}")]
    Statement(StatementError),
    /// The admin chain that the service showed is not to be trusted, or doesn't take a change.
    #[error("the admin chain is refused")]
    Admins(#[source] AdminError),
    /// The service's admin chain starts at an owner that the context doesn't know.
    #[error("the service's admin chain starts at an owner key that your context doesn't name")]
    ForeignAdmins,
    /// The key isn't an admin's, or not one with the role.
    #[error("your key ({key}) may not do this: it takes the role {needs}{where_}")]
    Role {
        /// The key's id.
        key: String,
        /// Which roles may.
        needs: String,
        /// In which list the key was looked for.
        where_: &'static str,
        /// Whether it stands in that list, with other roles.
        listed: bool,
    },
    /// The grant would be refused.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// The service answered something that doesn't fit what it was asked for.
    #[error("the service's answer is refused: {0}")]
    Answer(String),
}

impl CliError {
    /// Something that the system refused.
    pub(super) fn io(action: impl Into<String>, source: std::io::Error) -> Self {
        CliError::Io { action: action.into(), source }
    }

    /// The same, about a file.
    pub(super) fn file(action: &str, path: &Path, source: std::io::Error) -> Self {
        CliError::io(format!("{action} {}", path.display()), source)
    }

    /// The program's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::Usage(_) => 2,
            CliError::Server(error) => error.exit_code(),
            _ => 1,
        }
    }

    /// The problem's code, if the service refused.
    pub fn code(&self) -> Option<Code> {
        match self {
            CliError::Client(error) => error.code(),
            _ => None,
        }
    }

    /// What to do next, where the message doesn't say it already.
    pub fn next(&self) -> Option<String> {
        let text = match self {
            CliError::NoContext { .. } => {
                "ask whoever ran `muster-discovery init` for the context line, then: \
                 muster-discovery context add 'muster-context1 …'"
            }
            CliError::NoCurrentContext => {
                "choose one of `muster-discovery context list`: muster-discovery context use NAME, \
                 or --context NAME"
            }
            CliError::ContextTaken { .. } => {
                "keep both with --name NAME, or say --replace: what the other one knows of URLs, \
                 pins and owners is lost then"
            }
            CliError::NoKey(_) => {
                "name your key with --key FILE or MUSTER_ADMIN_KEY, or make one: \
                 muster-discovery key new --out FILE"
            }
            CliError::NoCluster(_) => "muster-discovery cluster list --all",
            CliError::MembersReport { .. } => {
                "stop the members first; --force retires the cluster although they run, and leaves \
                 its nodes running"
            }
            CliError::NoAdmin(_) => "muster-discovery admin list",
            CliError::Statements(StatementError::ForeignRoot(_)) => {
                "if another owner created it, run: muster-discovery context refresh"
            }
            CliError::Statements(_) => {
                "the service or its database was tampered with, or is of another version: \
                 don't hand out a token for this cluster before you know which"
            }
            CliError::ForeignAdmins => {
                "get the context line from somebody whom you trust, not from this service"
            }
            CliError::Role { listed: true, where_, .. } if !where_.is_empty() => {
                "an owner can give your key the role: muster-discovery admin add NAME PUBLIC_KEY \
                 --role ROLE --replace, then cluster restate NAME"
            }
            CliError::Role { listed: true, .. } => {
                "an owner can give your key the role: muster-discovery admin add NAME PUBLIC_KEY \
                 --role ROLE --replace"
            }
            CliError::Role { where_, .. } if !where_.is_empty() => {
                "if you became an admin after the cluster was created, an owner runs: \
                 muster-discovery cluster restate NAME"
            }
            CliError::Role { .. } => {
                "an owner can add your key: muster-discovery admin add NAME PUBLIC_KEY --role ROLE"
            }
            CliError::Client(ClientError::Unreachable { .. }) => {
                "is the service running, and is this the right context? muster-discovery context list"
            }
            CliError::Client(ClientError::Interrupted { .. }) => {
                "it may have been carried out: look before you repeat it"
            }
            CliError::Client(ClientError::Problem(problem)) => {
                return (problem.code == Code::NotInStatement)
                    .then(|| "muster-discovery cluster restate NAME (an owner)".to_owned());
            }
            _ => return None,
        };
        Some(text.to_owned())
    }
}
