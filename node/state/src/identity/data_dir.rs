//! The data directory: its lock, incarnation marker, boot counter, log mark and tombstone.
//!
//! The log mark says that the directory's member has begun a log. If the log is gone while the mark
//! exists, this member has lost entries and votes that it promised to its peers. If the member
//! started again under its old identity, it could help a majority to drop entries that it had
//! acknowledged.
//!
//! Each small file is replaced as a whole: a temporary file is written, synced and renamed, and the
//! directory is synced. So reading a file always gives one of the values that were written.

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
    ClusterId, ForcedCluster, Incarnation, MemberId,
    start_evidence::{StartEvidence, StartKind, StartRefusal},
};

const MARKER: &str = "muster-incarnation";
const BOOT_COUNTER: &str = "muster-boot";
const TOMBSTONE: &str = "muster-tombstone.json";
/// Name of the file with the record of a single-member cluster that was made by force from this
/// directory's data.
const FORCED: &str = "muster-forced.json";
/// Name of the file with the plan of a forced single-member cluster that is not completely made
/// yet.
const FORCING: &str = "muster-forcing.json";
/// Name of a file that marks a first start with `--force-new-cluster` and without data in the
/// directory.
const FORCE_WITHOUT_DATA: &str = "muster-force-without-data";
/// Path of the log. Supervisors check for it: if it exists, the member has a log.
const LOG: &str = "member/wal";
/// Name of the log mark, which exists from the time when the log was first created.
const LOG_MARK: &str = "muster-log";
/// Path of an etcd's store; muster-node never makes a file of this name.
const ETCDS_STORE: &str = "member/snap/db";
/// Name of the folder with the member's log and store. The name is the same for muster-node and
/// etcd.
const MEMBER: &str = "member";
/// Prefix of the names of all files of muster-node outside the folder [`MEMBER`].
const OUR_PREFIX: &str = "muster-";
/// Recommended mode of the directory: access for its owner only.
const PRIVATE: u32 = 0o700;

/// An open, locked data directory. The lock is released when this value is dropped or the process
/// ends.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// Open handle of the directory, which holds the lock.
    handle: std::fs::File,
    /// Whether the directory is only inspected. Files that belong to other users can then be read
    /// too.
    is_read_only: bool,
}

/// Why a data directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// A file operation failed, or the path is not a directory. Or another user could write to the
    /// directory, and may have put its files there.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// The directory belongs to an etcd.
    #[error(
        "{} holds the data of an etcd, which this program cannot take over: give it a data directory of its own",
        .0.display()
    )]
    EtcdDirectory(PathBuf),
    /// The directory belongs to muster-node, but an etcd that was started there by mistake has left
    /// its store in it.
    #[error(
        "an etcd was started in {}, which is a muster-node's, whose data is as it was: take {ETCDS_STORE} away, which that etcd has left, and start muster-node again",
        .0.display()
    )]
    EtcdStoreBeside(PathBuf),
    /// The directory should belong to an etcd, but contains no etcd's data.
    #[error("{} holds no etcd's data", .0.display())]
    NoEtcdData(PathBuf),
    /// The member has begun a log, but the log is missing.
    #[error(
        "{} is missing, but this member had begun a log there: it has lost data, and with it what it promised to its peers; its cluster must remove it and add a new one",
        .0.display()
    )]
    LogMissing(PathBuf),
    /// Another process has locked the directory.
    #[error("the data directory {} is in use by another process", .0.display())]
    InUse(PathBuf),
    /// The member was removed from its cluster and can never return.
    #[error("this member has been permanently removed from the cluster")]
    Removed(Box<Tombstone>),
    /// The directory belongs to another incarnation than expected.
    #[error("the data directory {} belongs to incarnation {found}, not to {expected}", path.display())]
    OtherIncarnation {
        /// Path of the data directory.
        path: PathBuf,
        /// Incarnation in the directory's incarnation marker.
        found: Incarnation,
        /// Incarnation that the member document or the log requires.
        expected: Incarnation,
    },
    /// A small file has contents that muster-node never writes.
    #[error("{} is damaged: {problem}", path.display())]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: &'static str,
    },
}

impl DataDirError {
    /// Whether a restart can never help, so that a supervisor must leave this member stopped.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::Files(error) => error.is_refusal(),
            Self::EtcdDirectory(_)
            | Self::EtcdStoreBeside(_)
            | Self::LogMissing(_)
            | Self::Removed(_)
            | Self::OtherIncarnation { .. }
            | Self::Damaged { .. } => true,
            Self::InUse(_) | Self::NoEtcdData(_) => false,
        }
    }
}

/// The record of a member's removal from its cluster, kept in its data directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    version: u64,
    /// Incarnation of the removed member, which may never act again, in lower-case hex.
    pub incarnation: String,
    /// Id of the removed member, in lower-case hex.
    pub member_id: String,
    /// Id of the member's cluster, in lower-case hex.
    pub cluster_id: String,
    /// Time at which the member learned of its removal, in RFC 3339 format.
    pub at: String,
    /// Source of the information: `log` if the member applied its own removal, otherwise the peer's
    /// id.
    pub by: String,
}

impl Tombstone {
    /// Creates the tombstone of a removed member.
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
    /// Opens the directory `path` and locks it. If it does not exist, it is created with mode 0700.
    /// An existing directory is not changed. Even its mode stays, because the operator may have
    /// chosen it.
    ///
    /// # Errors
    /// Fails with `InUse` if another process has locked it, `Removed` if it contains a tombstone,
    /// and `Files` or `EtcdDirectory` if this program can't use it.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        let dir = Self::lock(path)?;
        if let Some(error) = dir.etcd_store_error()? {
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

    /// Fails if other users could have put files into the directory. Logs a warning if other users
    /// can still write there.
    fn check_exposure(
        &self,
        exposure: Option<&muster_files::Exposure>,
    ) -> Result<(), DataDirError> {
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

    /// Opens and locks an existing data directory of an etcd.
    ///
    /// # Errors
    /// Fails like `open`, and with `NoEtcdData` if there is no etcd's data.
    pub fn open_etcd(path: &Path) -> Result<Self, DataDirError> {
        if !path.join(ETCDS_STORE).exists() {
            return Err(DataDirError::NoEtcdData(path.to_owned()));
        }
        Self::lock(path)
    }

    fn lock(path: &Path) -> Result<Self, DataDirError> {
        let io = |action| muster_files::Error::io(action, path);
        let found = muster_files::open_data_folder(path)?;
        let handle = found.file;
        match flock(&handle, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(DataDirError::InUse(path.to_owned()));
            }
            Err(errno) => return Err(io("lock")(errno.into()).into()),
        }
        let dir = Self { path: found.path, handle, is_read_only: false };
        dir.check_exposure(found.exposure.as_ref())?;
        let tombstone = dir.tombstone()?;
        let past = StartEvidence { has_tombstone: tombstone.is_some(), ..StartEvidence::default() };
        if let (Err(StartRefusal::Removed), Some(tombstone)) =
            (past.start_kind(Guards::ALL), tombstone)
        {
            return Err(DataDirError::Removed(Box::new(tombstone)));
        }
        Ok(dir)
    }

    /// Opens `path` for inspection. Nothing in it is changed, and no member can start there
    /// meanwhile. The returned flag is true if a member is already running there, so that the files
    /// can change.
    ///
    /// # Errors
    /// Fails if the directory can't be opened, read or locked.
    pub fn open_read_only(path: &Path) -> Result<(Self, bool), DataDirError> {
        let io = |action| muster_files::Error::io(action, path);
        let handle = muster_files::open_folder(path).map_err(io("open"))?;
        // This finds out early whether the user has no permission to list the directory.
        std::fs::read_dir(path).map_err(io("read"))?;
        let in_use = match flock(&handle, FlockOperation::NonBlockingLockShared) {
            Ok(()) => false,
            Err(rustix::io::Errno::WOULDBLOCK) => true,
            Err(errno) => return Err(io("lock")(errno.into()).into()),
        };
        Ok((Self { path: path.to_owned(), handle, is_read_only: true }, in_use))
    }

    /// Returns the path of the directory. Once it is locked, the path contains no symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the file `name` in the directory, whether it exists or not.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Whether the directory contains an etcd's data and none of muster-node's.
    #[must_use]
    pub fn is_etcd_directory(&self) -> bool {
        matches!(self.etcd_store_error(), Ok(Some(DataDirError::EtcdDirectory(_))))
    }

    /// Returns the error to be reported for an etcd's store in this directory. Returns `None` if
    /// there is no such store.
    ///
    /// # Errors
    /// Fails if the disk can't be read.
    pub fn etcd_store_error(&self) -> Result<Option<DataDirError>, DataDirError> {
        let path = || self.path.clone();
        Ok(match (self.has(ETCDS_STORE)?, self.has(LOG_MARK)?) {
            (false, _) => None,
            (true, true) => Some(DataDirError::EtcdStoreBeside(path())),
            (true, false) => Some(DataDirError::EtcdDirectory(path())),
        })
    }

    /// Whether the member has a log here, and so must not bootstrap.
    ///
    /// # Errors
    /// Fails with `LogMissing` if the member had a log and it is missing.
    pub fn has_log(&self) -> Result<bool, DataDirError> {
        let (has_log, had_log) = (self.has(LOG)?, self.has(LOG_MARK)?);
        // A directory with a tombstone can't be opened, so there is none here.
        let past = StartEvidence { has_tombstone: false, has_log, has_log_mark: had_log };
        match past.start_kind(Guards::ALL) {
            Ok(start) => Ok(start == StartKind::Restart),
            Err(StartRefusal::LogMissing | StartRefusal::Removed) => {
                Err(DataDirError::LogMissing(self.join(LOG)))
            }
        }
    }

    /// Records durably that there is a log. The caller must do this after it creates the log, and
    /// before it sends any vote or acknowledgement to peers. Until then, an interrupted first start
    /// can simply be repeated.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub fn mark_log(&self) -> Result<(), DataDirError> {
        if self.has(LOG_MARK)? { Ok(()) } else { self.replace(LOG_MARK, b"begun\n") }
    }

    /// Whether the file `name` exists. Fails if the disk can't be read.
    fn has(&self, name: &str) -> Result<bool, DataDirError> {
        let path = self.join(name);
        Ok(path.try_exists().map_err(muster_files::Error::io("look for", &path))?)
    }

    /// Returns the incarnation in the directory's incarnation marker, or `None` if there is no
    /// marker.
    ///
    /// # Errors
    /// Fails if the marker can't be read or parsed.
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

    /// Returns the incarnation of this directory. If there are both an incarnation marker and
    /// `expected`, they must be equal. A marker that descends from `expected` by a forced new
    /// cluster is accepted too. If there is no marker, `expected` or a new incarnation is written
    /// durably as the marker.
    ///
    /// # Errors
    /// Fails with `OtherIncarnation` if marker and `expected` differ.
    pub fn claim(&self, expected: Option<Incarnation>) -> Result<Incarnation, DataDirError> {
        let descends = |expected| {
            Ok::<_, DataDirError>(
                self.forced_cluster()?.is_some_and(|made| made.descends_from(expected)),
            )
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

    /// Durably writes another incarnation to the incarnation marker.
    ///
    /// # Errors
    /// Fails if the marker can't be written.
    pub fn replace_marker(&self, as_incarnation: Incarnation) -> Result<(), DataDirError> {
        self.replace(MARKER, format!("{as_incarnation}\n").as_bytes())
    }

    /// Returns the record of the single-member cluster that was made from this data. Returns `None`
    /// if there is no such cluster.
    ///
    /// # Errors
    /// Fails if the record can't be read or parsed.
    pub fn forced_cluster(&self) -> Result<Option<ForcedCluster>, DataDirError> {
        self.read_forced(FORCED)
    }

    /// Returns the plan of a single-member cluster that is not completely made yet, or `None`.
    ///
    /// # Errors
    /// Fails if the plan can't be read or parsed.
    pub fn forced_plan(&self) -> Result<Option<ForcedCluster>, DataDirError> {
        self.read_forced(FORCING)
    }

    /// Writes the plan of a new single-member cluster, durably.
    ///
    /// # Errors
    /// Fails if the plan can't be written.
    pub fn write_forced_plan(&self, plan: &ForcedCluster) -> Result<(), DataDirError> {
        self.replace(FORCING, &json(plan))
    }

    /// Writes the record of the new single-member cluster, durably.
    ///
    /// # Errors
    /// Fails if the record can't be written.
    pub fn write_forced_cluster(&self, made: &ForcedCluster) -> Result<(), DataDirError> {
        self.replace(FORCED, &json(made))
    }

    /// Deletes the plan of a forced single-member cluster, durably, after the plan was carried out
    /// or abandoned.
    ///
    /// # Errors
    /// Fails if the file can't be deleted.
    pub fn delete_forced_plan(&self) -> Result<(), DataDirError> {
        let path = self.join(FORCING);
        data::remove(&path)?;
        Ok(data::sync(&self.path)?)
    }

    /// Returns the contents of a small file, or `None` if it does not exist.
    fn read_small(&self, path: &Path) -> Result<Option<Vec<u8>>, DataDirError> {
        let read = if self.is_read_only { muster_files::read } else { data::read_own };
        Ok(read(path, MAX_SMALL_BYTES)?)
    }

    /// Records durably that `--force-new-cluster` was given when the directory had no data.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub fn mark_force_without_data(&self) -> Result<(), DataDirError> {
        if self.has_force_without_data()? {
            return Ok(());
        }
        self.replace(FORCE_WITHOUT_DATA, b"begun\n")
    }

    /// Whether the first start had `--force-new-cluster` without data, and every later start had
    /// the flag too.
    ///
    /// # Errors
    /// Fails if the disk can't be read.
    pub fn has_force_without_data(&self) -> Result<bool, DataDirError> {
        self.has(FORCE_WITHOUT_DATA)
    }

    /// Deletes the file that [`Self::mark_force_without_data`] wrote, durably, because the member
    /// has started without `--force-new-cluster`.
    ///
    /// # Errors
    /// Fails if the file can't be deleted.
    pub fn unmark_force_without_data(&self) -> Result<(), DataDirError> {
        if !self.has_force_without_data()? {
            return Ok(());
        }
        let path = self.join(FORCE_WITHOUT_DATA);
        std::fs::remove_file(&path).map_err(muster_files::Error::io("remove", &path))?;
        Ok(muster_files::sync(&self.path)?)
    }

    fn read_forced(&self, name: &str) -> Result<Option<ForcedCluster>, DataDirError> {
        let path = self.join(name);
        let Some(bytes) = self.read_small(&path)? else { return Ok(None) };
        match serde_json::from_slice::<ForcedCluster>(&bytes) {
            Ok(forced) if forced.is_known() => Ok(Some(forced)),
            Ok(_) => Err(DataDirError::Damaged { path, problem: "a later version wrote it" }),
            Err(_) => Err(DataDirError::Damaged {
                path,
                problem: "it is not the record of a cluster that was made by force",
            }),
        }
    }

    /// Increments the boot counter durably, and returns it; the first start is 1. Peers refuse a
    /// number below the highest that they have seen. So an old image of this directory can't act as
    /// the member.
    ///
    /// # Errors
    /// Fails with `Damaged` if there is a log but no counter, since the counter is always written
    /// first.
    pub fn count_boot(&self) -> Result<u64, DataDirError> {
        let path = self.join(BOOT_COUNTER);
        let damaged = |problem| DataDirError::Damaged { path: path.clone(), problem };
        let last = match self.boot_count()? {
            None if self.has_log()? => return Err(damaged("it is missing, but there is a log")),
            last => last.unwrap_or(0),
        };
        let boot = last.checked_add(1).ok_or_else(|| damaged("it is at its end"))?;
        self.replace(BOOT_COUNTER, format!("{boot}\n").as_bytes())?;
        Ok(boot)
    }

    /// Writes the tombstone durably. After that, `open` fails.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub fn write_tombstone(&self, tombstone: &Tombstone) -> Result<(), DataDirError> {
        self.replace(TOMBSTONE, &json(tombstone))
    }

    /// Replaces the small file `name` as a whole, durably.
    ///
    /// # Errors
    /// Fails if the file can't be written; it then has either its old or its new contents.
    pub fn replace(&self, name: &str, content: &[u8]) -> Result<(), DataDirError> {
        Ok(data::replace(&self.join(name), content)?)
    }

    /// Returns the number of times that the member was started, or `None` if it never was.
    ///
    /// # Errors
    /// Fails with `Damaged` if the counter can't be parsed.
    pub fn boot_count(&self) -> Result<Option<u64>, DataDirError> {
        let path = self.join(BOOT_COUNTER);
        let Some(bytes) = self.read_small(&path)? else { return Ok(None) };
        let count = std::str::from_utf8(&bytes).ok().and_then(|text| text.trim_end().parse().ok());
        count.map(Some).ok_or(DataDirError::Damaged { path, problem: "it is not a number" })
    }

    /// Returns the tombstone, if there is one.
    ///
    /// # Errors
    /// Fails with `Damaged` if it can't be parsed; the member counts as removed all the same.
    pub fn tombstone(&self) -> Result<Option<Tombstone>, DataDirError> {
        let path = self.join(TOMBSTONE);
        let Some(bytes) = self.read_small(&path)? else {
            return Ok(None);
        };
        // An unreadable tombstone still means that the member was removed.
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

/// Maximum size of a small file in bytes, far more than any of them needs.
const MAX_SMALL_BYTES: u64 = 64 * 1024;

#[cfg(test)]
mod tests;
