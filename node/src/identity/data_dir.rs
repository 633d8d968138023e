//! The data directory: lock, incarnation marker, boot counter, mark of the log, tombstone.
//!
//! The mark says that this directory's member has begun a log. A log that is gone while its mark
//! stands held promises of this member, entries and votes, that it no longer knows of: begun anew
//! under its old identity it would help to outvote what it once acknowledged.
//!
//! Each small file is replaced whole: written beside itself, synced, renamed, and its directory
//! synced. What is read back is therefore always one of the values that were written.

use std::{
    ffi::OsStr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use muster_files::data;
use node_consensus::Guards;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::{
    ClusterId, Forced, Incarnation, MemberId,
    past::{NoStart, Past, Start},
};

const MARKER: &str = "muster-incarnation";
const BOOT_COUNTER: &str = "muster-boot";
const TOMBSTONE: &str = "muster-tombstone.json";
/// A cluster of one was made of what lies here.
const FORCED: &str = "muster-forced.json";
/// The same, as long as it is only planned, or half done.
const FORCING: &str = "muster-forcing.json";
/// The member began from nothing while `--force-new-cluster` was given.
const FORCE_WITHOUT_DATA: &str = "muster-force-without-data";
/// Supervisors look for this: once it exists, the member has a log of its own.
const LOG: &str = "member/wal";
/// Exists from the moment at which the log first had its name.
const LOG_MARK: &str = "muster-log";
/// Where etcd keeps its store; there never is a file of this name here.
const ETCDS_STORE: &str = "member/snap/db";
/// The member's log and store, and an etcd's.
const MEMBER: &str = "member";
/// What the names of all other files of ours begin with.
const OUR_PREFIX: &str = "muster-";
/// What the directory's owner alone should be able to do.
const PRIVATE: u32 = 0o700;

/// An open, locked data directory. The lock lasts as long as this value, and dies with the process.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// Holds the lock.
    handle: std::fs::File,
    /// Another user's directory is looked at too.
    only_looks: bool,
}

/// Why a data directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// The disk refused; or it isn't a directory; or another user may have prepared what lies there.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// It was made by etcd.
    #[error(
        "{} holds the data of an etcd, which this program cannot take over: give it a data directory of its own",
        .0.display()
    )]
    Etcds(PathBuf),
    /// It is this program's, and an etcd that was started there by mistake has left something in it.
    #[error(
        "an etcd was started in {}, which is a muster-node's, whose data is as it was: take {ETCDS_STORE} away, which that etcd has left, and start muster-node again",
        .0.display()
    )]
    EtcdsBeside(PathBuf),
    /// It was not.
    #[error("{} holds no etcd's data", .0.display())]
    NotEtcds(PathBuf),
    /// Its member had a log, which is gone.
    #[error(
        "{} is missing, but this member had begun a log there: it has lost data, and with it what it promised to its peers; its cluster must remove it and add a new one",
        .0.display()
    )]
    LogGone(PathBuf),
    /// Another process runs on it.
    #[error("the data directory {} is in use by another process", .0.display())]
    InUse(PathBuf),
    /// Its member was removed from its cluster: it never comes back.
    #[error("this member has been permanently removed from the cluster")]
    Removed(Box<Tombstone>),
    /// It belongs to another incarnation than the one that should start on it.
    #[error("the data directory {} belongs to incarnation {found}, not to {expected}", path.display())]
    OtherIncarnation {
        /// The directory.
        path: PathBuf,
        /// What its marker says.
        found: Incarnation,
        /// What the member document, or the log, says.
        expected: Incarnation,
    },
    /// One of its small files doesn't hold what only this program writes there.
    #[error("{} is damaged: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: &'static str,
    },
}

impl DataDirError {
    /// Whether a restart can never help: a supervisor must leave this member stopped.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Files(error) => error.is_refusal(),
            Self::Etcds(_)
            | Self::EtcdsBeside(_)
            | Self::LogGone(_)
            | Self::Removed(_)
            | Self::OtherIncarnation { .. }
            | Self::Damaged { .. } => true,
            Self::InUse(_) | Self::NotEtcds(_) => false,
        }
    }
}

/// What is left of a member that was removed from its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    version: u64,
    /// The incarnation that may never act again, lower-case hex.
    pub incarnation: String,
    /// Lower-case hex.
    pub member_id: String,
    /// Lower-case hex.
    pub cluster_id: String,
    /// When this member learned of it, RFC 3339.
    pub at: String,
    /// From whom: `log` if it applied its own removal, else the peer's id.
    pub by: String,
}

impl Tombstone {
    /// A tombstone for this incarnation.
    #[must_use]
    pub fn new(
        incarnation: Incarnation,
        member: MemberId,
        cluster: ClusterId,
        at: String,
        by: String,
    ) -> Self {
        Self {
            version: 1,
            incarnation: incarnation.to_string(),
            member_id: member.to_string(),
            cluster_id: cluster.to_string(),
            at,
            by,
        }
    }
}

impl DataDir {
    /// Opens `path`, making it (mode 0700) if it isn't there, and locks it. Nothing is changed in a
    /// directory that is there, its mode neither: who made it may have had a reason.
    ///
    /// # Errors
    /// `InUse` if another process holds it, `Removed` if a tombstone stands in it, `Files` and
    /// `Etcds` if it is nothing that this program could use.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        let dir = Self::lock(path)?;
        if let Some(error) = dir.etcds_store()? {
            return Err(error);
        }
        data::sweep(&dir.path)?;
        let io = muster_files::Error::io("look at", path);
        let mode = dir.handle.metadata().map_err(io)?.mode() & 0o777;
        if mode & !PRIVATE != 0 {
            tracing::warn!(
                path = %path.display(), mode = format!("{mode:o}"), recommended = format!("{PRIVATE:o}"),
                "the data directory is open to others than its owner"
            );
        }
        Ok(dir)
    }

    /// Refuses what another user may have prepared here, and warns where others may still write.
    fn check(&self, exposure: Option<&muster_files::Exposure>) -> Result<(), DataDirError> {
        let is_data = |name: &OsStr| {
            name == MEMBER || name.as_encoded_bytes().starts_with(OUR_PREFIX.as_bytes())
        };
        if let Some(exposure) = exposure {
            tracing::warn!(
                path = %self.path.display(),
                "other users can delete or replace this member's data: {exposure}"
            );
        }
        if let Some(path) = data::check(&self.path, is_data)? {
            tracing::warn!(
                path = %path.display(),
                "others than the owner may write to this part of the data directory, and its file system does not let muster-node close it to them: they can change what this member has stored"
            );
        }
        Ok(())
    }

    /// The same of a directory that an etcd made, and that is there.
    ///
    /// # Errors
    /// As `open`; `NotEtcds` where no etcd's data lies.
    pub(crate) fn open_etcds(path: &Path) -> Result<Self, DataDirError> {
        if !path.join(ETCDS_STORE).exists() {
            return Err(DataDirError::NotEtcds(path.to_owned()));
        }
        Self::lock(path)
    }

    fn lock(path: &Path) -> Result<Self, DataDirError> {
        let io = |action| muster_files::Error::io(action, path);
        let found = muster_files::data_folder(path)?;
        let handle = found.file;
        match flock(&handle, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(DataDirError::InUse(path.to_owned()));
            }
            Err(errno) => return Err(io("lock")(errno.into()).into()),
        }
        let dir = Self { path: found.path, handle, only_looks: false };
        dir.check(found.exposure.as_ref())?;
        let tombstone = dir.tombstone()?;
        let past = Past { has_tombstone: tombstone.is_some(), ..Past::default() };
        if let (Err(NoStart::Removed), Some(tombstone)) = (past.start(Guards::ALL), tombstone) {
            return Err(DataDirError::Removed(Box::new(tombstone)));
        }
        Ok(dir)
    }

    /// `path`, for a look: nothing in it is changed, and no member can start there meanwhile. Says
    /// whether one runs there already, and so changes it.
    ///
    /// # Errors
    /// If it can't be looked at.
    pub fn look(path: &Path) -> Result<(Self, bool), DataDirError> {
        let io = |action| muster_files::Error::io(action, path);
        let handle = muster_files::open_folder(path).map_err(io("open"))?;
        // Also: that its names may be read.
        std::fs::read_dir(path).map_err(io("read"))?;
        let in_use = match flock(&handle, FlockOperation::NonBlockingLockShared) {
            Ok(()) => false,
            Err(rustix::io::Errno::WOULDBLOCK) => true,
            Err(errno) => return Err(io("lock")(errno.into()).into()),
        };
        Ok((Self { path: path.to_owned(), handle, only_looks: true }, in_use))
    }

    /// Where it is, without links once it is locked.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where a file called `name` is, or would be.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Whether an etcd's data lies here, and none of this program's.
    #[must_use]
    pub fn is_etcds(&self) -> bool {
        matches!(self.etcds_store(), Ok(Some(DataDirError::Etcds(_))))
    }

    /// What is to be said of an etcd's store that lies here, if one does.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn etcds_store(&self) -> Result<Option<DataDirError>, DataDirError> {
        let path = || self.path.clone();
        Ok(match (self.has(ETCDS_STORE)?, self.has(LOG_MARK)?) {
            (false, _) => None,
            (true, true) => Some(DataDirError::EtcdsBeside(path())),
            (true, false) => Some(DataDirError::Etcds(path())),
        })
    }

    /// Whether the member has a log of its own here, and so must not bootstrap.
    ///
    /// # Errors
    /// `LogGone` if it had one.
    pub fn has_log(&self) -> Result<bool, DataDirError> {
        let (has_log, had_log) = (self.has(LOG)?, self.has(LOG_MARK)?);
        // A tombstone keeps it from being opened.
        let past = Past { has_tombstone: false, has_log, had_log };
        match past.start(Guards::ALL) {
            Ok(start) => Ok(start == Start::Again),
            Err(NoStart::LogGone | NoStart::Removed) => Err(DataDirError::LogGone(self.join(LOG))),
        }
    }

    /// Remembers durably that there is a log. To be called once there is one, before it promises
    /// anything; until then a first start that was cut short may simply begin again.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn mark_log(&self) -> Result<(), DataDirError> {
        if self.has(LOG_MARK)? { Ok(()) } else { self.replace(LOG_MARK, b"begun\n") }
    }

    /// Whether there is something called `name`. That the disk can't say is not a no.
    fn has(&self, name: &str) -> Result<bool, DataDirError> {
        let path = self.join(name);
        Ok(path.try_exists().map_err(muster_files::Error::io("look for", &path))?)
    }

    /// The incarnation that this directory belongs to, if one has been marked.
    ///
    /// # Errors
    /// If the marker can't be read or isn't one.
    pub fn marker(&self) -> Result<Option<Incarnation>, DataDirError> {
        let path = self.join(MARKER);
        let Some(bytes) = self.read_small(&path)? else {
            return Ok(None);
        };
        std::str::from_utf8(&bytes)
            .ok()
            .and_then(|text| text.strip_suffix('\n').unwrap_or(text).parse().ok())
            .map(Some)
            .ok_or(DataDirError::Damaged { path, problem: "it is not 32 lower-case hex digits" })
    }

    /// The incarnation of this directory: the marked one, which must be `expected` if that is
    /// given, or have been that one before it was made a cluster of its own; else `expected`, or a
    /// new one, is marked durably.
    ///
    /// # Errors
    /// `OtherIncarnation` if marker and `expected` differ.
    pub fn claim(&self, expected: Option<Incarnation>) -> Result<Incarnation, DataDirError> {
        let descends = |expected| {
            Ok::<_, DataDirError>(self.forced()?.is_some_and(|made| made.descends_from(expected)))
        };
        match (self.marker()?, expected) {
            (Some(found), Some(expected)) if found != expected && !descends(expected)? => {
                Err(DataDirError::OtherIncarnation { path: self.path.clone(), found, expected })
            }
            (Some(found), _) => Ok(found),
            (None, expected) => {
                let incarnation = expected.unwrap_or_else(Incarnation::random);
                self.replace(MARKER, format!("{incarnation}\n").as_bytes())?;
                Ok(incarnation)
            }
        }
    }

    /// From now on the directory belongs to another incarnation, durably.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(crate) fn reborn(&self, as_incarnation: Incarnation) -> Result<(), DataDirError> {
        self.replace(MARKER, format!("{as_incarnation}\n").as_bytes())
    }

    /// The cluster of one that was made of what lies here, if one was.
    ///
    /// # Errors
    /// If the record can't be read or isn't one.
    pub fn forced(&self) -> Result<Option<Forced>, DataDirError> {
        self.read_forced(FORCED)
    }

    /// The one that is planned, or half made.
    ///
    /// # Errors
    /// If the plan can't be read or isn't one.
    pub fn forcing(&self) -> Result<Option<Forced>, DataDirError> {
        self.read_forced(FORCING)
    }

    /// Writes the plan, durably.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(crate) fn plan(&self, plan: &Forced) -> Result<(), DataDirError> {
        self.replace(FORCING, &json(plan))
    }

    /// Writes the record, durably.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(crate) fn record(&self, made: &Forced) -> Result<(), DataDirError> {
        self.replace(FORCED, &json(made))
    }

    /// Takes the plan away, durably: it was carried out, or nothing of it was.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(crate) fn forget_plan(&self) -> Result<(), DataDirError> {
        let path = self.join(FORCING);
        data::remove(&path)?;
        Ok(data::sync(&self.path)?)
    }

    /// The content of a small file, or `None` if there is none.
    fn read_small(&self, path: &Path) -> Result<Option<Vec<u8>>, DataDirError> {
        let read = if self.only_looks { muster_files::read } else { data::read_own };
        Ok(read(path, MAX_SMALL_BYTES)?)
    }

    /// Remembers durably that `--force-new-cluster` was given when there was nothing here.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(crate) fn note_force_without_data(&self) -> Result<(), DataDirError> {
        if self.has_force_without_data()? {
            return Ok(());
        }
        self.replace(FORCE_WITHOUT_DATA, b"begun\n")
    }

    /// Whether every start since the first one had `--force-new-cluster`.
    ///
    /// # Errors
    /// If the disk can't say.
    pub(crate) fn has_force_without_data(&self) -> Result<bool, DataDirError> {
        self.has(FORCE_WITHOUT_DATA)
    }

    /// Forgets what [`Self::note_force_without_data`] noted, durably: the member has started without the
    /// flag.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(crate) fn forget_force_without_data(&self) -> Result<(), DataDirError> {
        if !self.has_force_without_data()? {
            return Ok(());
        }
        let path = self.join(FORCE_WITHOUT_DATA);
        std::fs::remove_file(&path).map_err(muster_files::Error::io("remove", &path))?;
        Ok(muster_files::sync(&self.path)?)
    }

    fn read_forced(&self, name: &str) -> Result<Option<Forced>, DataDirError> {
        let path = self.join(name);
        let Some(bytes) = self.read_small(&path)? else { return Ok(None) };
        match serde_json::from_slice::<Forced>(&bytes) {
            Ok(forced) if forced.is_known() => Ok(Some(forced)),
            Ok(_) => Err(DataDirError::Damaged { path, problem: "a later version wrote it" }),
            Err(_) => Err(DataDirError::Damaged {
                path,
                problem: "it is not the record of a cluster that was made by force",
            }),
        }
    }

    /// Counts this start, durably, and returns its number; the first is 1. Peers refuse a number
    /// below the highest that they have seen, so that an old image of this directory can't act.
    ///
    /// # Errors
    /// `Damaged` if the counter is gone from beside a log: it is written before the log ever is.
    pub fn count_boot(&self) -> Result<u64, DataDirError> {
        let path = self.join(BOOT_COUNTER);
        let damaged = |problem| DataDirError::Damaged { path: path.clone(), problem };
        let last = match self.boots()? {
            None if self.has_log()? => return Err(damaged("it is missing, but there is a log")),
            last => last.unwrap_or(0),
        };
        let boot = last.checked_add(1).ok_or_else(|| damaged("it is at its end"))?;
        self.replace(BOOT_COUNTER, format!("{boot}\n").as_bytes())?;
        Ok(boot)
    }

    /// Writes the tombstone, durably: from now on `open` refuses.
    ///
    /// # Errors
    /// If the disk does.
    pub fn bury(&self, tombstone: &Tombstone) -> Result<(), DataDirError> {
        self.replace(TOMBSTONE, &json(tombstone))
    }

    /// Replaces the small file `name` whole and durably.
    ///
    /// # Errors
    /// If the disk does; the file then holds either its old or its new content.
    pub fn replace(&self, name: &str, content: &[u8]) -> Result<(), DataDirError> {
        Ok(data::replace(&self.join(name), content)?)
    }

    /// How often the member was started.
    ///
    /// # Errors
    /// `Damaged` if the counter is not one.
    pub fn boots(&self) -> Result<Option<u64>, DataDirError> {
        let path = self.join(BOOT_COUNTER);
        let Some(bytes) = self.read_small(&path)? else { return Ok(None) };
        let count = std::str::from_utf8(&bytes).ok().and_then(|text| text.trim_end().parse().ok());
        count.map(Some).ok_or(DataDirError::Damaged { path, problem: "it is not a number" })
    }

    /// The tombstone, if one stands here.
    ///
    /// # Errors
    /// `Damaged` if it can't be read: somebody was buried here all the same.
    pub fn tombstone(&self) -> Result<Option<Tombstone>, DataDirError> {
        let path = self.join(TOMBSTONE);
        let Some(bytes) = self.read_small(&path)? else {
            return Ok(None);
        };
        // One that can't be read still says that somebody was buried here.
        serde_json::from_slice(&bytes).map(Some).map_err(|_| DataDirError::Damaged {
            path,
            problem: "it is a tombstone, but not one that can be read",
        })
    }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    let mut json = serde_json::to_vec(value).expect("plain strings and numbers");
    json.push(b'\n');
    json
}

/// Far more than any of these files holds.
const MAX_SMALL_BYTES: u64 = 64 * 1024;

#[cfg(test)]
mod tests;
