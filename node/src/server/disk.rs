//! What a member has on disk, found or made: identity, log, store.
//!
//! Order matters, because a crash may come between any two steps. The incarnation is marked before
//! anything bears it; the boot counter rises before a peer can hear it; the store is whole before
//! the log has its name, and once the log has its name the member never bootstraps again: a mark
//! outside the member's own directory says so even when the log is lost.

use std::{
    io::BufReader,
    path::{Path, PathBuf},
    sync::Arc,
};

use muster_files::data;

use super::{
    ServerError,
    join::{self, Joining},
    node::random,
};
use crate::{
    apply::Machine,
    config::{ClusterState, Config, Force},
    disk::{Backend, Open, RealDisk, SharedDisk},
    identity::{Bearer, ClusterId, DataDir, Incarnation, InitialCluster, InitialMember, MemberId},
    log::{self, Log, LogOptions, Recovered},
    machine::{Position, StateMachine as _},
    membership::Member,
    mvcc::{Options as StoreOptions, StoreFile},
    recovery::{self, ForceError, Survivor},
    tls::PeerTls,
    transport::Local,
    witness::OnDisk,
};

/// A member's directory within the data directory.
const MEMBER_DIR: &str = "member";
/// Where snapshots on their way in and out lie, in it.
const SNAPSHOT_DIR: &str = "snap";
/// The whole state, as a new member has received it, in that one.
const JOINING: &str = "joining";

/// Everything that a member has on disk, open.
pub(super) struct Found {
    pub dir: DataDir,
    pub local: Local,
    /// This start is the identity's first.
    pub first_start: bool,
    pub machine: Machine,
    pub store_file: StoreFile,
    pub log: Log,
    pub recovered: Recovered,
}

/// How a member without a log begins.
enum Beginning {
    /// With the others of a new cluster.
    New(InitialCluster),
    /// With what a running cluster has.
    Joins(Joining),
}

/// Opens the data directory, or makes it what a first start needs; with `--force-new-cluster`, makes a
/// cluster of one of the member in it. The flag acts once, and never on a member that began with it.
pub(super) async fn open(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
) -> Result<Found, ServerError> {
    let Some(force) = &config.force_new_cluster else {
        let found = open_member(config, tls, DataDir::open(&config.data_dir)?).await?;
        // The next start with the flag is meant anew.
        if let Some(made) = found.dir.forced()?.filter(|made| !made.rearmed) {
            found.dir.record(&made.rearm())?;
        }
        found.dir.forget_force_without_data()?;
        return Ok(found);
    };
    let dir = DataDir::open(&config.data_dir)?;
    resume(&dir)?;
    if dir.has_log()? && !dir.has_force_without_data()? {
        return open_forced(config, tls, dir, force).await;
    }
    dir.note_force_without_data()?;
    tracing::warn!(
        data_dir = %config.data_dir.display(),
        "--force-new-cluster was given for a directory without a member's data, and is not followed: this member begins as the other flags say; take it off the command line"
    );
    open_member(config, tls, dir).await
}

/// Makes a cluster of one of the member that is there, and starts nothing.
pub(super) async fn force(config: &Config, force: &Force) -> Result<Found, ServerError> {
    let nothing = || ForceError::Nothing(config.data_dir.clone());
    if !config.data_dir.try_exists().unwrap_or(true) {
        return Err(nothing().into());
    }
    let dir = DataDir::open(&config.data_dir)?;
    resume(&dir)?;
    if !dir.has_log()? {
        return Err(nothing().into());
    }
    open_forced(config, None, dir, force).await
}

async fn open_forced(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
    dir: DataDir,
    force: &Force,
) -> Result<Found, ServerError> {
    let found = open_member(config, tls, dir).await?;
    if let Some(made) = found.dir.forced()?.filter(|made| !made.rearmed) {
        tracing::warn!(
            cluster.id = %made.is.cluster_id, at = made.at,
            "--force-new-cluster has made this cluster already, and is not followed again: take it off the command line; a start without it makes it count again"
        );
        return Ok(found);
    }
    let dir = make_cluster(found, force)?;
    open_member(config, tls, dir).await
}

/// A cluster of one, of what a member has.
fn make_cluster(found: Found, force: &Force) -> Result<DataDir, ServerError> {
    let Found { dir, local, machine, log, .. } = found;
    let was = Bearer {
        cluster_id: local.cluster,
        member_id: local.member,
        incarnation: local.incarnation,
    };
    let (disk, member_dir): (SharedDisk, _) = (Arc::new(RealDisk), dir.join(MEMBER_DIR));
    let survivor = Survivor { dir: &dir, disk: &disk, member_dir: &member_dir, was, machine, log };
    recovery::force(survivor, force)?;
    Ok(dir)
}

/// What a start before this one has left undone.
fn resume(dir: &DataDir) -> Result<(), ServerError> {
    let (disk, member_dir): (SharedDisk, _) = (Arc::new(RealDisk), dir.join(MEMBER_DIR));
    recovery::resume(dir, &disk, &member_dir, || {
        open_store(&disk, &member_dir, Open::Existing, Vec::new())
    })
}

async fn open_member(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
    dir: DataDir,
) -> Result<Found, ServerError> {
    resume(&dir)?;
    let beginning = beginning(config, tls, &dir).await?;
    let incarnation = dir.claim(config.bound_incarnation())?;
    let (boot, run) = (dir.count_boot()?, random());
    let member_dir = dir.join(MEMBER_DIR);
    let disk: SharedDisk = Arc::new(RealDisk);
    let system = |action| move |source| ServerError::System { action, source };
    disk.create_dir(&member_dir).map_err(system("make the member's directory"))?;
    disk.sync_dir(dir.path()).map_err(system("sync the data directory"))?;
    let snapshots = member_dir.join(SNAPSHOT_DIR);
    disk.create_dir(&snapshots).map_err(system("make the directory for snapshots"))?;
    let store_file = StoreFile::new(disk.clone(), &member_dir);
    let options = LogOptions::default();
    let create = |cluster: ClusterId, member: MemberId, base| {
        let incarnation = u128::from_be_bytes(incarnation.0);
        let identity = log::Identity { cluster: cluster.0, member: member.0, incarnation };
        Log::create_after(base, &disk, &member_dir, &identity, &options).map_err(ServerError::Log)
    };
    let machine = match &beginning {
        None => open_store(&disk, &member_dir, Open::Existing, Vec::new())?,
        Some(Beginning::New(initial)) => {
            let own = initial.member(&config.name).expect("a bootstrap names this member");
            let machine = open_store(&disk, &member_dir, Open::New, first_members(initial))?;
            create(initial.id, own.id, Position::default())?;
            machine
        }
        Some(Beginning::Joins(joining)) => {
            let (cluster, member) = (joining.cluster, joining.member);
            let held = OnDisk::default();
            let local = Local { cluster, member, incarnation, boot, run, disk: held };
            let body = snapshots.join(JOINING);
            let at = join::fetch(joining, &local, tls, &body).await?;
            let machine = open_store(&disk, &member_dir, Open::New, Vec::new())?;
            let machine = install(machine, body, store_file.path()).await?;
            create(cluster, member, at)?;
            machine
        }
    };
    // Also where a crash came between the two.
    dir.mark_log()?;
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
        run,
        disk: on_disk(&recovered),
    };
    Ok(Found { dir, local, first_start: beginning.is_some(), machine, store_file, log, recovered })
}

/// How a member without a log begins. With one, the store's members count, and what the cluster
/// began with is not asked for.
async fn beginning(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
    dir: &DataDir,
) -> Result<Option<Beginning>, ServerError> {
    if dir.has_log()? {
        return Ok(None);
    }
    Ok(Some(match config.initial_cluster_state {
        ClusterState::New => {
            let initial = may_bootstrap(config)?;
            join::check_not_begun(config, tls, &initial).await?;
            Beginning::New(initial)
        }
        ClusterState::Existing => Beginning::Joins(join::ask(config, tls).await?),
    }))
}

/// What this member can't have forgotten.
fn on_disk(recovered: &Recovered) -> OnDisk {
    let state = recovered.hard_state;
    OnDisk { term: state.term, vote: state.vote, last: recovered.last().index }
}

/// A first start is for a new cluster, which names this member and whose members can be told apart.
fn may_bootstrap(config: &Config) -> Result<InitialCluster, ServerError> {
    let initial = config.initial().map_err(ServerError::Bootstrap)?;
    match initial.identical_ids() {
        Some((a, b)) => Err(ServerError::IdenticalIds(a.name.clone(), b.name.clone())),
        None => Ok(initial),
    }
}

/// Everything that the whole state, received into `body`, holds, durably. On another thread, so that
/// a signal is heard meanwhile: what it leaves undone the next start begins anew.
async fn install(
    mut machine: Machine,
    body: PathBuf,
    store: PathBuf,
) -> Result<Machine, ServerError> {
    let system = |action| move |source| ServerError::System { action, source };
    let installing = tokio::task::spawn_blocking(move || {
        let opened = data::open(&body, data::Open::Read).map_err(std::io::Error::from);
        let file = opened.map_err(system("open the received state"))?;
        let installed = machine.install_snapshot(&mut BufReader::new(file));
        let removed = data::remove(&body).map_err(std::io::Error::from);
        installed.map_err(|source| ServerError::Store { path: store, source })?;
        removed.map_err(system("remove the received state"))?;
        Ok(machine)
    });
    let ended = installing.await.map_err(std::io::Error::other);
    ended.map_err(system("install the received state"))?
}

fn open_store(
    disk: &SharedDisk,
    member_dir: &Path,
    how: Open,
    members: Vec<Member>,
) -> Result<Machine, ServerError> {
    let store_file = StoreFile::new(disk.clone(), member_dir);
    let path = store_file.path();
    let system = |action| move |source| ServerError::System { action, source };
    let exists = disk.exists(&path).map_err(system("look for the store"))?;
    match how {
        Open::Existing if !exists => return Err(ServerError::StoreGone(path)),
        // A first start that was cut short before it had a log: it promised nothing to anybody.
        Open::New if exists => {
            disk.remove(&path).map_err(system("remove an unfinished store"))?;
        }
        _ => {}
    }
    store_file.tidy().map_err(system("remove an unfinished copy of the store"))?;
    let file = disk.open(&path, how).map_err(system("open the store"))?;
    // Made anew from the log it would know of no member.
    if exists
        && matches!(how, Open::Existing)
        && file.is_empty().map_err(system("open the store"))?
    {
        return Err(ServerError::StoreGone(path));
    }
    let options = StoreOptions { members, ..StoreOptions::default() };
    let backend = Backend::new(file).map_err(system("read the store past the page cache"))?;
    let machine = Machine::open(backend, options)
        .map_err(|source| ServerError::Store { path: path.clone(), source })?;
    disk.sync_dir(member_dir).map_err(system("sync the member's directory"))?;
    Ok(machine)
}

fn first_members(initial: &InitialCluster) -> Vec<Member> {
    initial.members.iter().map(InitialMember::member).collect()
}
