//! What can happen to a cluster at the service. Everything in an event has been verified.

use std::sync::Arc;

use crate::service::cluster::Row;
use crate::values::{
    Document, Epoch, GrantId, Hash, KeyId, Micros, Record, Release, Session, Statement,
};

/// One event, applied in one transaction under the cluster's row lock.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time has passed: a parked poll's deadline, or the sweep.
    Tick,
    /// A redeem; both signatures, the chain to the statement and the issuer's role are verified.
    Redeem(Redeem),
    /// A poll, by an access token bound to `key`.
    Poll(Poll),
    /// An agent is about to send what names its session: a nack, a row or a report. A higher boot
    /// counter takes over, as with a poll.
    Speaks { key: KeyId, session: Session },
    /// A signed ack.
    Ack { key: KeyId, epoch: Epoch, h: Hash, jws: Arc<str> },
    /// An agent can't sign, and says why; it speaks for itself only.
    Nack { key: KeyId, epoch: Epoch, reason: String },
    /// A row of the probe matrix; it replaces the prober's row of before.
    Probes { key: KeyId, epoch: Epoch, row: Row },
    /// A signed release.
    Release { key: KeyId, release: Release },
    /// A member's own node says which Raft cluster it is in.
    Report { key: KeyId, raft_cluster: u64 },
    /// A member's own node finds no leader, and says why in its log.
    Trouble { key: KeyId, text: String },
    /// The next statement, signed by an owner in the last one.
    Restate(Statement),
    /// A grant was revoked.
    GrantRevoked(GrantId),
    /// A whole document, verified by chain, records and acks: shown by an agent or by a ledger.
    Adopt(Document),
    /// An operator gives the cluster up.
    Abandon { by: String },
    /// An owner signed its end.
    Retire { by: String },
    /// An owner signed that the retirement is taken back.
    Unretire { by: String },
    /// This database is not the one that the processes knew, or lacks an entry of a ledger.
    DatabaseChanged,
    /// Every known process has put its ledger's commits back.
    DatabaseSettled,
    /// An owner runs `db accept`: abandons what isn't committed, serves the rest.
    DatabaseAccepted { by: String },
}

/// A redeem.
#[derive(Clone, Debug)]
pub struct Redeem {
    /// The agent's record; its key is the agent's.
    pub record: Arc<Record>,
    /// Who holds the key now.
    pub session: Session,
    /// The highest epoch that it signed or released, 0 for none.
    pub highest_epoch: Epoch,
    /// The grant that the record names, as the database knows it.
    pub grant: Grant,
}

/// What the database knows of a grant.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Its id.
    pub id: GrantId,
    /// How many seats it may hold at once.
    pub uses: u32,
    /// When it stops admitting new keys.
    pub expires: Micros,
    /// Whether it was revoked.
    pub revoked: bool,
}

/// A poll.
#[derive(Clone, Copy, Debug)]
pub struct Poll {
    /// Whose.
    pub key: KeyId,
    /// Who holds the key now.
    pub session: Session,
    /// The highest epoch that it signed or released, 0 for none.
    pub highest_epoch: Epoch,
}
