//! Copies, and whole folders on disk.

use std::fs::File;
use std::io;
use std::path::Path;

/// Copies the files of `from` to `to`, a new folder. etcd's folders hold no others, and what it
/// makes room with is not worth it.
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

/// Sees to it that a folder is on disk with all that is in it.
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
