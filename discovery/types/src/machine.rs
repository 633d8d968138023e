//! Which machine an agent runs on: facts that may be missing. Whether two sets of them are one
//! machine's is the protocol's to say (`discovery_formation::Machine`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Longest fact.
pub const MAX_FACT: usize = 128;

/// Facts that name a machine. Each may be missing; none is secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineFacts {
    /// DMI product UUID.
    pub dmi_uuid: Option<String>,
    /// `/etc/machine-id`, or the file that stands in for it.
    pub machine_id: Option<String>,
}

impl MachineFacts {
    /// Whether each fact is short and printable.
    pub fn is_sane(&self) -> bool {
        [&self.dmi_uuid, &self.machine_id].into_iter().flatten().all(|fact| {
            (1..=MAX_FACT).contains(&fact.len()) && fact.bytes().all(|b| b.is_ascii_graphic())
        })
    }
}
