//! Log lines on standard error: as text for people, or as one JSON object each.
//!
//! The node's lines get the same form as the agent's own. muster-node and etcd write JSON objects,
//! and an object quoted inside a string can't be searched. The lines' time, level and fields are
//! kept; `target` is `node`.

use std::io::Write;
use std::sync::OnceLock;

use discovery_types::text::log_field;
use serde_json::{Map, Value};
use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{FormatFields, debug_fn};

use crate::cli::AgentLogFormat;
use crate::exit::ExitError;
use crate::observe::node_log;

/// The form of this process's log lines, set by [`start`].
static FORMAT: OnceLock<AgentLogFormat> = OnceLock::new();

/// Starts logging for the whole process. `filter` has the form `info,muster_agent=debug`.
///
/// # Errors
/// Returns a usage error if `filter` can't be parsed.
pub(crate) fn start(filter: &str, format: AgentLogFormat) -> Result<(), ExitError> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        ExitError::Usage(format!("--log {filter}: {error}: say a level, as in info"))
    })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        AgentLogFormat::Text => {
            let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            builder.with_ansi(colours).with_target(false).fmt_fields(one_line()).try_init()
        }
        AgentLogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    // Starting the logger fails only in a process that already has a logger.
    drop(started);
    let _ = FORMAT.set(format);
    Ok(())
}

/// Logs one line of the node's log under the level that the line states, `info` if it states none.
pub(crate) fn pass_on_node_line(line: &str) {
    let level = node_log::level(line).unwrap_or(Level::INFO);
    let object = serde_json::from_str::<Map<String, Value>>(line).ok();
    if let Some(object) = &object
        && FORMAT.get() == Some(&AgentLogFormat::Json)
    {
        if is_enabled(level) {
            // If the log can't be written, there is nowhere to report it.
            let _ = writeln!(std::io::stderr(), "{}", node_object(object, level));
        }
        return;
    }
    let text = object.as_ref().map_or_else(|| line.to_owned(), node_text);
    match level {
        Level::ERROR => tracing::error!(target: "node", "node: {text}"),
        Level::WARN => tracing::warn!(target: "node", "node: {text}"),
        _ => tracing::info!(target: "node", "node: {text}"),
    }
}

fn is_enabled(level: Level) -> bool {
    match level {
        Level::ERROR => tracing::enabled!(target: "node", Level::ERROR),
        Level::WARN => tracing::enabled!(target: "node", Level::WARN),
        _ => tracing::enabled!(target: "node", Level::INFO),
    }
}

/// Name of the level's field in a node's JSON line.
const LEVEL_FIELD: &str = "level";
/// Name of the time's field in a node's JSON line.
const TIME_FIELD: &str = "ts";
/// Name of the message's field in a node's JSON line.
const MESSAGE_FIELD: &str = "msg";

/// Rewrites a node's JSON line with the agent's names for time, level and message.
fn node_object(line: &Map<String, Value>, level: Level) -> Value {
    let mut object = Map::new();
    let time = line.get(TIME_FIELD).cloned();
    object.insert(
        "timestamp".into(),
        time.unwrap_or_else(|| jiff::Timestamp::now().to_string().into()),
    );
    object.insert("level".into(), level.as_str().into());
    object.insert("message".into(), line.get(MESSAGE_FIELD).cloned().unwrap_or_default());
    object.insert("target".into(), "node".into());
    for (name, value) in line {
        if ![LEVEL_FIELD, TIME_FIELD, MESSAGE_FIELD].contains(&name.as_str()) {
            // A field of the node's line doesn't replace a value that was inserted above under that
            // name.
            object.entry(name).or_insert_with(|| value.clone());
        }
    }
    object.into()
}

/// Formats a node's JSON line as text: its message, then its fields as `name=value`. Time and level
/// are left out, because the agent's line has its own.
fn node_text(line: &Map<String, Value>) -> String {
    let mut text = line.get(MESSAGE_FIELD).and_then(Value::as_str).unwrap_or_default().to_owned();
    for (name, value) in line {
        if [LEVEL_FIELD, TIME_FIELD, MESSAGE_FIELD, "caller"].contains(&name.as_str()) {
            continue;
        }
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        text.push_str(&format!(" {name}={value}"));
    }
    text
}

/// Returns the last line that `run` logs as JSON: the reason why the agent ended, in the form of
/// all other log lines.
pub(crate) fn exit_error_object(end: &ExitError) -> Value {
    let mut object = Map::new();
    object.insert("timestamp".into(), jiff::Timestamp::now().to_string().into());
    object.insert("level".into(), Level::ERROR.as_str().into());
    object.insert("message".into(), "the agent ended".into());
    object.insert("target".into(), "muster_agent".into());
    if let Value::Object(fields) = end.json() {
        object.extend(fields);
    }
    object.into()
}

/// Formats fields so that text from a service, a peer or the node can't break out of its log line.
/// The JSON form needs no such step, since JSON escapes by itself.
fn one_line() -> impl for<'writer> FormatFields<'writer> + 'static {
    debug_fn(|to, field, value| log_field(to, field.name(), value)).delimited(" ")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn node_line_becomes_one_object_with_the_agents_names() {
        let line = r#"{"level":"warn","ts":"2026-01-02T03:04:05.000006Z","caller":"a.rs:1","msg":"slow","took":"2s","message":"forged"}"#;
        let object = node_object(&serde_json::from_str(line).unwrap(), Level::WARN);
        let shown = r#"{"timestamp":"2026-01-02T03:04:05.000006Z","level":"WARN","message":"slow","target":"node","caller":"a.rs:1","took":"2s"}"#;
        assert_eq!(object, serde_json::from_str::<Value>(shown).unwrap());
        assert!(!object.to_string().contains('\n'));
    }

    #[test]
    fn node_line_is_a_sentence_with_fields_for_people() {
        let line = r#"{"level":"info","ts":"x","caller":"a.rs:1","msg":"became leader","term":3}"#;
        assert_eq!(node_text(&serde_json::from_str(line).unwrap()), "became leader term=3");
    }

    #[test]
    fn end_of_a_run_has_time_and_level_like_every_line() {
        let end = exit_error_object(&ExitError::DoNotRestart("removed".into()));
        assert!(end["timestamp"].as_str().unwrap().parse::<jiff::Timestamp>().is_ok());
        assert_eq!((end["level"].as_str(), end["exit_code"].as_u64()), (Some("ERROR"), Some(3)));
    }

    #[test]
    fn foreign_text_stays_on_one_line_without_control_characters() {
        let captured = LogBuffer::default();
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
