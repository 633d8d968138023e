//! What is on disk: where it lies, how it is written, who may write it.
//!
//! Everything of the agent's lies in `<data-dir>/agent/` (0700, also where others may write to the data
//! directory), everything of the node's in
//! `<data-dir>/node/`. One agent at a time holds the lock on the data directory.

pub mod archive;
pub mod journal;
pub(crate) mod known;
pub mod lock;
pub mod node_dir;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use muster_files::data;

const AGENT: &str = "agent";
const NODE: &str = "node";
const AGENT_LOCK: &str = "agent.lock";
const NODE_LOCK: &str = "node.lock";

/// Why the state can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The disk refused, and a restart may find it healthy; or it isn't ours to take.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// The file is there and isn't what this program wrote. Never overwritten: a person looks.
    #[error("{} is damaged ({what}); it was left as it is", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A newer version of this program wrote it.
    #[error(
        "{} has version {found}, this program knows {known}: use the newer muster-agent",
        path.display()
    )]
    Newer {
        /// Which file.
        path: PathBuf,
        /// The version in it.
        found: u64,
        /// The newest one this program reads.
        known: u64,
    },
}

impl StateError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let error = muster_files::Error::io(action, path);
        move |source| Self::Files(error(source))
    }

    /// Whether a restart could help; otherwise a person has to look.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Files(error) => !error.is_refusal(),
            Self::Damaged { .. } | Self::Newer { .. } => false,
        }
    }
}

/// Where everything lies under one data directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    /// The layout under `root`, the agent's `--data-dir`. Absolute, because the node gets paths.
    pub fn new(root: &Path) -> io::Result<Self> {
        Ok(Self { root: std::path::absolute(root)? })
    }

    /// The layout under `root` for a look at it, by whatever links lead there.
    pub fn look(root: &Path) -> io::Result<Self> {
        root.canonicalize().map(|root| Self { root }).or_else(|_| Self::new(root))
    }

    /// The data directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The agent's own folder.
    pub fn agent(&self) -> PathBuf {
        self.root.join(AGENT)
    }

    /// The node's `--data-dir`.
    pub fn node(&self) -> PathBuf {
        self.root.join(NODE)
    }

    /// Locked for as long as an agent runs.
    pub fn agent_lock(&self) -> PathBuf {
        self.root.join(AGENT_LOCK)
    }

    /// Locked for as long as a launcher or a node runs: the node inherits the open file.
    pub fn node_lock(&self) -> PathBuf {
        self.root.join(NODE_LOCK)
    }

    /// The journal.
    pub fn journal(&self) -> PathBuf {
        self.agent().join("journal.json")
    }

    /// The agent's Ed25519 key, PKCS#8 PEM.
    pub fn agent_key(&self) -> PathBuf {
        self.agent().join("agent.key")
    }

    /// What the agent is doing, for `status`.
    pub fn status(&self) -> PathBuf {
        self.agent().join("status.json")
    }

    /// Who runs as the node.
    pub fn pid_file(&self) -> PathBuf {
        self.agent().join("node.pid")
    }

    /// The node's standard output and error.
    pub fn node_log(&self) -> PathBuf {
        self.agent().join("node.log")
    }

    /// How far the node's log was passed on.
    pub fn tail_position(&self) -> PathBuf {
        self.agent().join("node.log.position")
    }

    /// The list for the node's `--muster-document`.
    pub fn member_document(&self) -> PathBuf {
        self.agent().join("members.json")
    }

    /// The list of members that the cluster confirmed last.
    pub fn known_members(&self) -> PathBuf {
        self.agent().join("known-members.json")
    }

    /// Certificates and the node's key.
    pub fn tls(&self) -> PathBuf {
        self.agent().join("tls")
    }

    /// The node's P-256 key.
    pub fn node_key(&self) -> PathBuf {
        self.tls().join("node.key")
    }

    /// Makes the folders, 0700, durably, and returns the layout by its path without links.
    ///
    /// # Errors
    /// Refuses as [`Layout::own`] does.
    pub fn create(&self) -> Result<Self, StateError> {
        let owned = self.own()?;
        for folder in [&owned.agent(), &owned.tls()] {
            data::make_folder(folder)?;
        }
        // One that an earlier start has made may not be durable yet: it was killed before its sync.
        data::sync(&owned.root)?;
        data::sync(&owned.agent())?;
        Ok(owned)
    }

    /// Takes the data directory, which may be a volume that others may write as well, for a command
    /// that changes the state. Returns the layout by its path without links.
    ///
    /// # Errors
    /// Refuses what another user may have prepared in it, and state that stays open to others: keys
    /// lie there.
    pub fn own(&self) -> Result<Self, StateError> {
        let found = muster_files::data_folder(&self.root)?;
        let owned = Self { root: found.path };
        if let Some(exposure) = found.exposure {
            tracing::warn!(
                path = %owned.root.display(),
                "other users can delete or replace this host's state: {exposure}"
            );
        }
        let is_ours = |name: &OsStr| [AGENT, AGENT_LOCK, NODE_LOCK].iter().any(|our| name == *our);
        if let Some(path) = data::check(&owned.root, is_ours)? {
            return Err(muster_files::Error::StaysOpen(path).into());
        }
        // No key lies there, and the node says what it can't close to others.
        data::check(&owned.root, |name| name == NODE)?;
        Ok(owned)
    }

    /// Removes what writers that were killed have left. For whom holds the agent's lock.
    pub fn sweep(&self) -> Result<(), StateError> {
        for folder in [&self.agent(), &self.tls()] {
            data::sweep(folder)?;
        }
        Ok(())
    }
}

/// More than any of these files holds.
const LARGEST_FILE: u64 = 16 << 20;

/// The content of a file of the state's, or nothing if there is no such file.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, StateError> {
    Ok(data::read(path, LARGEST_FILE)?)
}
