//! Why a file or folder can't be used, with what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why not.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("can't {action} {}", path.display())]
    Io {
        /// What was tried: "read", "write", ….
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It stands where a new file was to be made.
    #[error("{} exists already: choose another name, or move it away first", .0.display())]
    Exists(PathBuf),
    /// Somebody else's.
    #[error(
        "{} belongs to user {owner}, and this program runs as user {us}: who owns a folder decides \
         what lies in it. Name another one, or run as its owner; give it to user {us} only if you \
         know all that lies in it", path.display()
    )]
    NotOurs {
        /// What was looked at.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Whom we run as.
        us: u32,
    },
    /// Another user's file or folder among our data.
    #[error(
        "{} belongs to user {owner}, and this program runs as user {us}: another user may have \
         prepared it. Look at what it is; if it is this program's data, chown it to user {us}, \
         else move it away", path.display()
    )]
    Prepared {
        /// What was looked at.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Whom we run as.
        us: u32,
    },
    /// Others may put there what they like.
    #[error(
        "{} may be written by others than its owner (mode {mode:04o}): name another one, or look at \
         what lies in it, then chmod go-w it", path.display()
    )]
    OthersMayWrite {
        /// What was looked at.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It is ours, and others can't be kept from writing to it.
    #[error(
        "others than the owner may write to {}, and its file system refuses chmod go-w: keep state \
         on a file system with owners and modes", .0.display()
    )]
    StaysOpen(PathBuf),
    /// A link, a pipe, a device, or a file with a second name.
    #[error("{} is no plain file of its own: look at what it is, and move it away", .0.display())]
    NotPlain(PathBuf),
    /// A file where a folder is wanted.
    #[error("{} is not a directory", .0.display())]
    NotAFolder(PathBuf),
}

impl Error {
    /// [`Error::Io`], to be given what the system said.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Io { source, .. } => source.kind(),
            Self::Exists(_) => io::ErrorKind::AlreadyExists,
            Self::NotAFolder(_) => io::ErrorKind::NotADirectory,
            Self::NotOurs { .. }
            | Self::Prepared { .. }
            | Self::OthersMayWrite { .. }
            | Self::StaysOpen(_)
            | Self::NotPlain(_) => io::ErrorKind::PermissionDenied,
        }
    }

    pub(crate) fn prepared(path: &Path, owner: u32, us: u32) -> Self {
        Self::Prepared { path: path.to_owned(), owner, us }
    }

    /// Whether it names something that isn't ours to take: nothing helps but another name, or a
    /// person who looks at it.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Io { .. } => false,
            Self::Exists(_)
            | Self::NotOurs { .. }
            | Self::Prepared { .. }
            | Self::OthersMayWrite { .. }
            | Self::StaysOpen(_)
            | Self::NotPlain(_)
            | Self::NotAFolder(_) => true,
        }
    }
}

/// What the system said, or a refusal in words: for callers that name the file themselves.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io { source, .. } => source,
            error => Self::new(error.kind(), error),
        }
    }
}
