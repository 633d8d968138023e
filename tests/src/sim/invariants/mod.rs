//! What must hold after every step, one file each.

pub mod changes;
pub mod configurations;
pub mod durable_acks;
pub mod election_safety;
pub mod leader_completeness;
pub mod leases;
pub mod linearizable;
pub mod log_matching;
pub mod monotone;
pub mod progress;
pub mod quorum_counts;
pub mod quorums;
pub mod removed;
pub mod state_machine;
pub mod store;
pub mod watch;

use node_consensus::{Message, MessageKind};

use super::Violation;

/// All of them.
#[derive(Debug, Default)]
pub struct Invariants {
    /// One leader per term, one vote per member and term.
    pub elections: election_safety::ElectionSafety,
    /// Equal (index, term), equal entries before it.
    pub logs: log_matching::LogMatching,
    /// What is committed is in every later leader's log.
    pub leaders: leader_completeness::LeaderCompleteness,
    /// One entry per index is ever applied.
    pub machines: state_machine::StateMachineSafety,
    /// Terms, votes and commit indexes don't go back.
    pub monotone: monotone::Monotone,
    /// Reads and writes as if there were one copy.
    pub clients: linearizable::Linearizable,
    /// Answers and stores are the model's.
    pub stores: store::Stores,
    /// The next change waits for the last.
    pub changes: changes::Changes,
    /// Voters count, and nobody else.
    pub counts: quorum_counts::QuorumCounts,
    /// Who was removed doesn't act.
    pub removed: removed::Removed,
    /// Leases live as long as they were granted for.
    pub leases: leases::Leases,
    /// What was acknowledged stays.
    pub acks: durable_acks::DurableAcks,
}

impl Invariants {
    /// A message has left a member, which runs on `machine`.
    pub fn sent(&mut self, machine: u64, message: &Message) -> Result<(), Violation> {
        self.monotone.sent(machine, message);
        if message.kind == MessageKind::Append {
            self.logs.observe(message.from, &message.entries, Some(message.log_term))?;
        }
        self.elections.sent(message)
    }
}
