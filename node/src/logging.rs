//! Writes log lines in etcd's format, without ever blocking the threads that log.
//!
//! The thread that logs formats the line and puts it into a bounded queue. The writer thread takes
//! it from there. If the reader of the log is stuck, further lines are dropped and counted. The
//! next line that gets through reports the count. So reads and writes of clients never wait for the
//! log (etcd #22214).
//!
//! There is one exception. A thread that logs a line with the field `fatal = true` waits until the
//! line is written, but only for a short time. The process ends right after such a line.

use std::{
    fmt::{self, Write as _},
    io::{self, Write},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt},
    util::SubscriberInitExt,
};

use crate::config::{LogLineFormat, LogOutput};

/// Maximum number of queued lines. Further lines are dropped and counted.
const QUEUE_LINES: usize = 8192;
/// Maximum time to wait until a fatal line is written. The process ends right after it.
const FATAL_LINE_TIMEOUT: Duration = Duration::from_millis(100);
/// Maximum time to wait at the end of the process until the last lines are written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of lines that all logs of this process have dropped.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of lines that this process has dropped because the reader of the log was too
/// slow.
#[must_use]
pub fn lines_dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Handle of the log. Dropping it writes the lines that are queued.
pub struct Logging {
    lines: Option<mpsc::SyncSender<LogLine>>,
    ended: mpsc::Receiver<()>,
    dropped: Arc<AtomicU64>,
}

enum LogLine {
    Text(String),
    /// A fatal line. The thread that logs it waits until it is written, because the process is
    /// about to end.
    Fatal(String, mpsc::SyncSender<()>),
    End,
}

impl Logging {
    /// Opens the outputs and installs the log as the global one of this process.
    ///
    /// # Errors
    /// Fails if a file can't be opened, or if it is a symbolic link, a pipe or a file with several
    /// names.
    pub fn start(
        level: Level,
        format: LogLineFormat,
        outputs: &[LogOutput],
    ) -> Result<Self, muster_files::Error> {
        let mut writers: Vec<Box<dyn Write + Send>> = Vec::new();
        for output in outputs {
            writers.push(match output {
                LogOutput::Stderr => Box::new(io::stderr()),
                LogOutput::Stdout => Box::new(io::stdout()),
                LogOutput::File(path) if path == Path::new("/dev/null") => Box::new(io::sink()),
                // A symbolic link is refused, because another user may have created it.
                LogOutput::File(path) => Box::new(muster_files::open(
                    path,
                    std::fs::OpenOptions::new().create(true).append(true),
                )?),
            });
        }
        let (logging, layer) = start(level, format, writers)
            .map_err(muster_files::Error::io("start a thread for", Path::new("the log")))?;
        // In tests, a process may start several logs. Then the first one stays in use.
        let _ = tracing_subscriber::registry().with(layer).try_init();
        Ok(logging)
    }

    /// Returns the number of lines that this log has dropped because its reader was too slow.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        if let Some(lines) = self.lines.take() {
            // Wait only if the queue has room for the end mark. A full queue means that the reader
            // of the log is stuck, and waiting would not help.
            if lines.try_send(LogLine::End).is_ok() {
                let _ = self.ended.recv_timeout(FLUSH_TIMEOUT);
            }
        }
    }
}

fn start(
    level: Level,
    format: LogLineFormat,
    mut writers: Vec<Box<dyn Write + Send>>,
) -> io::Result<(Logging, LogLayer)> {
    let (lines, queue) = mpsc::sync_channel::<LogLine>(QUEUE_LINES);
    let (end, ended) = mpsc::sync_channel(1);
    let dropped = Arc::new(AtomicU64::new(0));
    std::thread::Builder::new().name("log".to_owned()).spawn(move || {
        loop {
            let (line, written) = match queue.recv() {
                Ok(LogLine::Text(line)) => (line, None),
                Ok(LogLine::Fatal(line, written)) => (line, Some(written)),
                Ok(LogLine::End) | Err(_) => break,
            };
            for writer in &mut writers {
                // If writing the log fails, there is no other place to report that.
                let _ = writer.write_all(line.as_bytes()).and_then(|()| writer.flush());
            }
            if let Some(written) = written {
                let _ = written.try_send(());
            }
        }
        let _ = end.send(());
    })?;
    let layer = LogLayer {
        level,
        format,
        lines: lines.clone(),
        dropped: Arc::clone(&dropped),
        reported: AtomicU64::new(0),
    };
    Ok((Logging { lines: Some(lines), ended, dropped }, layer))
}

/// The tracing layer that turns events into lines.
struct LogLayer {
    level: Level,
    format: LogLineFormat,
    lines: mpsc::SyncSender<LogLine>,
    dropped: Arc<AtomicU64>,
    /// Number of dropped lines that have been reported in a later line.
    reported: AtomicU64,
}

impl<S: Subscriber> Layer<S> for LogLayer {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        let ours = ["muster", "node_consensus"].iter().any(|p| metadata.target().starts_with(p));
        // Clients can cause any number of warnings in the HTTP/2 library, so only its errors are
        // logged.
        let others = if metadata.target().starts_with("h2") { Level::ERROR } else { Level::WARN };
        let least = if ours { self.level } else { self.level.min(others) };
        *metadata.level() <= least
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::from_level(self.level))
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = EventFields::default();
        event.record(&mut fields);
        let dropped = self.dropped.load(Ordering::Relaxed);
        let untold = dropped - self.reported.load(Ordering::Relaxed);
        if untold > 0 {
            fields.push("log.lines.dropped", &serde_json::Value::from(untold));
        }
        let line = format_line(self.format, event.metadata(), &fields);
        let (line, written) = if fields.fatal {
            let (sender, written) = mpsc::sync_channel(1);
            (LogLine::Fatal(line, sender), Some(written))
        } else {
            (LogLine::Text(line), None)
        };
        if self.lines.try_send(line).is_ok() {
            if let Some(written) = written {
                let _ = written.recv_timeout(FATAL_LINE_TIMEOUT);
            }
            if untold > 0 {
                self.reported.store(dropped, Ordering::Relaxed);
            }
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn format_line(format: LogLineFormat, metadata: &Metadata<'_>, fields: &EventFields) -> String {
    let level = match *metadata.level() {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG | Level::TRACE => "debug",
    };
    let now = jiff::Timestamp::now();
    let file = metadata.file().unwrap_or_default();
    let file = file.rsplit_once("src/").map_or(file, |(_, short)| short);
    let caller = format!("{file}:{}", metadata.line().unwrap_or_default());
    let mut out = String::with_capacity(160 + fields.json.len());
    let _ = match format {
        LogLineFormat::Json => write!(
            out,
            "{{\"level\":\"{level}\",\"ts\":\"{now:.6}\",\"caller\":{},\"msg\":{}{}}}",
            to_json(&caller),
            to_json(&fields.message),
            fields.json
        ),
        LogLineFormat::Console => {
            let rest = fields.json.trim_start_matches(',');
            let message = fields.message.replace(['\n', '\r'], " ");
            let separator = if rest.is_empty() { "" } else { "\t" };
            write!(out, "{now:.3}\t{level}\t{caller}\t{message}{separator}{rest}")
        }
    };
    out.push('\n');
    out
}

fn to_json(text: &str) -> serde_json::Value {
    serde_json::Value::from(text)
}

/// Fields of an event: its message, and the others as JSON members, each preceded by a comma.
#[derive(Default)]
struct EventFields {
    message: String,
    json: String,
    /// Whether the process ends right after this line.
    fatal: bool,
}

impl EventFields {
    fn push(&mut self, name: &str, value: &serde_json::Value) {
        let _ = write!(self.json, ",{}:{value}", to_json(name));
    }
}

impl Visit for EventFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message.push_str(value);
        } else {
            self.push(field.name(), &to_json(value));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.message, "{value:?}");
        } else {
            self.push(field.name(), &to_json(&format!("{value:?}")));
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field.name(), &value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field.name(), &value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field.name(), &value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.fatal |= value && field.name() == "fatal";
        self.push(field.name(), &value.into());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.push(field.name(), &to_json(&node_engine::causes::error_chain(value)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct MemoryWriter(Arc<Mutex<Vec<u8>>>);

    impl Write for MemoryWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogLineFormat, events: impl FnOnce()) -> String {
        let memory = MemoryWriter::default();
        let (logging, layer) = start(Level::INFO, format, vec![Box::new(memory.clone())]).unwrap();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), events);
        drop(logging);
        let bytes = memory.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_log_file_that_is_a_link_or_a_pipe_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("victim"), "").unwrap();
        std::os::unix::fs::symlink("victim", path("link")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap();
        assert!(made.success());
        let open = |path| {
            Logging::start(Level::INFO, LogLineFormat::Json, &[LogOutput::File(path)]).map(drop)
        };
        // A pipe without a reader blocks whoever opens it as a plain file. So this test hangs if
        // the check fails.
        for refused in ["link", "pipe"] {
            assert!(open(path(refused)).is_err_and(|error| error.is_refusal()), "{refused}");
        }
        open(path("log")).unwrap();
        open(path("log")).unwrap();
        open("/dev/null".into()).unwrap();
    }

    #[test]
    fn a_line_is_one_json_object_whatever_is_in_it() {
        let text = logged(LogLineFormat::Json, || {
            tracing::warn!(name = "a\"b\n{", index = 7_u64, ok = true, "it\nhappened");
            tracing::debug!("not at this level");
        });
        assert_eq!(text.lines().count(), 1);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["level"], "warn");
        assert_eq!(value["msg"], "it\nhappened");
        assert_eq!(value["name"], "a\"b\n{");
        assert_eq!((&value["index"], &value["ok"]), (&7.into(), &true.into()));
        assert!(value["ts"].as_str().unwrap().ends_with('Z'));
    }

    #[test]
    fn a_console_line_contains_no_line_break() {
        let text = logged(LogLineFormat::Console, || tracing::info!(index = 7_u64, "two\nlines"));
        assert_eq!(text.lines().count(), 1);
        assert!(text.contains("\tinfo\t") && text.contains("\ttwo lines\t\"index\":7"), "{text}");
    }

    #[test]
    fn a_fatal_line_is_written_before_the_next_statement() {
        let memory = MemoryWriter::default();
        let (_logging, layer) =
            start(Level::INFO, LogLineFormat::Json, vec![Box::new(memory.clone())]).unwrap();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::error!(fatal = true, "the last words");
            assert!(String::from_utf8_lossy(&memory.0.lock().unwrap()).contains("last words"));
        });
    }

    /// A writer that blocks until the test releases it.
    struct StuckWriter(Arc<(Mutex<bool>, Condvar)>, MemoryWriter);

    impl Write for StuckWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let (free, changed) = &*self.0;
            let _free = changed.wait_while(free.lock().unwrap(), |free| !*free).unwrap();
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn with_a_stuck_reader_lines_are_dropped_and_counted_without_waiting() {
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        let memory = MemoryWriter::default();
        let writer = Box::new(StuckWriter(Arc::clone(&gate), memory.clone()));
        let (logging, layer) = start(Level::INFO, LogLineFormat::Json, vec![writer]).unwrap();
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            for n in 0..QUEUE_LINES + 100 {
                // Error lines must not block either. If each took the time-out of a fatal line,
                // this loop would take a quarter of an hour.
                tracing::error!(n, "line");
            }
            assert!(logging.dropped() >= 99, "{}", logging.dropped());
            assert!(lines_dropped() >= logging.dropped());
            *gate.0.lock().unwrap() = true;
            gate.1.notify_all();
            while !memory.0.lock().unwrap().ends_with(b"\n") {
                std::thread::yield_now();
            }
            while !String::from_utf8_lossy(&memory.0.lock().unwrap()).contains("lines.dropped") {
                tracing::info!("after");
            }
        });
    }
}
