//! Decides what an agent does when it starts, from its journal and the node's directory alone.

use crate::agent::directory::Directory;
use crate::agent::event::From;
use crate::agent::journal::{Journal, Start};
use crate::rules::{Rule, Rules};
use crate::values::Machine;

/// Next step of a starting agent, as [`at_start`] decides it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// There is no journal: make key, incarnation and journal, and begin.
    BeginNew,
    /// The journal was made on another machine: move key and journal aside, then decide again
    /// without them.
    SetAsideAndBeginNew,
    /// Persist [`Journal::rebooted`], then go on where the journal stands (redeem, or wait).
    GoOn,
    /// Persist [`Journal::rebooted`], then step [`Event::Looked`](super::Event::Looked). The agent
    /// holds the document, or the running cluster has added this host.
    GoOnToLaunch,
    /// Execute the node, without asking the service or any peer.
    Start(From),
    /// The node's data is lost: ask for a replacement and look again in a minute. Never start the
    /// node from nothing.
    ReplacementWanted { why: String },
    /// Touch nothing, say why, and end with exit code 1.
    Refuse { why: String },
    /// The member was removed from its cluster: end with exit code 3.
    Removed,
}

/// Decides what a restarted agent does. With the node's own log in the directory it never asks the
/// discovery service.
#[must_use]
pub fn at_start(
    rules: &Rules,
    journal: Option<&Journal>,
    machine: &Machine,
    directory: &Directory,
) -> Decision {
    if *directory == Directory::Tombstone || journal.is_some_and(|journal| journal.tombstone) {
        return Decision::Removed;
    }
    let Some(journal) = journal else {
        return match directory {
            Directory::Blank => Decision::BeginNew,
            other => refuse(other),
        };
    };
    if rules.on(Rule::SameMachine) && journal.machine.differs_from(machine) {
        return match directory {
            Directory::Log(_) => Decision::Refuse {
                why: format!(
                    "key and journal were made on another machine, and the node's directory holds \
                     {directory}: this is a copy, or a disk that was moved"
                ),
            },
            _ => Decision::SetAsideAndBeginNew,
        };
    }
    match journal.start {
        Start::NotYet => before_launch(rules, journal, directory),
        Start::Launching => match own(journal, directory) {
            Own::Marker => Decision::Start(From::List),
            Own::Log => Decision::Start(From::Log),
            Own::Nothing => {
                lost("the node was launched, and its directory has no marker", directory)
            }
            Own::AnothersIncarnation => refuse(directory),
        },
        Start::Ran => match own(journal, directory) {
            Own::Log => Decision::Start(From::Log),
            Own::Marker | Own::Nothing => {
                lost("the node has run, and its log is not there", directory)
            }
            Own::AnothersIncarnation => refuse(directory),
        },
    }
}

fn before_launch(rules: &Rules, journal: &Journal, directory: &Directory) -> Decision {
    let member = journal.may_launch();
    match (directory, own(journal, directory)) {
        (Directory::Blank, _) if member => Decision::GoOnToLaunch,
        (Directory::Blank, _) => Decision::GoOn,
        (_, Own::Marker) if member => Decision::GoOnToLaunch,
        // With `LaunchingBeforeExec` off nothing is written before the exec: only a log shows that
        // the node ran.
        (Directory::Log(_), _) if member && !rules.on(Rule::LaunchingBeforeExec) => {
            Decision::Start(From::Log)
        }
        (other, _) => refuse(other),
    }
}

/// Trace of this agent's own incarnation in the node's directory.
enum Own {
    Marker,
    Log,
    Nothing,
    AnothersIncarnation,
}

fn own(journal: &Journal, directory: &Directory) -> Own {
    match directory {
        Directory::Marked(whose) if *whose == journal.incarnation => Own::Marker,
        Directory::Log(Some(whose)) if *whose == journal.incarnation => Own::Log,
        Directory::Marked(_) | Directory::Log(Some(_)) => Own::AnothersIncarnation,
        Directory::Blank | Directory::Log(None) | Directory::Foreign(_) | Directory::Tombstone => {
            Own::Nothing
        }
    }
}

fn refuse(directory: &Directory) -> Decision {
    Decision::Refuse { why: format!("the node's directory holds {directory}") }
}

fn lost(what: &str, directory: &Directory) -> Decision {
    Decision::ReplacementWanted { why: format!("{what}: it is {directory}") }
}
