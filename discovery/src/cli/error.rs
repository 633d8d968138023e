//! Errors of commands, each with advice on what to do next.

use std::path::{Path, PathBuf};

use discovery_types::admin::AdminError;
use discovery_types::bundle::LineError;
use discovery_types::client::ClientError;
use discovery_types::grant::GrantError;
use discovery_types::key::KeyFileError;
use discovery_types::name::Name;
use discovery_types::problem::Code;
use discovery_types::service::ServiceStatementError;
use discovery_types::statement::StatementError;

use super::audit::AuditError;
use crate::server::ServerError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The arguments can't be used. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// A server command or `init` failed.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The service refused the request, or is unreachable.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A key file can't be read.
    #[error(transparent)]
    Key(#[from] KeyFileError),
    /// A file or folder can't be written, or another user owns it or may write to it.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// The system refused an operation.
    #[error("{action}")]
    Io {
        /// The operation that failed.
        action: String,
        #[source]
        source: std::io::Error,
    },
    /// No context has this name, or there is no context at all.
    #[error("there is no context `{name}` in {}", home.display())]
    NoContext {
        name: String,
        /// Folder of the contexts.
        home: PathBuf,
    },
    /// There are contexts, but none of them is the current one.
    #[error("no context is current")]
    NoCurrentContext,
    /// Another context has the same name.
    #[error("there is another context `{name}` already, for {url}")]
    ContextTaken {
        name: Name,
        /// Service URL of the existing context.
        url: String,
    },
    /// A context line can't be parsed.
    #[error("{place}")]
    Context {
        /// Argument, file or stream from which the context line was read.
        place: String,
        #[source]
        source: LineError,
    },
    /// The key file doesn't exist.
    #[error("there is no key at {}", .0.display())]
    NoKey(PathBuf),
    /// The verification of an event chain failed.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// No cluster has this name or id.
    #[error("there is no cluster `{0}`")]
    NoCluster(String),
    /// The intent that the command waited for ended without being carried out.
    #[error("it was not done: it is {0}")]
    NotDone(discovery_types::api::IntentState),
    /// The cluster that the command waited for has not formed.
    #[error("the cluster has not formed: {0}")]
    NotFormed(String),
    /// Members have not followed the last step of a replacement of CAs.
    #[error("not all members are ready: {0}")]
    MembersNotReady(String),
    /// Members of the cluster to be retired still report.
    #[error("agents of these members reported within the last five minutes: {members}")]
    MembersReport {
        /// Names of the reporting members.
        members: String,
    },
    /// No admin has this name or key id.
    #[error("there is no admin `{0}`")]
    NoAdmin(String),
    /// The service's statement chain can't be trusted.
    #[error("the statements that the service shows for this cluster are refused")]
    Statements(#[source] StatementError),
    /// The statement to be signed would be invalid.
    #[error("{0}")]
    Statement(StatementError),
    /// The service statement to be sent would be invalid.
    #[error("{0}")]
    Service(ServiceStatementError),
    /// The service's admin chain can't be trusted, or a change doesn't extend it.
    #[error("the admin chain is refused")]
    Admins(#[source] AdminError),
    /// The service's admin chain starts at an owner that the context doesn't contain.
    #[error("the service's admin chain starts at an owner key that your context doesn't name")]
    ForeignAdmins,
    /// The key isn't an admin's, or its admin lacks the role.
    #[error("your key ({key}) may not do this: it takes the role {needs}{where_}")]
    Role {
        /// Id of the key.
        key: String,
        /// Roles that may perform the action.
        needs: String,
        /// The list in which the key was looked up, as the end of a sentence.
        where_: &'static str,
        /// Whether the list of admins contains the key, with other roles.
        listed: bool,
    },
    /// The service would refuse the grant.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// The service's response doesn't fit the request.
    #[error("the service's answer is refused: {0}")]
    Answer(String),
}

impl CliError {
    /// Error for an operation that the system refused.
    pub(super) fn io(action: impl Into<String>, source: std::io::Error) -> Self {
        CliError::Io { action: action.into(), source }
    }

    /// Error for an operation on a file that the system refused.
    pub(super) fn file(action: &str, path: &Path, source: std::io::Error) -> Self {
        CliError::io(format!("{action} {}", path.display()), source)
    }

    /// The program's exit code for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::Usage(_) => 2,
            CliError::Server(error) => error.exit_code(),
            _ => 1,
        }
    }

    /// Code of the problem document, if the service refused.
    pub fn code(&self) -> Option<Code> {
        match self {
            CliError::Client(error) => error.code(),
            _ => None,
        }
    }

    /// Advice on what to do next. `None` if there is none, or if the message contains it already.
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
            CliError::NotFormed(_) => {
                "muster-discovery cluster explain NAME says what it waits for, and what to do"
            }
            CliError::MembersNotReady(_) => {
                "look at those members, then run the command again; --force goes on without them"
            }
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
