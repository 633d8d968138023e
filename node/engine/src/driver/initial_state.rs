//! Recovery of the initial state of consensus from the log and the store.

use node_consensus::{ConfigError, InitialState, Members, Position};
use thiserror::Error;

use crate::log::{Log, LogError, StoreConsistency};

/// Reason why a member can't start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The log can't be used, or contradicts the store.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The recovered state is not a valid state of consensus.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The operating system refused to create a thread.
    #[error("can't start a thread")]
    Thread(#[source] std::io::Error),
    /// The directory for snapshots can't be used.
    #[error("can't use the directory for snapshots")]
    Snapshots(#[source] std::io::Error),
}

/// Checks that the log and the store fit each other, and finishes a snapshot install that a crash
/// interrupted. Then reads the entries that the store has not applied yet. `members` are the
/// members that the store has at position `applied`.
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
