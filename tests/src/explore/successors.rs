//! Work of both searches at each state: checking it and computing its successors.

use crate::explore::actions::{Action, enumerate};
use crate::explore::apply::apply;
use crate::explore::fingerprint::{Fingerprint, fingerprint};
use crate::explore::properties::Violation;
use crate::explore::road;
use crate::explore::search::{Search, Tally};
use crate::explore::world::World;

/// A state and its fingerprint.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub world: World,
    pub print: Fingerprint,
}

impl State {
    /// Computes the fingerprint of `world`.
    #[must_use]
    pub(super) fn of(world: World, search: &Search<'_>) -> State {
        let print = fingerprint(&world, search.config);
        State { world, print }
    }
}

/// Walks the road from `state` if its fingerprint selects it, and returns the actions that are
/// possible. A state beyond the epoch bound has none.
///
/// # Errors
/// Returns a violation of property 7.
pub(super) fn arrive(
    search: &Search<'_>,
    state: &State,
    tally: &mut Tally,
) -> Result<Vec<Action>, Violation> {
    let config = search.config;
    let is_turn = config.roads > 0 && (state.print.whole as u64).is_multiple_of(config.roads);
    if is_turn && !config.liar {
        tally.roads += 1;
        road::walk(&state.world, config)?;
    }
    if state.world.database.cluster.epoch > config.epochs {
        tally.beyond += 1;
        return Ok(Vec::new());
    }
    Ok(enumerate(&state.world, config))
}

/// Takes one step. Returns `None` if the state it leads to was visited before.
///
/// # Errors
/// Returns the property that the step violates.
pub(super) fn take(
    search: &Search<'_>,
    state: &State,
    action: &Action,
    tally: &mut Tally,
) -> Result<Option<State>, Violation> {
    let world = apply(&state.world, search.config, action)?;
    if world.shares_all_with(&state.world) {
        return Ok(None);
    }
    tally.steps += 1;
    let next = State::of(world, search);
    // A fault without effect: the state before it still has that fault left, so all that follows is
    // explored from there.
    let idle = search.config.reduced && next.print.without_faults == state.print.without_faults;
    if idle || !search.visited.insert(next.print.whole) {
        return Ok(None);
    }
    tally.states += 1;
    Ok(Some(next))
}
