//! The ledger's file: opening, locking, appending and parsing.

use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::index::{DatabasePosition, LedgerLine};
use super::position::{self, StoredPosition};

/// Name of the file in the ledger's folder.
pub(crate) const NAME: &str = "ledger.jsonl";
const VERSION: u32 = 2;
/// Maximum time to wait for another holder of the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two attempts to take the lock.
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// Number of hex digits of a line's checksum.
const SUM_LEN: usize = 16;

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
    file: std::fs::File,
    dir: PathBuf,
}

/// Takes the file's lock. A previous process that is ending can hold the lock for a moment. So can
/// a child of this process between fork and exec. A failed attempt is therefore repeated until
/// [`LOCK_TIMEOUT`] has passed.
fn lock(file: &std::fs::File, path: &Path, shown: &str) -> Result<(), LedgerError> {
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

/// Opens or makes the ledger. Returns the file, the process id, and all lines after the header.
pub(super) fn open(dir: &Path) -> Result<(LedgerFile, Uuid, Vec<LedgerLine>), LedgerError> {
    muster_files::open_own_folder(dir)?;
    let path = dir.join(NAME);
    let shown = path.display().to_string();
    let mut options = std::fs::OpenOptions::new();
    let mut file =
        muster_files::open(&path, options.create(true).truncate(false).read(true).write(true))?;
    lock(&file, &path, &shown)?;
    muster_files::sweep(dir)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(io(format!("can't read {shown}")))?;
    let (mut lines, whole) =
        parse(&bytes).map_err(|offset| LedgerError::Damaged { path: path.clone(), offset })?;
    if whole < bytes.len() as u64 {
        tracing::warn!(offset = whole, "cutting a torn last line off the ledger");
        file.set_len(whole).map_err(io(format!("can't cut {shown}")))?;
        file.sync_all().map_err(io(format!("can't sync {shown}")))?;
    }
    file.seek(SeekFrom::Start(whole)).map_err(io(format!("can't read {shown}")))?;
    let sealed = matches!(lines.last(), Some(LedgerLine::Seal));
    lines.retain(|line| *line != LedgerLine::Seal);
    let mut ledger = LedgerFile { file, dir: dir.to_owned() };
    if lines.is_empty() {
        let process = Uuid::now_v7();
        let header = LedgerLine::Header { version: VERSION, process };
        ledger.append(&[&header])?;
        ledger.seal()?;
        muster_files::sync_folder(&path)?;
        return Ok((ledger, process, Vec::new()));
    }
    if !sealed {
        ledger.seal()?;
    }
    match take_header(&mut lines) {
        Some(process) => Ok((ledger, process, lines)),
        None => Err(LedgerError::Damaged { path, offset: 0 }),
    }
}

/// A ledger's file, read without changing it.
pub(super) struct InspectedLedger {
    /// Lines after the header.
    pub(super) lines: Vec<LedgerLine>,
    /// The database's position, from the file beside the ledger.
    pub(super) position: Option<StoredPosition>,
    /// Whether another process has locked the file.
    pub(super) is_locked: bool,
}

/// Reads the ledger in `dir`, and changes nothing. Returns `None` if there is none yet, and one could
/// be made.
pub(super) fn inspect(dir: &Path) -> Result<Option<InspectedLedger>, LedgerError> {
    if !muster_files::inspect_own_folder(dir)? {
        return Ok(None);
    }
    let path = dir.join(NAME);
    let opened = muster_files::open(&path, std::fs::OpenOptions::new().read(true));
    let mut file = match opened {
        Err(muster_files::Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok(None);
        }
        opened => opened?,
    };
    // Closing the file releases this lock. A service that starts meanwhile retries for
    // `LOCK_TIMEOUT`.
    let tried = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared);
    let is_locked = tried == Err(rustix::io::Errno::WOULDBLOCK);
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(io(format!("can't read {}", path.display())))?;
    let damaged = |offset| LedgerError::Damaged { path: path.clone(), offset };
    let (mut lines, _) = parse(&bytes).map_err(damaged)?;
    lines.retain(|line| *line != LedgerLine::Seal);
    let position = position::read(dir, &file)?;
    if !lines.is_empty() {
        take_header(&mut lines).ok_or_else(|| damaged(0))?;
    }
    Ok(Some(InspectedLedger { lines, position, is_locked }))
}

/// Takes the first line, which names the process. Returns `None` if it is no header of this version.
fn take_header(lines: &mut Vec<LedgerLine>) -> Option<Uuid> {
    match lines.remove(0) {
        LedgerLine::Header { version: VERSION, process } => Some(process),
        _ => None,
    }
}

impl LedgerFile {
    #[cfg(test)]
    pub(super) fn from_file(file: std::fs::File, dir: &Path) -> Self {
        LedgerFile { file, dir: dir.to_owned() }
    }

    /// Writes the lines and syncs. The lines are durable when this returns.
    pub(super) fn append(&mut self, lines: &[&LedgerLine]) -> Result<(), LedgerError> {
        let mut bytes = Vec::new();
        for line in lines {
            bytes.extend_from_slice(&encode(line)?);
        }
        self.file.write_all(&bytes).map_err(io("can't write to the ledger"))?;
        self.file.sync_data().map_err(io("can't sync the ledger"))
    }

    /// Appends a seal, which states that all lines before it are durable. Call this only after
    /// [`LedgerFile::append`] has succeeded.
    pub(super) fn seal(&mut self) -> Result<(), LedgerError> {
        self.append(&[&LedgerLine::Seal])
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

/// Encodes a line with its checksum and line break.
pub(super) fn encode(line: &LedgerLine) -> Result<Vec<u8>, LedgerError> {
    let json = serde_json::to_string(line).map_err(|error| io("can't encode")(error.into()))?;
    Ok(format!("{} {json}\n", checksum(json.as_bytes())).into_bytes())
}

fn checksum(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    data_encoding::HEXLOWER.encode(&digest.as_ref()[..SUM_LEN / 2])
}

/// Parses all lines. Returns the lines and the offset at which the last valid line ends. The error
/// is the offset of a damaged line. A broken line without a seal after it is torn: its append never
/// finished, so nothing depends on it.
fn parse(bytes: &[u8]) -> Result<(Vec<LedgerLine>, u64), u64> {
    let mut lines = Vec::new();
    let mut offset = 0;
    while offset < bytes.len() {
        let rest = &bytes[offset..];
        let end = rest.iter().position(|byte| *byte == b'\n');
        let length = end.map_or(rest.len(), |end| end + 1);
        let last = offset + length == bytes.len();
        match end.and_then(|end| parse_line(&rest[..end])) {
            Some(line) => lines.push(line),
            // An older version wrote no seals. In its files an incomplete last line counts as torn.
            None if last && end.is_none() => return Ok((lines, offset as u64)),
            None if lines.contains(&LedgerLine::Seal) && !is_sealed(&rest[length..]) => {
                return Ok((lines, offset as u64));
            }
            None => return Err(offset as u64),
        }
        offset += length;
    }
    Ok((lines, offset as u64))
}

fn is_sealed(bytes: &[u8]) -> bool {
    bytes.split(|byte| *byte == b'\n').any(|line| parse_line(line) == Some(LedgerLine::Seal))
}

pub(super) fn parse_line(line: &[u8]) -> Option<LedgerLine> {
    let (sum, rest) = line.split_at_checked(SUM_LEN)?;
    let json = rest.strip_prefix(b" ")?;
    if checksum(json).as_bytes() != sum {
        return None;
    }
    serde_json::from_slice(json).ok()
}
