//! Checks that a running etcd uses the directories that its settings name. The etcd may use others,
//! if its settings were changed after it began. It also does if its systemd unit has mounted
//! another folder at a directory's path (`BindPaths=`).

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::process::DATABASE;
use crate::exit::ExitError;
use crate::state::adopted::{AdoptedNode, WAL_FOLDER};
use crate::state::node_dir::is_log_file;

/// The files that a process has open.
struct OpenFiles(BTreeSet<FileId>);

/// Device and inode number of a file.
type FileId = (u64, u64);

impl OpenFiles {
    fn of(pid: u32) -> io::Result<Self> {
        let mut files = BTreeSet::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
            // Skip a file that the process has closed since the folder was listed.
            if let Some(id) = file_id(&entry?.path())? {
                files.insert(id);
            }
        }
        Ok(Self(files))
    }

    fn contain(&self, path: &Path) -> io::Result<bool> {
        Ok(file_id(path)?.is_some_and(|id| self.0.contains(&id)))
    }

    /// Whether a file of etcd's log in this directory is open.
    fn contain_log(&self, directory: &Path) -> io::Result<bool> {
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let path = entry?.path();
            if is_log_file(&path) && self.contain(&path)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns the identity of a file; `None` if it doesn't exist.
fn file_id(path: &Path) -> io::Result<Option<FileId>> {
    match std::fs::metadata(path) {
        Ok(found) => Ok(Some((found.dev(), found.ino()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns an error unless the process `pid` has the database and the log open in the directories
/// that the etcd's settings name.
pub(crate) fn check_directories(pid: u32, node: &AdoptedNode) -> Result<(), ExitError> {
    let failed = |error: io::Error| {
        ExitError::Failed(format!("can't look which files process {pid} has open: {error}"))
    };
    let open = OpenFiles::of(pid).map_err(failed)?;
    let wal = node.wal_directory.clone().unwrap_or_else(|| node.directory.join(WAL_FOLDER));
    let unused = if !open.contain(&node.directory.join(DATABASE)).map_err(failed)? {
        &node.directory
    } else if !open.contain_log(&wal).map_err(failed)? {
        &wal
    } else {
        return Ok(());
    };
    Err(ExitError::Usage(format!(
        "the etcd of process {pid} doesn't use {}, which its settings name: restart it if its \
         settings were changed, and let its unit show it the host's own folders (no BindPaths=)",
        unused.display()
    )))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::state::adopted::tests::node;

    #[test]
    fn the_process_must_have_the_database_and_the_log_open() {
        let dir = tempfile::tempdir().unwrap();
        let (data, wal) = (dir.path().join("data"), dir.path().join("wal"));
        let inner = data.join(WAL_FOLDER);
        for folder in [&wal, &inner, &data.join("member/snap")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        let refused = |node: &AdoptedNode| {
            check_directories(std::process::id(), node).unwrap_err().to_string()
        };
        let inside = node(&data);
        let apart = AdoptedNode { wal_directory: Some(wal.clone()), ..node(&data) };
        let shown = data.display().to_string();
        assert!(refused(&inside).contains(&shown), "there is no database: {}", refused(&inside));

        std::fs::write(data.join(DATABASE), "").unwrap();
        assert!(refused(&inside).contains(&shown), "nobody uses it: {}", refused(&inside));
        let _database = File::open(data.join(DATABASE)).unwrap();
        let text = refused(&inside);
        assert!(text.contains(&inner.display().to_string()), "there is no log: {text}");

        let _log = File::create(inner.join("0-0.wal")).unwrap();
        check_directories(std::process::id(), &inside).unwrap();
        let text = refused(&apart);
        assert!(text.contains(&wal.display().to_string()), "the log is elsewhere: {text}");
        let _other = File::create(wal.join("0.tmp")).unwrap();
        assert_eq!(refused(&apart), text, "the file is no log");
        let _log = File::create(wal.join("0-0.wal")).unwrap();
        check_directories(std::process::id(), &apart).unwrap();
    }

    #[test]
    fn a_copy_of_the_data_is_not_what_the_process_uses() {
        let dir = tempfile::tempdir().unwrap();
        let (used, copy) = (dir.path().join("used"), dir.path().join("copy"));
        let mut open = Vec::new();
        for data in [&used, &copy] {
            for file in [data.join(DATABASE), data.join(WAL_FOLDER).join("0-0.wal")] {
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(&file, "").unwrap();
                if data == &used {
                    open.push(File::open(&file).unwrap());
                }
            }
        }
        check_directories(std::process::id(), &node(&used)).unwrap();
        assert!(check_directories(std::process::id(), &node(&copy)).is_err());
        drop(open);
        assert!(check_directories(std::process::id(), &node(&used)).is_err());
    }
}
