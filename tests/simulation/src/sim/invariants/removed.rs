//! Invariant: a removed member never acts again.
//!
//! - The member's process doesn't start on a machine with the member's tombstone.
//! - The member isn't elected if a quorum of the remaining voters had applied its removal when they
//!   voted.
//! - No id and no incarnation is used twice.

use std::collections::{BTreeMap, BTreeSet};

use node_consensus::{Members, Role, Status};

use crate::model::members::MembershipModel;
use crate::sim::InvariantViolation;

/// History of members, machines and incarnations, as far as the invariant needs it.
#[derive(Debug, Default)]
pub struct RemovedMembers {
    /// Machines with a tombstone.
    machines_with_tombstone: BTreeSet<u64>,
    /// Highest index that each member has applied.
    applied: BTreeMap<u64, u64>,
    /// Index that each member had applied when it voted, by member and term. It is kept because a
    /// vote may be counted much later, when the member has applied more.
    voted: BTreeMap<(u64, u64), u64>,
    /// Last term in which each member has led.
    led: BTreeMap<u64, u64>,
    /// Member as which each incarnation ran for the first time.
    incarnations: BTreeMap<u128, u64>,
}

fn violated(what: String) -> Result<(), InvariantViolation> {
    Err(InvariantViolation::new("removed members never act", what))
}

impl RemovedMembers {
    /// Records that this machine has a tombstone.
    pub fn record_tombstone(&mut self, machine: u64) {
        self.machines_with_tombstone.insert(machine);
    }

    /// Checks that a machine's process may run as this member with this incarnation.
    pub fn check_start(
        &mut self,
        machine: u64,
        member: u64,
        incarnation: u128,
    ) -> Result<(), InvariantViolation> {
        if self.machines_with_tombstone.contains(&machine) {
            return violated(format!("{member} runs on {machine}, which has its tombstone"));
        }
        let first = *self.incarnations.entry(incarnation).or_insert(member);
        if first == member {
            return Ok(());
        }
        violated(format!("the incarnation of {first} runs as {member}"))
    }

    /// Checks a member's state after a step.
    pub fn observe(
        &mut self,
        member: u64,
        status: &Status,
        members: &Members,
        model: &MembershipModel,
    ) -> Result<(), InvariantViolation> {
        let applied = self.applied.entry(member).or_default();
        *applied = status.applied.max(*applied);
        if status.vote != 0 {
            self.voted.entry((member, status.term)).or_insert(*applied);
        }
        if status.role != Role::Leader {
            return Ok(());
        }
        if let Some(peer) = status.peers.iter().find(|peer| !members.contains(peer.member)) {
            return violated(format!("{member} has the peer {}, which is no member", peer.member));
        }
        if self.led.insert(member, status.term) == Some(status.term) {
            return Ok(());
        }
        let Some(removal) = model.removal(member) else { return Ok(()) };
        let left = model.configuration_at(removal).map_or(&[][..], |left| &left.members.voters);
        let has =
            |voter: &&u64| self.voted.get(&(**voter, status.term)).is_some_and(|at| *at >= removal);
        if left.iter().filter(has).count() <= left.len() / 2 {
            return Ok(());
        }
        violated(format!("{member}, removed by entry {removal}, leads in term {}", status.term))
    }
}
