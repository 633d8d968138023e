//! Facts about the machine that an agent runs on. By these facts the protocol decides whether two
//! agents run on one machine (`discovery_formation::MachineIdentity`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum length of one of the facts that identify a machine, in bytes.
pub const MAX_FACT_BYTES: usize = 128;

/// Facts that identify a machine. Each may be missing; none is secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineFacts {
    /// DMI product UUID of the machine.
    pub dmi_uuid: Option<String>,
    /// Content of `/etc/machine-id`, or of the file that replaces it.
    pub machine_id: Option<String>,
}

impl MachineFacts {
    /// Whether each given fact has 1 to [`MAX_FACT_BYTES`] printable ASCII characters, without
    /// spaces.
    pub fn is_sane(&self) -> bool {
        [&self.dmi_uuid, &self.machine_id].into_iter().flatten().all(|fact| {
            (1..=MAX_FACT_BYTES).contains(&fact.len()) && fact.bytes().all(|b| b.is_ascii_graphic())
        })
    }
}
