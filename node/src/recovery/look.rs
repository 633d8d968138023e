//! What lies in a data directory, found out by what a start would do with it, and without leaving a
//! trace: the log's end, the store, and the store as it would be with the whole log applied.

use std::{path::Path, sync::Arc};

use serde::Serialize;

use crate::{
    apply::Machine,
    causes::chain,
    disk::{Backend, Open, ReadOnlyDisk, SharedDisk},
    driver,
    identity::{ClusterId, DataDir, DataDirError, Forced, Incarnation, MemberId, Tombstone},
    log::Log,
    machine::{Committed, StateMachine as _},
    mvcc::Options,
};

/// What would become of a start here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// A member, whole.
    Whole,
    /// A member that runs, and changes what lies here.
    InUse,
    /// A cluster of one is half made: the next start finishes it.
    Unfinished,
    /// Nobody's.
    Empty,
    /// A member that was removed from its cluster: no start will do.
    Removed,
    /// A member that has lost data, or whose data is damaged: no start will do.
    Damaged,
}

/// Which program made a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Maker {
    /// This one.
    MusterNode,
    /// An etcd.
    Etcd,
}

/// The log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogSight {
    /// The term that the member is in.
    pub term: u64,
    /// Whom it voted for in it; none: nobody.
    pub vote: Option<String>,
    /// The entry before the first.
    pub base_index: u64,
    /// The last entry.
    pub last_index: u64,
    /// Its term.
    pub last_term: u64,
    /// The entry up to which it is known to be committed.
    pub committed: u64,
    /// Where the last write was cut off, which nobody was told of.
    pub torn_at: Option<u64>,
}

/// The store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoreSight {
    /// The last entry that it holds.
    pub applied: u64,
    /// Its newest revision.
    pub stored_revision: i64,
    /// The newest revision, with the whole log applied; of an etcd's, whose log isn't, as it is stored.
    pub revision: i64,
    /// What can't be read any more, also then; -1: nothing was compacted.
    pub compacted_revision: i64,
    /// `HashKV` of that revision; not of an etcd's.
    pub hash: Option<u32>,
    /// Who belongs to the cluster then.
    pub members: Vec<MemberSight>,
}

/// One member of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemberSight {
    /// Its id.
    pub id: String,
    /// Its name; empty if it never started.
    pub name: String,
    /// Where its peers reach it.
    pub peer_urls: Vec<String>,
    /// Where clients reach it.
    pub client_urls: Vec<String>,
    /// It has no vote.
    pub is_learner: bool,
}

/// A data directory, as far as it could be looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sight {
    /// Where it is.
    pub data_dir: String,
    /// Who made it.
    pub maker: Maker,
    /// What would become of a start here.
    pub state: State,
    /// What is wrong, and where.
    pub problem: Option<String>,
    /// The cluster that it is of, hex.
    pub cluster_id: Option<String>,
    /// As which member, hex.
    pub member_id: Option<String>,
    /// Of which incarnation, hex; an etcd has one if an agent looks after it.
    pub incarnation: Option<String>,
    /// Its name, as the cluster knows it.
    pub name: Option<String>,
    /// How often it was started.
    pub boots: Option<u64>,
    /// The log.
    pub log: Option<LogSight>,
    /// The store.
    pub store: Option<StoreSight>,
    /// What is left of a removed member.
    pub tombstone: Option<Tombstone>,
    /// The cluster of one that was made here.
    pub forced: Option<Forced>,
}

/// Looks at the data directory at `path`.
///
/// # Errors
/// If it can't be looked at. What is wrong with what it holds is no error, but a [`State`].
pub fn look(path: &Path) -> Result<Sight, DataDirError> {
    let (dir, in_use) = DataDir::look(path)?;
    let mut sight = Sight {
        data_dir: path.display().to_string(),
        maker: if dir.is_etcds() { Maker::Etcd } else { Maker::MusterNode },
        state: State::Whole,
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
    if let Err((state, problem)) = see(&dir, in_use, &mut sight) {
        sight.state = state;
        sight.problem = problem;
    }
    Ok(sight)
}

/// How a look ended before everything was seen.
pub(super) type End = (State, Option<String>);

pub(super) fn damaged(error: &(dyn std::error::Error + 'static)) -> End {
    (State::Damaged, Some(chain(error)))
}

fn see(dir: &DataDir, in_use: bool, sight: &mut Sight) -> Result<(), End> {
    let disk: SharedDisk = Arc::new(ReadOnlyDisk);
    let member_dir = dir.join("member");
    let marker = dir.marker().map_err(|error| damaged(&error))?;
    sight.boots = dir.boots().map_err(|error| damaged(&error))?;
    sight.forced = dir.forced().map_err(|error| damaged(&error))?;
    sight.tombstone = dir.tombstone().map_err(|error| damaged(&error))?;
    if let Some(plan) = dir.forcing().map_err(|error| damaged(&error))?.filter(|_| !in_use) {
        sight.forced = Some(plan);
        let next = match sight.maker {
            Maker::MusterNode => {
                "a start of muster-node was killed while it made a new cluster here: start it once more, and look again"
            }
            Maker::Etcd => "a new cluster is half made here: make it again, and it is ended",
        };
        return Err((State::Unfinished, Some(next.to_owned())));
    }
    if sight.maker == Maker::Etcd {
        return super::etcd::see(dir, marker, in_use, sight);
    }
    if let Some(error) = dir.etcds_store().map_err(|error| damaged(&error))? {
        return Err(damaged(&error));
    }
    if !dir.has_log().map_err(|error| damaged(&error))? {
        let buried = sight.tombstone.is_some();
        return Err((if buried { State::Removed } else { State::Empty }, None));
    }
    let (mut incarnation, mut own) = (None, None);
    match Log::whose(&disk, &member_dir) {
        Ok(whose) => {
            sight.cluster_id = Some(ClusterId(whose.cluster).to_string());
            sight.member_id = Some(MemberId(whose.member).to_string());
            incarnation = Some(Incarnation(whose.incarnation.to_be_bytes()));
            sight.incarnation = incarnation.map(|incarnation| incarnation.to_string());
            own = Some(MemberId(whose.member));
        }
        // While it runs, its oldest segment may go away at any moment.
        Err(_) if in_use => {}
        Err(error) => return Err(damaged(&error)),
    }
    if in_use {
        return Err((State::InUse, Some("a member runs here: stop it to see the rest".to_owned())));
    }
    if let (Some(incarnation), Some(marker)) = (incarnation, marker)
        && incarnation != marker
    {
        let problem =
            format!("the log belongs to incarnation {incarnation}, the directory to {marker}");
        return Err((State::Damaged, Some(problem)));
    }
    see_data(&disk, &member_dir, own, sight)?;
    if sight.tombstone.is_some() {
        return Err((State::Removed, None));
    }
    Ok(())
}

fn see_data(
    disk: &SharedDisk,
    member_dir: &Path,
    own: Option<MemberId>,
    sight: &mut Sight,
) -> Result<(), End> {
    let (mut log, torn_at) = Log::look(disk, member_dir).map_err(|error| damaged(&error))?;
    let (hard_state, base, last) = (log.hard_state(), log.base(), log.last());
    let seen = sight.log.insert(LogSight {
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
        (State::Damaged, Some(problem))
    };
    if !disk.exists(&path).unwrap_or(true) {
        return Err(gone());
    }
    let file = disk.open(&path, Open::Existing).map_err(|error| damaged(&error))?;
    if file.is_empty().map_err(|error| damaged(&error))? {
        return Err(gone());
    }
    let backend = Backend::new(file).map_err(|error| damaged(&error))?;
    let mut machine =
        Machine::open(backend, Options::default()).map_err(|error| damaged(&error))?;
    machine.answer_only(|_| false);
    let stored = machine.store().view();
    seen.committed = log.hard_state_with(machine.applied()).commit;
    let applied = machine.applied();
    let initial = driver::recover(&mut log, applied, machine.members());
    let entries = initial.map_err(|error| damaged(&error))?.entries;
    let entries: Vec<Committed> = entries.into_iter().map(super::force::as_committed).collect();
    super::force::apply(&mut machine, &entries).map_err(|error| damaged(&error))?;
    let (store, view) = (machine.store(), machine.store().view());
    let hash = store.hash_kv(&view, 0).map_err(|error| damaged(&error))?;
    sight.name = own.and_then(|id| view.members().member(id)).map(|member| member.name.clone());
    let members = view.members().members().map(|member| MemberSight {
        id: member.id.to_string(),
        name: member.name.clone(),
        peer_urls: member.peer_urls.clone(),
        client_urls: member.client_urls.clone(),
        is_learner: member.is_learner,
    });
    sight.store = Some(StoreSight {
        applied: applied.index,
        stored_revision: stored.revision(),
        revision: view.revision(),
        compacted_revision: view.compacted(),
        hash: Some(hash.hash),
        members: members.collect(),
    });
    Ok(())
}
