//! How far the database's log had come, in a small file beside the ledger: it is written often, and
//! the ledger only grows. A database whose log ends before this was set back.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::file::{encode, io, parse_line, sync_dir};
use super::{LedgerError, Line, Seen};

const NAME: &str = "ledger.position";
const NEW: &str = "ledger.position.new";

/// The position, if there is one that is whole.
pub(super) fn read(dir: &Path) -> Option<Seen> {
    let path = dir.join(NAME);
    let bytes = std::fs::read(&path).ok()?;
    match parse_line(bytes.strip_suffix(b"\n").unwrap_or_default()) {
        Some(Line::Seen(seen)) => Some(seen),
        _ => {
            // The ledger's own, older position still counts.
            tracing::warn!(path = %path.display(), "not a position; ignored");
            None
        }
    }
}

/// Replaces it; durable when this returns.
pub(super) fn write(dir: &Path, seen: &Seen) -> Result<(), LedgerError> {
    let (path, new) = (dir.join(NAME), dir.join(NEW));
    let line = encode(&Line::Seen(seen.clone()))?;
    let mut options = std::fs::OpenOptions::new();
    options.create(true).truncate(true).write(true).mode(0o600);
    let written = options.open(&new).and_then(|mut file| {
        file.write_all(&line)?;
        file.sync_all()
    });
    written.and_then(|()| std::fs::rename(&new, &path)).map_err(io("can't write the position"))?;
    sync_dir(dir)
}
