//! A member that its cluster has removed: what is kept of it, and how its agent ends.
//!
//! Two places say it, each enough by itself and both durable: a tombstone in the node's directory,
//! and the journal. With either of them no agent starts a node here, asks anybody, or begins anew;
//! `muster-agent reset` is the one way on.

use discovery_types::text::printable;

use crate::exit::End;
use crate::state::journal::{self, Keepsakes};
use crate::state::node_dir::{self, Tombstone};
use crate::state::{Layout, StateError};

/// What is known of the removal, if there was one. The node's own word comes first.
pub(crate) fn known(layout: &Layout) -> Result<Option<Tombstone>, StateError> {
    match node_dir::tombstone(&layout.node())? {
        Some(tombstone) => Ok(Some(tombstone)),
        None => journal::removal(layout),
    }
}

/// Notes in `keepsakes` what the node's tombstone says; `journal` says that there was a removal.
pub(crate) fn note(layout: &Layout, keepsakes: &mut Keepsakes) -> Tombstone {
    let found = node_dir::tombstone(&layout.node()).ok().flatten();
    let tombstone = found.or_else(|| keepsakes.removed.clone()).unwrap_or_default();
    keepsakes.removed = Some(tombstone.clone());
    tombstone
}

/// How the agent of a removed member ends, now and at each later start.
pub(crate) fn end(tombstone: &Tombstone) -> End {
    End::DoNotRestart(format!(
        "{}. The data is kept for inspection; muster-agent reset puts it aside, so that this host can \
         join again as a new member, with a new ticket",
        printable(&tombstone.sentence())
    ))
}
