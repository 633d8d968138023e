//! The file behind the ledger.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::index::{Line, Seen};
use super::position::{self, Position};

/// Of the file in the ledger's folder.
pub(crate) const NAME: &str = "ledger.jsonl";
const VERSION: u32 = 2;
/// How long another holder of the lock is waited for, at most.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
/// How long between two tries.
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// Hex digits of a line's checksum.
const SUM_LEN: usize = 16;

/// Why the ledger can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    /// A file or folder.
    #[error("{what}")]
    Io {
        /// What didn't work.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file or folder, or whose they are.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// Another process has it.
    #[error("the ledger {path} is in use: each discovery process needs a --ledger of its own")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// Not a torn end: somebody or something changed the file.
    #[error(
        "the ledger {path} is damaged at byte {offset}. It is evidence of what clusters were let \
         out: restore it from a backup. If it is lost for good, start with an empty --ledger and \
         read what `muster-discovery process list` and `db accept` say"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Start of the damaged line.
        offset: u64,
    },
    /// A cluster has another commit here already: two clusters of one identity, almost.
    #[error("the ledger holds another commit of cluster {cluster_id}")]
    Contradiction {
        /// The cluster.
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

/// Open, locked, positioned at its end.
pub(super) struct LedgerFile {
    file: std::fs::File,
    dir: PathBuf,
}

/// Takes the file's lock. A predecessor that is just ending, or a child of this process between
/// fork and exec, holds it for a moment: that is waited for.
fn lock(file: &std::fs::File, path: &Path, shown: &str) -> Result<(), LedgerError> {
    let started = Instant::now();
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) if started.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(LOCK_RETRY);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(LedgerError::InUse { path: path.to_path_buf() });
            }
            Err(error) => return Err(io(format!("can't lock {shown}"))(error.into())),
        }
    }
}

/// Opens or makes the ledger: the file, our process id, and all lines after the header.
pub(super) fn open(dir: &Path) -> Result<(LedgerFile, Uuid, Vec<Line>), LedgerError> {
    muster_files::own_folder(dir)?;
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
    let sealed = matches!(lines.last(), Some(Line::Seal));
    lines.retain(|line| *line != Line::Seal);
    let mut ledger = LedgerFile { file, dir: dir.to_owned() };
    if lines.is_empty() {
        let process = Uuid::now_v7();
        let header = Line::Header { version: VERSION, process };
        ledger.append(&[&header])?;
        ledger.seal()?;
        muster_files::sync_folder(&path)?;
        return Ok((ledger, process, Vec::new()));
    }
    if !sealed {
        ledger.seal()?;
    }
    match lines.remove(0) {
        Line::Header { version: VERSION, process } => Ok((ledger, process, lines)),
        _ => Err(LedgerError::Damaged { path, offset: 0 }),
    }
}

impl LedgerFile {
    #[cfg(test)]
    pub(super) fn over(file: std::fs::File, dir: &Path) -> Self {
        LedgerFile { file, dir: dir.to_owned() }
    }

    /// Writes and syncs; the lines are durable when this returns.
    pub(super) fn append(&mut self, lines: &[&Line]) -> Result<(), LedgerError> {
        let mut bytes = Vec::new();
        for line in lines {
            bytes.extend_from_slice(&encode(line)?);
        }
        self.file.write_all(&bytes).map_err(io("can't write to the ledger"))?;
        self.file.sync_data().map_err(io("can't sync the ledger"))
    }

    /// Says that everything before it is durable. Call after [`LedgerFile::append`].
    pub(super) fn seal(&mut self) -> Result<(), LedgerError> {
        self.append(&[&Line::Seal])
    }

    /// The database's position as it was written down.
    pub(super) fn read_position(&self) -> Result<Option<Position>, LedgerError> {
        position::read(&self.dir, &self.file)
    }

    /// Writes the database's position down, beside the ledger.
    pub(super) fn write_position(&self, seen: &Seen, is_copy: bool) -> Result<(), LedgerError> {
        position::write(&self.dir, seen, &self.file, is_copy)
    }
}

/// A line as the file has it.
pub(super) fn encode(line: &Line) -> Result<Vec<u8>, LedgerError> {
    let json = serde_json::to_string(line).map_err(|error| io("can't encode")(error.into()))?;
    Ok(format!("{} {json}\n", checksum(json.as_bytes())).into_bytes())
}

fn checksum(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    data_encoding::HEXLOWER.encode(&digest.as_ref()[..SUM_LEN / 2])
}

/// All lines, and where the last whole one ends; or the offset of a damaged one. What is broken and
/// not sealed is the torn end of an append that nobody relied on.
fn parse(bytes: &[u8]) -> Result<(Vec<Line>, u64), u64> {
    let mut lines = Vec::new();
    let mut offset = 0;
    while offset < bytes.len() {
        let rest = &bytes[offset..];
        let end = rest.iter().position(|byte| *byte == b'\n');
        let length = end.map_or(rest.len(), |end| end + 1);
        let last = offset + length == bytes.len();
        match end.and_then(|end| parse_line(&rest[..end])) {
            Some(line) => lines.push(line),
            // Before there were seals, the very end told.
            None if last && end.is_none() => return Ok((lines, offset as u64)),
            None if lines.contains(&Line::Seal) && !is_sealed(&rest[length..]) => {
                return Ok((lines, offset as u64));
            }
            None => return Err(offset as u64),
        }
        offset += length;
    }
    Ok((lines, offset as u64))
}

fn is_sealed(bytes: &[u8]) -> bool {
    bytes.split(|byte| *byte == b'\n').any(|line| parse_line(line) == Some(Line::Seal))
}

pub(super) fn parse_line(line: &[u8]) -> Option<Line> {
    let (sum, rest) = line.split_at_checked(SUM_LEN)?;
    let json = rest.strip_prefix(b" ")?;
    if checksum(json).as_bytes() != sum {
        return None;
    }
    serde_json::from_slice(json).ok()
}
