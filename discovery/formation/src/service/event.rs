//! Events of a cluster at the service. The caller has verified everything in them.

use std::sync::Arc;

use crate::service::cluster::ProbeResults;
use crate::values::{
    AgentKey, AgentRecord, AgentSession, CommitDocument, Epoch, GrantId, Hash, Release, Statement,
    UnixMicros,
};

/// One event, applied in one transaction under the cluster's row lock.
#[derive(Clone, Debug)]
pub enum ClusterEvent {
    /// Time has passed: a waiting poll has reached its deadline, or the service's periodic sweep
    /// over all clusters is due.
    Tick,
    /// An agent redeems a token. The signatures by the agent's and the token's key, the chain to
    /// the statement, and the issuer's role are verified.
    Redeem(Redeem),
    /// An agent polls, with an access token that is bound to its key.
    Poll(Poll),
    /// An agent is about to send a message that names its session: a nack, a matrix row or a
    /// report. As with a poll, a session with a higher boot counter takes the key over.
    SessionSeen { key: AgentKey, session: AgentSession },
    /// A listed agent's signed ack for the proposal of `epoch`.
    Ack { key: AgentKey, epoch: Epoch, h: Hash, jws: Arc<str> },
    /// An agent can't sign the proposal and says why. The reason concerns only that agent.
    Nack { key: AgentKey, epoch: Epoch, reason: String },
    /// A row of the probe matrix; it replaces the same agent's earlier row.
    Probes { key: AgentKey, epoch: Epoch, row: ProbeResults },
    /// An agent's signed release of an epoch and all lower ones.
    Release { key: AgentKey, release: Release },
    /// A member's own node reports which Raft cluster it is in.
    Report { key: AgentKey, raft_cluster: u64 },
    /// A member's own node finds no leader; `text` is the reason from its log.
    Trouble { key: AgentKey, text: String },
    /// The cluster's next statement, signed by an owner whom the newest stored statement names.
    StatementAdded(Statement),
    /// An issuer approves an agent; `jws` is the approval as received.
    Approve { key: AgentKey, jws: Arc<str> },
    /// A grant was revoked. If `frees_seats`, the agents that redeemed it also lose their seats and
    /// places in the queue. They can't get new ones with this grant.
    GrantRevoked { grant: GrantId, frees_seats: bool },
    /// A whole commit document that an agent sent or a ledger holds. Chain, records and acks are
    /// verified.
    Adopt(CommitDocument),
    /// An operator abandons the cluster.
    Abandon { by: String },
    /// An owner has signed the cluster's retirement.
    Retire { by: String },
    /// An owner has signed a statement that takes the retirement back.
    Unretire { by: String },
    /// An owner lets a cluster whose deadline passed form after all, until `deadline`.
    Reopen { by: String, deadline: UnixMicros },
    /// The database is not the one that the processes have worked with, or lacks an entry of a
    /// ledger.
    DatabaseChanged,
    /// Every known process has restored its ledger's commits in the database.
    DatabaseSettled,
    /// An owner runs `db accept`. A cluster that is still forming is abandoned. Any other cluster
    /// goes on, without waiting for more ledgers.
    DatabaseAccepted { by: String },
}

/// Request of an agent to redeem a token.
#[derive(Clone, Debug)]
pub struct Redeem {
    /// Record of the agent, with the agent's key in it.
    pub record: Arc<AgentRecord>,
    /// Session of the agent that sends the request.
    pub session: AgentSession,
    /// Highest epoch of which the agent has signed a list or a release; 0 for none.
    pub highest_epoch: Epoch,
    /// Grant that the record names, as the database knows it.
    pub grant: Grant,
}

/// State of a grant in the database.
#[derive(Clone, Debug)]
pub struct Grant {
    pub id: GrantId,
    /// Number of seats that the grant may hold at once.
    pub uses: u32,
    /// Time from which on the grant admits no new key.
    pub expires: UnixMicros,
    pub revoked: bool,
}

/// Request of an agent for the state of its cluster.
#[derive(Clone, Copy, Debug)]
pub struct Poll {
    /// Public key of the agent.
    pub key: AgentKey,
    /// Session of the agent that sends the request.
    pub session: AgentSession,
    /// Highest epoch of which the agent has signed a list or a release; 0 for none.
    pub highest_epoch: Epoch,
}
