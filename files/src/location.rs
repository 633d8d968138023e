//! A file name in an open folder. Operations on it happen in that folder, even if the folder's path
//! changes meanwhile.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat};

use crate::Error;
use crate::folder::{open_resolved_folder, sync_at};

/// A file name, with the open folder that it is in.
#[derive(Debug)]
pub(crate) struct FileLocation {
    folder: OwnedFd,
    name: OsString,
    /// Whole path, used in error messages only.
    path: PathBuf,
}

impl FileLocation {
    /// Resolves `path` by the system's own rules; links are followed.
    pub(crate) fn resolve(path: &Path) -> Result<Self, Error> {
        let (folder, name) = split(path)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat(CWD, folder, flags, Mode::empty());
        let folder =
            opened.map_err(|errno| Error::io("reach the folder of", path)(errno.into()))?;
        Ok(Self { folder, name, path: path.to_owned() })
    }

    /// Resolves `path`, and follows only links that no other user can have created.
    pub(crate) fn resolve_safely(path: &Path) -> Result<Self, Error> {
        let (folder, name) = split(path)?;
        Ok(Self { folder: open_resolved_folder(folder)?, name, path: path.to_owned() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the location of `name` in the same folder.
    pub(crate) fn sibling(&self, name: OsString) -> io::Result<Self> {
        let folder = self.folder.try_clone()?;
        Ok(Self { folder, path: self.path.with_file_name(&name), name })
    }

    pub(crate) fn name(&self) -> &OsString {
        &self.name
    }

    /// Opens the file. Doesn't follow a link, and doesn't wait for the other end of a pipe.
    pub(crate) fn open(&self, flags: OFlags, mode: Mode) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(openat(&self.folder, &self.name, flags, mode)?.into())
    }

    /// Renames the file to `to`.
    pub(crate) fn rename(&self, to: &Self) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.folder, &self.name, &to.folder, &to.name)?)
    }

    /// Creates a hard link `to` to the file; fails if `to` exists.
    pub(crate) fn link(&self, to: &Self) -> io::Result<()> {
        let none = AtFlags::empty();
        Ok(rustix::fs::linkat(&self.folder, &self.name, &to.folder, &to.name, none)?)
    }

    pub(crate) fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty())?)
    }

    /// Creates a folder (0700) with this name.
    pub(crate) fn make_folder(&self) -> io::Result<()> {
        Ok(rustix::fs::mkdirat(&self.folder, &self.name, Mode::RWXU)?)
    }

    /// Syncs the folder, which makes files created, renamed or removed in it durable.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        sync_at(&self.folder, self.path.parent().unwrap_or(Path::new("/")))
    }
}

fn split(path: &Path) -> Result<(&Path, OsString), Error> {
    let name = path.file_name().ok_or(ErrorKind::InvalidInput);
    let name = name.map_err(|kind| Error::io("find", path)(kind.into()))?.to_owned();
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    Ok((folder, name))
}
