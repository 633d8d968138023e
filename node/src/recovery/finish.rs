//! What follows from plan and store, once the store is the new cluster's; each step may be the last
//! that a process takes.

use std::{io, path::Path};

use super::force::ForceError;
use crate::{
    apply::Machine,
    disk::SharedDisk,
    identity::{DataDir, Forced, Incarnation},
    log::{self, Log, LogOptions},
    machine::{Position, StateMachine as _},
};

/// The log's name, and where the old cluster's waits to be removed.
const LOG: &str = "wal";
const OLD_LOG: &str = "wal.old";

/// Ends what a start that was killed has begun: forwards if the store is the new cluster's, else
/// back. `open_store` opens the store; it is asked only if there is a plan.
///
/// # Errors
/// If the disk refuses, or what it finds is damaged.
pub(crate) fn resume<E: From<ForceError>>(
    dir: &DataDir,
    disk: &SharedDisk,
    member_dir: &Path,
    open_store: impl FnOnce() -> Result<Machine, E>,
) -> Result<(), E> {
    let Some(plan) = dir.forcing().map_err(ForceError::from)? else { return Ok(()) };
    let machine = open_store()?;
    let is_new = machine.members().contains(plan.is.member_id.0);
    drop(machine);
    if is_new {
        tracing::info!(cluster.id = %plan.is.cluster_id, "finishing the new cluster that a start before this one has begun");
        return Ok(finish(dir, disk, member_dir, &plan)?);
    }
    tracing::warn!(
        "a start before this one did not come to make a new cluster: this is the old member"
    );
    Ok(dir.forget_plan().map_err(ForceError::from)?)
}

/// Log, marker, record.
pub(super) fn finish(
    dir: &DataDir,
    disk: &SharedDisk,
    member_dir: &Path,
    plan: &Forced,
) -> Result<(), ForceError> {
    let failed = |action| move |source| ForceError::Disk { action, source };
    let (log, old) = (member_dir.join(LOG), member_dir.join(OLD_LOG));
    let incarnation = u128::from_be_bytes(plan.is.incarnation.0);
    let (cluster, member) = (plan.is.cluster_id.0, plan.is.member_id.0);
    let identity = log::Identity { cluster, member, incarnation };
    if Log::exists(disk, member_dir)? && Log::whose(disk, member_dir)? != identity {
        disk.rename(&log, &old).map_err(failed("set the old log aside"))?;
        disk.sync_dir(member_dir).map_err(failed("sync the member's directory"))?;
    }
    if !Log::exists(disk, member_dir)? {
        let base = Position { index: plan.base_index, term: plan.base_term };
        Log::create_after(base, disk, member_dir, &identity, &LogOptions::default())?;
    }
    dir.reborn(Incarnation(plan.is.incarnation.0))?;
    remove(&old).map_err(failed("remove the old log"))?;
    dir.record(plan)?;
    Ok(dir.forget_plan()?)
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
