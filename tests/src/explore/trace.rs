//! A path in words.

use crate::explore::actions::enumerate;
use crate::explore::apply::apply;
use crate::explore::config::Config;
use crate::explore::road;
use crate::explore::world::World;

/// The steps of `path` from `start`, each one the number of an action among those that are possible
/// there.
#[must_use]
pub(super) fn transcript(config: &Config, start: &World, path: &[u16]) -> Vec<String> {
    let mut world = start.clone();
    let mut lines = Vec::with_capacity(path.len() + 1);
    for &place in path {
        let actions = enumerate(&world, config);
        let action = &actions[usize::from(place)];
        let line = format!("{:3}. {action}", lines.len() + 1);
        match apply(&world, config, action) {
            Ok(next) => {
                lines.push(format!("{line}{}", shows(&world, &next)));
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

/// What of the service's state the step has changed, for a reader.
fn shows(before: &World, after: &World) -> String {
    let state = |world: &World| {
        let cluster = &world.database.cluster;
        format!("{} e{}", cluster.phase.as_str(), cluster.epoch)
    };
    let (was, is) = (state(before), state(after));
    if was == is { String::new() } else { format!("   [{was} → {is}]") }
}
