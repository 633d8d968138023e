//! How far the database has come, in a small file beside the ledger: it is written at each sweep,
//! and the ledger only grows. A database that is behind it was set back.

use std::path::Path;

use super::file::{encode, parse_line};
use super::{LedgerError, Line, Seen};

const NAME: &str = "ledger.position";
/// Far more than a position with all its processes.
const MAX_BYTES: u64 = 1 << 20;

/// The position, if there is one that is whole.
pub(super) fn read(dir: &Path) -> Result<Option<Seen>, LedgerError> {
    let path = dir.join(NAME);
    let Some(bytes) = muster_files::read(&path, MAX_BYTES)? else { return Ok(None) };
    Ok(match parse_line(bytes.strip_suffix(b"\n").unwrap_or_default()) {
        Some(Line::Seen(seen)) => Some(seen),
        _ => {
            // The ledger's own, older position still counts.
            tracing::warn!(path = %path.display(), "not a position; ignored");
            None
        }
    })
}

/// Replaces it; durable when this returns.
pub(super) fn write(dir: &Path, seen: &Seen) -> Result<(), LedgerError> {
    Ok(muster_files::replace(&dir.join(NAME), &encode(&Line::Seen(seen.clone()))?)?)
}
