//! Restores a snapshot file as the directory of a member of a new cluster.
//!
//! Each first member of the new cluster is restored from the same file, so their stores are equal.
//! Ids are computed from names, URLs and token by etcd's formula. The log begins after entry 1,
//! which represents the file. So if one member was not restored and starts empty, the others send
//! it the whole state. Such a member can't mistake its empty store for the store of a new cluster.
//!
//! The directory is made beside its target, synced, and then renamed. So an interrupted restore
//! leaves nothing on which a member could start.

use std::{
    fs::{DirBuilder, File},
    io::{self, BufRead as _, BufReader, ErrorKind},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use node_engine::log::{self, Log, LogError, LogOptions};
use node_state::auth::AuthState;
use node_state::{
    disk::{Disk as _, OpenMode, RealDisk, RedbBackend, SharedDisk},
    etcd_file::{EtcdFile, EtcdFileError, HashCheck},
    identity::{DataDir, DataDirError, InitialCluster, InitialMember},
    membership::{Member, MemberTable},
    mvcc::{Contents, StoreError, StoreOptions, StoreWriter},
    state_machine::Position,
};

/// Position after which a restored member's log begins. It stands for the contents of the snapshot
/// file.
const BASE: Position = Position { index: 1, term: 1 };
/// Part of the temporary directory's name, between the target's name and the process id.
const TEMPORARY_INFIX: &str = ".restoring-";

/// Parameters of a restore from a snapshot file.
#[derive(Clone, Debug)]
pub struct RestoreOptions {
    /// Directory of the new member.
    pub data_dir: PathBuf,
    /// Name of the new member, which `cluster` must contain.
    pub name: String,
    /// First members of the new cluster.
    pub cluster: InitialCluster,
    /// Number that is added to the newest revision; the raised revision is then marked as
    /// compacted. 0 changes nothing.
    pub bump_revision: i64,
    /// Whether the hash at the end of the snapshot file is checked.
    pub hash_check: HashCheck,
    /// Whether users and roles are left out. Every client of the new cluster may then do
    /// everything.
    pub drop_auth: bool,
}

/// Result of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreResult {
    /// Newest revision of the restored store.
    pub revision: i64,
    /// Revision of the last compaction; -1 for none.
    pub compacted: i64,
}

/// Why a restore failed. No directory was made, unless only the sync after the final rename failed.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The target exists and is not empty, or can't be read.
    #[error("data-dir {0:?} not empty or could not be read")]
    NotEmpty(PathBuf),
    /// The target path has no file name.
    #[error("{} cannot be the name of a new data directory", .0.display())]
    InvalidTarget(PathBuf),
    /// The snapshot file can't be opened or read.
    #[error("cannot open {}", path.display())]
    File {
        /// Path of the snapshot file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The contents of the snapshot file can't be used.
    #[error(transparent)]
    Import(#[from] EtcdFileError),
    /// The cluster does not contain this member.
    #[error("couldn't find local name \"{0}\" in the initial cluster configuration")]
    NoSuchMember(String),
    /// The raised revision would exceed the largest possible one.
    #[error("--bump-revision {0} is too much for revision {1}")]
    RevisionOverflow(i64, i64),
    /// A small file of the new directory can't be made.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// The new store can't be made.
    #[error("the new store cannot be made")]
    Store(#[from] StoreError),
    /// The new log can't be made.
    #[error("the new log cannot be made")]
    Log(#[from] LogError),
    /// An operation on the disk failed.
    #[error("cannot {action} {}", path.display())]
    Disk {
        /// Operation that was attempted.
        action: &'static str,
        /// Path on which the operation failed.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

fn disk_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RestoreError + use<> {
    let path = path.to_owned();
    move |source| RestoreError::Disk { action, path, source }
}

/// Makes a member's directory from the snapshot `file`.
///
/// # Errors
/// After an error, no directory was made, with one exception. If only the sync after the final
/// rename failed, the directory is complete, but may not survive a crash.
pub fn restore(file: &Path, wanted: &RestoreOptions) -> Result<RestoreResult, RestoreError> {
    let own = wanted.cluster.member(&wanted.name);
    let own = own.ok_or_else(|| RestoreError::NoSuchMember(wanted.name.clone()))?;
    let target = &wanted.data_dir;
    let is_empty = match std::fs::read_dir(target) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    if !is_empty {
        return Err(RestoreError::NotEmpty(target.clone()));
    }
    let opened = open(file)?;
    let mut file = EtcdFile::open(BufReader::new(opened), wanted.hash_check)?;
    let aside = temporary_path(target)?;
    // `create` fails if the directory exists. So a directory that another user has prepared is
    // never filled with data.
    let made = DirBuilder::new().mode(0o700).create(&aside);
    made.map_err(disk_error("make", &aside))?;
    let made = fill(&aside, &mut file, wanted, own).and_then(|restored| {
        std::fs::rename(&aside, target).map_err(disk_error("give its name to", target))?;
        RealDisk.sync_dir(&folder_of(target)).map_err(disk_error("sync the folder of", target))?;
        Ok(restored)
    });
    if made.is_err() {
        // Remove the partial directory: it is of no use, and it may have filled the disk.
        let _ = std::fs::remove_dir_all(&aside);
    }
    made
}

/// Returns a cluster token that depends only on the contents of the file. It is the same on each
/// host, and differs from the tokens that users choose.
///
/// # Errors
/// Fails if the file can't be read.
pub fn token_from_file(file: &Path) -> Result<String, RestoreError> {
    let failed = |source| RestoreError::File { path: file.to_owned(), source };
    let mut opened = BufReader::new(open(file)?);
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    loop {
        let bytes = opened.fill_buf().map_err(failed)?;
        if bytes.is_empty() {
            break;
        }
        hash.update(bytes);
        let read = bytes.len();
        opened.consume(read);
    }
    let hash = hash.finish();
    let hex = hash.as_ref()[..16].iter().map(|byte| format!("{byte:02x}"));
    Ok(format!("restored-{}", hex.collect::<String>()))
}

fn open(file: &Path) -> Result<File, RestoreError> {
    let opened = muster_files::open_named(file);
    opened.map_err(|source| RestoreError::File { path: file.to_owned(), source })
}

fn folder_of(target: &Path) -> PathBuf {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Returns an unused path beside the target. Directories that interrupted restores have left there
/// are removed.
fn temporary_path(target: &Path) -> Result<PathBuf, RestoreError> {
    let name = target.file_name().ok_or_else(|| RestoreError::InvalidTarget(target.to_owned()))?;
    let prefix = format!(".{}{TEMPORARY_INFIX}", name.to_string_lossy());
    let folder = folder_of(target);
    let names = RealDisk.list(&folder).map_err(disk_error("read", &folder))?;
    for left in names.iter().filter(|other| other.starts_with(&prefix)) {
        let left = folder.join(left);
        // Keep a directory that is locked: another restore is still making it.
        if matches!(DataDir::open_read_only(&left), Ok((_, false))) {
            std::fs::remove_dir_all(&left).map_err(disk_error("remove", &left))?;
        }
    }
    Ok(folder.join(format!("{prefix}{}", std::process::id())))
}

fn fill(
    aside: &Path,
    file: &mut EtcdFile<BufReader<File>>,
    wanted: &RestoreOptions,
    own: &InitialMember,
) -> Result<RestoreResult, RestoreError> {
    let summary = file.summary().clone();
    let (revision, bump) = (summary.revision, wanted.bump_revision);
    let revision =
        revision.checked_add(bump).ok_or(RestoreError::RevisionOverflow(bump, revision))?;
    let compacted = if bump > 0 { revision } else { summary.compacted };
    let contents = Contents {
        applied: BASE,
        revision,
        compact_revision: compacted,
        members: MemberTable::new(first_members(&wanted.cluster)),
        alarms: summary.alarms.clone(),
        leases: file.leases()?,
        auth: if wanted.drop_auth { AuthState::default() } else { file.auth()? },
    };
    let dir = DataDir::open(aside)?;
    let incarnation = dir.claim(None)?;
    dir.count_boot()?;
    let disk: SharedDisk = Arc::new(RealDisk);
    let member_dir = dir.join("member");
    for folder in [member_dir.clone(), member_dir.join("snap")] {
        disk.create_dir(&folder).map_err(disk_error("make", &folder))?;
    }
    let path = member_dir.join("db");
    let db = disk.open(&path, OpenMode::New).map_err(disk_error("make", &path))?;
    let backend = RedbBackend::new(db).map_err(disk_error("read", &path))?;
    let mut writer = StoreWriter::open(backend, StoreOptions::default())?;
    let records = file.records()?;
    writer.import::<EtcdFileError>(contents, |take| {
        records.for_each(|at, record| Ok::<_, EtcdFileError>(take(at, record)?))
    })?;
    drop(writer);
    let identity = log::LogIdentity {
        cluster: wanted.cluster.id.0,
        member: own.id.0,
        incarnation: u128::from_be_bytes(incarnation.0),
    };
    Log::create_after(BASE, &disk, &member_dir, &identity, &LogOptions::default())?;
    dir.mark_log()?;
    disk.sync_dir(aside).map_err(disk_error("sync", aside))?;
    Ok(RestoreResult { revision, compacted })
}

fn first_members(cluster: &InitialCluster) -> Vec<Member> {
    cluster.members.iter().map(InitialMember::to_member).collect()
}
