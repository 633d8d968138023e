//! Logging of the service.

use std::io::IsTerminal;

use clap::ValueEnum;
use discovery_types::text::log_field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::debug_fn;

use super::CliError;

/// Options for the log of `serve`.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(super) struct LogArgs {
    /// Filter for log lines: a level, or directives as in `info,muster_discovery=debug`
    #[arg(long, value_name = "FILTER", env = "MUSTER_LOG", default_value = "info")]
    log: String,
    /// Format of the log lines
    #[arg(long, value_name = "FORM", env = "MUSTER_LOG_FORMAT", default_value = "text")]
    log_format: ServeLogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ServeLogFormat {
    /// Text lines for people to read.
    Text,
    /// One JSON object per line.
    Json,
}

impl LogArgs {
    /// Sets up logging to stderr. A second call in one process fails.
    pub(super) fn install(&self) -> Result<(), CliError> {
        let filter = EnvFilter::try_new(&self.log)
            .map_err(|error| CliError::Usage(format!("--log: {error}")))?;
        let builder = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal());
        let installed = match self.log_format {
            ServeLogFormat::Text => {
                // Escape line breaks and control characters in values from agents and clients. JSON
                // escapes by itself.
                let fields = debug_fn(|to, field, value| log_field(to, field.name(), value));
                builder.fmt_fields(fields.delimited(" ")).try_init()
            }
            // Fields stand beside the message, as in the agent's lines.
            ServeLogFormat::Json => builder.json().flatten_event(true).try_init(),
        };
        installed.map_err(|error| CliError::Usage(format!("logging: {error}")))
    }
}
