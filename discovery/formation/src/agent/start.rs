//! Decides what an agent does when it starts. The decision follows from its journal and the node's
//! directory, and from nothing else.

use crate::agent::directory::DirectoryKind;
use crate::agent::event::StartSource;
use crate::agent::journal::{Journal, LaunchState};
use crate::rules::{Rule, Rules};
use crate::values::MachineIdentity;

/// Next step of a starting agent, as [`decide_at_start`] decides it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartDecision {
    /// There is no journal: make key, incarnation and journal, and begin.
    BeginNew,
    /// The journal was made on another machine: move key and journal aside, then decide again
    /// without them.
    SetAsideAndBeginNew,
    /// Persist [`Journal::with_next_boot`], then continue from the journal's state (redeem, or
    /// wait).
    Resume,
    /// Persist [`Journal::with_next_boot`], then pass the directory's kind to the agent as
    /// [`AgentEvent::DirectoryExamined`](super::AgentEvent::DirectoryExamined). The agent holds a
    /// commit document, or the running cluster has added this host.
    ResumeToLaunch,
    /// Execute the node, without asking the service or any peer.
    StartNode(StartSource),
    /// The node's data is lost: ask for a replacement and check again in a minute. Never start the
    /// node from nothing.
    RequestReplacement { why: String },
    /// Touch nothing, say why, and end with exit code 1.
    Refuse { why: String },
    /// The member was removed from its cluster: end with exit code 3.
    Removed,
}

/// Decides what a restarted agent does. If the node's own log is in the directory, the agent never
/// asks the discovery service.
#[must_use]
pub fn decide_at_start(
    rules: &Rules,
    journal: Option<&Journal>,
    machine: &MachineIdentity,
    directory: &DirectoryKind,
) -> StartDecision {
    if *directory == DirectoryKind::Tombstone || journal.is_some_and(|journal| journal.is_removed) {
        return StartDecision::Removed;
    }
    let Some(journal) = journal else {
        return match directory {
            DirectoryKind::Blank => StartDecision::BeginNew,
            other => refuse(other),
        };
    };
    if rules.is_on(Rule::SameMachine) && journal.machine.differs_from(machine) {
        return match directory {
            DirectoryKind::Log(_) => StartDecision::Refuse {
                why: format!(
                    "key and journal were made on another machine, and the node's directory holds \
                     {directory}: this is a copy, or a disk that was moved"
                ),
            },
            _ => StartDecision::SetAsideAndBeginNew,
        };
    }
    match journal.launch_state {
        LaunchState::NotStarted => decide_before_launch(rules, journal, directory),
        LaunchState::Launching => match find_own_files(journal, directory) {
            OwnFiles::Marker => StartDecision::StartNode(StartSource::List),
            OwnFiles::Log => StartDecision::StartNode(StartSource::Log),
            OwnFiles::Nothing => request_replacement(
                "the node was launched, and its directory has no marker",
                directory,
            ),
            OwnFiles::AnothersIncarnation => refuse(directory),
        },
        LaunchState::Ran => match find_own_files(journal, directory) {
            OwnFiles::Log => StartDecision::StartNode(StartSource::Log),
            OwnFiles::Marker | OwnFiles::Nothing => {
                request_replacement("the node has run, and its log is not there", directory)
            }
            OwnFiles::AnothersIncarnation => refuse(directory),
        },
    }
}

fn decide_before_launch(
    rules: &Rules,
    journal: &Journal,
    directory: &DirectoryKind,
) -> StartDecision {
    let member = journal.may_launch();
    match (directory, find_own_files(journal, directory)) {
        (DirectoryKind::Blank, _) if member => StartDecision::ResumeToLaunch,
        (DirectoryKind::Blank, _) => StartDecision::Resume,
        (_, OwnFiles::Marker) if member => StartDecision::ResumeToLaunch,
        // Case of the exploration: with the rule `LaunchingBeforeExec` off, the agent writes
        // nothing before it executes the node. Then only a log shows that the node has run.
        (DirectoryKind::Log(_), _) if member && !rules.is_on(Rule::LaunchingBeforeExec) => {
            StartDecision::StartNode(StartSource::Log)
        }
        (other, _) => refuse(other),
    }
}

/// Trace of this agent's own incarnation in the node's directory.
enum OwnFiles {
    Marker,
    Log,
    Nothing,
    AnothersIncarnation,
}

fn find_own_files(journal: &Journal, directory: &DirectoryKind) -> OwnFiles {
    match directory {
        DirectoryKind::Marked(incarnation) if *incarnation == journal.incarnation => {
            OwnFiles::Marker
        }
        DirectoryKind::Log(Some(incarnation)) if *incarnation == journal.incarnation => {
            OwnFiles::Log
        }
        DirectoryKind::Marked(_) | DirectoryKind::Log(Some(_)) => OwnFiles::AnothersIncarnation,
        DirectoryKind::Blank
        | DirectoryKind::Log(None)
        | DirectoryKind::Foreign(_)
        | DirectoryKind::Tombstone => OwnFiles::Nothing,
    }
}

fn refuse(directory: &DirectoryKind) -> StartDecision {
    StartDecision::Refuse { why: format!("the node's directory holds {directory}") }
}

fn request_replacement(what: &str, directory: &DirectoryKind) -> StartDecision {
    StartDecision::RequestReplacement { why: format!("{what}: it is {directory}") }
}
