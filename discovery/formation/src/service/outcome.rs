//! Result of a step: what to store, and what to answer.

use crate::service::cluster::Phase;
use crate::service::refusal::Refusal;
use crate::values::{AgentKey, Epoch, Hash, Seat};

/// Result of one step. The caller does the following, in this order:
///
/// 1. Save the cluster if `changed`.
/// 2. Append `changes` to the event chain, if there are any. Then `rev` was incremented by one.
/// 3. INSERT into `commits` if `committed`.
/// 4. COMMIT the transaction.
/// 5. Raise `alarms`.
/// 6. Fsync the ledger if the answer carries the commit document.
/// 7. Answer the request.
///
/// The caller does all of that also after a refusal, because time may have changed the cluster.
#[derive(Debug)]
#[must_use]
pub struct StepOutcome {
    /// Answer to the request, or its refusal.
    pub answer: Result<Answer, Refusal>,
    /// Whether anything in the cluster has changed, so that it must be saved.
    pub changed: bool,
    /// Changes that agents and `explain` can see, in order. If there are any, the change counter
    /// `rev` was incremented by one.
    pub changes: Vec<ClusterChange>,
    /// Hash of the list of members that this step has decided: INSERT it in this very transaction.
    pub committed: Option<Hash>,
    /// Alarms to raise once the transaction is committed.
    pub alarms: Vec<Alarm>,
}

impl StepOutcome {
    /// Whether the cluster's change counter (`rev`) was incremented, so that waiting polls of this
    /// cluster must wake.
    #[must_use]
    pub fn has_new_revision(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Whether the answer carries the commit document. The ledger must then hold the document
    /// before the answer is sent.
    #[must_use]
    pub fn carries_document(&self) -> bool {
        matches!(&self.answer, Ok(Answer { document: Some(_), .. }))
    }
}

/// Answer to a request: the state of the cluster, and of the agent that sent the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub phase: Phase,
    /// Epoch of the proposal, or of the next one.
    pub epoch: Epoch,
    /// Value of the cluster's change counter. The agent sends it as `after` in its next poll.
    pub rev: u64,
    /// Seat and state of the agent that sent the request; `None` if the sender is no agent of this
    /// cluster.
    pub standing: Option<AgentStanding>,
    /// Hash of the proposal, while preparing and for its members only. The caller sends these
    /// members the list in [`Cluster::frozen`](super::Cluster::frozen), with the agents' releases.
    pub proposal: Option<Hash>,
    /// Hash of the decided list, from the commit on and for its members only. The caller sends the
    /// commit document, with the leaf certificates of the member that asked.
    pub document: Option<Hash>,
}

/// Seat and state of an agent in its cluster, as the answer shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentStanding {
    /// The agent has this seat.
    Seat(Seat),
    /// The agent waits, with this many live standbys ahead of it.
    Standby { ahead: usize },
    /// The agent has neither a seat nor a place in the queue: its lease has lapsed, or the list of
    /// members was decided without it.
    Unseated,
}

/// One visible change of a cluster, for its event chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterChange {
    /// An agent with a new key has redeemed.
    Joined { key: AgentKey },
    /// An agent got a seat.
    Seated { key: AgentKey, seat: Seat },
    /// An agent was put into the queue of standbys.
    Queued { key: AgentKey },
    /// An agent's lease lapsed.
    Lapsed { key: AgentKey },
    /// An agent's new record replaced its old one.
    RecordReplaced { key: AgentKey },
    /// A failed list was counted against an agent, for the `counts`th time.
    Counted { key: AgentKey, counts: u32 },
    /// The list of members was frozen.
    Frozen { epoch: Epoch, h: Hash },
    /// The proposal was given up; the cluster is open again at `epoch`.
    Reopened { epoch: Epoch, why: ReopenReason },
    /// A member's ack came in.
    Acked { key: AgentKey, epoch: Epoch },
    /// An agent's row of the probe matrix came in.
    Probed { key: AgentKey, epoch: Epoch },
    /// An agent's release came in.
    Released { key: AgentKey, epoch: Epoch },
    /// The list of members is decided.
    Committed { epoch: Epoch, h: Hash },
    /// A received commit document proves that the list of members is decided.
    Adopted { epoch: Epoch, h: Hash },
    /// A member reported its Raft cluster.
    Reported { key: AgentKey, raft_cluster: u64 },
    /// A majority of the members runs this Raft cluster.
    Formed { raft_cluster: u64 },
    /// The next statement was stored.
    Restated { sequence: u64 },
    /// A grant was revoked.
    GrantRevoked,
    /// An admin took the seat or the place in the queue from an agent, because its token is
    /// revoked.
    SeatFreed { key: AgentKey },
    /// An issuer has approved an agent.
    Approved { key: AgentKey },
    /// The cluster ended in this phase.
    Ended { phase: Phase },
    /// The retirement was taken back: the cluster is committed or formed again.
    Unretired { phase: Phase, by: String },
    /// The database's generation (its history as the processes agree on it) changed.
    Unsettled,
    /// The ledgers agree with the database, or an owner accepted it.
    Settled,
    /// A second valid document was received.
    Split { other: Hash },
    /// Two sessions have used one agent key.
    KeyElsewhere { key: AgentKey },
}

/// Reason for which a proposal was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReopenReason {
    /// A seated agent's lease lapsed.
    Lapsed(AgentKey),
    /// An admin took the seat from a listed agent.
    SeatFreed(AgentKey),
    /// An agent refused the proposal.
    Refused { key: AgentKey, reason: String },
    /// Not all acks came in time.
    TimedOut,
    /// A member replaced its record.
    RecordReplaced(AgentKey),
    /// The next statement was stored.
    Restated,
    /// The database's generation (its history as the processes agree on it) changed.
    DatabaseChanged,
    /// An owner, `by`, gave the cluster a new deadline after the old one had passed.
    NewDeadline { by: String },
}

/// Event of which a person should be informed at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// Two sessions use one agent key: a cloned host, or a stolen key.
    KeyElsewhere { key: AgentKey },
    /// The cluster has two valid commit documents.
    Split { decided: Hash, other: Hash },
}
