//! The data directory: lock, incarnation marker, boot counter, tombstone.
//!
//! Each small file is replaced whole: written beside itself, synced, renamed, and its directory
//! synced. What is read back is therefore always one of the values that were written.

use std::{
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::{ClusterId, Incarnation, MemberId};

const MARKER: &str = "muster-incarnation";
const BOOT_COUNTER: &str = "muster-boot";
const TOMBSTONE: &str = "muster-tombstone.json";
/// Supervisors look for this: once it exists, the member has a log of its own.
const LOG: &str = "member/wal";

/// An open, locked data directory. The lock lasts as long as this value, and dies with the process.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// Holds the lock.
    handle: std::fs::File,
}

/// Why a data directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// The disk or its permissions refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What it said.
        #[source]
        source: std::io::Error,
    },
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
            Self::Removed(_) | Self::OtherIncarnation { .. } | Self::Damaged { .. } => true,
            Self::Io { .. } | Self::InUse(_) => false,
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
    /// Opens `path`, making it (mode 0700) if it isn't there, and locks it.
    ///
    /// # Errors
    /// `InUse` if another process holds it, `Removed` if a tombstone stands in it.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        let io = |action| move |source| DataDirError::Io { action, path: path.to_owned(), source };
        if !path.exists() {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(io("make the data directory"))?;
            if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
                sync_dir(parent)?;
            }
        }
        let handle = std::fs::File::open(path).map_err(io("open the data directory"))?;
        let mode = handle.metadata().map_err(io("look at"))?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            handle
                .set_permissions(std::fs::Permissions::from_mode(0o700))
                .map_err(io("make private (mode 0700)"))?;
        }
        match flock(&handle, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(DataDirError::InUse(path.to_owned()));
            }
            Err(errno) => return Err(io("lock")(errno.into())),
        }
        let dir = Self { path: path.to_owned(), handle };
        match dir.tombstone()? {
            Some(tombstone) => Err(DataDirError::Removed(Box::new(tombstone))),
            None => Ok(dir),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where a file called `name` is, or would be.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Whether the member has a log of its own here, and so must not bootstrap.
    #[must_use]
    pub fn has_log(&self) -> bool {
        self.path.join(LOG).exists()
    }

    /// The incarnation that this directory belongs to, if one has been marked.
    ///
    /// # Errors
    /// If the marker can't be read or isn't one.
    pub fn marker(&self) -> Result<Option<Incarnation>, DataDirError> {
        let path = self.join(MARKER);
        let Some(bytes) = read_small(&path)? else {
            return Ok(None);
        };
        std::str::from_utf8(&bytes)
            .ok()
            .and_then(|text| text.strip_suffix('\n').unwrap_or(text).parse().ok())
            .map(Some)
            .ok_or(DataDirError::Damaged { path, problem: "it is not 32 lower-case hex digits" })
    }

    /// The incarnation of this directory: the marked one, which must be `expected` if that is
    /// given; else `expected`, or a new one, is marked durably.
    ///
    /// # Errors
    /// `OtherIncarnation` if marker and `expected` differ.
    pub fn claim(&self, expected: Option<Incarnation>) -> Result<Incarnation, DataDirError> {
        match (self.marker()?, expected) {
            (Some(found), Some(expected)) if found != expected => {
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

    /// Counts this start, durably, and returns its number; the first is 1. Peers refuse a number
    /// below the highest that they have seen, so that an old image of this directory can't act.
    ///
    /// # Errors
    /// `Damaged` if the counter is gone from beside a log: it is written before the log ever is.
    pub fn count_boot(&self) -> Result<u64, DataDirError> {
        let path = self.join(BOOT_COUNTER);
        let damaged = |problem| DataDirError::Damaged { path: path.clone(), problem };
        let last = match read_small(&path)? {
            None if self.has_log() => return Err(damaged("it is missing, but there is a log")),
            None => 0,
            Some(bytes) => std::str::from_utf8(&bytes)
                .ok()
                .and_then(|text| text.trim_end().parse::<u64>().ok())
                .ok_or_else(|| damaged("it is not a number"))?,
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
        let mut json = serde_json::to_vec(tombstone).expect("a tombstone is plain strings");
        json.push(b'\n');
        self.replace(TOMBSTONE, &json)
    }

    /// Replaces the small file `name` whole and durably.
    ///
    /// # Errors
    /// If the disk does; the file then holds either its old or its new content.
    pub fn replace(&self, name: &str, content: &[u8]) -> Result<(), DataDirError> {
        let path = self.join(name);
        let temporary = self.join(&format!("{name}.tmp"));
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| DataDirError::Io { action, path, source }
        };
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(io("create", &temporary))?;
        file.write_all(content).map_err(io("write", &temporary))?;
        file.sync_all().map_err(io("sync", &temporary))?;
        std::fs::rename(&temporary, &path).map_err(io("rename into place", &path))?;
        self.handle.sync_all().map_err(io("sync", &self.path))
    }

    fn tombstone(&self) -> Result<Option<Tombstone>, DataDirError> {
        let path = self.join(TOMBSTONE);
        let Some(bytes) = read_small(&path)? else {
            return Ok(None);
        };
        // One that can't be read still says that somebody was buried here.
        serde_json::from_slice(&bytes).map(Some).map_err(|_| DataDirError::Damaged {
            path,
            problem: "it is a tombstone, but not one that can be read",
        })
    }
}

/// Far more than any of these files holds.
const MAX_SMALL_BYTES: u64 = 64 * 1024;

/// The content of a small file, or `None` if there is none.
fn read_small(path: &Path) -> Result<Option<Vec<u8>>, DataDirError> {
    use std::io::Read;
    let io = |source| DataDirError::Io { action: "read", path: path.to_owned(), source };
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_SMALL_BYTES).read_to_end(&mut bytes).map_err(io)?;
    Ok(Some(bytes))
}

fn sync_dir(path: &Path) -> Result<(), DataDirError> {
    std::fs::File::open(path).and_then(|dir| dir.sync_all()).map_err(|source| DataDirError::Io {
        action: "sync",
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().expect("a temporary directory");
        let path = root.path().join("data");
        (root, path)
    }

    #[test]
    fn a_new_directory_is_private() {
        let (_root, path) = scratch();
        let dir = DataDir::open(&path).expect("it can be made");
        let mode = std::fs::metadata(dir.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_second_process_is_refused_while_the_first_lives() {
        let (_root, path) = scratch();
        let first = DataDir::open(&path).unwrap();
        assert!(matches!(DataDir::open(&path), Err(DataDirError::InUse(_))));
        drop(first);
        assert!(DataDir::open(&path).is_ok());
    }

    #[test]
    fn an_incarnation_is_kept_for_good() {
        let (_root, path) = scratch();
        let dir = DataDir::open(&path).unwrap();
        let first = dir.claim(None).unwrap();
        assert_eq!(dir.claim(None).unwrap(), first);
        assert_eq!(dir.claim(Some(first)).unwrap(), first);
    }

    #[test]
    fn another_incarnation_is_refused_for_good() {
        let (_root, path) = scratch();
        let dir = DataDir::open(&path).unwrap();
        dir.claim(Some(Incarnation([1; 16]))).unwrap();
        let error = dir.claim(Some(Incarnation([2; 16]))).unwrap_err();
        assert!(matches!(error, DataDirError::OtherIncarnation { .. }));
        assert!(error.is_final());
    }

    #[test]
    fn a_supervisors_marker_is_read() {
        let (_root, path) = scratch();
        let dir = DataDir::open(&path).unwrap();
        std::fs::write(path.join(MARKER), format!("{}\n", "0a".repeat(16))).unwrap();
        assert_eq!(dir.claim(None).unwrap(), Incarnation([10; 16]));
        std::fs::write(path.join(MARKER), "junk").unwrap();
        assert!(matches!(dir.claim(None), Err(DataDirError::Damaged { .. })));
    }

    #[test]
    fn each_start_has_a_higher_number() {
        let (_root, path) = scratch();
        let dir = DataDir::open(&path).unwrap();
        assert_eq!(dir.count_boot().unwrap(), 1);
        assert_eq!(dir.count_boot().unwrap(), 2);
        drop(dir);
        assert_eq!(DataDir::open(&path).unwrap().count_boot().unwrap(), 3);
    }

    #[test]
    fn a_log_without_its_boot_counter_is_refused() {
        let (_root, path) = scratch();
        let dir = DataDir::open(&path).unwrap();
        std::fs::create_dir_all(path.join(LOG)).unwrap();
        assert!(matches!(dir.count_boot(), Err(DataDirError::Damaged { .. })));
    }

    #[test]
    fn a_buried_member_never_starts_again() {
        let (_root, path) = scratch();
        let dir = DataDir::open(&path).unwrap();
        let tombstone = Tombstone::new(
            Incarnation([3; 16]),
            MemberId(0xab),
            ClusterId(0xcd),
            "2026-01-01T00:00:00Z".to_owned(),
            "log".to_owned(),
        );
        dir.bury(&tombstone).unwrap();
        drop(dir);
        match DataDir::open(&path) {
            Err(DataDirError::Removed(found)) => assert_eq!(*found, tombstone),
            other => panic!("it opened: {other:?}"),
        }
        // Not even if its text is lost.
        std::fs::write(path.join(TOMBSTONE), b"").unwrap();
        assert!(DataDir::open(&path).unwrap_err().is_final());
    }
}
