//! What a step says to do and to answer.

use crate::service::cluster::Phase;
use crate::service::refusal::Refusal;
use crate::values::{Epoch, Hash, KeyId, Seat};

/// The result of one step. The caller, in this order: saves the cluster if `changed`; appends
/// `changes` to the event chain if there are any (the revision has moved by one); INSERTs into
/// `commits` if `committed`; COMMITs; raises `alarms`; fsyncs the ledger if the answer carries a
/// document; answers. All of that holds for a refusal too: what time did to the cluster stands.
#[derive(Debug)]
#[must_use]
pub struct Outcome {
    /// What to tell whoever asked.
    pub answer: Result<Answer, Refusal>,
    /// Something in the cluster is not as it was.
    pub changed: bool,
    /// What agents and `explain` see differently, in order; `rev` moved by one if any.
    pub changes: Vec<Change>,
    /// This step decided the list: INSERT it in this very transaction.
    pub committed: Option<Hash>,
    /// To be raised once the transaction is committed.
    pub alarms: Vec<Alarm>,
}

impl Outcome {
    /// Whether the revision moved: parked polls of this cluster wake.
    #[must_use]
    pub fn rev_moved(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Whether the answer carries the document, so that the ledger must have it first.
    #[must_use]
    pub fn document_leaves(&self) -> bool {
        matches!(&self.answer, Ok(Answer { document: Some(_), .. }))
    }
}

/// The answer to whoever asked: how the cluster looks to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Where the cluster stands.
    pub phase: Phase,
    /// Its epoch.
    pub epoch: Epoch,
    /// Its revision: poll with `after` this.
    pub rev: u64,
    /// Where the asker stands; none if it isn't an agent of this cluster.
    pub standing: Option<Standing>,
    /// In preparing, to those listed in it: serve `frozen` with the agents' releases.
    pub proposal: Option<Hash>,
    /// From the commit on, to those listed: serve the document with the asker's leaves.
    pub document: Option<Hash>,
}

/// Where an agent stands, as shown to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// In this seat.
    Seat(Seat),
    /// This many live standbys are ahead of it.
    Standby { ahead: usize },
    /// Neither: its lease has lapsed, or the list was decided without it.
    Out,
}

/// One visible change, for the event chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A new key.
    Joined { key: KeyId },
    /// It got a seat.
    Seated { key: KeyId, seat: Seat },
    /// It waits.
    Queued { key: KeyId },
    /// Its lease lapsed.
    Lapsed { key: KeyId },
    /// A new record took the old one's place.
    RecordReplaced { key: KeyId },
    /// It was counted, for the `counts`th time.
    Counted { key: KeyId, counts: u32 },
    /// The list was frozen.
    Frozen { epoch: Epoch, h: Hash },
    /// Back to open with `epoch`.
    Reopened { epoch: Epoch, why: Reopen },
    /// An ack came in.
    Acked { key: KeyId, epoch: Epoch },
    /// A row of the matrix came in.
    Probed { key: KeyId, epoch: Epoch },
    /// A release came in.
    Released { key: KeyId, epoch: Epoch },
    /// The list is decided.
    Committed { epoch: Epoch, h: Hash },
    /// A document that was shown is decided.
    Adopted { epoch: Epoch, h: Hash },
    /// A member reports its Raft cluster.
    Reported { key: KeyId, raft_cluster: u64 },
    /// A majority runs it.
    Formed { raft_cluster: u64 },
    /// The next statement.
    Restated { sequence: u64 },
    /// A grant was revoked.
    GrantRevoked,
    /// It ended.
    Ended { phase: Phase },
    /// Its retirement was taken back: it is committed or formed again.
    Unretired { phase: Phase, by: String },
    /// The database's generation changed.
    Unsettled,
    /// The ledgers agree, or an owner accepted.
    Settled,
    /// A second document was shown.
    Split { other: Hash },
    /// The same key from two sessions.
    KeyElsewhere { key: KeyId },
}

/// Why a proposal was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reopen {
    /// A seat's lease lapsed.
    Lapsed(KeyId),
    /// An agent refused.
    Refused { key: KeyId, reason: String },
    /// Not all acks came in time.
    TimedOut,
    /// A member replaced its record.
    RecordReplaced(KeyId),
    /// A next statement was stored.
    Restated,
    /// The database's generation changed.
    DatabaseChanged,
}

/// What a person should hear of at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// Two holders of one agent key: a clone, or a stolen key.
    KeyElsewhere { key: KeyId },
    /// Two valid documents of one cluster.
    Split { decided: Hash, other: Hash },
}
