//! Handlers: extract, authorise, one call, respond.

pub mod access;
pub mod admins;
pub mod body;
pub mod clusters;
pub mod database;
pub mod forming;
pub mod grants;
pub mod ops;

use discovery_formation::KeyId;
use discovery_types::role::Principal;

use crate::auth::Caller;

/// The agent who calls, in the machine's terms; none for an admin.
fn agent_key(caller: &Caller) -> Option<KeyId> {
    match caller.principal {
        Principal::Agent { .. } => Some(KeyId(*caller.key.as_bytes())),
        Principal::Admin { .. } => None,
    }
}
