//! A member that its cluster has removed: the records of the removal, and how its agent exits.
//!
//! The removal is recorded durably in two places: a tombstone in the node's directory, and the
//! journal. Each of them suffices. If either exists, the agent starts no node, contacts no peer and
//! does not join again. Only `muster-agent reset` allows this host to join again.

use discovery_types::text::printable;

use crate::exit::ExitError;
use crate::state::journal::{self, JournalExtras};
use crate::state::node_dir::{self, Tombstone};
use crate::state::{Layout, StateError};

/// Returns the recorded removal, if there is one. The node's own tombstone takes precedence over
/// the journal's copy.
pub(crate) fn recorded_removal(layout: &Layout) -> Result<Option<Tombstone>, StateError> {
    match node_dir::read_tombstone(&layout.node())? {
        Some(tombstone) => Ok(Some(tombstone)),
        None => journal::read_tombstone(layout),
    }
}

/// Copies the node's tombstone into `extras`, and returns it. If there is none on disk, keeps
/// the tombstone that is already in `extras`, or records an empty one.
pub(crate) fn record_removal(layout: &Layout, extras: &mut JournalExtras) -> Tombstone {
    let found = node_dir::read_tombstone(&layout.node()).ok().flatten();
    let tombstone = found.or_else(|| extras.removed.clone()).unwrap_or_default();
    extras.removed = Some(tombstone.clone());
    tombstone
}

/// The error with which the agent of a removed member exits, at the removal and at each later
/// start.
pub(crate) fn removal_error(tombstone: &Tombstone) -> ExitError {
    ExitError::DoNotRestart(format!(
        "{}. The data is kept for inspection; muster-agent reset puts it aside, so that this host can \
         join again as a new member, with a new ticket",
        printable(&tombstone.sentence())
    ))
}
