//! Readable description of a path, for reports.

use crate::explore::apply::apply;
use crate::explore::config::ExplorationConfig;
use crate::explore::enumeration::enumerate;
use crate::explore::fault_free_run;
use crate::explore::state::SystemState;

/// Describes the steps of `path` from `start`. Each element of `path` is the index of an action
/// among the actions that are possible in the state reached so far.
#[must_use]
pub(super) fn transcript(
    config: &ExplorationConfig,
    start: &SystemState,
    path: &[u16],
) -> Vec<String> {
    let mut system = start.clone();
    let mut lines = Vec::with_capacity(path.len() + 1);
    for &index in path {
        let actions = enumerate(&system, config);
        let action = &actions[usize::from(index)];
        let line = format!("{:3}. {action}", lines.len() + 1);
        match apply(&system, config, action) {
            Ok(next) => {
                lines.push(format!("{line}{}", describe_phase_change(&system, &next)));
                system = next;
            }
            Err(violation) => {
                lines.push(line);
                lines.push(format!("     VIOLATED {violation}"));
                return lines;
            }
        }
    }
    if let Err(violation) = fault_free_run::walk(&system, config) {
        lines.push(format!("     and in the fault-free run from there: VIOLATED {violation}"));
    }
    lines
}

/// Returns the change of the cluster's phase and epoch in a step; empty if there is none.
fn describe_phase_change(before: &SystemState, after: &SystemState) -> String {
    let state = |system: &SystemState| {
        let cluster = &system.database.cluster;
        format!("{} e{}", cluster.phase.as_str(), cluster.epoch)
    };
    let (was, is) = (state(before), state(after));
    if was == is { String::new() } else { format!("   [{was} → {is}]") }
}
