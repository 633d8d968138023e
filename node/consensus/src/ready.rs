//! Output of consensus: the work that the caller must do.

use crate::{Entry, HardState, Message, Position, ReadContext};

/// One round of work. The crate's documentation says what the caller has to do with each field.
#[derive(Debug, Default)]
pub struct Ready {
    /// Ascending number of this round. The caller passes it to
    /// [`Consensus::report_persisted`](crate::Consensus::report_persisted).
    pub number: u64,
    /// Messages that may be sent at once.
    pub messages: Vec<Message>,
    /// State that the caller must make durable.
    pub persist: PersistRequest,
    /// Messages that may be sent only after `persist` of this round and of all earlier rounds is
    /// durable.
    pub after_persist: Vec<Message>,
    /// Committed entries, durable here, that the caller must apply in order.
    pub committed: Vec<Entry>,
    /// Reads whose index a quorum has confirmed.
    pub reads: Vec<ReadState>,
    /// Entries that a slow peer needs and that are no longer in memory.
    pub fetches: Vec<FetchRequest>,
    /// Peer that needs a snapshot, because the log no longer has the entries that it lacks.
    pub snapshot_wanted: Option<u64>,
}

/// Changes that must be made durable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PersistRequest {
    /// Hard state, if it changed. A change of `commit` alone may wait for the next write.
    pub hard_state: Option<HardState>,
    /// Entries to append. They replace everything in the log from the first one's index on.
    pub entries: Vec<Entry>,
    /// Position of a snapshot that replaces log and store before `entries` are appended.
    pub snapshot: Option<Position>,
    /// Whether the write can't be delayed. This holds for entries, a snapshot, a new term or vote,
    /// and a committed change of members.
    pub urgent: bool,
}

/// A confirmed read: the requester may read once `index` is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadState {
    /// Context that [`Consensus::read_index`](crate::Consensus::read_index) returned.
    pub context: ReadContext,
    /// Index that must be applied before the read is answered.
    pub index: u64,
}

/// Request to read entries from the log and pass them to
/// [`Consensus::supply_fetched`](crate::Consensus::supply_fetched).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchRequest {
    /// Number of the request. The caller passes it back with the entries.
    pub id: u64,
    /// Index of the first entry to read.
    pub low: u64,
    /// Index after the last entry to read.
    pub high: u64,
    /// Bytes after which the caller may stop reading. The caller reads at least one entry in any
    /// case.
    pub max_bytes: u64,
}

/// Role of a member in its current term.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// Follows a leader, or waits for one.
    #[default]
    Follower,
    /// Runs a pre-vote: asks whether it could win an election, without raising any term.
    PreCandidate,
    /// Requests votes for itself.
    Candidate,
    /// Replicates its log to the others.
    Leader,
}

/// State of the replication to one peer, as in etcd's raft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Searches for the last entry that both logs have in common.
    Probe,
    /// Sends entries without waiting for each acknowledgement.
    Replicate,
    /// Waits until the peer has received a snapshot.
    Snapshot,
}

/// A leader's view of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    pub member: u64,
    /// Highest index known to be durable on the peer.
    pub matched: u64,
    /// Index of the next entry to send to the peer.
    pub next: u64,
    /// Ticks since the peer's last message; `None` if it has sent none since this member started.
    pub silent_ticks: Option<u64>,
    pub state: PeerState,
}

/// Largest normal number of ticks without a message from a peer. A leader sends a heartbeat in each
/// tick, the peer answers each of them, and an answer can be up to a tick late.
const PROMPT_TICKS: u64 = 2;

impl PeerStatus {
    /// Returns whether the peer has answered one of the latest heartbeats.
    #[must_use]
    pub fn is_prompt(&self) -> bool {
        self.silent_ticks.is_some_and(|ticks| ticks <= PROMPT_TICKS)
    }
}

/// State of a consensus instance at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub term: u64,
    /// Member that received this member's vote in `term`; 0 if none did.
    pub vote: u64,
    /// Leader known to this member; 0 if it knows none.
    pub leader: u64,
    pub role: Role,
    /// Highest index known to be committed.
    pub commit: u64,
    /// Highest index that was applied.
    pub applied: u64,
    /// First index that the log still has.
    pub first: u64,
    /// Last index, durable or not.
    pub last: u64,
    /// Last index that is durable on this member.
    pub persisted: u64,
    /// Leaders only: index of an entry that comes after all changes of members that this leader has
    /// applied. A member that has this entry on disk also knows durably that those changes are
    /// committed.
    pub barrier_index: Option<u64>,
    /// Leaders only: replication status of the other members, ascending by id.
    pub peers: Vec<PeerStatus>,
}
