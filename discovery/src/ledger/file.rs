//! The ledger's file: opening, locking, appending and parsing.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::index::{DatabasePosition, Index, LedgerLine};
use super::places::MAX_FILE_BYTES;
use super::position::{self, StoredPosition};
use super::reader::LedgerReader;

/// Name of the file in the ledger's folder.
pub(crate) const NAME: &str = "ledger.jsonl";
const VERSION: u32 = 2;
/// Maximum time to wait for another holder of the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two attempts to take the lock.
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// Number of hex digits of a line's checksum.
const SUM_LEN: usize = 16;
/// Position in a line at which the JSON begins, after the checksum and a space.
pub(super) const JSON_START: usize = SUM_LEN + 1;
/// Size in bytes of the buffer with which the file is read from its start.
const READ_BUFFER: usize = 64 << 10;

/// Why the ledger can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    /// A file or folder couldn't be read or written.
    #[error("{what}")]
    Io {
        /// The operation that failed.
        what: String,
        #[source]
        source: std::io::Error,
    },
    /// A file or folder can't be used, or belongs to another user.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// Another process has locked the ledger.
    #[error("the ledger {path} is in use: each discovery process needs a --ledger of its own")]
    InUse {
        /// Path of the ledger's file.
        path: PathBuf,
    },
    /// The file is damaged, beyond a torn last line: a person or a fault changed it.
    #[error(
        "the ledger {path} is damaged at byte {offset}. It is evidence of what clusters were let \
         out: restore it from a backup. If it is lost for good, start with an empty --ledger and \
         read what `muster-discovery process list` and `db accept` say"
    )]
    Damaged {
        /// Path of the ledger's file.
        path: PathBuf,
        /// Offset in bytes of the damaged line.
        offset: u64,
    },
    /// The ledger holds another commit of the same cluster. With both commits, two clusters would
    /// have the same identity.
    #[error("the ledger holds another commit of cluster {cluster_id}")]
    Contradiction {
        /// Id of the cluster with two commits.
        cluster_id: Uuid,
    },
    /// An earlier write failed, and the process is about to stop.
    #[error("the ledger's disk has failed")]
    Failed,
}

pub(super) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> LedgerError {
    let what = what.into();
    move |source| LedgerError::Io { what, source }
}

/// The ledger's file: open, locked, and positioned at its end.
pub(super) struct LedgerFile {
    file: Arc<File>,
    dir: PathBuf,
    /// Offset in bytes of the file's end.
    end: u64,
}

/// A ledger that was opened and read.
pub(super) struct OpenedLedger {
    pub(super) file: LedgerFile,
    pub(super) reader: LedgerReader,
    /// Id of the process, from the header.
    pub(super) process: Uuid,
    pub(super) index: Index,
}

/// A line of the ledger, with its place in the file.
pub(super) struct StoredLine<'a> {
    pub(super) line: LedgerLine,
    /// The line as it is in the file, with its checksum.
    pub(super) bytes: &'a [u8],
    /// Offset in bytes at which the line begins.
    pub(super) offset: u64,
}

/// Takes the file's lock. A previous process that is ending can hold the lock for a moment. So can
/// a child of this process between fork and exec. A failed attempt is therefore repeated until
/// [`LOCK_TIMEOUT`] has passed.
fn lock(file: &File, path: &Path, shown: &str) -> Result<(), LedgerError> {
    let started = Instant::now();
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) if started.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(LOCK_RETRY);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(LedgerError::InUse { path: path.to_path_buf() });
            }
            Err(error) => return Err(io(format!("can't lock {shown}"))(error.into())),
        }
    }
}

/// Opens or makes the ledger, and reads it.
pub(super) fn open(dir: &Path) -> Result<OpenedLedger, LedgerError> {
    muster_files::open_own_folder(dir)?;
    let path = dir.join(NAME);
    let shown = path.display().to_string();
    let mut options = std::fs::OpenOptions::new();
    let file =
        muster_files::open(&path, options.create(true).truncate(false).read(true).write(true))?;
    lock(&file, &path, &shown)?;
    muster_files::sweep(dir)?;
    let file = Arc::new(file);
    let reader = LedgerReader::new(file.clone(), path.clone());
    let content = read_lines(&file, &reader)?;
    let end = content.valid_end;
    if content.is_torn {
        tracing::warn!(offset = end, "cutting a torn last line off the ledger");
        file.set_len(end).map_err(io(format!("can't cut {shown}")))?;
        file.sync_all().map_err(io(format!("can't sync {shown}")))?;
    }
    (&*file).seek(SeekFrom::Start(end)).map_err(io(format!("can't read {shown}")))?;
    let mut file = LedgerFile { file, dir: dir.to_owned(), end };
    let Some(process) = content.process else {
        let process = Uuid::now_v7();
        let header = LedgerLine::Header { version: VERSION, process };
        file.append(&[&header])?;
        file.seal()?;
        muster_files::sync_folder(&path)?;
        return Ok(OpenedLedger { file, reader, process, index: content.index });
    };
    if !content.is_sealed {
        file.seal()?;
    }
    Ok(OpenedLedger { file, reader, process, index: content.index })
}

/// A ledger's file, read without changing it.
pub(super) struct InspectedLedger {
    pub(super) index: Index,
    /// The database's position, from the file beside the ledger.
    pub(super) position: Option<StoredPosition>,
    /// Whether another process has locked the file.
    pub(super) is_locked: bool,
}

/// Reads the ledger in `dir`, and changes nothing. Returns `None` if `dir` has no ledger yet, but
/// one could be made there.
pub(super) fn inspect(dir: &Path) -> Result<Option<InspectedLedger>, LedgerError> {
    if !muster_files::inspect_own_folder(dir)? {
        return Ok(None);
    }
    let path = dir.join(NAME);
    let opened = muster_files::open(&path, std::fs::OpenOptions::new().read(true));
    let file = match opened {
        Err(muster_files::Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok(None);
        }
        opened => opened?,
    };
    // This shared lock is held until the file is closed. A service that starts meanwhile repeats
    // its attempt to lock the file, for up to `LOCK_TIMEOUT`.
    let tried = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared);
    let is_locked = tried == Err(rustix::io::Errno::WOULDBLOCK);
    let file = Arc::new(file);
    let content = read_lines(&file, &LedgerReader::new(file.clone(), path))?;
    let position = position::read(dir, &file)?;
    Ok(Some(InspectedLedger { index: content.index, position, is_locked }))
}

/// Content of a ledger's file.
struct LedgerContent {
    /// Id of the process, from the header. `None` if the file has no line.
    process: Option<Uuid>,
    index: Index,
    /// Offset in bytes at which the last valid line ends.
    valid_end: u64,
    /// Whether the last valid line is a seal, which states that all lines before it are durable.
    is_sealed: bool,
    /// Whether a torn line follows the last valid line.
    is_torn: bool,
}

/// Reads all lines of the file from its start into an index. Memory holds one line at a time.
///
/// A broken line without a seal after it is torn: its append never finished, so nothing depends on
/// it. Any other broken line is damage.
fn read_lines(file: &File, reader: &LedgerReader) -> Result<LedgerContent, LedgerError> {
    let read_failed = || io("can't read the ledger");
    let mut content = LedgerContent {
        process: None,
        index: Index::default(),
        valid_end: 0,
        is_sealed: false,
        is_torn: false,
    };
    let mut input = BufReader::with_capacity(READ_BUFFER, file);
    let (mut bytes, mut has_seal) = (Vec::new(), false);
    loop {
        bytes.clear();
        let length = input.read_until(b'\n', &mut bytes).map_err(read_failed())?;
        if length == 0 {
            return Ok(content);
        }
        let offset = content.valid_end;
        if offset + length as u64 > MAX_FILE_BYTES {
            return Err(io("the ledger is too large")(ErrorKind::FileTooLarge.into()));
        }
        // A line without a line break is the last one of the file: `read_until` returns such a line
        // only there.
        let text = bytes.strip_suffix(b"\n");
        match text.and_then(parse_line) {
            Some(LedgerLine::Seal) => (has_seal, content.is_sealed) = (true, true),
            Some(line) => {
                content.is_sealed = false;
                if content.process.is_none() {
                    let LedgerLine::Header { version: VERSION, process } = line else {
                        return Err(reader.damaged(0));
                    };
                    content.process = Some(process);
                } else {
                    let bytes = &bytes[..];
                    content.index.apply(StoredLine { line, bytes, offset }, reader)?;
                }
            }
            None => {
                // Ledgers of an older version have no seals. In such a ledger, an incomplete last
                // line counts as torn.
                content.is_torn = text.is_none()
                    || has_seal && !has_seal_left(&mut input).map_err(read_failed())?;
                return if content.is_torn { Ok(content) } else { Err(reader.damaged(offset)) };
            }
        }
        content.valid_end += length as u64;
    }
}

/// Reads the rest of the file, and returns whether a seal is among its lines.
fn has_seal_left(input: &mut impl BufRead) -> std::io::Result<bool> {
    for line in input.split(b'\n') {
        if parse_line(&line?) == Some(LedgerLine::Seal) {
            return Ok(true);
        }
    }
    Ok(false)
}

impl LedgerFile {
    #[cfg(test)]
    pub(super) fn from_file(file: File, dir: &Path) -> Self {
        LedgerFile { file: Arc::new(file), dir: dir.to_owned(), end: 0 }
    }

    /// Writes the lines and syncs. The lines are durable when this returns.
    pub(super) fn append(&mut self, lines: &[&LedgerLine]) -> Result<AppendedLines, LedgerError> {
        let mut appended = AppendedLines { offset: self.end, bytes: Vec::new(), ends: Vec::new() };
        for line in lines {
            appended.bytes.extend_from_slice(&encode(line)?);
            appended.ends.push(appended.bytes.len());
        }
        let end = self.end + appended.bytes.len() as u64;
        if end > MAX_FILE_BYTES {
            return Err(io("the ledger has reached its maximum size")(
                ErrorKind::FileTooLarge.into(),
            ));
        }
        (&*self.file).write_all(&appended.bytes).map_err(io("can't write to the ledger"))?;
        self.file.sync_data().map_err(io("can't sync the ledger"))?;
        self.end = end;
        Ok(appended)
    }

    /// Appends a seal, which states that all lines before it are durable. Call this only after
    /// [`LedgerFile::append`] has succeeded.
    pub(super) fn seal(&mut self) -> Result<(), LedgerError> {
        self.append(&[&LedgerLine::Seal]).map(drop)
    }

    /// Reads the database's position from the file beside the ledger.
    pub(super) fn read_position(&self) -> Result<Option<StoredPosition>, LedgerError> {
        position::read(&self.dir, &self.file)
    }

    /// Writes the database's position to the file beside the ledger.
    pub(super) fn write_position(
        &self,
        seen: &DatabasePosition,
        is_copy: bool,
    ) -> Result<(), LedgerError> {
        position::write(&self.dir, seen, &self.file, is_copy)
    }
}

/// Lines that an append has written to the file.
#[derive(Default)]
pub(super) struct AppendedLines {
    /// Offset in bytes at which the first line begins.
    offset: u64,
    bytes: Vec<u8>,
    /// Index in `bytes` at which each line ends.
    ends: Vec<usize>,
}

impl AppendedLines {
    /// Iterates over the lines and the offsets at which they begin.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let line = |(start, &end)| (self.offset + start as u64, &self.bytes[start..end]);
        starts.zip(&self.ends).map(line)
    }
}

/// Encodes a line with its checksum and line break.
pub(super) fn encode(line: &LedgerLine) -> Result<Vec<u8>, LedgerError> {
    let json = serde_json::to_string(line).map_err(|error| io("can't encode")(error.into()))?;
    Ok(format!("{} {json}\n", checksum(json.as_bytes())).into_bytes())
}

fn checksum(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    data_encoding::HEXLOWER.encode(&digest.as_ref()[..SUM_LEN / 2])
}

pub(super) fn parse_line(line: &[u8]) -> Option<LedgerLine> {
    let (sum, rest) = line.split_at_checked(SUM_LEN)?;
    let json = rest.strip_prefix(b" ")?;
    if checksum(json).as_bytes() != sum {
        return None;
    }
    serde_json::from_slice(json).ok()
}
