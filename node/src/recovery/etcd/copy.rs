//! Copies the files of a folder, and syncs whole folders.

use std::fs::File;
use std::io;
use std::path::Path;

/// Copies the files in the folder `from` to the new folder `to`. Files that end in `.tmp` are
/// skipped, because etcd only preallocates them for later use. Subfolders are skipped too; etcd
/// makes none in these folders.
pub(super) fn copy_files(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_file() && !name.to_string_lossy().ends_with(".tmp") {
            std::fs::copy(entry.path(), to.join(name))?;
        }
    }
    Ok(())
}

/// Makes a folder and everything in it durable.
pub(super) fn sync_all(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_all(&entry.path())?;
        } else {
            File::open(entry.path())?.sync_all()?;
        }
    }
    File::open(folder)?.sync_all()
}
