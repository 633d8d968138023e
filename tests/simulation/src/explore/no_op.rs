//! Recognises actions that would change nothing in a state. That is cheaper than applying them. An
//! action that isn't recognised is applied, and then found to have changed nothing.

use formation_explored::agent::Journal;
use formation_explored::service::{Phase, Seating};
use formation_explored::{AgentKey, AgentSession, Epoch, Hash, Rule};

use crate::explore::config::ExplorationConfig;
use crate::explore::identities::epoch_of;
use crate::explore::service_steps::nonce_of;
use crate::explore::state::{PENDING_DEADLINE_DISTANCE, SystemState};

/// Returns whether the agent releases nothing, because it holds a commit document.
#[must_use]
pub(super) fn has_stopped_releasing(config: &ExplorationConfig, journal: &Journal) -> bool {
    journal.held_document.is_some() && config.rules.is_on(Rule::HeldReleasesNothing)
}

/// Returns whether the database has decided the list of members with hash `h`. If an agent shows
/// the service that list's commit document, nothing changes then.
#[must_use]
pub(super) fn is_decided(system: &SystemState, h: Hash) -> bool {
    let cluster = &system.database.cluster;
    matches!(cluster.phase, Phase::Committed | Phase::Formed)
        && cluster.frozen.as_ref().is_some_and(|frozen| frozen.proposal_hash == h)
}

/// Returns whether a poll of the agent would change nothing. The row must already hold the agent's
/// session, its highest epoch and an unexpired lease.
#[must_use]
pub(super) fn would_poll_change_nothing(
    system: &SystemState,
    config: &ExplorationConfig,
    at: usize,
    journal: &Journal,
) -> bool {
    let cluster = &system.database.cluster;
    let Some(known) = cluster.agents.get(&journal.key) else { return false };
    if config.quiet_lapses || known.session.is_none_or(|session| session.boot != journal.boot) {
        return false;
    }
    let session = AgentSession { boot: journal.boot, nonce: nonce_of(system, journal) };
    let forming = matches!(cluster.phase, Phase::Open | Phase::Preparing);
    let highest = journal.highest_epoch();
    let no_news = highest <= known.highest_epoch || (config.reduced && highest < cluster.epoch);
    let renewed = system.now().after(PENDING_DEADLINE_DISTANCE);
    let live = known.seating != Seating::Absent && known.lease_until == renewed;
    // The host must be the only holder of the key. If a disk was copied, another host may hold the
    // same key.
    let only = system.key(at) == journal.key && config.faults.clones == 0;
    only && known.session == Some(session) && (!forming || (live && no_news))
}

/// Returns whether the agent would do nothing about the list of members with hash `h`. Two
/// conditions must hold:
///
/// - The agent has released every epoch below that of the list, or it will never release another
///   epoch.
/// - The agent has already sent its ack, or it must refuse the list and the service doesn't wait
///   for its answer.
#[must_use]
pub(super) fn is_list_ignored(
    system: &SystemState,
    config: &ExplorationConfig,
    journal: &Journal,
    h: Hash,
) -> bool {
    let epoch = epoch_of(h);
    if journal.released_epoch + 1 < epoch && !has_stopped_releasing(config, journal) {
        return false;
    }
    let signed =
        journal.signed_lists.get(&epoch).is_some_and(|signed_list| signed_list.proposal_hash == h);
    if signed && epoch > journal.released_epoch && journal.held_document.is_none() {
        return system.sent.acks.contains(&(journal.key, h));
    }
    let late = config.rules.is_on(Rule::OneListPerEpoch) && journal.highest_epoch() >= epoch;
    let refuses = late || journal.held_document.is_some();
    refuses && !is_answer_awaited(system, journal.key, epoch)
}

/// Returns whether the service waits for the agent's answer to a list of members of this epoch.
fn is_answer_awaited(system: &SystemState, key: AgentKey, epoch: Epoch) -> bool {
    let cluster = &system.database.cluster;
    cluster.phase == Phase::Preparing && cluster.epoch == epoch && cluster.is_listed(key)
}

/// Returns whether too few releases prevent the agent from signing `h` (rule S6 of the formation,
/// `agent/sign.rs`). Only then does it matter whether the agent has waited long enough.
#[must_use]
pub(super) fn is_missing_releases(
    system: &SystemState,
    config: &ExplorationConfig,
    journal: &Journal,
    h: Hash,
) -> bool {
    // When the agent examines a list of members, it releases all lower epochs.
    let own = journal.released_epoch.max(epoch_of(h) - 1);
    config.rules.is_on(Rule::ReleasesFirst)
        && journal
            .signed_lists
            .iter()
            .filter(|(_, signed_list)| signed_list.proposal_hash != h)
            .any(|(&epoch, signed_list)| {
                let released = |key: AgentKey| {
                    let sent = system.sent.releases.get(&key).copied().unwrap_or(0);
                    (if key == journal.key { sent.max(own) } else { sent }) >= epoch
                };
                let count =
                    signed_list.members.iter().filter(|member| released(member.key)).count();
                count < signed_list.releases_needed(&config.rules)
            })
}
