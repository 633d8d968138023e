//! Everything that the service keeps about one cluster: plain data, loaded from its rows under the
//! row lock and saved in the same transaction.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::service::settings::FormationSettings;
use crate::values::{
    AgentKey, AgentRecord, AgentSession, ClusterId, Epoch, GrantId, Hash, ProposedList, Release,
    Seat, Statement, UnixMicros, quorum,
};

/// Phase in a cluster's life. A draft is not a cluster yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Agents take seats and lose them.
    Open,
    /// A list of members is frozen and waits for its acks.
    Preparing,
    /// The list of members is decided, for ever.
    Committed,
    /// A majority of the members runs the Raft cluster.
    Formed,
    /// The deadline passed before the commit.
    Expired,
    /// Given up before the commit, by an operator or by `db accept`.
    Abandoned,
    /// Ended by its owner after the commit.
    Retired,
}

impl Phase {
    /// Name of the phase in the API and in database rows.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Open => "open",
            Phase::Preparing => "preparing",
            Phase::Committed => "committed",
            Phase::Formed => "formed",
            Phase::Expired => "expired",
            Phase::Abandoned => "abandoned",
            Phase::Retired => "retired",
        }
    }

    /// Parses a name that [`Phase::as_str`] returns.
    #[must_use]
    pub fn parse(text: &str) -> Option<Phase> {
        use Phase::{Abandoned, Committed, Expired, Formed, Open, Preparing, Retired};
        [Open, Preparing, Committed, Formed, Expired, Abandoned, Retired]
            .into_iter()
            .find(|phase| phase.as_str() == text)
    }

    /// Whether the cluster has ended. Some ends can be undone. A host that sends the commit
    /// document brings back a cluster that `db accept` has abandoned. An owner can undo a
    /// retirement, and reopen an expired cluster.
    #[must_use]
    pub fn has_ended(self) -> bool {
        matches!(self, Phase::Expired | Phase::Abandoned | Phase::Retired)
    }
}

/// State of one cluster. Every field is persisted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Id of the cluster; it never changes.
    pub id: ClusterId,
    /// Newest statement of the cluster. The store keeps the whole chain.
    pub statement: Statement,
    pub phase: Phase,
    /// Epoch of the present proposal, or of the next one. Starts at 1, and never falls unless the
    /// database is set back.
    pub epoch: Epoch,
    /// Highest epoch of which any agent of the cluster has signed a list or a release, as far as
    /// the agents have reported.
    pub floor: Epoch,
    /// Change counter of the cluster. Each step that changes anything that agents or `explain` can
    /// see increments it by one.
    pub rev: u64,
    /// Time at which an uncommitted cluster expires.
    pub deadline: UnixMicros,
    /// Every agent key that has redeemed, seated or not. Rows are never deleted: they count
    /// towards the limit of keys.
    pub agents: BTreeMap<AgentKey, Applicant>,
    /// Next number in the queue of standbys; only grows.
    pub next_queue_number: u64,
    /// The proposal while preparing, or the decided list of members from the commit on; otherwise
    /// `None`.
    pub frozen: Option<FrozenList>,
    /// Raft cluster id that each member's own node reports. Only after the commit.
    pub reports: BTreeMap<AgentKey, u64>,
    /// Grants that were revoked: they admit no new key.
    pub revoked: BTreeSet<GrantId>,
    /// Revoked grants whose seats were freed: no agent that came with such a grant gets a seat.
    pub freed: BTreeSet<GrantId>,
    /// Reason for which the cluster ended; set in the last three phases.
    pub ended: Option<ClusterEnd>,
    /// Second valid commit document, if one was received. From then on only ticks, a retirement and
    /// events of the database are applied.
    pub split: Option<Split>,
    /// Whether the cluster waits for the database to be settled. That is so after the database was
    /// replaced or has lost entries of a ledger. Meanwhile no list of members is frozen or
    /// committed.
    pub is_unsettled: bool,
    /// Last error of the cluster, for `explain`.
    pub last_error: Option<LastError>,
}

/// State that the service keeps of one agent that has redeemed. Only this state decides whether the
/// agent gets a seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applicant {
    /// Newest record of the agent.
    pub record: Arc<AgentRecord>,
    /// Number of seats that the grant of its record may hold at once.
    pub uses: u32,
    /// Seat of the agent, place in the queue, or neither.
    pub seating: Seating,
    /// End of the agent's lease. Judged only while the cluster is open or preparing and `seating`
    /// isn't `Absent`.
    pub lease_until: UnixMicros,
    /// Session that holds the key; `None` after an adoption, until the agent's next request.
    pub session: Option<AgentSession>,
    /// Highest epoch of which the agent has signed a list or a release, as the agent has reported
    /// it.
    pub highest_epoch: Epoch,
    /// Number of failed lists of members that were counted against the agent.
    pub failed_lists: u32,
    /// End of the agent's backoff. No list of members that includes the agent is frozen before this
    /// time.
    pub backoff_until: UnixMicros,
    /// The agent's signed [`Release`] of the highest epoch. Kept and served as long as the cluster
    /// is forming.
    pub release: Option<Release>,
    /// An issuer's signed approval of the agent, as received.
    pub approval: Option<Arc<str>>,
}

impl Cluster {
    /// Whether a list of members may have this agent: it is approved, or needs no approval.
    #[must_use]
    pub fn is_approved(&self, key: AgentKey) -> bool {
        !self.statement.needs_approval
            || self.agents.get(&key).is_some_and(|agent| agent.approval.is_some())
    }
}

/// Place of an applicant: a seat, the queue of standbys, or neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Seating {
    /// The applicant has this seat, 1 to `size`.
    Seat(Seat),
    /// The applicant waits in the queue; the smallest number has waited longest.
    Standby(u64),
    /// The applicant's lease has lapsed.
    Absent,
}

/// A frozen list of members, with the acks and probes that have come in for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenList {
    pub proposal: ProposedList,
    /// Hash of the proposal, over which the acks are signed.
    pub proposal_hash: Hash,
    /// Time at which the list was frozen.
    pub at: UnixMicros,
    /// Acks by agent: each is a JWS by the agent's key over `proposal_hash`.
    pub acks: BTreeMap<AgentKey, Arc<str>>,
    /// Rows of the probe matrix, by the agent that probed.
    pub probes: BTreeMap<AgentKey, ProbeResults>,
}

/// Row of the probe matrix: one agent's result for each peer that it probed.
pub type ProbeResults = BTreeMap<AgentKey, ProbeOutcome>;

/// Result of probing one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// The right agent answered.
    Reached,
    /// The peer was not reached yet. The value is the reason in one sentence, cut to 400 bytes.
    Failed(String),
}

/// Reason, time and author of a cluster's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterEnd {
    pub cause: EndCause,
    /// Time at which the cluster ended.
    pub at: UnixMicros,
    /// Name of the admin who ended the cluster and, for a retirement, the reason. If the deadline
    /// passed, a text that says so.
    pub by: String,
}

/// Reason for which a cluster ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndCause {
    /// An operator ran `cluster abandon`.
    Abandon,
    /// An owner ran `db accept` after the database changed. A valid commit document undoes this
    /// end.
    DatabaseAccepted,
    /// The deadline passed before the commit.
    Deadline,
    /// An owner signed a retirement.
    Retire,
}

impl EndCause {
    /// Name of the reason in the API and in database rows.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            EndCause::Abandon => "abandon",
            EndCause::DatabaseAccepted => "database_accepted",
            EndCause::Deadline => "deadline",
            EndCause::Retire => "retire",
        }
    }

    /// Parses a name that [`EndCause::as_str`] returns.
    #[must_use]
    pub fn parse(text: &str) -> Option<EndCause> {
        [EndCause::Abandon, EndCause::DatabaseAccepted, EndCause::Deadline, EndCause::Retire]
            .into_iter()
            .find(|cause| cause.as_str() == text)
    }
}

/// A second valid commit document of a cluster that has committed another list of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Hash of the list in the commit document that the service did not adopt.
    pub other: Hash,
    /// Epoch of the list in the commit document that the service did not adopt.
    pub epoch: Epoch,
}

/// Last error of a cluster, for `explain`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError {
    /// Time at which the error happened.
    pub at: UnixMicros,
    /// Agent that caused the error, if it was one agent.
    pub key: Option<AgentKey>,
    /// The error in one sentence.
    pub text: String,
}

impl Cluster {
    /// Returns a cluster as it is when its first statement is stored: open and without agents.
    #[must_use]
    pub fn opened(statement: Statement, deadline: UnixMicros) -> Cluster {
        Cluster {
            id: statement.cluster,
            statement,
            phase: Phase::Open,
            epoch: 1,
            floor: 0,
            rev: 1,
            deadline,
            agents: BTreeMap::new(),
            next_queue_number: 1,
            frozen: None,
            reports: BTreeMap::new(),
            revoked: BTreeSet::new(),
            freed: BTreeSet::new(),
            ended: None,
            split: None,
            is_unsettled: false,
            last_error: None,
        }
    }

    /// Returns the agent in each seat, seat 1 first.
    #[must_use]
    pub fn seats(&self) -> BTreeMap<Seat, AgentKey> {
        let seat = |(&key, agent): (&AgentKey, &Applicant)| match agent.seating {
            Seating::Seat(seat) => Some((seat, key)),
            Seating::Standby(_) | Seating::Absent => None,
        };
        self.agents.iter().filter_map(seat).collect()
    }

    /// Returns the standbys by number in the queue, the longest waiting first.
    #[must_use]
    pub fn standbys(&self) -> BTreeMap<u64, AgentKey> {
        let standby = |(&key, agent): (&AgentKey, &Applicant)| match agent.seating {
            Seating::Standby(order) => Some((order, key)),
            Seating::Seat(_) | Seating::Absent => None,
        };
        self.agents.iter().filter_map(standby).collect()
    }

    /// Returns the Raft cluster id that a majority of the founders report, if there is one.
    #[must_use]
    pub fn majority_report(&self) -> Option<u64> {
        let majority = quorum(usize::from(self.statement.size));
        let agreeing = |id: &u64| self.reports.values().filter(|other| *other == id).count();
        self.reports.values().copied().find(|id| agreeing(id) >= majority)
    }

    /// Returns the time until which an owner may undo the cluster's end; `None` if the cluster is
    /// neither retired nor expired.
    #[must_use]
    pub fn undo_until(&self, settings: &FormationSettings) -> Option<UnixMicros> {
        let can_be_undone = matches!(self.phase, Phase::Retired | Phase::Expired);
        let ended = self.ended.as_ref().filter(|_| can_be_undone)?;
        Some(ended.at.after(settings.undo_window))
    }

    /// Whether the frozen or decided list of members has `key` in it.
    #[must_use]
    pub fn is_listed(&self, key: AgentKey) -> bool {
        self.frozen.as_ref().is_some_and(|frozen| frozen.proposal.seat_of(key).is_some())
    }
}
