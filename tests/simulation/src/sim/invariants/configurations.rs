//! Invariant: all parts of the system have one membership. Every store's member table equals the
//! model's table at the log index that the store has applied. Each process's consensus uses the
//! table of its store. In etcd's issues 13196, 20967 and 21694, members were learners in one place
//! and voters in another.

use node_consensus::Members;
use node_state::membership::MemberTable;

use crate::model::members::MembershipModel;
use crate::sim::InvariantViolation;

/// Checks the member table of a store that has applied entry `index`.
pub fn check_table(
    machine: u64,
    index: u64,
    table: &MemberTable,
    model: &MembershipModel,
) -> Result<(), InvariantViolation> {
    let violated = |what| Err(InvariantViolation::new("member tables equal the model's", what));
    let Some(expected) = model.configuration_at(index) else {
        return violated(format!("{index} precedes every known configuration"));
    };
    let found = table.voters_and_learners();
    if found != expected.members {
        let expected = &expected.members;
        return violated(format!("{machine} at {index}: {found:?}, not {expected:?}"));
    }
    let removed: Vec<u64> = table.removed().map(|(id, _)| id.0).collect();
    if !removed.iter().eq(&expected.removed) {
        let expected = &expected.removed;
        return violated(format!("{machine} at {index}: {removed:?} removed, not {expected:?}"));
    }
    Ok(())
}

/// Checks that consensus uses the members of the store's table. Call this only when consensus knows
/// up to which index the store has applied the log.
pub fn check_consensus_members(
    machine: u64,
    consensus: &Members,
    table: &MemberTable,
) -> Result<(), InvariantViolation> {
    let table = table.voters_and_learners();
    if *consensus == table {
        return Ok(());
    }
    let what = format!("{machine} counts with {consensus:?}, its table says {table:?}");
    Err(InvariantViolation::new("configuration equals table", what))
}
