//! The position file beside the ledger stores the last known position of the database's history. It
//! is replaced at each sweep, because a ledger with such entries would grow without end. A database
//! that is behind the stored position was set back to an older state.
//!
//! The file also holds the inodes and birth times of itself and the ledger, which no copy keeps. A
//! ledger can be old because it was restored from a backup, or came with a cloned machine. A
//! database of the same age agrees with such a ledger. Only the inodes and birth times then show
//! that the ledger is a copy.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::file::{encode, parse_line};
use super::{DatabasePosition, LedgerError, LedgerLine};

/// Name of the position file.
pub(crate) const NAME: &str = "ledger.position";
/// Maximum size of the position file in bytes, far more than a position with all its processes
/// needs.
const MAX_BYTES: u64 = 1 << 20;

/// Identity of the position file and the ledger when the position was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileIdentities {
    position: FileIdentity,
    ledger: FileIdentity,
}

/// Identity of a file, unique among all files that its file system ever held. A rename keeps it. A
/// copy has another one, even a copy over an existing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileIdentity {
    inode: u64,
    /// Birth time of the file, in nanoseconds since 1970. Not every file system records it.
    born_ns: Option<u64>,
}

impl FileIdentity {
    fn of(file: &Metadata) -> Self {
        let born = file.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born_ns = born.and_then(|born| u64::try_from(born.as_nanos()).ok());
        FileIdentity { inode: file.ino(), born_ns }
    }
}

impl FileIdentities {
    fn of(position: &Metadata, ledger: &Metadata) -> Self {
        FileIdentities { position: FileIdentity::of(position), ledger: FileIdentity::of(ledger) }
    }
}

/// Content of the position file.
pub(super) struct StoredPosition {
    /// The database's identity and position.
    pub(super) seen: DatabasePosition,
    /// Whether the position file and the ledger are the original files, not copies.
    pub(super) is_original: bool,
}

/// Reads the position file. Returns `None` if the file is missing or damaged.
pub(super) fn read(dir: &Path, ledger: &File) -> Result<Option<StoredPosition>, LedgerError> {
    let path = dir.join(NAME);
    let Some(bytes) = muster_files::read(&path, MAX_BYTES)? else { return Ok(None) };
    let Some(LedgerLine::Here { seen, home }) =
        parse_line(bytes.strip_suffix(b"\n").unwrap_or_default())
    else {
        // Without the file, the older position in the ledger itself is used.
        tracing::warn!(path = %path.display(), "not a position; ignored");
        return Ok(None);
    };
    let here =
        std::fs::metadata(&path).and_then(|own| Ok(FileIdentities::of(&own, &ledger.metadata()?)));
    let here = here.map_err(super::file::io(format!("can't look at {}", path.display())))?;
    Ok(Some(StoredPosition { seen, is_original: home == Some(here) }))
}

/// Replaces the position file; it is durable when this returns. With `is_copy` the file identifies
/// no original files, so that the ledger is still known to be a copy.
pub(super) fn write(
    dir: &Path,
    seen: &DatabasePosition,
    ledger: &File,
    is_copy: bool,
) -> Result<(), LedgerError> {
    let path = dir.join(NAME);
    let line = |home| encode(&LedgerLine::Here { seen: seen.clone(), home });
    if is_copy {
        return Ok(muster_files::replace(&path, &line(None)?)?);
    }
    let written = muster_files::replace_by(&path, |aside| {
        let home = FileIdentities::of(&aside.metadata()?, &ledger.metadata()?);
        line(Some(home)).map_err(std::io::Error::other)
    });
    Ok(written?)
}
