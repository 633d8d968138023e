//! The API's handlers: each one reads the request, authorises the caller, makes one call and
//! responds.

pub(crate) mod access;
pub(crate) mod admins;
pub(crate) mod body;
pub(crate) mod clusters;
pub(crate) mod console;
pub(crate) mod database;
pub(crate) mod etcd_tokens;
pub(crate) mod events;
pub(crate) mod forming;
pub(crate) mod grants;
pub(crate) mod intents;
pub(crate) mod ops;
mod pages;

use discovery_formation::AgentKey;
use discovery_types::role::Principal;

use crate::auth::Caller;

/// Returns the calling agent's key as the state machine's type; `None` for an admin.
fn agent_key(caller: &Caller) -> Option<AgentKey> {
    match caller.principal {
        Principal::Agent { .. } => Some(AgentKey(*caller.key.as_bytes())),
        Principal::Admin { .. } => None,
    }
}
