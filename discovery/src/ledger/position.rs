//! How far the database has come, in a small file beside the ledger: it is written at each sweep,
//! and the ledger only grows. A database that is behind it was set back.
//!
//! It also says where it was written, by what no copy of a file carries. A ledger that was put back
//! from a backup, or that a cloned machine brought along, knows nothing that came later. Beside a
//! database of the same age everything agrees, and only this tells.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::file::{encode, parse_line};
use super::{LedgerError, Line, Seen};

/// Of the file beside the ledger.
pub(crate) const NAME: &str = "ledger.position";
/// Far more than a position with all its processes.
const MAX_BYTES: u64 = 1 << 20;

/// Where the position and the ledger were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Home {
    position: Birth,
    ledger: Birth,
}

/// One file among all that its file system ever held. It keeps both when it is renamed; whoever
/// copies it, over another one as well, has other ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Birth {
    inode: u64,
    /// Nanoseconds since 1970; not every file system knows it.
    born_ns: Option<u64>,
}

impl Birth {
    fn of(file: &Metadata) -> Self {
        let born = file.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born_ns = born.and_then(|born| u64::try_from(born.as_nanos()).ok());
        Birth { inode: file.ino(), born_ns }
    }
}

impl Home {
    fn of(position: &Metadata, ledger: &Metadata) -> Self {
        Home { position: Birth::of(position), ledger: Birth::of(ledger) }
    }
}

/// What the file says.
pub(super) struct Position {
    /// How far the database has come.
    pub(super) seen: Seen,
    /// Whether it stands where it was written.
    pub(super) at_home: bool,
}

/// The position, if there is one that is whole.
pub(super) fn read(dir: &Path, ledger: &File) -> Result<Option<Position>, LedgerError> {
    let path = dir.join(NAME);
    let Some(bytes) = muster_files::read(&path, MAX_BYTES)? else { return Ok(None) };
    let Some(Line::Here { seen, home }) = parse_line(bytes.strip_suffix(b"\n").unwrap_or_default())
    else {
        // The ledger's own, older position still counts.
        tracing::warn!(path = %path.display(), "not a position; ignored");
        return Ok(None);
    };
    let here = std::fs::metadata(&path).and_then(|own| Ok(Home::of(&own, &ledger.metadata()?)));
    let here = here.map_err(super::file::io(format!("can't look at {}", path.display())))?;
    Ok(Some(Position { seen, at_home: home == Some(here) }))
}

/// Replaces it; durable when this returns. `is_copy`: what it stands beside came from elsewhere, and
/// stays known as that.
pub(super) fn write(
    dir: &Path,
    seen: &Seen,
    ledger: &File,
    is_copy: bool,
) -> Result<(), LedgerError> {
    let path = dir.join(NAME);
    let line = |home| encode(&Line::Here { seen: seen.clone(), home });
    if is_copy {
        return Ok(muster_files::replace(&path, &line(None)?)?);
    }
    let written = muster_files::replace_by(&path, |aside| {
        let home = Home::of(&aside.metadata()?, &ledger.metadata()?);
        line(Some(home)).map_err(std::io::Error::other)
    });
    Ok(written?)
}
