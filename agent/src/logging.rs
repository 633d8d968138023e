//! Log lines on standard error: for people, or one JSON object each.

use discovery_types::text::log_field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{FormatFields, debug_fn};

use crate::cli::LogFormat;

/// What is logged unless `MUSTER_LOG` says otherwise.
const DEFAULT_FILTER: &str = "info";

/// Starts logging for the whole process. `MUSTER_LOG` takes a filter as in `info,muster_agent=debug`.
pub(crate) fn start(format: LogFormat) {
    let filter =
        EnvFilter::try_from_env("MUSTER_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => {
            let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            builder.with_ansi(colours).with_target(false).fmt_fields(one_line()).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    // Only a second start in one process fails, and then there is a logger already.
    drop(started);
}

/// What a service, a peer or the node said stays within its line; JSON escapes by itself.
fn one_line() -> impl for<'writer> FormatFields<'writer> + 'static {
    debug_fn(|to, field, value| log_field(to, field.name(), value)).delimited(" ")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_comes_from_elsewhere_forges_no_line_and_steers_no_terminal() {
        let captured = Captured::default();
        let to = captured.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || to.clone())
            .with_ansi(false)
            .with_target(false)
            .fmt_fields(one_line())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let said = "no\r\n2026-01-01T00:00:00Z  INFO forged\u{1b}[2J";
            tracing::warn!(seat = 3, error = %said, "discovery says: {said}");
        });
        let text = String::from_utf8(captured.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text:?}");
        assert!(!text.trim_end().contains(char::is_control), "{text:?}");
        let clean = "no 2026-01-01T00:00:00Z  INFO forged\u{fffd}[2J";
        assert!(
            text.contains(&format!("discovery says: {clean} seat=3 error={clean}")),
            "{text:?}"
        );
    }
}
