//! Rule: membership exists once. The member table of every store is the model's at the store's
//! position, and what a process' consensus counts with is its store's table (etcd 13196, 20967,
//! 21694: members that were learners here and voters there).

use muster_node::membership::MemberTable;
use node_consensus::Members;

use crate::model::members::Membership;
use crate::sim::Violation;

/// A store that has applied entry `index` has this table.
pub fn table(
    machine: u64,
    index: u64,
    table: &MemberTable,
    model: &Membership,
) -> Result<(), Violation> {
    let violated = |what| Err(Violation::new("member tables are the model's", what));
    let Some(expected) = model.at(index) else { return violated(format!("{index} is before all")) };
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

/// A process that has applied what its store has counts with its members.
pub fn counted(machine: u64, consensus: &Members, table: &MemberTable) -> Result<(), Violation> {
    let table = table.voters_and_learners();
    if *consensus == table {
        return Ok(());
    }
    let what = format!("{machine} counts with {consensus:?}, its table says {table:?}");
    Err(Violation::new("configuration equals table", what))
}
