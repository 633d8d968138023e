//! What consensus asks its caller to do.

use crate::{Entry, HardState, Message, Position, ReadContext};

/// One round of work. The crate's documentation says what is owed for each field.
#[derive(Debug, Default)]
pub struct Ready {
    /// Ascending; handed back to [`Consensus::persisted`](crate::Consensus::persisted).
    pub number: u64,
    /// May leave at once.
    pub messages: Vec<Message>,
    /// To be made durable.
    pub persist: Persist,
    /// May leave only when `persist` and everything before it is durable.
    pub after_persist: Vec<Message>,
    /// Committed and persisted: to be applied, in order.
    pub committed: Vec<Entry>,
    /// Reads whose index is confirmed.
    pub reads: Vec<ReadState>,
    /// Entries that a slow peer needs and that are no longer in memory.
    pub fetches: Vec<Fetch>,
    /// A peer that is behind the log's beginning: it needs a snapshot.
    pub snapshot_wanted: Option<u64>,
}

/// What has to be durable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Persist {
    /// Present if it changed. A change of `commit` alone may wait for the next write.
    pub hard_state: Option<HardState>,
    /// To be appended; they replace whatever the log holds from the first one's index on.
    pub entries: Vec<Entry>,
    /// A snapshot of this position replaces log and store, before `entries`.
    pub snapshot: Option<Position>,
    /// Something here can't wait: entries, a snapshot, a new term or vote, a change of members that
    /// is committed.
    pub urgent: bool,
}

/// A confirmed read: whoever asked under `context` may read once `index` is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadState {
    /// As returned by [`Consensus::read_index`](crate::Consensus::read_index).
    pub context: ReadContext,
    /// What must be applied first.
    pub index: u64,
}

/// Entries to be read from the log, for [`Consensus::fetched`](crate::Consensus::fetched).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Handed back with the result.
    pub id: u64,
    /// First index.
    pub low: u64,
    /// One past the last index.
    pub high: u64,
    /// Enough bytes (at least one entry in any case).
    pub max_bytes: u64,
}

/// A member's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// Receives.
    #[default]
    Follower,
    /// Asks whether an election could be won, without disturbing anyone.
    PreCandidate,
    /// Asks for votes.
    Candidate,
    /// Leads.
    Leader,
}

/// How replication to one peer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Looking for the place where the logs meet.
    Probe,
    /// Streaming entries.
    Replicate,
    /// Waiting for a snapshot to arrive there.
    Snapshot,
}

/// A leader's view of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    /// Who.
    pub member: u64,
    /// Known to be durable there.
    pub matched: u64,
    /// Sent next.
    pub next: u64,
    /// Ticks since its last message; `None` if it has sent none since this member started.
    pub silent_ticks: Option<u64>,
    /// How replication goes.
    pub state: PeerState,
}

/// Silence of up to this many ticks is normal: a member that answers each heartbeat, one a tick, may be up to
/// a tick late with each.
const PROMPT_TICKS: u64 = 2;

impl PeerStatus {
    /// Whether it has answered one of the last heartbeats.
    #[must_use]
    pub fn is_prompt(&self) -> bool {
        self.silent_ticks.is_some_and(|ticks| ticks <= PROMPT_TICKS)
    }
}

/// A moment's view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Current term.
    pub term: u64,
    /// Whom this member voted for in `term`; 0 is nobody.
    pub vote: u64,
    /// The leader this member knows; 0 is none.
    pub leader: u64,
    /// This member's part.
    pub role: Role,
    /// Highest committed index known.
    pub commit: u64,
    /// Highest index applied.
    pub applied: u64,
    /// First index that the log still has.
    pub first: u64,
    /// Last index, durable or not.
    pub last: u64,
    /// Last durable index.
    pub persisted: u64,
    /// Leaders only: an entry that was appended after every change of members that this leader has
    /// applied. Whoever has it on disk knows there, too, that those are committed.
    pub settles: Option<u64>,
    /// Leaders only: the other members, ascending by id.
    pub peers: Vec<PeerStatus>,
}
