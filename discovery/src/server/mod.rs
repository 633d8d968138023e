//! Start and stop.

mod args;
pub(crate) mod tls;

pub use args::{DatabaseArgs, InitArgs, LimitArgs, ServeArgs, TimeArgs, parse_duration};
pub use tls::{ClientCertificate, Peer};

/// Why `init` or `serve` ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The arguments contradict each other or what they name. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Anything that a second try or an operator may mend. Exit code 1.
    #[error("{message}")]
    Failed {
        /// What didn't work, and what to do.
        message: String,
        /// What the system said.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
}

impl ServerError {
    /// The program's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            ServerError::Usage(_) => 2,
            ServerError::Failed { .. } => 1,
        }
    }
}

/// Makes the service's key directory and returns what the operator must be shown: the context
/// line, ready to be printed on stdout.
pub fn init(args: &InitArgs) -> Result<String, ServerError> {
    let _ = args;
    Err(ServerError::Usage("init isn't wired up yet".into()))
}

/// Serves until SIGTERM or SIGINT, then drains. Needs a tokio runtime around it, and a tracing
/// subscriber set up by the caller.
pub async fn serve(args: ServeArgs) -> Result<(), ServerError> {
    let _ = args;
    Err(ServerError::Usage("serve isn't wired up yet".into()))
}
