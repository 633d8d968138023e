//! Actions: the atomic steps by which a state becomes the next one.

use std::fmt;

use formation_explored::{AgentKey, Epoch, Hash};

use crate::explore::identities::{format_list, name};
use crate::explore::processes::RestoreMethod;
use crate::explore::state::SystemState;

/// One atomic step of a host, a process or the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SystemAction {
    /// A host's agent starts, makes its key and record, and redeems its token.
    Join(usize),
    /// An agent polls, or redeems its token if the database doesn't know the agent.
    Poll(usize),
    /// A late message arrives from an agent that no longer exists.
    DeliverLatePoll(AgentKey),
    /// An agent learns that the service is at this epoch.
    SeeEpoch(usize, Epoch),
    /// An agent examines a list of members: it probes the members. Then it signs or refuses the
    /// list, or sends its row of the matrix (which members it reaches).
    ExamineList(usize, Hash),
    /// As `ExamineList`, but the agent has waited long enough to report which releases are missing.
    ReportMissingReleases(usize, Hash),
    /// An ack arrives at the service.
    DeliverAck(AgentKey, Hash),
    /// The acks of all members arrive at the service, in one step.
    DeliverAcks(Hash),
    /// A release arrives at the service.
    DeliverRelease(AgentKey),
    /// An agent gets a commit document.
    SeeDocument(usize, Hash),
    /// An agent takes its next step towards starting its node.
    AdvanceAgent(usize),
    /// A node makes its log.
    MakeLog(usize),
    /// An agent sees that its node has a log.
    SeeLog(usize),
    /// A member reports its Raft cluster.
    Report(usize),
    /// An agent shows the service the commit document that it holds.
    ShowDocument(usize),
    /// A process writes the commit document to its ledger and then sends it.
    Publish(usize),
    /// A process compares its database with its ledger. If the database lacks entries of the
    /// ledger, the process restores them.
    InspectDatabase(usize),
    /// A process makes one of its periodic sweeps: it compares its database with its ledger, and
    /// increments its sweep counter.
    Sweep(usize),
    /// The process with this index serves the action, instead of process 0.
    ServedBy(usize, Box<SystemAction>),
    /// A lease lapses, possibly without any transaction that notices it.
    Lapse(AgentKey),
    /// The frozen list of members times out.
    TimeOut,
    /// An agent's backoff ends.
    EndBackoff(AgentKey),
    /// An operator abandons the cluster.
    Abandon,
    /// The cluster's deadline passes.
    PassDeadline,
    /// An owner retires the cluster.
    Retire,
    /// An owner takes the retirement back.
    Unretire,
    /// An owner reopens the expired cluster.
    Reopen,
    /// An owner accepts the changed database.
    Accept,
    /// The link between two hosts goes down.
    Cut(usize, usize),
    /// The service's clock jumps ahead.
    ClockAhead,
    /// The service's clock is set right.
    ClockBack,
    /// A backup of the database is taken.
    Backup,
    /// The backup of the database is restored by this method.
    Restore(RestoreMethod),
    /// A process's ledger is copied.
    SaveLedger(usize),
    /// A process is stopped, and the earlier copy of its ledger replaces the ledger. If the flag is
    /// true, the copied position replaces the position beside the ledger, too.
    PutLedgerBack(usize, bool),
    /// A process is lost for good, with its ledger.
    LoseProcess(usize),
    /// An owner declares that a process won't come back.
    ForgetProcess(usize),
    /// An agent is killed and starts again.
    Kill(usize),
    /// A host dies for good.
    Die(usize),
    /// A node's directory is lost, and its host starts again.
    LoseDirectory(usize),
    /// A host is re-imaged: nothing on it survives.
    ReimageHost(usize),
    /// A host's disk is copied to another machine, which then starts.
    Clone(usize, usize),
    /// A process crashes, and may lose its unsynced writes.
    Crash(usize),
    /// A process reads the cluster's row without locking it.
    ReadUnlocked(usize),
    /// A process writes the result of this action, computed from the row that it read without a
    /// lock.
    WriteUnlocked(usize, Box<SystemAction>),
}

impl SystemAction {
    /// Returns the host that takes the action, or to which the action happens.
    #[must_use]
    pub fn host(&self) -> Option<usize> {
        match self {
            SystemAction::Join(at)
            | SystemAction::Poll(at)
            | SystemAction::SeeEpoch(at, _)
            | SystemAction::ExamineList(at, _)
            | SystemAction::ReportMissingReleases(at, _)
            | SystemAction::SeeDocument(at, _)
            | SystemAction::AdvanceAgent(at)
            | SystemAction::MakeLog(at)
            | SystemAction::SeeLog(at)
            | SystemAction::Report(at)
            | SystemAction::ShowDocument(at)
            | SystemAction::Kill(at)
            | SystemAction::Die(at)
            | SystemAction::LoseDirectory(at)
            | SystemAction::ReimageHost(at)
            | SystemAction::Clone(at, _) => Some(*at),
            SystemAction::ServedBy(_, action) => action.host(),
            _ => None,
        }
    }

    /// Returns whether a process serves the action.
    #[must_use]
    pub fn is_service_request(&self) -> bool {
        matches!(
            self,
            SystemAction::Join(_)
                | SystemAction::Poll(_)
                | SystemAction::DeliverLatePoll(_)
                | SystemAction::ExamineList(..)
                | SystemAction::ReportMissingReleases(..)
                | SystemAction::DeliverAck(..)
                | SystemAction::DeliverAcks(_)
                | SystemAction::DeliverRelease(_)
                | SystemAction::Report(_)
                | SystemAction::ShowDocument(_)
                | SystemAction::Lapse(_)
                | SystemAction::TimeOut
                | SystemAction::EndBackoff(_)
                | SystemAction::Abandon
                | SystemAction::PassDeadline
                | SystemAction::Retire
                | SystemAction::Unretire
                | SystemAction::Reopen
                | SystemAction::Accept
        )
    }

    /// Returns whether the action is a fault, so that the bounds limit it. The lapse of a lease
    /// isn't a fault if the agent's host no longer exists.
    #[must_use]
    pub fn is_fault(&self, system: &SystemState) -> bool {
        match self {
            SystemAction::Lapse(key) => !system.is_key_gone(*key),
            SystemAction::ServedBy(_, action) => action.is_fault(system),
            SystemAction::TimeOut
            | SystemAction::Abandon
            | SystemAction::PassDeadline
            | SystemAction::Retire
            | SystemAction::Reopen
            | SystemAction::Accept
            | SystemAction::Restore(_)
            | SystemAction::PutLedgerBack(..)
            | SystemAction::LoseProcess(_)
            | SystemAction::ForgetProcess(_)
            | SystemAction::Kill(_)
            | SystemAction::Die(_)
            | SystemAction::LoseDirectory(_)
            | SystemAction::ReimageHost(_)
            | SystemAction::Clone(..)
            | SystemAction::Crash(_)
            | SystemAction::Cut(..)
            | SystemAction::ClockAhead
            | SystemAction::ReadUnlocked(_) => true,
            _ => false,
        }
    }
}

impl fmt::Display for SystemAction {
    #[allow(clippy::too_many_lines, reason = "a table: one text for each action")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = |host: &usize| char::from(b'A' + u8::try_from(*host).unwrap_or(25));
        match self {
            SystemAction::Join(at) => write!(f, "{} starts, makes its key and redeems", host(at)),
            SystemAction::Poll(at) => write!(f, "{} polls", host(at)),
            SystemAction::DeliverLatePoll(key) => {
                write!(f, "a late message of {} arrives", name(*key))
            }
            SystemAction::SeeEpoch(at, epoch) => write!(f, "{} sees epoch {epoch}", host(at)),
            SystemAction::ExamineList(at, h) => {
                write!(f, "{} looks at {}", host(at), format_list(*h))
            }
            SystemAction::ReportMissingReleases(at, h) => {
                write!(f, "{} has waited for the releases that {} needs", host(at), format_list(*h))
            }
            SystemAction::DeliverAck(key, h) => {
                write!(f, "{}'s ack of {} arrives", name(*key), format_list(*h))
            }
            SystemAction::DeliverAcks(h) => write!(f, "the acks of {} arrive", format_list(*h)),
            SystemAction::DeliverRelease(key) => write!(f, "{}'s release arrives", name(*key)),
            SystemAction::SeeDocument(at, h) => {
                write!(f, "{} gets the document {}", host(at), format_list(*h))
            }
            SystemAction::AdvanceAgent(at) => write!(f, "{} goes on towards its node", host(at)),
            SystemAction::MakeLog(at) => write!(f, "{}'s node makes its log", host(at)),
            SystemAction::SeeLog(at) => write!(f, "{} sees its node's log", host(at)),
            SystemAction::Report(at) => write!(f, "{} reports its Raft cluster", host(at)),
            SystemAction::ShowDocument(at) => write!(f, "{} shows its document", host(at)),
            SystemAction::Publish(at) => write!(f, "process {at} lets the document out"),
            SystemAction::InspectDatabase(at) => write!(f, "process {at} looks at its database"),
            SystemAction::Sweep(at) => write!(f, "process {at} sweeps"),
            SystemAction::ServedBy(at, action) => write!(f, "through process {at}: {action}"),
            SystemAction::Lapse(key) => write!(f, "{}'s lease lapses", name(*key)),
            SystemAction::TimeOut => write!(f, "the frozen list times out"),
            SystemAction::EndBackoff(key) => write!(f, "{} leaves its backoff", name(*key)),
            SystemAction::Abandon => write!(f, "an operator abandons the cluster"),
            SystemAction::PassDeadline => write!(f, "the deadline passes"),
            SystemAction::Retire => write!(f, "an owner retires the cluster"),
            SystemAction::Unretire => write!(f, "an owner takes the retirement back"),
            SystemAction::Reopen => write!(f, "an owner reopens the expired cluster"),
            SystemAction::Accept => write!(f, "an owner accepts the database"),
            SystemAction::Cut(one, other) => {
                write!(f, "the link between {} and {} goes down", host(one), host(other))
            }
            SystemAction::ClockAhead => write!(f, "the service's clock jumps half an hour ahead"),
            SystemAction::ClockBack => write!(f, "the service's clock is set right"),
            SystemAction::Backup => write!(f, "a backup is taken"),
            SystemAction::Restore(RestoreMethod::Dump) => {
                write!(f, "the backup is loaded into a new database")
            }
            SystemAction::Restore(RestoreMethod::InPlace) => {
                write!(f, "the rows are set back to the backup, under the processes")
            }
            SystemAction::SaveLedger(at) => write!(f, "process {at}'s ledger is copied"),
            SystemAction::PutLedgerBack(at, true) => {
                write!(f, "process {at}'s ledger is put back to the copy")
            }
            SystemAction::PutLedgerBack(at, false) => {
                write!(
                    f,
                    "process {at}'s ledger is put back to the copy, the position beside it isn't"
                )
            }
            SystemAction::LoseProcess(at) => {
                write!(f, "process {at} is lost for good, with its ledger")
            }
            SystemAction::ForgetProcess(at) => {
                write!(f, "an owner says that process {at} won't come back")
            }
            SystemAction::Kill(at) => write!(f, "{}'s agent is killed and starts again", host(at)),
            SystemAction::Die(at) => write!(f, "{} dies for good", host(at)),
            SystemAction::LoseDirectory(at) => {
                write!(f, "{}'s node directory is lost; the host restarts", host(at))
            }
            SystemAction::ReimageHost(at) => {
                write!(f, "{} is re-imaged: nothing on it survives", host(at))
            }
            SystemAction::Clone(from, to) => {
                write!(f, "{}'s disk is copied to {}, which starts", host(from), host(to))
            }
            SystemAction::Crash(at) => write!(f, "process {at} crashes"),
            SystemAction::ReadUnlocked(at) => {
                write!(f, "process {at} reads the row, without a lock")
            }
            SystemAction::WriteUnlocked(at, action) => {
                write!(f, "process {at} writes what it made of: {action}")
            }
        }
    }
}
