//! Everything that the service keeps about one cluster: plain data, loaded from its rows under the
//! row lock and saved in the same transaction.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::service::settings::Settings;
use crate::values::{
    ClusterId, Epoch, GrantId, Hash, KeyId, Micros, Proposal, Record, Release, Seat, Session,
    Statement, quorum,
};

/// Where a cluster stands. A draft isn't one yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Seats are taken and lost.
    Open,
    /// A list is frozen and waits for its acks.
    Preparing,
    /// The list is decided, for ever.
    Committed,
    /// A majority runs it.
    Formed,
    /// The deadline passed before the commit.
    Expired,
    /// Given up before the commit, by an operator or by `db accept`.
    Abandoned,
    /// Ended by its owner after the commit.
    Retired,
}

impl Phase {
    /// As it is written in the API and in rows.
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

    /// The reverse of [`Phase::as_str`].
    #[must_use]
    pub fn parse(text: &str) -> Option<Phase> {
        use Phase::{Abandoned, Committed, Expired, Formed, Open, Preparing, Retired};
        [Open, Preparing, Committed, Formed, Expired, Abandoned, Retired]
            .into_iter()
            .find(|phase| phase.as_str() == text)
    }

    /// Nothing happens in it any more, unless a document undoes `db accept` or an owner takes a
    /// retirement back.
    #[must_use]
    pub fn has_ended(self) -> bool {
        matches!(self, Phase::Expired | Phase::Abandoned | Phase::Retired)
    }
}

/// One cluster, whole. Every field is persisted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Its id; never changes.
    pub id: ClusterId,
    /// The newest statement. The chain itself is the store's.
    pub statement: Statement,
    /// Where it stands.
    pub phase: Phase,
    /// The epoch of the proposal, or of the next one. Starts at 1, never falls in one database.
    pub epoch: Epoch,
    /// The highest epoch that any of its agents has signed or released, as far as they told.
    pub floor: Epoch,
    /// Moves by one whenever something that agents or `explain` show has changed.
    pub rev: u64,
    /// When an uncommitted cluster expires.
    pub deadline: Micros,
    /// Every agent key that has redeemed, seated or not. Rows are never deleted: they count
    /// towards the limit of keys.
    pub agents: BTreeMap<KeyId, Applicant>,
    /// The next place in the queue of standbys; only grows.
    pub next_place: u64,
    /// In preparing: the proposal. From the commit on: the decided list. Else none.
    pub frozen: Option<Frozen>,
    /// Member → Raft cluster id that its own node reports. After the commit only.
    pub reports: BTreeMap<KeyId, u64>,
    /// Grants revoked: they admit no new key.
    pub revoked: BTreeSet<GrantId>,
    /// Why it ended; set in the three last phases.
    pub ended: Option<Ended>,
    /// A second valid document was shown: nothing is done here any more.
    pub split: Option<Split>,
    /// The database's generation has changed and the ledgers have not agreed yet: nothing is
    /// frozen or committed.
    pub unsettled: bool,
    /// What went wrong last, for `explain`.
    pub last_error: Option<LastError>,
}

/// What the service keeps of one agent that has redeemed: no more than this decides on its seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applicant {
    /// Its newest record.
    pub record: Arc<Record>,
    /// How many seats the grant of its record may hold at once.
    pub uses: u32,
    /// Seat, queue or neither.
    pub seating: Seating,
    /// Its lease; judged only while the cluster is open or preparing and `seating` isn't `Absent`.
    pub lease_until: Micros,
    /// The session that holds the key; none after an adoption, until it speaks.
    pub session: Option<Session>,
    /// The highest epoch that it says it signed or released.
    pub highest_epoch: Epoch,
    /// How often it has been counted.
    pub counts: u32,
    /// A freeze waits until then if it is seated.
    pub held_until: Micros,
    /// Its newest release, kept and served as long as the cluster is forming.
    pub release: Option<Release>,
}

/// Whether an applicant sits, waits or has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Seating {
    /// In a seat, 1 to `size`.
    Seat(Seat),
    /// Waiting; the smallest number waits longest.
    Standby(u64),
    /// Its lease has lapsed.
    Absent,
}

/// A frozen list and what has come in for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The list.
    pub proposal: Proposal,
    /// Its hash.
    pub h: Hash,
    /// When it was frozen.
    pub at: Micros,
    /// The acks: JWS by the agent's key over `h`.
    pub acks: BTreeMap<KeyId, Arc<str>>,
    /// Prober → its row of the matrix.
    pub probes: BTreeMap<KeyId, Row>,
}

/// One prober's findings: peer → what happened.
pub type Row = BTreeMap<KeyId, Probe>;

/// What a probe of one peer found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// The right agent answered.
    Reached,
    /// Not yet, and why: one sentence, of which 400 bytes are kept.
    Failed(String),
}

/// Why and how a cluster ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// What ended it.
    pub cause: EndCause,
    /// When.
    pub at: Micros,
    /// By whom (an admin's name), and why, in words.
    pub by: String,
}

/// What ended a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndCause {
    /// `cluster abandon`.
    Abandon,
    /// `db accept` after the database changed; a valid document undoes it.
    DatabaseAccepted,
    /// The deadline passed.
    Deadline,
    /// An owner-signed retire.
    Retire,
}

impl EndCause {
    /// As it is written in the API and in rows.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            EndCause::Abandon => "abandon",
            EndCause::DatabaseAccepted => "database_accepted",
            EndCause::Deadline => "deadline",
            EndCause::Retire => "retire",
        }
    }

    /// The reverse of [`EndCause::as_str`].
    #[must_use]
    pub fn parse(text: &str) -> Option<EndCause> {
        [EndCause::Abandon, EndCause::DatabaseAccepted, EndCause::Deadline, EndCause::Retire]
            .into_iter()
            .find(|cause| cause.as_str() == text)
    }
}

/// Two valid documents of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The one that was not taken.
    pub other: Hash,
    /// Its epoch.
    pub epoch: Epoch,
}

/// The last thing that went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError {
    /// When.
    pub at: Micros,
    /// Whose, if it is an agent's.
    pub key: Option<KeyId>,
    /// One sentence.
    pub text: String,
}

impl Cluster {
    /// A cluster as it is when its first statement is stored: open, nobody in it.
    #[must_use]
    pub fn opened(statement: Statement, deadline: Micros) -> Cluster {
        Cluster {
            id: statement.cluster,
            statement,
            phase: Phase::Open,
            epoch: 1,
            floor: 0,
            rev: 1,
            deadline,
            agents: BTreeMap::new(),
            next_place: 1,
            frozen: None,
            reports: BTreeMap::new(),
            revoked: BTreeSet::new(),
            ended: None,
            split: None,
            unsettled: false,
            last_error: None,
        }
    }

    /// Who sits where, seat 1 first.
    #[must_use]
    pub fn seats(&self) -> BTreeMap<Seat, KeyId> {
        let seat = |(&key, agent): (&KeyId, &Applicant)| match agent.seating {
            Seating::Seat(seat) => Some((seat, key)),
            Seating::Standby(_) | Seating::Absent => None,
        };
        self.agents.iter().filter_map(seat).collect()
    }

    /// Who waits, longest first.
    #[must_use]
    pub fn standbys(&self) -> BTreeMap<u64, KeyId> {
        let standby = |(&key, agent): (&KeyId, &Applicant)| match agent.seating {
            Seating::Standby(order) => Some((order, key)),
            Seating::Seat(_) | Seating::Absent => None,
        };
        self.agents.iter().filter_map(standby).collect()
    }

    /// The Raft cluster that a majority of the founders report.
    #[must_use]
    pub fn majority_report(&self) -> Option<u64> {
        let majority = quorum(usize::from(self.statement.size));
        let agreeing = |id: &u64| self.reports.values().filter(|other| *other == id).count();
        self.reports.values().copied().find(|id| agreeing(id) >= majority)
    }

    /// Until when a retirement may be taken back; none for a cluster that is not retired.
    #[must_use]
    pub fn unretire_until(&self, settings: &Settings) -> Option<Micros> {
        let ended = self.ended.as_ref().filter(|_| self.phase == Phase::Retired)?;
        Some(ended.at.after(settings.unretire))
    }

    /// Whether the decided list has `key` in it.
    #[must_use]
    pub fn lists(&self, key: KeyId) -> bool {
        self.frozen.as_ref().is_some_and(|frozen| frozen.proposal.seat_of(key).is_some())
    }
}
