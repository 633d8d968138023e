//! Log lines on standard error: for people, or one JSON object each.

use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// What is logged unless `MUSTER_LOG` says otherwise.
const DEFAULT_FILTER: &str = "info";

/// Starts logging for the whole process. `MUSTER_LOG` takes a filter as in `info,muster_agent=debug`.
pub fn start(format: LogFormat) {
    let filter =
        EnvFilter::try_from_env("MUSTER_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => {
            let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            builder.with_ansi(colours).with_target(false).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    // Only a second start in one process fails, and then there is a logger already.
    drop(started);
}
