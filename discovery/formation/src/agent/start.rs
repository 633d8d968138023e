//! What an agent does when it starts: journal and directory decide, nobody is asked.

use crate::agent::directory::Directory;
use crate::agent::event::From;
use crate::agent::journal::Journal;
use crate::rules::Rules;
use crate::values::Machine;

/// What to do at a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// No journal: make key, incarnation and journal, and begin.
    BeginNew,
    /// The journal was made on another machine: move key and journal aside, then begin as new.
    SetAsideAndBeginNew,
    /// Persist [`Journal::rebooted`], then go on where the journal stands (redeem, or wait).
    GoOn,
    /// Persist [`Journal::rebooted`], then step [`Event::Looked`](super::Event::Looked): the
    /// document is held.
    GoOnToLaunch,
    /// Execute the node, without asking anybody.
    Start(From),
    /// The node's data is lost: ask for a replacement, look again in a minute. Never a new start.
    ReplacementWanted { why: String },
    /// Touch nothing, say why, and end with exit code 1.
    Refuse { why: String },
    /// Removed: end with exit code 3.
    Removed,
}

/// The restart table.
#[must_use]
pub fn at_start(
    rules: &Rules,
    journal: Option<&Journal>,
    machine: &Machine,
    directory: &Directory,
) -> Decision {
    let _ = (rules, journal, machine, directory);
    todo!()
}
