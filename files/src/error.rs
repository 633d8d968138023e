//! Reasons why a file or folder can't be used, with advice in each message.

use std::io;
use std::path::{Path, PathBuf};

/// Reason why a file or folder can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("can't {action} {}", path.display())]
    Io {
        /// Attempted action as a verb: "read", "write", ….
        action: &'static str,
        /// File or folder that the action was for.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// A new file was to be created at a path that exists.
    #[error("{} exists already: choose another name, or move it away first", .0.display())]
    Exists(PathBuf),
    /// A folder belongs to another user, so that user decides about its content.
    #[error(
        "{} belongs to user {owner}, and this program runs as user {us}: who owns a folder decides \
         what lies in it. Name another one, or run as its owner; give it to user {us} only if you \
         know all that lies in it", path.display()
    )]
    OtherOwner {
        /// Path that was checked.
        path: PathBuf,
        /// User id of the owner of that path.
        owner: u32,
        /// User id that this process runs as.
        us: u32,
    },
    /// A file or folder in our data folder belongs to another user.
    #[error(
        "{} belongs to user {owner}, and this program runs as user {us}: another user may have \
         prepared it. Look at what it is; if it is this program's data, run this command as its \
         owner, or chown it to user {us} if all of the data is to be theirs; else move it away",
        path.display()
    )]
    ForeignEntry {
        /// Path that was checked.
        path: PathBuf,
        /// User id of the file's or folder's owner.
        owner: u32,
        /// User id that this process runs as.
        us: u32,
    },
    /// Group or others may write to a folder that must be closed to them.
    #[error(
        "{} may be written by others than its owner (mode {mode:04o}): name another one, or look at \
         what lies in it, then chmod go-w it", path.display()
    )]
    OthersMayWrite {
        /// Path that was checked.
        path: PathBuf,
        /// Permission bits of the folder.
        mode: u32,
    },
    /// Our user owns the folder, but chmod didn't remove the write permission of group and others.
    #[error(
        "others than the owner may write to {}, and its file system refuses chmod go-w: keep state \
         on a file system with owners and modes", .0.display()
    )]
    CannotRestrict(PathBuf),
    /// A link, a pipe, a device, or a file with more than one hard link.
    #[error("{} is no plain file of its own: look at what it is, and move it away", .0.display())]
    NotPlainFile(PathBuf),
    /// A file was found where a folder is expected.
    #[error("{} is not a directory", .0.display())]
    NotAFolder(PathBuf),
}

impl Error {
    /// Returns a function that wraps an I/O error in [`Error::Io`], for use with `map_err`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Io { source, .. } => source.kind(),
            Self::Exists(_) => io::ErrorKind::AlreadyExists,
            Self::NotAFolder(_) => io::ErrorKind::NotADirectory,
            Self::OtherOwner { .. }
            | Self::ForeignEntry { .. }
            | Self::OthersMayWrite { .. }
            | Self::CannotRestrict(_)
            | Self::NotPlainFile(_) => io::ErrorKind::PermissionDenied,
        }
    }

    pub(crate) fn foreign_entry(path: &Path, owner: u32, us: u32) -> Self {
        Self::ForeignEntry { path: path.to_owned(), owner, us }
    }

    /// Whether the path itself was refused, so that a retry is useless. A person must name another
    /// path, or inspect this one.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Io { .. } => false,
            Self::Exists(_)
            | Self::OtherOwner { .. }
            | Self::ForeignEntry { .. }
            | Self::OthersMayWrite { .. }
            | Self::CannotRestrict(_)
            | Self::NotPlainFile(_)
            | Self::NotAFolder(_) => true,
        }
    }
}

/// Returns the system's error from [`Error::Io`], and wraps any other error. This is for callers
/// whose own message names the file.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io { source, .. } => source,
            error => Self::new(error.kind(), error),
        }
    }
}
