//! Carries out the steps that follow the commit of a new single-member cluster. Each step is
//! determined by the store and by the plan, the file `muster-forcing.json`. The process may end
//! after any of the steps, and the next start continues.

use std::{io, path::Path};

use node_engine::log::{self, Log, LogOptions};
use node_state::{
    apply::KvStateMachine,
    disk::SharedDisk,
    identity::{DataDir, ForcedCluster, Incarnation},
    state_machine::{Position, StateMachine as _},
};

use super::force::ForceError;

/// Name of the folder with the log.
const LOG_FOLDER: &str = "wal";
/// Name of the folder with the old cluster's log, until it is removed.
const OLD_LOG_FOLDER: &str = "wal.old";

/// Completes or abandons the new cluster that an interrupted start has begun. If the store already
/// belongs to the new cluster, the remaining steps are done. Otherwise the plan is deleted.
/// `open_store` opens the store; it is called only if there is a plan.
///
/// # Errors
/// Fails if a disk operation fails, or if the files are damaged.
pub(crate) fn resume_forced_cluster<E: From<ForceError>>(
    dir: &DataDir,
    disk: &SharedDisk,
    member_dir: &Path,
    open_store: impl FnOnce() -> Result<KvStateMachine, E>,
) -> Result<(), E> {
    let Some(plan) = dir.forced_plan().map_err(ForceError::from)? else { return Ok(()) };
    let machine = open_store()?;
    let is_new = machine.members().contains(plan.is.member_id.0);
    drop(machine);
    if is_new {
        tracing::info!(cluster.id = %plan.is.cluster_id, "finishing the new cluster that a start before this one has begun");
        return Ok(finish(dir, disk, member_dir, &plan)?);
    }
    tracing::warn!(
        "an interrupted start did not complete the new cluster; continuing as the old member"
    );
    Ok(dir.delete_forced_plan().map_err(ForceError::from)?)
}

/// Replaces the log, writes the new incarnation into the incarnation marker, and writes the record
/// of the new cluster. Each step can be repeated.
pub(super) fn finish(
    dir: &DataDir,
    disk: &SharedDisk,
    member_dir: &Path,
    plan: &ForcedCluster,
) -> Result<(), ForceError> {
    let failed = |action| move |source| ForceError::Disk { action, source };
    let (log, old) = (member_dir.join(LOG_FOLDER), member_dir.join(OLD_LOG_FOLDER));
    let incarnation = u128::from_be_bytes(plan.is.incarnation.0);
    let (cluster, member) = (plan.is.cluster_id.0, plan.is.member_id.0);
    let identity = log::LogIdentity { cluster, member, incarnation };
    // The old log is renamed, which is atomic. Removing it in place could leave a part of it under
    // this name.
    if Log::exists(disk, member_dir)? && Log::identity_of(disk, member_dir)? != identity {
        disk.rename(&log, &old).map_err(failed("set the old log aside"))?;
        disk.sync_dir(member_dir).map_err(failed("sync the member's directory"))?;
    }
    if !Log::exists(disk, member_dir)? {
        let base = Position { index: plan.base_index, term: plan.base_term };
        Log::create_after(base, disk, member_dir, &identity, &LogOptions::default())?;
    }
    dir.replace_marker(Incarnation(plan.is.incarnation.0))?;
    remove(&old).map_err(failed("remove the old log"))?;
    dir.write_forced_cluster(plan)?;
    Ok(dir.delete_forced_plan()?)
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
