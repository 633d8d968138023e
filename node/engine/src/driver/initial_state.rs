//! Recovery of consensus' initial state from log and store.

use node_consensus::{ConfigError, InitialState, Members, Position};
use thiserror::Error;

use crate::log::{Log, LogError, StoreConsistency};

/// Reason why a member can't start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The log can't be used, or doesn't fit the store.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The recovered state contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The operating system refused to create a thread.
    #[error("can't start a thread")]
    Thread(#[source] std::io::Error),
    /// The directory for snapshots can't be used.
    #[error("can't use the directory for snapshots")]
    Snapshots(#[source] std::io::Error),
}

/// Checks that log and store fit each other, and finishes a snapshot's install that a crash
/// interrupted. Then it reads the entries that the store has yet to apply. `members` are the
/// store's members at `applied`.
pub fn recover_initial_state(
    log: &mut Log,
    applied: Position,
    members: Members,
) -> Result<InitialState, StartError> {
    if log.check_store(applied)? == StoreConsistency::Installed {
        log.finish_install(applied)?;
    }
    let entries = log.read(applied.index + 1, log.last().index + 1, u64::MAX)?;
    Ok(InitialState {
        hard_state: log.hard_state_with(applied),
        base: log.base(),
        terms: log.terms().clone(),
        entries,
        applied,
        members,
    })
}
