//! Inspects a data directory without changing it. The result describes the end of the log, the
//! store, and the state that the store would have if the whole log were applied. The directory is
//! read as a start would read it.

use std::{path::Path, sync::Arc};

use serde::Serialize;

use node_engine::{causes::error_chain, driver, log::Log};
use node_state::{
    apply::KvStateMachine,
    disk::{OpenMode, ReadOnlyDisk, RedbBackend, SharedDisk},
    identity::{ClusterId, DataDir, DataDirError, ForcedCluster, Incarnation, MemberId, Tombstone},
    mvcc::StoreOptions,
    state_machine::{CommittedEntry, StateMachine as _},
};

/// Condition of a data directory: the result that a start in it would have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirectoryState {
    /// The data of a member is complete.
    Whole,
    /// The data belongs to a running member, which changes it.
    InUse,
    /// A new single-member cluster is partly made here; the next start finishes it.
    Unfinished,
    /// The directory holds no member's data.
    Empty,
    /// The member was removed from its cluster and can't be started.
    Removed,
    /// The member has lost data, or its data is damaged; it can't be started.
    Damaged,
}

/// Program that made a data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Maker {
    /// The node of Muster, `muster-node`.
    MusterNode,
    /// A server of etcd.
    Etcd,
}

/// State of the Raft log in a data directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogInspection {
    /// Term of the member.
    pub term: u64,
    /// Id, in hexadecimal, of the member that got this member's vote in the term; `None` if it has
    /// not voted.
    pub vote: Option<String>,
    /// Index of the entry just before the log's first entry.
    pub base_index: u64,
    /// Index of the last entry in the log.
    pub last_index: u64,
    /// Term of the last entry.
    pub last_term: u64,
    /// Index of the last entry that is known to be committed.
    pub committed: u64,
    /// Offset in the log of an incomplete last write, which was never acknowledged; `None` if the
    /// log is complete.
    pub torn_at: Option<u64>,
}

/// State of the store in a data directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoreInspection {
    /// Index of the last entry that is applied in the store.
    pub applied: u64,
    /// Newest revision in the store.
    pub stored_revision: i64,
    /// Newest revision if the whole log were applied. For an etcd's directory this is
    /// `stored_revision`, because etcd's log is not applied here.
    pub revision: i64,
    /// Revision of the last compaction if the whole log were applied; -1 if there was none. For an
    /// etcd's directory, this is the last compaction in the store.
    pub compacted_revision: i64,
    /// `HashKV` at `revision`; `None` for an etcd's directory.
    pub hash: Option<u32>,
    /// Members of the cluster if the whole log were applied. For an etcd's directory, these are the
    /// members in the store.
    pub members: Vec<InspectedMember>,
}

/// A member of the cluster, according to the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InspectedMember {
    /// Member id in hexadecimal.
    pub id: String,
    /// Name of the member; empty if it never started.
    pub name: String,
    /// URLs under which peers reach the member.
    pub peer_urls: Vec<String>,
    /// URLs under which clients reach the member.
    pub client_urls: Vec<String>,
    /// Whether the member is a learner, which has no vote.
    pub is_learner: bool,
}

/// Contents of a data directory that could be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DirectoryInspection {
    /// Path of the data directory.
    pub data_dir: String,
    /// Program that made the directory.
    pub maker: Maker,
    /// Condition of the directory.
    pub state: DirectoryState,
    /// Description of what is wrong, if anything is.
    pub problem: Option<String>,
    /// Id of the member's cluster, in hexadecimal.
    pub cluster_id: Option<String>,
    /// Id of the member, in hexadecimal.
    pub member_id: Option<String>,
    /// Incarnation of the member, in hexadecimal. An etcd has one only if an agent manages it.
    pub incarnation: Option<String>,
    /// Name of the member, according to the cluster.
    pub name: Option<String>,
    /// Number of times that the member was started.
    pub boots: Option<u64>,
    /// State of the Raft log.
    pub log: Option<LogInspection>,
    /// State of the store.
    pub store: Option<StoreInspection>,
    /// Tombstone of a member that was removed.
    pub tombstone: Option<Tombstone>,
    /// Record of the single-member cluster that was made here by force from the member's data, if
    /// any.
    pub forced: Option<ForcedCluster>,
}

/// Inspects the data directory at `path`.
///
/// # Errors
/// Fails if the directory can't be inspected. Problems with its contents are no error; they are
/// reported as a [`DirectoryState`].
pub fn inspect_directory(path: &Path) -> Result<DirectoryInspection, DataDirError> {
    let (dir, in_use) = DataDir::open_read_only(path)?;
    let mut sight = DirectoryInspection {
        data_dir: path.display().to_string(),
        maker: if dir.is_etcd_directory() { Maker::Etcd } else { Maker::MusterNode },
        state: DirectoryState::Whole,
        problem: None,
        cluster_id: None,
        member_id: None,
        incarnation: None,
        name: None,
        boots: None,
        log: None,
        store: None,
        tombstone: None,
        forced: None,
    };
    if let Err((state, problem)) = inspect(&dir, in_use, &mut sight) {
        sight.state = state;
        sight.problem = problem;
    }
    Ok(sight)
}

/// Reason why an inspection stopped before everything was read: the state, and a description of the
/// problem.
pub(super) type InspectionStop = (DirectoryState, Option<String>);

pub(super) fn damaged_stop(error: &(dyn std::error::Error + 'static)) -> InspectionStop {
    (DirectoryState::Damaged, Some(error_chain(error)))
}

fn inspect(
    dir: &DataDir,
    in_use: bool,
    sight: &mut DirectoryInspection,
) -> Result<(), InspectionStop> {
    let disk: SharedDisk = Arc::new(ReadOnlyDisk);
    let member_dir = dir.join("member");
    let marker = dir.marker().map_err(|error| damaged_stop(&error))?;
    sight.boots = dir.boot_count().map_err(|error| damaged_stop(&error))?;
    sight.forced = dir.forced_cluster().map_err(|error| damaged_stop(&error))?;
    sight.tombstone = dir.tombstone().map_err(|error| damaged_stop(&error))?;
    if let Some(plan) = dir.forced_plan().map_err(|error| damaged_stop(&error))?.filter(|_| !in_use)
    {
        sight.forced = Some(plan);
        let next = match sight.maker {
            Maker::MusterNode => {
                "a start of muster-node was killed while it made a new cluster here: start it once more, and look again"
            }
            Maker::Etcd => "a new cluster is half made here: make it again, and it is ended",
        };
        return Err((DirectoryState::Unfinished, Some(next.to_owned())));
    }
    if sight.maker == Maker::Etcd {
        return super::etcd::inspect(dir, marker, in_use, sight);
    }
    if let Some(error) = dir.etcd_store_error().map_err(|error| damaged_stop(&error))? {
        return Err(damaged_stop(&error));
    }
    if !dir.has_log().map_err(|error| damaged_stop(&error))? {
        let buried = sight.tombstone.is_some();
        return Err((if buried { DirectoryState::Removed } else { DirectoryState::Empty }, None));
    }
    let (mut incarnation, mut own) = (None, None);
    match Log::identity_of(&disk, &member_dir) {
        Ok(whose) => {
            sight.cluster_id = Some(ClusterId(whose.cluster).to_string());
            sight.member_id = Some(MemberId(whose.member).to_string());
            incarnation = Some(Incarnation(whose.incarnation.to_be_bytes()));
            sight.incarnation = incarnation.map(|incarnation| incarnation.to_string());
            own = Some(MemberId(whose.member));
        }
        // This is no damage: a running member may remove its log's oldest segment while the log is
        // read.
        Err(_) if in_use => {}
        Err(error) => return Err(damaged_stop(&error)),
    }
    if in_use {
        return Err((
            DirectoryState::InUse,
            Some("a member runs here: stop it to see the rest".to_owned()),
        ));
    }
    if let (Some(incarnation), Some(marker)) = (incarnation, marker)
        && incarnation != marker
    {
        let problem =
            format!("the log belongs to incarnation {incarnation}, the directory to {marker}");
        return Err((DirectoryState::Damaged, Some(problem)));
    }
    inspect_data(&disk, &member_dir, own, sight)?;
    if sight.tombstone.is_some() {
        return Err((DirectoryState::Removed, None));
    }
    Ok(())
}

fn inspect_data(
    disk: &SharedDisk,
    member_dir: &Path,
    own: Option<MemberId>,
    sight: &mut DirectoryInspection,
) -> Result<(), InspectionStop> {
    let (mut log, torn_at) =
        Log::open_read_only(disk, member_dir).map_err(|error| damaged_stop(&error))?;
    let (hard_state, base, last) = (log.hard_state(), log.base(), log.last());
    let seen = sight.log.insert(LogInspection {
        term: hard_state.term,
        vote: (hard_state.vote != 0).then(|| MemberId(hard_state.vote).to_string()),
        base_index: base.index,
        last_index: last.index,
        last_term: last.term,
        committed: hard_state.commit,
        torn_at,
    });
    let path = member_dir.join("db");
    let gone = || {
        let problem = format!("{} is missing or empty, but there is a log", path.display());
        (DirectoryState::Damaged, Some(problem))
    };
    if !disk.exists(&path).unwrap_or(true) {
        return Err(gone());
    }
    let file = disk.open(&path, OpenMode::Existing).map_err(|error| damaged_stop(&error))?;
    if file.is_empty().map_err(|error| damaged_stop(&error))? {
        return Err(gone());
    }
    let backend = RedbBackend::new(file).map_err(|error| damaged_stop(&error))?;
    let mut machine = KvStateMachine::open(backend, StoreOptions::default())
        .map_err(|error| damaged_stop(&error))?;
    machine.set_answer_filter(|_| false);
    let stored = machine.store().view();
    seen.committed = log.hard_state_with(machine.applied()).commit;
    let applied = machine.applied();
    let initial = driver::recover_initial_state(&mut log, applied, machine.members());
    let entries = initial.map_err(|error| damaged_stop(&error))?.entries;
    let entries: Vec<CommittedEntry> =
        entries.into_iter().map(super::force::to_committed).collect();
    super::force::apply_entries(&mut machine, &entries).map_err(|error| damaged_stop(&error))?;
    let (store, view) = (machine.store(), machine.store().view());
    let hash = store.hash_kv(&view, 0).map_err(|error| damaged_stop(&error))?;
    sight.name = own.and_then(|id| view.members().member(id)).map(|member| member.name.clone());
    let members = view.members().members().map(|member| InspectedMember {
        id: member.id.to_string(),
        name: member.name.clone(),
        peer_urls: member.peer_urls.clone(),
        client_urls: member.client_urls.clone(),
        is_learner: member.is_learner,
    });
    sight.store = Some(StoreInspection {
        applied: applied.index,
        stored_revision: stored.revision(),
        revision: view.revision(),
        compacted_revision: view.compact_revision(),
        hash: Some(hash.hash),
        members: members.collect(),
    });
    Ok(())
}
