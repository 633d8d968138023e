//! Output of a command: data on stdout, everything else on stderr.

use std::error::Error;
use std::io::{BufRead, IsTerminal, Read, Write};

use comfy_table::{ContentArrangement, Table, presets};
use discovery_types::api::Explanation;
use discovery_types::text::printable;
use serde::Serialize;
use serde_json::Value;

use super::CliError;

/// Maximum length in bytes of a line that is read as an answer.
const MAX_ANSWER: u64 = 256;

/// The output streams of a command, and the form of its answer.
pub(super) struct Printer {
    json: bool,
    out: Box<dyn Write>,
    err: Box<dyn Write>,
}

/// Writer for an answer in human-readable form.
pub(super) struct TextOutput<'p> {
    out: &'p mut dyn Write,
    failed: Option<std::io::Error>,
}

impl Printer {
    pub(super) fn stdio(json: bool) -> Self {
        Self::new(json, Box::new(std::io::stdout()), Box::new(std::io::stderr()))
    }

    pub(super) fn new(json: bool, out: Box<dyn Write>, err: Box<dyn Write>) -> Self {
        Self { json, out, err }
    }

    /// Prints the answer: as JSON, or in the form that `text` writes.
    pub(super) fn print_value<T: Serialize>(
        &mut self,
        value: &T,
        text: impl FnOnce(&mut TextOutput<'_>),
    ) -> Result<(), CliError> {
        let written = if self.json {
            let mut json = serde_json::to_value(value).expect("answers are plain structs");
            write_times(&mut json);
            writeln!(self.out, "{json:#}")
        } else {
            let mut target = TextOutput { out: &mut *self.out, failed: None };
            text(&mut target);
            target.failed.map_or(Ok(()), Err)
        };
        let flushed = written.and_then(|()| self.out.flush());
        match flushed {
            // The reader has closed the pipe (`| head`), which is no error.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            other => other.map_err(|source| CliError::io("writing the answer", source)),
        }
    }

    /// Prints lines that are formatted already, such as JSON lines.
    pub(super) fn print_lines(&mut self, lines: &str) -> Result<(), CliError> {
        match self.out.write_all(lines.as_bytes()).and_then(|()| self.out.flush()) {
            // The reader has closed the pipe (`| head`), which is no error.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            other => other.map_err(|source| CliError::io("writing the answer", source)),
        }
    }

    /// Prints additional information, as one line on stderr.
    pub(super) fn note(&mut self, text: &str) {
        self.say(&printable(text));
    }

    /// Prints a warning on stderr.
    pub(super) fn warn(&mut self, text: &str) {
        self.say(&format!("warning: {}", printable(text)));
    }

    /// Asks a person. Returns `None` without a terminal, where there is nobody to ask.
    pub(super) fn ask(&mut self, question: &str) -> Option<String> {
        if !std::io::stdin().is_terminal() {
            return None;
        }
        self.say(question);
        let mut answer = String::new();
        std::io::stdin().lock().take(MAX_ANSWER).read_line(&mut answer).ok()?;
        Some(answer.trim().to_owned())
    }

    /// Prints an error with its causes, and advice on what to do next.
    pub(super) fn print_error(&mut self, error: &CliError) {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(source) = cause {
            let text = source.to_string();
            // Skip a cause if the message ends with it already: a transparent error has the same
            // text as its source.
            if !message.ends_with(&text) {
                message = format!("{message}: {text}");
            }
            cause = source.source();
        }
        if self.json {
            let value = serde_json::json!({
                "error": message,
                "code": error.code().map(|code| code.as_str()),
                "next": error.next(),
                "exit_code": error.exit_code(),
            });
            self.say(&value.to_string());
            return;
        }
        self.say(&format!("error: {}", printable(&message)));
        if let Some(next) = error.next() {
            self.say(&format!("next: {next}"));
        }
    }

    fn say(&mut self, text: &str) {
        // Ignore the error: there is no other stream to report it on.
        let _ = writeln!(self.err, "{text}");
    }
}

/// Suffixes of fields that hold a time in milliseconds since 1970.
const TIMES_IN_MS: [&str; 4] = ["at_ms", "seen_ms", "until_ms", "now_ms"];
/// Fields that hold a time in seconds since 1970. They are part of what admins sign.
const TIMES_IN_SECONDS: [&str; 2] = ["issued_at", "expires_at"];

/// Replaces every time by its RFC 3339 form, and removes the unit `_ms` from its field's name.
fn write_times(json: &mut Value) {
    match json {
        Value::Array(items) => items.iter_mut().for_each(write_times),
        Value::Object(fields) => {
            for (name, mut value) in std::mem::take(fields) {
                write_times(&mut value);
                let in_ms = TIMES_IN_MS.iter().any(|ending| name.ends_with(ending));
                let (name, ms) = match value.as_i64() {
                    Some(ms) if in_ms => (name.trim_end_matches("_ms").to_owned(), Some(ms)),
                    None if in_ms && value.is_null() => {
                        (name.trim_end_matches("_ms").to_owned(), None)
                    }
                    Some(seconds) if TIMES_IN_SECONDS.contains(&name.as_str()) => {
                        (name, Some(seconds.saturating_mul(1_000)))
                    }
                    _ => (name, None),
                };
                let text = ms.and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
                fields.insert(name, text.map_or(value, |time| time.to_string().into()));
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

impl TextOutput<'_> {
    /// Prints one line, with control characters replaced.
    pub(super) fn line(&mut self, text: &str) {
        if let Err(error) = writeln!(self.out, "{}", printable(text)) {
            self.failed.get_or_insert(error);
        }
    }

    /// Prints a table without borders, in columns as wide as their content, so that `awk` can parse
    /// it.
    pub(super) fn table<const N: usize>(
        &mut self,
        header: [&str; N],
        rows: impl IntoIterator<Item = [String; N]>,
    ) {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(header);
        for row in rows {
            table.add_row(row.map(|cell| printable(&cell).into_owned()));
        }
        for line in table.to_string().lines() {
            self.line(line.trim());
        }
    }

    /// Prints names and values, one pair a line.
    pub(super) fn fields(&mut self, fields: &[(&str, String)]) {
        let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
        for (name, value) in fields {
            self.line(&format!("{name:width$}  {value}"));
        }
    }
}

/// Prints what a cluster or an intent waits for, and what to do about it.
pub(super) fn write_explanations(out: &mut TextOutput<'_>, explain: &[Explanation]) {
    for reason in explain {
        out.line("");
        let mut fields = vec![("why", reason.missing.clone())];
        if !reason.held_by.is_empty() {
            fields.push(("held by", reason.held_by.join(", ")));
        }
        if let Some(error) = &reason.last_error {
            fields.push(("last error", error.clone()));
        }
        if let Some(retry) = reason.next_retry_ms {
            fields.push(("judged again", time(retry)));
        }
        if let Some(command) = &reason.command {
            fields.push(("to do", command.clone()));
        }
        out.fields(&fields);
    }
}

/// Formats milliseconds since 1970 as RFC 3339.
pub(super) fn time(ms: i64) -> String {
    match jiff::Timestamp::from_second(ms.div_euclid(1000)) {
        Ok(time) => time.to_string(),
        Err(_) => format!("{ms} ms"),
    }
}

/// Formats seconds since 1970 as RFC 3339. Out-of-range values are allowed.
pub(super) fn time_of_seconds(seconds: u64) -> String {
    time(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000))
}

/// Formats a time in seconds as the command line accepts it: `24h`, `90m`, `45s`.
pub(super) fn duration(seconds: u64) -> String {
    match seconds {
        s if s > 0 && s.is_multiple_of(3_600) => format!("{}h", s / 3_600),
        s if s > 0 && s.is_multiple_of(60) => format!("{}m", s / 60),
        s => format!("{s}s"),
    }
}

/// Formats a value, or `-` if there is none.
pub(super) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::write_times;

    #[test]
    fn every_point_in_time_is_written_as_rfc_3339_and_no_duration_is() {
        let mut shown = json!({
            "created_at_ms": 1_700_000_000_250_i64,
            "processes": [{ "last_seen_ms": 1_700_000_000_000_i64, "forgotten_at_ms": null }],
            "grant": { "issued_at": 1_700_000_000, "expires_at": 1_700_003_600 },
            "at_ms": 0,
            "next_retry_ms": 1_500, "since_full_ms": 12, "lease_ms": 90_000, "deadline_seconds": 60,
        });
        write_times(&mut shown);
        let wanted = json!({
            "created_at": "2023-11-14T22:13:20.25Z",
            "processes": [{ "last_seen": "2023-11-14T22:13:20Z", "forgotten_at": null }],
            "grant": { "issued_at": "2023-11-14T22:13:20Z", "expires_at": "2023-11-14T23:13:20Z" },
            "at": "1970-01-01T00:00:00Z",
            "next_retry_ms": 1_500, "since_full_ms": 12, "lease_ms": 90_000, "deadline_seconds": 60,
        });
        assert_eq!(shown, wanted);
    }
}
