//! Work of both searches at each state: checking it and computing its successors.

use crate::explore::actions::SystemAction;
use crate::explore::apply::apply;
use crate::explore::enumeration::enumerate;
use crate::explore::fault_free_run;
use crate::explore::fingerprint::{Fingerprint, fingerprint};
use crate::explore::properties::PropertyViolation;
use crate::explore::search::{Search, SearchCounters};
use crate::explore::state::SystemState;

/// A state and its fingerprint.
#[derive(Clone, Debug)]
pub(super) struct FingerprintedState {
    pub system: SystemState,
    pub fingerprint: Fingerprint,
}

impl FingerprintedState {
    /// Computes the fingerprint of `system`.
    #[must_use]
    pub(super) fn new(system: SystemState, search: &Search<'_>) -> FingerprintedState {
        let print = fingerprint(&system, search.config);
        FingerprintedState { system, fingerprint: print }
    }
}

/// Plays the fault-free run from `state`, if the state's fingerprint selects it for that. Returns
/// the actions that are possible; none if the state is beyond the epoch bound.
///
/// # Errors
/// Returns a violation of property 7.
pub(super) fn check_and_enumerate(
    search: &Search<'_>,
    state: &FingerprintedState,
    counters: &mut SearchCounters,
) -> Result<Vec<SystemAction>, PropertyViolation> {
    let config = search.config;
    let is_selected = config.fault_free_interval > 0
        && (state.fingerprint.whole as u64).is_multiple_of(config.fault_free_interval);
    if is_selected && !config.service_lies {
        counters.fault_free_runs += 1;
        fault_free_run::walk(&state.system, config)?;
    }
    if state.system.database.cluster.epoch > config.epochs {
        counters.states_beyond_bound += 1;
        return Ok(Vec::new());
    }
    Ok(enumerate(&state.system, config))
}

/// Takes one step. Returns `None` if the state it leads to was visited before.
///
/// # Errors
/// Returns the property that the step violates.
pub(super) fn take_step(
    search: &Search<'_>,
    state: &FingerprintedState,
    action: &SystemAction,
    counters: &mut SearchCounters,
) -> Result<Option<FingerprintedState>, PropertyViolation> {
    let system = apply(&state.system, search.config, action)?;
    if system.shares_all_with(&state.system) {
        return Ok(None);
    }
    counters.steps += 1;
    let next = FingerprintedState::new(system, search);
    // The state after a fault without effect is not explored. The state before the fault differs
    // only in that the fault can still happen. So everything that can follow is explored from
    // there.
    let idle = search.config.reduced
        && next.fingerprint.without_faults == state.fingerprint.without_faults;
    if idle || !search.visited.insert(next.fingerprint.whole) {
        return Ok(None);
    }
    counters.states += 1;
    Ok(Some(next))
}
