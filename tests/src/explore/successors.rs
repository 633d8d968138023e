//! Work of both searches at each state: checking it and computing its successors.

use crate::explore::actions::{SystemAction, enumerate};
use crate::explore::apply::apply;
use crate::explore::fingerprint::{Fingerprint, fingerprint};
use crate::explore::properties::PropertyViolation;
use crate::explore::road;
use crate::explore::search::{Search, SearchCounters};
use crate::explore::world::SystemState;

/// A state and its fingerprint.
#[derive(Clone, Debug)]
pub(super) struct FingerprintedState {
    pub world: SystemState,
    pub fingerprint: Fingerprint,
}

impl FingerprintedState {
    /// Computes the fingerprint of `world`.
    #[must_use]
    pub(super) fn of(world: SystemState, search: &Search<'_>) -> FingerprintedState {
        let print = fingerprint(&world, search.config);
        FingerprintedState { world, fingerprint: print }
    }
}

/// Walks the road from `state` if its fingerprint selects it, and returns the actions that are
/// possible. A state beyond the epoch bound has none.
///
/// # Errors
/// Returns a violation of property 7.
pub(super) fn check_and_enumerate(
    search: &Search<'_>,
    state: &FingerprintedState,
    tally: &mut SearchCounters,
) -> Result<Vec<SystemAction>, PropertyViolation> {
    let config = search.config;
    let is_turn = config.road_interval > 0
        && (state.fingerprint.whole as u64).is_multiple_of(config.road_interval);
    if is_turn && !config.service_lies {
        tally.roads += 1;
        road::walk(&state.world, config)?;
    }
    if state.world.database.cluster.epoch > config.epochs {
        tally.states_beyond_bound += 1;
        return Ok(Vec::new());
    }
    Ok(enumerate(&state.world, config))
}

/// Takes one step. Returns `None` if the state it leads to was visited before.
///
/// # Errors
/// Returns the property that the step violates.
pub(super) fn take_step(
    search: &Search<'_>,
    state: &FingerprintedState,
    action: &SystemAction,
    tally: &mut SearchCounters,
) -> Result<Option<FingerprintedState>, PropertyViolation> {
    let world = apply(&state.world, search.config, action)?;
    if world.shares_all_with(&state.world) {
        return Ok(None);
    }
    tally.steps += 1;
    let next = FingerprintedState::of(world, search);
    // A fault without effect: the state before it still has that fault left, so all that follows is
    // explored from there.
    let idle = search.config.reduced
        && next.fingerprint.without_faults == state.fingerprint.without_faults;
    if idle || !search.visited.insert(next.fingerprint.whole) {
        return Ok(None);
    }
    tally.states += 1;
    Ok(Some(next))
}
