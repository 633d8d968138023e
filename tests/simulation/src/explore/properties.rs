//! The seven properties. Six of them must hold in every state and at every step. The seventh must
//! hold for the fault-free run from a state.

use std::fmt;

use formation_explored::service::{Cluster, ClusterChange, Phase, Seating, StepOutcome};
use formation_explored::{AgentKey, Hash, UnixMicros, quorum};

use crate::explore::config::ExplorationConfig;
use crate::explore::identities::{format_list, incarnation, members_of, name};
use crate::explore::state::{HostState, SystemState};

/// One of the seven properties that are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Property {
    /// 1. A cluster has at most one commit document, if its processes keep ledgers.
    OneDocument,
    /// 2. No node runs another list of members than the committed one.
    CommittedListOnly,
    /// 3. No two lists of members both get a majority. Without ledgers, this is checked only for
    ///    lists that share a host.
    NoTwoMajorities,
    /// 4. With each incarnation, a node starts from empty at most once, and never after data was
    ///    lost.
    OneStartFromEmpty,
    /// 5. At most `size` seats are taken, and no key has two of them.
    SeatsBounded,
    /// 6. No node starts after the cluster was abandoned.
    NothingAfterAbandon,
    /// 7. A run without further faults forms the cluster, or `explain` names a reason and a way
    ///    out.
    WayOut,
}

impl Property {
    /// All seven properties, in the order of their numbers.
    pub const ALL: [Property; 7] = [
        Property::OneDocument,
        Property::CommittedListOnly,
        Property::NoTwoMajorities,
        Property::OneStartFromEmpty,
        Property::SeatsBounded,
        Property::NothingAfterAbandon,
        Property::WayOut,
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
            Property::WayOut => {
                "7: without further faults the cluster forms, or there is a way out"
            }
        })
    }
}

/// A property that doesn't hold, and how it was violated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PropertyViolation {
    /// Property that doesn't hold.
    pub property: Property,
    /// Description of the violation.
    pub description: String,
}

impl PropertyViolation {
    /// Returns a violation of `property`, described by `what`.
    #[must_use]
    pub fn new(property: Property, what: impl Into<String>) -> PropertyViolation {
        PropertyViolation { property, description: what.into() }
    }
}

impl fmt::Display for PropertyViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "property {}: {}", self.property, self.description)
    }
}

/// Checks the properties that a single transaction can violate.
///
/// - Property 5.
/// - A part of property 1: a decided list never changes, and a retired list never vanishes.
/// - Two parts of property 7: no list is committed with a dead member, and every member may still
///   sign a new frozen list.
pub(super) fn check_transaction(
    before: &Cluster,
    after: &Cluster,
    outcome: &StepOutcome,
    now: UnixMicros,
) -> Result<(), PropertyViolation> {
    // Abandoning a committed cluster violates property 6, which is checked when a node starts
    // afterwards.
    let is_kept = is_decided(after.phase) || before.phase == Phase::Retired;
    if let (true, Some(decided)) = (is_decided(before.phase) && is_kept, &before.frozen) {
        let is_same = after
            .frozen
            .as_ref()
            .is_some_and(|frozen| frozen.proposal_hash == decided.proposal_hash);
        if !is_same || !is_decided(after.phase) {
            let what =
                format!("{} was decided, and is no more", format_list(decided.proposal_hash));
            return Err(PropertyViolation::new(Property::OneDocument, what));
        }
    }
    let in_seats = after.agents.values().filter(|agent| matches!(agent.seating, Seating::Seat(_)));
    let seats = after.seats();
    let size = after.statement.size;
    if in_seats.count() != seats.len() || seats.keys().any(|&seat| seat == 0 || seat > size) {
        return Err(PropertyViolation::new(Property::SeatsBounded, "more holders than seats"));
    }
    if let Some(frozen) = &after.frozen {
        let mut keys: Vec<AgentKey> =
            frozen.proposal.records.iter().map(|record| record.key).collect();
        keys.sort_unstable();
        keys.dedup();
        if keys.len() != usize::from(size) {
            return Err(PropertyViolation::new(
                Property::SeatsBounded,
                "a frozen list of another size",
            ));
        }
    }
    let decided =
        outcome.changes.iter().any(|change| matches!(change, ClusterChange::Committed { .. }));
    if let (true, Some(frozen)) = (decided, &after.frozen) {
        let gone = frozen.proposal.records.iter().find(|record| {
            before.agents.get(&record.key).is_none_or(|agent| agent.lease_until <= now)
        });
        if let Some(record) = gone {
            let what = format!("{} was committed though its lease had lapsed", name(record.key));
            return Err(PropertyViolation::new(Property::WayOut, what));
        }
    }
    for change in &outcome.changes {
        if let ClusterChange::Frozen { epoch, .. } = change {
            let signed = seats.values().find(|key| after.agents[*key].highest_epoch >= *epoch);
            if let Some(key) = signed {
                let what = format!(
                    "epoch {epoch} was frozen with {}, which has signed or released epoch {}",
                    name(*key),
                    after.agents[key].highest_epoch
                );
                return Err(PropertyViolation::new(Property::WayOut, what));
            }
        }
    }
    Ok(())
}

fn is_decided(phase: Phase) -> bool {
    matches!(phase, Phase::Committed | Phase::Formed | Phase::Retired)
}

/// Checks properties 1 and 6 when a process sends a commit document.
pub(super) fn check_sent_document(
    system: &SystemState,
    config: &ExplorationConfig,
    h: Hash,
) -> Result<(), PropertyViolation> {
    if config.expects_ledger
        && let Some(other) = system.sent.documents.iter().find(|&&other| other != h)
    {
        let what =
            format!("{} and {} have both left the service", format_list(*other), format_list(h));
        return Err(PropertyViolation::new(Property::OneDocument, what));
    }
    if system.sent.abandoned && config.expects_ledger {
        let what = format!("{} left the service after the cluster was abandoned", format_list(h));
        return Err(PropertyViolation::new(Property::NothingAfterAbandon, what));
    }
    Ok(())
}

/// Checks properties 2 and 6 when a node is executed with the list of members that has the hash
/// `h`.
pub(super) fn check_executed_node(
    system: &SystemState,
    config: &ExplorationConfig,
    h: Hash,
) -> Result<(), PropertyViolation> {
    if !config.service_lies && !system.sent.committed.contains(&h) {
        let what = format!("a node runs {}, which nobody committed", format_list(h));
        return Err(PropertyViolation::new(Property::CommittedListOnly, what));
    }
    if config.expects_ledger
        && let Some(other) = system.sent.started.values().find(|&&other| other != h)
    {
        let what = format!("nodes run {} and {}", format_list(*other), format_list(h));
        return Err(PropertyViolation::new(Property::CommittedListOnly, what));
    }
    if system.sent.abandoned && config.expects_ledger {
        let what = format!("a node starts with {} after the cluster was abandoned", format_list(h));
        return Err(PropertyViolation::new(Property::NothingAfterAbandon, what));
    }
    Ok(())
}

/// Checks property 4 when `host`'s node makes a log from nothing, with the incarnation of `key`.
pub(super) fn check_new_log(
    system: &SystemState,
    host: &HostState,
    key: AgentKey,
) -> Result<(), PropertyViolation> {
    if system.sent.started.contains_key(&incarnation(key)) {
        let what = format!("the identity {} starts from empty a second time", name(key));
        return Err(PropertyViolation::new(Property::OneStartFromEmpty, what));
    }
    if host.data_lost {
        let what = format!("the identity {} starts from empty after its data was lost", name(key));
        return Err(PropertyViolation::new(Property::OneStartFromEmpty, what));
    }
    Ok(())
}

/// Checks property 3 after the start of a node was recorded.
pub(super) fn check_majorities(
    system: &SystemState,
    config: &ExplorationConfig,
) -> Result<(), PropertyViolation> {
    let lists: std::collections::BTreeSet<Hash> = system.sent.started.values().copied().collect();
    let majority = |h: Hash| {
        let members = members_of(h);
        let started = members.filter(|&key| system.sent.started.get(&incarnation(key)) == Some(&h));
        started.count() >= quorum(usize::from(config.seats))
    };
    let with_majority: Vec<Hash> = lists.into_iter().filter(|&h| majority(h)).collect();
    for (place, &one) in with_majority.iter().enumerate() {
        for &other in &with_majority[place + 1..] {
            let shared = members_of(one).any(|key| members_of(other).any(|second| second == key));
            if shared || config.expects_ledger {
                let what =
                    format!("{} and {} both have a majority", format_list(one), format_list(other));
                return Err(PropertyViolation::new(Property::NoTwoMajorities, what));
            }
        }
    }
    Ok(())
}
