//! One state's judgement and what can follow it: what both searches do at each state.

use crate::explore::actions::{Action, enumerate};
use crate::explore::apply::apply;
use crate::explore::fingerprint::{Fingerprint, fingerprint};
use crate::explore::properties::Violation;
use crate::explore::road;
use crate::explore::search::{Search, Tally};
use crate::explore::world::World;

/// A state and what stands for it.
#[derive(Clone, Debug)]
pub(super) struct State {
    /// Itself.
    pub world: World,
    /// Its fingerprint.
    pub print: Fingerprint,
}

impl State {
    /// `world`, with its fingerprint.
    #[must_use]
    pub(super) fn of(world: World, search: &Search<'_>) -> State {
        let print = fingerprint(&world, search.config);
        State { world, print }
    }
}

/// Walks the road from `state` if it is its turn, and says what can happen next in it: nothing
/// beyond the bound of epochs.
///
/// # Errors
/// The part of property 7 that doesn't hold.
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

/// Takes one step; none if the state that it leads to was seen before.
///
/// # Errors
/// The property that the step violates.
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
    // A fault that has changed nothing: with it still to come everything can follow as well.
    let idle = search.config.reduced && next.print.without_faults == state.print.without_faults;
    if idle || !search.visited.insert(next.print.whole) {
        return Ok(None);
    }
    tally.states += 1;
    Ok(Some(next))
}
