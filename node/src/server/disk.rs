//! What a member has on disk, found or made: identity, log, store.
//!
//! Order matters, because a crash may come between any two steps. The incarnation is marked before
//! anything bears it; the boot counter rises before a peer can hear it; the store is whole before
//! the log has its name, and once the log has its name the member never bootstraps again: a mark
//! outside the member's own directory says so even when the log is lost.

use std::{path::Path, sync::Arc};

use super::ServerError;
use crate::{
    apply::Machine,
    config::{ClusterState, Config},
    disk::{Backend, Open, RealDisk, SharedDisk},
    identity::{ClusterId, DataDir, Incarnation, InitialCluster, MemberId},
    log::{self, Log, LogOptions, Recovered},
    membership::Member,
    mvcc::Options as StoreOptions,
    transport::Local,
};

/// A member's directory within the data directory.
const MEMBER_DIR: &str = "member";
/// The store's file in it.
const STORE: &str = "db";
/// Where snapshots on their way in and out lie, in it.
const SNAPSHOT_DIR: &str = "snap";

/// Everything that a member has on disk, open.
pub(super) struct Found {
    pub dir: DataDir,
    pub local: Local,
    /// This start is the identity's first.
    pub first_start: bool,
    pub machine: Machine,
    pub log: Log,
    pub recovered: Recovered,
}

/// Opens the data directory, or makes it what a first start needs.
pub(super) fn open(config: &Config) -> Result<Found, ServerError> {
    let dir = DataDir::open(&config.data_dir)?;
    // With a log, the store's members count, and what the cluster began with is not asked for.
    let initial = if dir.has_log()? { None } else { Some(may_bootstrap(config)?) };
    let incarnation = dir.claim(config.bound_incarnation())?;
    let boot = dir.count_boot()?;
    let member_dir = dir.join(MEMBER_DIR);
    let disk: SharedDisk = Arc::new(RealDisk);
    let system = |action| move |source| ServerError::System { action, source };
    disk.create_dir(&member_dir).map_err(system("make the member's directory"))?;
    disk.sync_dir(dir.path()).map_err(system("sync the data directory"))?;
    let machine = open_store(&disk, &member_dir, initial.as_ref())?;
    let options = LogOptions::default();
    if let Some(initial) = &initial {
        let identity = log_identity(config, initial, incarnation);
        Log::create(&disk, &member_dir, &identity, &options).map_err(ServerError::Log)?;
    }
    // Also where a crash came between the two.
    dir.mark_log()?;
    let snapshots = member_dir.join(SNAPSHOT_DIR);
    disk.create_dir(&snapshots).map_err(system("make the directory for snapshots"))?;
    let (log, recovered) = Log::open(&disk, &member_dir, &options).map_err(ServerError::Log)?;
    if let Some((path, offset)) = &recovered.cut {
        tracing::warn!(
            path = %path.display(), offset,
            "cut off the log's last write, which a crash had left unfinished"
        );
    }
    let found = Incarnation(recovered.identity.incarnation.to_be_bytes());
    if found != incarnation {
        return Err(ServerError::ForeignLog {
            path: config.data_dir.clone(),
            found,
            expected: incarnation,
        });
    }
    let local = Local {
        cluster: ClusterId(recovered.identity.cluster),
        member: MemberId(recovered.identity.member),
        incarnation,
        boot,
    };
    Ok(Found { dir, local, first_start: initial.is_some(), machine, log, recovered })
}

/// A first start is for a new cluster, which names this member and whose members can be told apart.
fn may_bootstrap(config: &Config) -> Result<InitialCluster, ServerError> {
    if config.initial_cluster_state == ClusterState::Existing {
        return Err(ServerError::CannotJoin);
    }
    let initial = config.initial().map_err(ServerError::Bootstrap)?;
    match initial.identical_ids() {
        Some((a, b)) => Err(ServerError::IdenticalIds(a.name.clone(), b.name.clone())),
        None => Ok(initial),
    }
}

fn open_store(
    disk: &SharedDisk,
    member_dir: &Path,
    initial: Option<&InitialCluster>,
) -> Result<Machine, ServerError> {
    let path = member_dir.join(STORE);
    let system = |action| move |source| ServerError::System { action, source };
    let exists = disk.exists(&path).map_err(system("look for the store"))?;
    if initial.is_none() && !exists {
        return Err(ServerError::StoreGone(path));
    }
    if initial.is_some() && exists {
        // A first start that was cut short before it had a log: it promised nothing to anybody.
        disk.remove(&path).map_err(system("remove an unfinished store"))?;
    }
    let how = if initial.is_some() { Open::New } else { Open::Existing };
    let file = disk.open(&path, how).map_err(system("open the store"))?;
    let members = initial
        .into_iter()
        .flat_map(|initial| &initial.members)
        .map(|member| Member {
            id: member.id,
            name: member.name.clone(),
            peer_urls: member.peer_urls.clone(),
            client_urls: member.client_urls.clone(),
            is_learner: false,
            incarnation: member.incarnation,
            node_key: member.node_key,
        })
        .collect();
    let options = StoreOptions { members, ..StoreOptions::default() };
    let backend = Backend::new(file).map_err(system("read the store past the page cache"))?;
    let machine = Machine::open(backend, options)
        .map_err(|source| ServerError::Store { path: path.clone(), source })?;
    disk.sync_dir(member_dir).map_err(system("sync the member's directory"))?;
    Ok(machine)
}

fn log_identity(
    config: &Config,
    initial: &InitialCluster,
    incarnation: Incarnation,
) -> log::Identity {
    let own = initial.member(&config.name).expect("a bootstrap names this member");
    log::Identity {
        cluster: initial.id.0,
        member: own.id.0,
        incarnation: u128::from_be_bytes(incarnation.0),
    }
}
