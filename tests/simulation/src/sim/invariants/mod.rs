//! Invariants that must hold after every step, one file each.

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

use super::InvariantViolation;

/// State of all invariants of one history.
#[derive(Debug, Default)]
pub struct Invariants {
    /// Each term has at most one leader, and each member votes once per term.
    pub elections: election_safety::ElectionSafety,
    /// If two logs have an entry with the same index and term, they are equal up to that entry.
    pub logs: log_matching::LogMatching,
    /// Committed entries are in every later leader's log.
    pub leaders: leader_completeness::LeaderCompleteness,
    /// At most one entry is ever applied at each index.
    pub machines: state_machine::StateMachineSafety,
    /// Terms, votes and commit indexes never go back.
    pub monotone: monotone::Monotone,
    /// Reads and writes behave as with a single copy.
    pub clients: linearizable::Linearizable,
    /// Answers and stores equal the model's.
    pub stores: store::StoreComparison,
    /// A membership change is proposed only once a quorum knows that the previous one is committed.
    pub changes: changes::MembershipChanges,
    /// A quorum consists of voters only.
    pub counts: quorum_counts::QuorumCounts,
    /// Removed members never act.
    pub removed: removed::RemovedMembers,
    /// Leases last as long as they were granted for.
    pub leases: leases::Leases,
    /// Acknowledged writes are never lost.
    pub acks: durable_acks::DurableAcks,
}

impl Invariants {
    /// Checks a message that a member on `machine` has sent.
    pub fn check_message(
        &mut self,
        machine: u64,
        message: &Message,
    ) -> Result<(), InvariantViolation> {
        self.monotone.record_sent_term(machine, message);
        if message.kind == MessageKind::Append {
            self.logs.observe(message.from, &message.entries, Some(message.log_term))?;
        }
        self.elections.check_vote(message)
    }
}
