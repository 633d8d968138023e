//! A member's files: identity, log and store. They are opened, or created at the first start.
//!
//! The order of steps matters, since a crash may come between any two of them:
//!
//! 1. The incarnation is marked on disk before it is used anywhere.
//! 2. The boot counter is incremented before a peer can receive the new value.
//! 3. The store is complete before the log is renamed to its final name.
//! 4. Once the log has that name, the member never bootstraps again. A marker outside the member's
//!    directory ensures this even if the log is lost.

use std::{
    io::BufReader,
    path::{Path, PathBuf},
    sync::Arc,
};

use muster_files::data;
use node_engine::{
    log::{self, Log, LogOptions, RecoveredState},
    tls::PeerTls,
    transport::LocalMember,
    witness::DiskState,
};
use node_state::{
    apply::KvStateMachine,
    disk::{OpenMode, RealDisk, RedbBackend, SharedDisk},
    identity::{
        ClusterId, DataDir, Incarnation, InitialCluster, InitialMember, MemberId, MemberIdentity,
    },
    membership::Member,
    mvcc::{StoreFile, StoreOptions},
    state_machine::{Position, StateMachine as _},
};

use super::{
    ServerError,
    join::{self, JoinDecision},
    node::random,
};
use crate::{
    config::{ClusterState, Config, ForceNewCluster},
    recovery::{self, ForceError, SurvivingMember},
};

/// Name of the member's directory within the data directory.
const MEMBER_DIR: &str = "member";
/// Name of the directory for received and sent snapshots, within the member's directory.
const SNAPSHOT_DIR: &str = "snap";
/// Name of the file for the whole state that a new member fetches, within the snapshot directory.
const JOIN_STATE_FILE: &str = "joining";

/// Everything that a member has on disk, opened.
pub(super) struct MemberStorage {
    pub dir: DataDir,
    pub local: LocalMember,
    /// Whether this start has created the member's log. A first start that was interrupted before
    /// that is repeated, and counts as first again.
    pub first_start: bool,
    pub machine: KvStateMachine,
    pub store_file: StoreFile,
    pub log: Log,
    pub recovered: RecoveredState,
}

/// Data with which a member without a log begins.
enum StartMode {
    /// The member begins as one of the first members of a new cluster.
    New(InitialCluster),
    /// The member joins a running cluster, and begins with that cluster's state.
    Join(JoinDecision),
}

/// Opens the data directory, or prepares it for a first start. With `--force-new-cluster`, turns
/// the directory's member into a single-member cluster. The flag takes effect once. It has no
/// effect on a member that was already created with the flag.
pub(super) async fn open(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
) -> Result<MemberStorage, ServerError> {
    let Some(force) = &config.force_new_cluster else {
        let found = open_member(config, tls, DataDir::open(&config.data_dir)?).await?;
        // This is a start without `--force-new-cluster`. It allows the flag to take effect again at
        // a later start.
        if let Some(made) = found.dir.forced_cluster()?.filter(|made| !made.rearmed) {
            found.dir.write_forced_cluster(&made.rearm())?;
        }
        found.dir.unmark_force_without_data()?;
        return Ok(found);
    };
    let dir = DataDir::open(&config.data_dir)?;
    resume(&dir)?;
    if dir.has_log()? && !dir.has_force_without_data()? {
        return open_forced(config, tls, dir, force).await;
    }
    dir.mark_force_without_data()?;
    tracing::warn!(
        data_dir = %config.data_dir.display(),
        "--force-new-cluster was given for a directory without a member's data, and is not followed: this member begins as the other flags say; take it off the command line"
    );
    open_member(config, tls, dir).await
}

/// Turns the existing member into a single-member cluster. Starts nothing.
pub(super) async fn force(
    config: &Config,
    force: &ForceNewCluster,
) -> Result<MemberStorage, ServerError> {
    let nothing = || ForceError::NoLog(config.data_dir.clone());
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
    force: &ForceNewCluster,
) -> Result<MemberStorage, ServerError> {
    let found = open_member(config, tls, dir).await?;
    if let Some(made) = found.dir.forced_cluster()?.filter(|made| !made.rearmed) {
        tracing::warn!(
            cluster.id = %made.is.cluster_id, at = made.at,
            "--force-new-cluster has made this cluster already, and is not followed again: take it off the command line; a start without it makes it count again"
        );
        return Ok(found);
    }
    let dir = make_cluster(found, force)?;
    open_member(config, tls, dir).await
}

/// Makes a single-member cluster from a member's data.
fn make_cluster(found: MemberStorage, force: &ForceNewCluster) -> Result<DataDir, ServerError> {
    let MemberStorage { dir, local, machine, log, .. } = found;
    let was = MemberIdentity {
        cluster_id: local.cluster,
        member_id: local.member,
        incarnation: local.incarnation,
    };
    let (disk, member_dir): (SharedDisk, _) = (Arc::new(RealDisk), dir.join(MEMBER_DIR));
    let survivor = SurvivingMember {
        dir: &dir,
        disk: &disk,
        member_dir: &member_dir,
        old_identity: was,
        machine,
        log,
    };
    recovery::force_new_cluster(survivor, force)?;
    Ok(dir)
}

/// Completes or abandons the single-member cluster that an interrupted start has begun here.
fn resume(dir: &DataDir) -> Result<(), ServerError> {
    let (disk, member_dir): (SharedDisk, _) = (Arc::new(RealDisk), dir.join(MEMBER_DIR));
    recovery::resume_forced_cluster(dir, &disk, &member_dir, || {
        open_store(&disk, &member_dir, OpenMode::Existing, Vec::new())
    })
}

/// Logs a warning if recovery has cut an unfinished last write off the log.
fn warn_if_truncated(recovered: &RecoveredState) {
    if let Some((path, offset)) = &recovered.truncated_at {
        tracing::warn!(
            path = %path.display(), offset,
            "cut off the log's last write, which a crash had left unfinished"
        );
    }
}

async fn open_member(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
    dir: DataDir,
) -> Result<MemberStorage, ServerError> {
    resume(&dir)?;
    let beginning = start_mode(config, tls, &dir).await?;
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
        let identity = log::LogIdentity { cluster: cluster.0, member: member.0, incarnation };
        Log::create_after(base, &disk, &member_dir, &identity, &options).map_err(ServerError::Log)
    };
    let machine = match &beginning {
        None => open_store(&disk, &member_dir, OpenMode::Existing, Vec::new())?,
        Some(StartMode::New(initial)) => {
            let own = initial.member(&config.name).expect("a bootstrap names this member");
            let machine = open_store(&disk, &member_dir, OpenMode::New, first_members(initial))?;
            create(initial.id, own.id, Position::default())?;
            machine
        }
        Some(StartMode::Join(joining)) => {
            let (cluster, member) = (joining.cluster, joining.member);
            let held = DiskState::default();
            let local = LocalMember { cluster, member, incarnation, boot, run, disk: held };
            let body = snapshots.join(JOIN_STATE_FILE);
            let at = join::fetch(joining, &local, tls, &body).await?;
            let machine = open_store(&disk, &member_dir, OpenMode::New, Vec::new())?;
            let machine = install(machine, body, store_file.path()).await?;
            create(cluster, member, at)?;
            machine
        }
    };
    // Write the mark that the log exists at each start. A crash may have come after the creation of
    // the log and before the mark.
    dir.mark_log()?;
    let (log, recovered) = Log::open(&disk, &member_dir, &options).map_err(ServerError::Log)?;
    warn_if_truncated(&recovered);
    let found = Incarnation(recovered.identity.incarnation.to_be_bytes());
    if found != incarnation {
        return Err(ServerError::ForeignLog {
            path: config.data_dir.clone(),
            found,
            expected: incarnation,
        });
    }
    let local = LocalMember {
        cluster: ClusterId(recovered.identity.cluster),
        member: MemberId(recovered.identity.member),
        incarnation,
        boot,
        run,
        disk: on_disk(&recovered),
    };
    Ok(MemberStorage {
        dir,
        local,
        first_start: beginning.is_some(),
        machine,
        store_file,
        log,
        recovered,
    })
}

/// Returns how a member without a log begins; `None` if it has a log. If there is a log, the
/// members come from the store, and the flags for the initial cluster are ignored.
async fn start_mode(
    config: &Config,
    tls: Option<&Arc<PeerTls>>,
    dir: &DataDir,
) -> Result<Option<StartMode>, ServerError> {
    if dir.has_log()? {
        return Ok(None);
    }
    Ok(Some(match config.initial_cluster_state {
        ClusterState::New => {
            let initial = check_bootstrap(config)?;
            join::check_not_begun(config, tls, &initial).await?;
            StartMode::New(initial)
        }
        ClusterState::Existing => StartMode::Join(join::decide_join(config, tls).await?),
    }))
}

/// Returns the term, the vote and the last index on this member's disk.
fn on_disk(recovered: &RecoveredState) -> DiskState {
    let state = recovered.hard_state;
    DiskState { term: state.term, vote: state.vote, last: recovered.last().index }
}

/// Returns the initial cluster for a first start. It must contain this member, and its members must
/// have different IDs.
fn check_bootstrap(config: &Config) -> Result<InitialCluster, ServerError> {
    let initial = config.first_configuration().map_err(ServerError::Bootstrap)?;
    match initial.identical_ids() {
        Some((a, b)) => Err(ServerError::IdenticalIds(a.name.clone(), b.name.clone())),
        None => Ok(initial),
    }
}

/// Installs the whole state received into `body`, durably. The work runs on another thread, so that
/// signals are handled meanwhile. An interrupted installation is repeated by the next start.
async fn install(
    mut machine: KvStateMachine,
    body: PathBuf,
    store: PathBuf,
) -> Result<KvStateMachine, ServerError> {
    let system = |action| move |source| ServerError::System { action, source };
    let installing = tokio::task::spawn_blocking(move || {
        let opened = data::open(&body, data::OpenMode::Read).map_err(std::io::Error::from);
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
    how: OpenMode,
    members: Vec<Member>,
) -> Result<KvStateMachine, ServerError> {
    let store_file = StoreFile::new(disk.clone(), member_dir);
    let path = store_file.path();
    let system = |action| move |source| ServerError::System { action, source };
    let exists = disk.exists(&path).map_err(system("look for the store"))?;
    match how {
        OpenMode::Existing if !exists => return Err(ServerError::StoreGone(path)),
        // An interrupted first start has left this store. It can be removed: the member has no log
        // yet, so it has sent no vote or acknowledgement to any peer.
        OpenMode::New if exists => {
            disk.remove(&path).map_err(system("remove an unfinished store"))?;
        }
        _ => {}
    }
    store_file.tidy().map_err(system("remove an unfinished copy of the store"))?;
    let file = disk.open(&path, how).map_err(system("open the store"))?;
    // Refuse an empty file, because it would be opened as a new store. That store would never get
    // the first members: replaying the log doesn't restore them.
    if exists
        && matches!(how, OpenMode::Existing)
        && file.is_empty().map_err(system("open the store"))?
    {
        return Err(ServerError::StoreGone(path));
    }
    let options = StoreOptions { members, ..StoreOptions::default() };
    let backend = RedbBackend::new(file).map_err(system("read the store past the page cache"))?;
    let machine = KvStateMachine::open(backend, options)
        .map_err(|source| ServerError::Store { path: path.clone(), source })?;
    disk.sync_dir(member_dir).map_err(system("sync the member's directory"))?;
    Ok(machine)
}

fn first_members(initial: &InitialCluster) -> Vec<Member> {
    initial.members.iter().map(InitialMember::to_member).collect()
}
