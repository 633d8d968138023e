//! Description of a path in words, for reports.

use crate::explore::actions::enumerate;
use crate::explore::apply::apply;
use crate::explore::config::ExplorationConfig;
use crate::explore::road;
use crate::explore::world::SystemState;

/// Describes the steps of `path` from `start`. Each element is an index among the actions that are
/// possible in that state.
#[must_use]
pub(super) fn transcript(
    config: &ExplorationConfig,
    start: &SystemState,
    path: &[u16],
) -> Vec<String> {
    let mut world = start.clone();
    let mut lines = Vec::with_capacity(path.len() + 1);
    for &place in path {
        let actions = enumerate(&world, config);
        let action = &actions[usize::from(place)];
        let line = format!("{:3}. {action}", lines.len() + 1);
        match apply(&world, config, action) {
            Ok(next) => {
                lines.push(format!("{line}{}", describe_phase_change(&world, &next)));
                world = next;
            }
            Err(violation) => {
                lines.push(line);
                lines.push(format!("     VIOLATED {violation}"));
                return lines;
            }
        }
    }
    if let Err(violation) = road::walk(&world, config) {
        lines.push(format!("     and on the road from there: VIOLATED {violation}"));
    }
    lines
}

/// Returns the change of the cluster's phase and epoch in a step; empty if there is none.
fn describe_phase_change(before: &SystemState, after: &SystemState) -> String {
    let state = |world: &SystemState| {
        let cluster = &world.database.cluster;
        format!("{} e{}", cluster.phase.as_str(), cluster.epoch)
    };
    let (was, is) = (state(before), state(after));
    if was == is { String::new() } else { format!("   [{was} → {is}]") }
}
