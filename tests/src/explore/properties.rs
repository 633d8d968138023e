//! The properties that every state must have, and those of the road from it.

use std::fmt;

use formation_explored::service::{Change, Cluster, Outcome, Phase, Seating};
use formation_explored::{Hash, KeyId, Micros, quorum};

use crate::explore::config::Config;
use crate::explore::identity::{incarnation, list, members_of, name};
use crate::explore::world::{Host, World};

/// One of the seven properties that are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Property {
    /// 1. One document per cluster (with ledger).
    OneDocument,
    /// 2. No node runs another list than the one committed.
    CommittedListOnly,
    /// 3. Two lists never both get a majority.
    NoTwoMajorities,
    /// 4. One start from empty per identity; none after data was lost.
    OneStartFromEmpty,
    /// 5. At most `size` seats; one key, one seat.
    SeatsBounded,
    /// 6. Nothing starts after abandon.
    NothingAfterAbandon,
    /// 7. A fault-free road leads to formed, or `explain` has a reason and a way out.
    AWayOut,
}

impl Property {
    /// All seven properties, in the order of their numbers.
    pub const EACH: [Property; 7] = [
        Property::OneDocument,
        Property::CommittedListOnly,
        Property::NoTwoMajorities,
        Property::OneStartFromEmpty,
        Property::SeatsBounded,
        Property::NothingAfterAbandon,
        Property::AWayOut,
    ];
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Property::OneDocument => "1: one document per cluster",
            Property::CommittedListOnly => "2: no node runs another list than the one committed",
            Property::NoTwoMajorities => "3: two lists never both get a majority",
            Property::OneStartFromEmpty => {
                "4: one start from empty per identity; none after data was lost"
            }
            Property::SeatsBounded => "5: at most `size` seats; one key, one seat",
            Property::NothingAfterAbandon => "6: nothing starts after abandon",
            Property::AWayOut => "7: a fault-free road leads to formed, or there is a way out",
        })
    }
}

/// A property that doesn't hold, and how it was violated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Property that doesn't hold.
    pub property: Property,
    /// Description of what was observed.
    pub what: String,
}

impl Violation {
    /// Returns a violation of `property`, described by `what`.
    #[must_use]
    pub fn of(property: Property, what: impl Into<String>) -> Violation {
        Violation { property, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "property {}: {}", self.property, self.what)
    }
}

/// Checks what a single transaction can violate.
///
/// - Property 5.
/// - A part of property 1: a decided list never changes, and a retired one never vanishes.
/// - Two parts of property 7: no list is committed with a dead member, and every member may still sign a new
///   frozen list.
pub(super) fn after_transaction(
    before: &Cluster,
    after: &Cluster,
    outcome: &Outcome,
    now: Micros,
) -> Result<(), Violation> {
    // Abandoning a committed cluster violates property 6, which is checked when a node starts afterwards.
    let is_kept = is_decided(after.phase) || before.phase == Phase::Retired;
    if let (true, Some(decided)) = (is_decided(before.phase) && is_kept, &before.frozen) {
        let is_same = after.frozen.as_ref().is_some_and(|frozen| frozen.h == decided.h);
        if !is_same || !is_decided(after.phase) {
            let what = format!("{} was decided, and is no more", list(decided.h));
            return Err(Violation::of(Property::OneDocument, what));
        }
    }
    let in_seats = after.agents.values().filter(|agent| matches!(agent.seating, Seating::Seat(_)));
    let seats = after.seats();
    let size = after.statement.size;
    if in_seats.count() != seats.len() || seats.keys().any(|&seat| seat == 0 || seat > size) {
        return Err(Violation::of(Property::SeatsBounded, "more holders than seats"));
    }
    if let Some(frozen) = &after.frozen {
        let mut keys: Vec<KeyId> =
            frozen.proposal.records.iter().map(|record| record.key).collect();
        keys.sort_unstable();
        keys.dedup();
        if keys.len() != usize::from(size) {
            return Err(Violation::of(Property::SeatsBounded, "a frozen list of another size"));
        }
    }
    let decided = outcome.changes.iter().any(|change| matches!(change, Change::Committed { .. }));
    if let (true, Some(frozen)) = (decided, &after.frozen) {
        let gone = frozen.proposal.records.iter().find(|record| {
            before.agents.get(&record.key).is_none_or(|agent| agent.lease_until <= now)
        });
        if let Some(record) = gone {
            let what = format!("{} was committed though its lease had lapsed", name(record.key));
            return Err(Violation::of(Property::AWayOut, what));
        }
    }
    for change in &outcome.changes {
        if let Change::Frozen { epoch, .. } = change {
            let signed = seats.values().find(|key| after.agents[*key].highest_epoch >= *epoch);
            if let Some(key) = signed {
                let what = format!(
                    "epoch {epoch} was frozen with {}, which has signed or released epoch {}",
                    name(*key),
                    after.agents[key].highest_epoch
                );
                return Err(Violation::of(Property::AWayOut, what));
            }
        }
    }
    Ok(())
}

fn is_decided(phase: Phase) -> bool {
    matches!(phase, Phase::Committed | Phase::Formed | Phase::Retired)
}

/// Checks properties 1 and 6 when a process sends a document.
pub(super) fn document_leaves(world: &World, config: &Config, h: Hash) -> Result<(), Violation> {
    if config.expects_ledger
        && let Some(other) = world.said.documents.iter().find(|&&other| other != h)
    {
        let what = format!("{} and {} have both left the service", list(*other), list(h));
        return Err(Violation::of(Property::OneDocument, what));
    }
    if world.said.abandoned && config.expects_ledger {
        let what = format!("{} left the service after the cluster was abandoned", list(h));
        return Err(Violation::of(Property::NothingAfterAbandon, what));
    }
    Ok(())
}

/// Checks properties 2 and 6 when a node is executed with list `h`.
pub(super) fn node_executed(world: &World, config: &Config, h: Hash) -> Result<(), Violation> {
    if !config.liar && !world.said.committed.contains(&h) {
        let what = format!("a node runs {}, which nobody committed", list(h));
        return Err(Violation::of(Property::CommittedListOnly, what));
    }
    if config.expects_ledger
        && let Some(other) = world.said.started.values().find(|&&other| other != h)
    {
        let what = format!("nodes run {} and {}", list(*other), list(h));
        return Err(Violation::of(Property::CommittedListOnly, what));
    }
    if world.said.abandoned && config.expects_ledger {
        let what = format!("a node starts with {} after the cluster was abandoned", list(h));
        return Err(Violation::of(Property::NothingAfterAbandon, what));
    }
    Ok(())
}

/// Checks property 4 when `host`'s node makes a log from nothing, as the identity of `key`.
pub(super) fn log_made(world: &World, host: &Host, key: KeyId) -> Result<(), Violation> {
    if world.said.started.contains_key(&incarnation(key)) {
        let what = format!("the identity {} starts from empty a second time", name(key));
        return Err(Violation::of(Property::OneStartFromEmpty, what));
    }
    if host.data_lost {
        let what = format!("the identity {} starts from empty after its data was lost", name(key));
        return Err(Violation::of(Property::OneStartFromEmpty, what));
    }
    Ok(())
}

/// Checks property 3, after a start was recorded.
pub(super) fn no_two_majorities(world: &World, config: &Config) -> Result<(), Violation> {
    let lists: std::collections::BTreeSet<Hash> = world.said.started.values().copied().collect();
    let majority = |h: Hash| {
        let members = members_of(h);
        let started = members.filter(|&key| world.said.started.get(&incarnation(key)) == Some(&h));
        started.count() >= quorum(usize::from(config.seats))
    };
    let with_majority: Vec<Hash> = lists.into_iter().filter(|&h| majority(h)).collect();
    for (place, &one) in with_majority.iter().enumerate() {
        for &other in &with_majority[place + 1..] {
            let shared = members_of(one).any(|key| members_of(other).any(|second| second == key));
            if shared || config.expects_ledger {
                let what = format!("{} and {} both have a majority", list(one), list(other));
                return Err(Violation::of(Property::NoTwoMajorities, what));
            }
        }
    }
    Ok(())
}
