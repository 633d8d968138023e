//! Passes on the node's log, and limits the disk space of its file.
//!
//! The node keeps its log open for appending as long as it lives, and stock etcd can't be told to
//! open it again. So renaming the file would let it grow for ever under its new name. Copying and
//! then truncating it would lose every line written between the copy and the truncation.
//!
//! Instead, the space of lines already passed on is freed *inside* the file: a hole is punched at
//! its start. The file's length grows on, but its space on disk doesn't. No line can be lost, since
//! unread bytes are never touched. On file systems without hole punching the file is truncated
//! instead. This may lose lines written in that instant, and the log says so once.
//!
//! At each start of a node, the launcher renames a log that has grown: no process writes to it
//! then.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_files::data;
use rustix::fs::{FallocateFlags, fallocate};
use tokio_util::sync::CancellationToken;

/// Minimum number of bytes kept of the node's log; at most twice as many are kept.
pub(crate) const KEEP_BYTES: u64 = 16 * 1024 * 1024;
/// Maximum length of a line in bytes; longer lines are passed on in pieces.
const LINE_LIMIT: usize = 16 * 1024;
/// How often the file is checked for new lines.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Number of bytes read at once.
const CHUNK: usize = 64 * 1024;
/// Alignment in bytes at which every common file system can punch holes.
const BLOCK: u64 = 4096;

/// Follows one log file across restarts of its writer.
#[derive(Debug)]
pub(crate) struct Tail {
    path: PathBuf,
    position_file: PathBuf,
    open: Option<OpenLog>,
    partial: Vec<u8>,
    warned: bool,
    keep: u64,
}

#[derive(Debug)]
struct OpenLog {
    file: File,
    inode: u64,
    /// Offset before which everything was read.
    read: u64,
    /// Offset before which the disk space was freed.
    freed_up_to: u64,
}

impl Tail {
    /// Follows `path`. Starts at the position that an earlier agent saved in `position_file`, if
    /// that is a position in the present file. Otherwise starts at the beginning.
    pub(crate) fn new(path: PathBuf, position_file: PathBuf) -> Self {
        Self {
            path,
            position_file,
            open: None,
            partial: Vec::new(),
            warned: false,
            keep: KEEP_BYTES,
        }
    }

    /// Passes lines to `sink` until cancelled, then passes the remaining lines and ends.
    pub(crate) async fn follow(mut self, stop: CancellationToken, sink: fn(&str)) {
        loop {
            let stopped = stop.is_cancelled();
            let mut passed = self;
            // File reads block: the log's disk may be slow, while everything else has to go on.
            let joined = tokio::task::spawn_blocking(move || {
                let result = passed.read_new_lines(sink);
                (passed, result)
            })
            .await;
            let Ok((this, result)) = joined else { return };
            self = this;
            if let Err(error) = result
                && !self.warned
            {
                self.warned = true;
                tracing::warn!(%error, "can't follow the node's log {}", self.path.display());
            }
            if stopped {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    /// Passes on the lines that the file contains now.
    fn read_new_lines(&mut self, mut sink: impl FnMut(&str)) -> io::Result<()> {
        let before = self.open.as_ref().map_or(0, |open| open.read);
        self.reopen_if_replaced(&mut sink)?;
        let Some(open) = &mut self.open else { return Ok(()) };
        read_lines(open, &mut self.partial, &mut sink)?;
        free_read_space(open, self.keep, &mut self.warned)?;
        if open.read != before {
            let text = format!("{} {}\n", open.inode, open.read - self.partial.len() as u64);
            // Best effort: if the position is lost, the next agent repeats lines.
            let _ = data::replace_volatile(&self.position_file, text.as_bytes());
        }
        Ok(())
    }

    fn reopen_if_replaced(&mut self, sink: &mut impl FnMut(&str)) -> io::Result<()> {
        let inode = match std::fs::metadata(&self.path) {
            Ok(metadata) => metadata.ino(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if let Some(open) = &mut self.open {
            if open.inode == inode {
                return Ok(());
            }
            read_lines(open, &mut self.partial, sink)?;
            self.partial.clear();
        }
        // Open the log for writing, too, because holes will be punched through this descriptor.
        let mut file = data::open(&self.path, data::OpenMode::ReadWrite)?;
        let metadata = file.metadata()?;
        let read = self.saved_position(metadata.ino()).filter(|read| *read <= metadata.len());
        let read = file.seek(SeekFrom::Start(read.unwrap_or(0)))?;
        self.open = Some(OpenLog { file, inode: metadata.ino(), read, freed_up_to: 0 });
        Ok(())
    }

    fn saved_position(&self, inode: u64) -> Option<u64> {
        let text = std::fs::read_to_string(&self.position_file).ok()?;
        let mut words = text.split_whitespace();
        let same_file = words.next()?.parse::<u64>().ok()? == inode;
        let read = words.next()?.parse().ok()?;
        same_file.then_some(read)
    }
}

fn read_lines(
    open: &mut OpenLog,
    partial: &mut Vec<u8>,
    sink: &mut impl FnMut(&str),
) -> io::Result<()> {
    if open.file.metadata()?.len() < open.read {
        // The file was truncated, so its whole content is new.
        open.read = open.file.seek(SeekFrom::Start(0))?;
        open.freed_up_to = 0;
        partial.clear();
    }
    let mut chunk = vec![0; CHUNK];
    loop {
        let got = open.file.read(&mut chunk)?;
        if got == 0 {
            return Ok(());
        }
        open.read += got as u64;
        for &byte in &chunk[..got] {
            if byte == b'\n' || partial.len() == LINE_LIMIT {
                pass_line(partial, sink);
            }
            if byte != b'\n' {
                partial.push(byte);
            }
        }
    }
}

fn pass_line(line: &mut Vec<u8>, sink: &mut impl FnMut(&str)) {
    let text = String::from_utf8_lossy(line);
    // Remove zero bytes: the first line that is read after an agent's restart may begin in a hole,
    // which reads as zero bytes.
    let text = text.trim_matches(['\0', '\r']);
    if !text.trim().is_empty() {
        sink(text);
    }
    line.clear();
}

fn free_read_space(open: &mut OpenLog, keep: u64, warned: &mut bool) -> io::Result<()> {
    if open.read - open.freed_up_to < 2 * keep {
        return Ok(());
    }
    let end = (open.read - keep) / BLOCK * BLOCK;
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(&open.file, hole, 0, end) {
        Ok(()) => open.freed_up_to = end,
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            if !*warned {
                *warned = true;
                tracing::warn!(
                    "this file system can't punch holes: the node's log is truncated when it has \
                     grown, and lines written in that instant are lost"
                );
            }
            open.file.set_len(0)?;
            open.read = open.file.seek(SeekFrom::Start(0))?;
            open.freed_up_to = 0;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// The end of a log at some time.
#[derive(Debug)]
pub(crate) struct LogPosition {
    inode: u64,
    length: u64,
}

impl LogPosition {
    /// Returns the current end of the log, if there is one.
    pub(crate) fn end_of(path: &Path) -> Option<Self> {
        let log = std::fs::metadata(path).ok()?;
        Some(Self { inode: log.ino(), length: log.len() })
    }
}

/// Returns the lines after `since`, or all lines if the log was replaced or truncated since then.
/// At most the last chunk of the file is read.
fn lines_since(path: &Path, since: Option<&LogPosition>) -> Vec<String> {
    let read = (|| {
        let mut file = File::open(path)?;
        let log = file.metadata()?;
        let since = since.filter(|mark| mark.inode == log.ino() && mark.length <= log.len());
        let from = since.map_or(0, |mark| mark.length);
        file.seek(SeekFrom::Start(from.max(log.len().saturating_sub(CHUNK as u64))))?;
        let mut bytes = Vec::new();
        file.take(CHUNK as u64).read_to_end(&mut bytes)?;
        io::Result::Ok(bytes)
    })();
    let bytes = read.unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
}

/// Returns the last lines of a node's log, for a message about its death.
pub(crate) fn last_lines(path: &Path, count: usize) -> Vec<String> {
    let mut lines = lines_since(path, None);
    lines.split_off(lines.len().saturating_sub(count))
}

/// Returns the line that tells why a node ended, for people. `started` is the end of the log at the
/// node's start.
///
/// Text that a dying program writes outside its log begins with the reason; usage or a stack trace
/// follows. So the first such line is returned. If there is none, the last line of the log is
/// returned.
pub(crate) fn death_reason(path: &Path, started: Option<&LogPosition>) -> Option<String> {
    let lines = lines_since(path, started);
    let logged = lines.iter().rposition(|line| is_log_line(line));
    let outside = &lines[logged.map_or(0, |last| last + 1)..];
    outside.first().or(lines.last()).map(|line| readable_text(line))
}

/// Text of stock etcd's last error after its cluster has removed it.
const REMOVED_ERROR: &str = "the member has been permanently removed from the cluster";

/// Returns whether a stock etcd has ended because its cluster removed it. `started` is the end of
/// the log when that etcd started. The log is the only sign: stock etcd leaves no tombstone, and
/// its exit code is 0.
pub(crate) fn has_removal_error(path: &Path, started: Option<&LogPosition>) -> bool {
    lines_since(path, started).iter().any(|line| is_removal_error(line))
}

/// Returns whether the line is the server's own final error. Other lines can contain
/// [`REMOVED_ERROR`] too, such as a peer's answer to a connection attempt, or a client's key.
fn is_removal_error(line: &str) -> bool {
    let Ok(fields) = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(line)
    else {
        let own = server_error_text(line);
        return own == Some(REMOVED_ERROR);
    };
    let is = |name: &str, value: &str| fields.get(name).is_some_and(|field| field == value);
    is("msg", "server error") && is("error", REMOVED_ERROR)
}

/// Returns the text of an error line by the server itself, in etcd 3.4's format.
fn server_error_text(line: &str) -> Option<&str> {
    let (letter, text) = parse_etcd34_line(line)?;
    text.strip_prefix("etcdserver: ").filter(|_| letter == "E")
}

/// Returns whether a line has a log's format: JSON, or beginning with a date.
fn is_log_line(line: &str) -> bool {
    line.starts_with('{') || line.starts_with(|first: char| first.is_ascii_digit())
}

/// Number of log lines that are searched for a warning or an error.
const COMPLAINT_LINES: usize = 200;

/// Returns the level stated in a line of muster-node's or etcd's log; `None` below a warning.
pub(crate) fn level(line: &str) -> Option<tracing::Level> {
    /// Number of bytes at a line's start in which the level is searched.
    const WITHIN: usize = 64;
    let head = line.get(..WITHIN).unwrap_or(line);
    let is = |level: &str| head.contains(&format!("\"level\":\"{level}\""));
    let letter = parse_etcd34_line(line).map(|(letter, _)| letter);
    if ["error", "fatal", "panic", "dpanic"].into_iter().any(is)
        || matches!(letter, Some("C" | "E"))
    {
        Some(tracing::Level::ERROR)
    } else if is("warn") || letter == Some("W") {
        Some(tracing::Level::WARN)
    } else {
        None
    }
}

/// Splits a line in etcd 3.4's format, `DATE TIME W | package: text`, into level and text.
fn parse_etcd34_line(line: &str) -> Option<(&str, &str)> {
    let (head, text) = line.split_once(" | ")?;
    let mut words = head.split(' ').skip(2);
    let letter = words.next().filter(|letter| letter.len() == 1)?;
    words.next().is_none().then_some((letter, text))
}

/// Returns the last warning or error in the node's log, for people.
pub(crate) fn last_warning(path: &Path) -> Option<String> {
    let lines = last_lines(path, COMPLAINT_LINES);
    lines.iter().rev().find(|line| level(line).is_some()).map(|line| readable_text(line))
}

/// Returns the text of a log line for people: message and error of a JSON line, any other line as
/// it is.
pub(crate) fn readable_text(line: &str) -> String {
    let fields: Option<serde_json::Map<String, serde_json::Value>> =
        serde_json::from_str(line).ok();
    let field = |name| fields.as_ref()?.get(name)?.as_str().map(str::to_owned);
    match (field("msg"), field("error")) {
        (Some(message), Some(error)) => format!("{message}: {error}"),
        (Some(message), None) => message,
        (None, _) => parse_etcd34_line(line).map_or(line, |(_, text)| text).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn tail(dir: &Path) -> Tail {
        Tail::new(dir.join("node.log"), dir.join("node.log.position"))
    }

    fn lines(tail: &mut Tail) -> Vec<String> {
        let mut lines = Vec::new();
        tail.read_new_lines(|line| lines.push(line.to_owned())).unwrap();
        lines
    }

    fn append(dir: &Path, text: &str) {
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(dir.join("node.log"))
            .unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn the_last_complaint_is_the_newest_line_that_warns() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("node.log");
        assert_eq!(last_warning(&log), None);
        append(dir.path(), "{\"level\":\"info\",\"msg\":\"starting\"}\n");
        assert_eq!(last_warning(&log), None);
        append(
            dir.path(),
            "{\"level\":\"warn\",\"ts\":\"x\",\"msg\":\"rejected\",\"error\":\"tls\"}\n\
             {\"level\":\"info\",\"msg\":\"is starting a new election\"}\nplain text\n",
        );
        assert_eq!(last_warning(&log).as_deref(), Some("rejected: tls"));
        append(
            dir.path(),
            "2026-11-22 00:16:57.747603 W | rafthttp: health check for peer 8e9e could not connect\n\
             2026-11-22 00:16:58.747603 I | raft: 8e9e is starting a new election\n",
        );
        let said = last_warning(&log);
        assert_eq!(said.as_deref(), Some("rafthttp: health check for peer 8e9e could not connect"));
    }

    #[test]
    fn lines_are_passed_on_once_and_only_when_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut tail = tail(dir.path());
        assert!(lines(&mut tail).is_empty());
        append(dir.path(), "one\ntw");
        assert_eq!(lines(&mut tail), ["one"]);
        append(dir.path(), "o\n");
        assert_eq!(lines(&mut tail), ["two"]);
        assert!(lines(&mut tail).is_empty());
    }

    #[test]
    fn the_next_agent_goes_on_where_the_last_one_stopped() {
        let dir = tempfile::tempdir().unwrap();
        append(dir.path(), "one\nhal");
        assert_eq!(lines(&mut tail(dir.path())), ["one"]);
        append(dir.path(), "f\n");
        assert_eq!(lines(&mut tail(dir.path())), ["half"]);
    }

    #[test]
    fn a_new_file_under_the_same_name_is_followed_after_the_rest_of_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut tail = tail(dir.path());
        append(dir.path(), "one\n");
        assert_eq!(lines(&mut tail), ["one"]);
        append(dir.path(), "two\n");
        std::fs::rename(dir.path().join("node.log"), dir.path().join("node.log.1")).unwrap();
        append(dir.path(), "three\n");
        assert_eq!(lines(&mut tail), ["two", "three"]);
    }

    #[test]
    fn the_space_of_a_grown_log_is_freed_without_losing_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let mut tail = Tail { keep: 64 * 1024, ..tail(dir.path()) };
        let mut seen = 0;
        for round in 0..40 {
            append(dir.path(), &"x".repeat(99).add_line().repeat(200));
            append(dir.path(), &format!("round {round}\n"));
            let passed = lines(&mut tail);
            assert_eq!(passed.last().unwrap(), &format!("round {round}"));
            seen += passed.len();
        }
        assert_eq!(seen, 40 * 201);
        let on_disk = std::fs::metadata(dir.path().join("node.log")).unwrap().blocks() * 512;
        assert!(on_disk < 4 * 64 * 1024, "{on_disk} bytes on disk");
    }

    #[test]
    fn a_line_without_end_is_passed_on_in_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let mut tail = tail(dir.path());
        append(dir.path(), &"y".repeat(3 * LINE_LIMIT));
        let passed = lines(&mut tail);
        assert_eq!(passed.len(), 2);
        assert!(passed.iter().all(|line| line.len() == LINE_LIMIT));
    }

    #[test]
    fn the_last_lines_are_returned_without_blank_ones() {
        let dir = tempfile::tempdir().unwrap();
        append(dir.path(), "one\ntwo\n\nthree\n");
        assert_eq!(last_lines(&dir.path().join("node.log"), 2), ["two", "three"]);
        assert!(last_lines(&dir.path().join("absent"), 2).is_empty());
    }

    /// Returns the reason of death of a node that wrote `text` into a log already containing
    /// `earlier`.
    fn death_reason_after(earlier: &str, text: &str) -> Option<String> {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("node.log");
        append(dir.path(), earlier);
        let started = LogPosition::end_of(&log);
        append(dir.path(), text);
        death_reason(&log, started.as_ref())
    }

    /// Output of `etcd --bogus`, etcd 3.7.
    const ETCD_REFUSES_A_FLAG: &str = r#"flag provided but not defined: -bogus
Usage:

  etcd [flags]
    Start an etcd server.

  etcd --version
    Show the version of etcd.

  etcd -h | --help
    Show the help information about etcd.

  etcd --config-file
    Path to the server configuration file. Note that if a configuration file is provided, other command line flags and environment variables will be ignored.
    Duration-typed fields (for example --heartbeat-interval, --election-timeout,
    --watch-progress-notify-interval) must be specified as integer nanoseconds
    in the JSON/YAML file (e.g. 600000000000 for 10m); human-readable strings
    such as "10m" are only accepted on the command line.

  etcd gateway
    Run the stateless pass-through etcd TCP connection forwarding proxy.

  etcd grpc-proxy
    Run the stateless etcd v3 gRPC L7 reverse proxy.

"#;

    #[test]
    fn the_death_reason_names_a_refused_flag_and_not_the_usage_text_after_it() {
        let words = "flag provided but not defined: -bogus";
        assert_eq!(death_reason_after("", ETCD_REFUSES_A_FLAG).as_deref(), Some(words));
        let own = "muster-node: flag provided but not defined: -bogus\n\
                   muster-node --help shows the flags.\n";
        let own_words = "muster-node: flag provided but not defined: -bogus";
        assert_eq!(death_reason_after("", own).as_deref(), Some(own_words));
        // Lines from before the node's start are ignored.
        assert_eq!(death_reason_after(own, ETCD_REFUSES_A_FLAG).as_deref(), Some(words));
        assert_eq!(death_reason_after(ETCD_REFUSES_A_FLAG, own).as_deref(), Some(own_words));
        assert_eq!(death_reason_after(own, ""), None);
    }

    #[test]
    fn the_death_reason_is_the_first_line_after_the_log_or_else_the_logs_last_line() {
        let log = "{\"level\":\"info\",\"msg\":\"starting\"}\n\
                   {\"level\":\"fatal\",\"msg\":\"cannot listen\",\"error\":\"address in use\"}\n";
        let said = death_reason_after(ETCD_REFUSES_A_FLAG, log);
        assert_eq!(said.as_deref(), Some("cannot listen: address in use"));
        let old = "2026-11-22 00:16:57.747603 I | etcdmain: etcd Version: 3.4.38\n\
                   2026-11-22 00:16:57.747703 C | etcdmain: listen tcp: address in use\n";
        let said = death_reason_after("", old);
        assert_eq!(said.as_deref(), Some("etcdmain: listen tcp: address in use"));
        let stack = "panic: index out of range\n\ngoroutine 1 [running]:\nmain.main()\n";
        let said = death_reason_after("", &format!("{log}{stack}"));
        assert_eq!(said.as_deref(), Some("panic: index out of range"));
    }

    #[test]
    fn only_etcds_own_final_error_means_that_it_was_removed() {
        let own = [
            r#"{"level":"warn","msg":"server error","error":"the member has been permanently removed from the cluster"}"#,
            "2026-11-22 00:16:57.747603 E | etcdserver: the member has been permanently removed from the cluster",
        ];
        let others = [
            r#"{"level":"warn","msg":"peer became inactive","error":"failed to dial 9b75 on stream MsgApp v2 (the member has been permanently removed from the cluster)"}"#,
            r#"{"level":"warn","msg":"apply request took too long","request":"key:\"the member has been permanently removed from the cluster\""}"#,
            r#"{"level":"warn","msg":"server error","error":"other: the member has been permanently removed from the cluster"}"#,
            "2026-11-22 00:16:57.747603 E | rafthttp: failed to dial 9b75 on stream Message (the member has been permanently removed from the cluster)",
            "2026-11-22 00:16:57.747603 W | etcdserver: the member has been permanently removed from the cluster",
        ];
        assert!(own.iter().all(|line| is_removal_error(line)));
        assert_eq!(others.iter().find(|line| is_removal_error(line)), None);
    }

    #[test]
    fn a_removal_that_was_logged_before_the_nodes_start_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("node.log");
        append(
            dir.path(),
            "2026-11-22 00:16:57.747603 E | etcdserver: the member has been permanently removed from \
             the cluster\n",
        );
        assert!(has_removal_error(&log, None));
        assert!(!has_removal_error(&log, LogPosition::end_of(&log).as_ref()));
    }

    #[test]
    fn if_the_log_was_renamed_since_the_start_the_new_file_is_read_from_its_beginning() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("node.log");
        append(dir.path(), "x\n");
        let started = LogPosition::end_of(&log);
        std::fs::rename(&log, dir.path().join("node.log.1")).unwrap();
        append(dir.path(), "error: no\nusage\n");
        assert_eq!(death_reason(&log, started.as_ref()).as_deref(), Some("error: no"));
    }

    #[test]
    fn json_lines_and_plain_lines_become_readable_text() {
        let json = r#"{"level":"fatal","msg":"cannot listen","error":"address in use"}"#;
        assert_eq!(readable_text(json), "cannot listen: address in use");
        assert_eq!(readable_text(r#"{"msg":"stopped"}"#), "stopped");
        assert_eq!(readable_text("panic: no"), "panic: no");
    }

    trait AddLine {
        fn add_line(self) -> String;
    }

    impl AddLine for String {
        fn add_line(mut self) -> String {
            self.push('\n');
            self
        }
    }
}
