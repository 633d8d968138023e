//! State on disk: its paths, its formats, and the lock for writing it.
//!
//! The agent's files are in `<data-dir>/agent/`, the node's in `<data-dir>/node/`. `agent/` has
//! mode 0700, even if other users can write to the data directory. One agent at a time holds the
//! lock on the data directory.

pub(crate) mod addresses;
pub mod adopted;
pub mod archive;
pub mod journal;
pub(crate) mod known;
pub mod lock;
pub mod node_dir;
pub(crate) mod peer_addresses;
pub(crate) mod service;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use discovery_types::jws::newer_version;
use muster_files::data;

use self::adopted::{AdoptedNode, AdoptionStage};

use crate::exit::{ExitError, error_chain};

const AGENT: &str = "agent";
const NODE: &str = "node";
const AGENT_LOCK: &str = "agent.lock";
const NODE_LOCK: &str = "node.lock";

/// Why the state can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file operation failed, which a restart may overcome; or a file doesn't belong to this
    /// program.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// The file exists but is not what this program wrote. It is never overwritten; a person has to
    /// look.
    #[error("{} is damaged ({what}); it was left as it is", path.display())]
    Damaged {
        path: PathBuf,
        /// Description of the damage.
        what: String,
    },
    /// A newer version of this program wrote the file.
    #[error(
        "{} has version {found}, this program knows {known}: use the newer muster-agent",
        path.display()
    )]
    Newer {
        path: PathBuf,
        /// Version of the file's format.
        found: u64,
        /// Newest version that this program reads.
        known: u64,
    },
    /// A newer version of this program signed a text in the file.
    #[error("{} holds what this program can't read ({what}); it was left as it is", path.display())]
    NewerText {
        path: PathBuf,
        /// Name of the signed text, its version, and the newest version that this program reads.
        what: String,
    },
}

impl StateError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let error = muster_files::Error::io(action, path);
        move |source| Self::Files(error(source))
    }

    /// Error for a file in which a signed text can't be verified: it is damaged, or newer than this
    /// program.
    pub(crate) fn unverified(path: &Path, error: &(dyn std::error::Error + 'static)) -> Self {
        let (path, what) = (path.to_owned(), error_chain(error));
        match newer_version(error) {
            Some(_) => Self::NewerText { path, what },
            None => Self::Damaged { path, what },
        }
    }

    /// Returns whether a restart could help. Otherwise a person has to look.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Files(error) => !error.is_refusal(),
            Self::Damaged { .. } | Self::Newer { .. } | Self::NewerText { .. } => false,
        }
    }
}

/// Paths of all files in a data directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    root: PathBuf,
    /// The etcd that this agent has taken over; `None` if its node began under an agent.
    adopted: Option<AdoptedNode>,
}

impl Layout {
    /// Returns the layout under `root`, the agent's `--data-dir`. The path is made absolute,
    /// because the node gets paths below it.
    pub fn new(root: &Path) -> io::Result<Self> {
        Ok(Self::under(std::path::absolute(root)?))
    }

    /// Returns the layout under `root` for reading only. Links are followed.
    pub fn new_read_only(root: &Path) -> io::Result<Self> {
        root.canonicalize().map(Self::under).or_else(|_| Self::new(root))
    }

    /// A file about an adopted etcd that can't be read counts as missing here. Commands that change
    /// the state read it again, and report the error.
    fn under(root: PathBuf) -> Self {
        let mut layout = Self { root, adopted: None };
        let adopted = adopted::read_adopted(&layout).ok().flatten();
        layout.adopted = adopted.filter(|node| node.stage == AdoptionStage::TakenOver);
        layout
    }

    /// Returns the etcd that this agent has taken over; `None` if its node began under an agent.
    pub fn adopted(&self) -> Option<&AdoptedNode> {
        self.adopted.as_ref()
    }

    /// Returns the data directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of the agent's own files.
    pub fn agent(&self) -> PathBuf {
        self.root.join(AGENT)
    }

    /// Returns the node's `--data-dir`.
    pub fn node(&self) -> PathBuf {
        match &self.adopted {
            Some(adopted) => adopted.directory.clone(),
            None => self.root.join(NODE),
        }
    }

    /// File that is locked while an agent runs.
    pub fn agent_lock(&self) -> PathBuf {
        self.root.join(AGENT_LOCK)
    }

    /// File that is locked while a launcher or a node runs. The node inherits the open file.
    pub fn node_lock(&self) -> PathBuf {
        self.root.join(NODE_LOCK)
    }

    pub fn journal(&self) -> PathBuf {
        self.agent().join("journal.json")
    }

    /// File with the agent's Ed25519 key, PKCS#8 PEM.
    pub fn agent_key(&self) -> PathBuf {
        self.agent().join("agent.key")
    }

    /// File with the agent's state, for `status`.
    pub fn status(&self) -> PathBuf {
        self.agent().join("status.json")
    }

    /// File that identifies the node's process.
    pub fn pid_file(&self) -> PathBuf {
        self.agent().join("node.pid")
    }

    /// File with the node's standard output and error.
    pub fn node_log(&self) -> PathBuf {
        self.agent().join("node.log")
    }

    /// File with the position up to which the node's log was passed on.
    pub fn tail_position(&self) -> PathBuf {
        self.agent().join("node.log.position")
    }

    /// File with the list of members for the node's `--muster-document`.
    pub fn member_document(&self) -> PathBuf {
        self.agent().join("members.json")
    }

    /// File with the list of members that the cluster confirmed last.
    pub fn known_members(&self) -> PathBuf {
        self.agent().join("known-members.json")
    }

    /// File in the node's directory with addresses of peers that have moved.
    pub fn peer_addresses(&self) -> PathBuf {
        self.node().join("muster-peer-addresses")
    }

    /// File that says with which CAs the node's process was started.
    pub fn node_start(&self) -> PathBuf {
        self.agent().join("node-start.json")
    }

    /// File with the service statement that the agent follows.
    pub fn service_statement(&self) -> PathBuf {
        self.agent().join("service.jws")
    }

    /// File with the service statement that an operator offers to the agent.
    pub fn service_offer(&self) -> PathBuf {
        self.agent().join("service-offer.jws")
    }

    /// File with the last checkpoint of discovery's history.
    pub fn checkpoint(&self) -> PathBuf {
        self.agent().join("checkpoint.jws")
    }

    /// File with two checkpoints of discovery's history that contradict each other.
    pub fn contradiction(&self) -> PathBuf {
        self.agent().join("contradiction.json")
    }

    /// File with the result of the last verification of stored backups.
    pub(crate) fn backup_verification(&self) -> PathBuf {
        self.agent().join("backup-verification.json")
    }

    /// Directory of temporary files of backups.
    pub(crate) fn backup_spool(&self) -> PathBuf {
        self.agent().join("backup-spool")
    }

    /// Directory of the certificates and the node's key.
    pub fn tls(&self) -> PathBuf {
        self.agent().join("tls")
    }

    /// File with the node's P-256 key.
    pub fn node_key(&self) -> PathBuf {
        self.tls().join("node.key")
    }

    /// Makes the directories durably, with mode 0700. Returns the layout under a path without
    /// links.
    ///
    /// # Errors
    /// Refuses what [`Layout::claim`] refuses.
    pub fn create(&self) -> Result<Self, StateError> {
        let owned = self.claim()?;
        for folder in [&owned.agent(), &owned.tls()] {
            data::make_folder(folder)?;
        }
        // Sync the directories even if they exist: an earlier start may have made them and been
        // killed before it synced them.
        data::sync(&owned.root)?;
        data::sync(&owned.agent())?;
        Ok(owned)
    }

    /// Claims the data directory for a command that changes the state. The directory may be a
    /// volume that other users can write to. Returns the layout under a path without links.
    ///
    /// # Errors
    /// Fails if another user may have prepared the content. Also fails if other users' access to
    /// the state can't be removed, since the state includes keys.
    pub fn claim(&self) -> Result<Self, StateError> {
        let found = muster_files::open_data_folder(&self.root)?;
        let owned = Self { root: found.path, adopted: self.adopted.clone() };
        if let Some(exposure) = found.exposure {
            tracing::warn!(
                path = %owned.root.display(),
                "other users can delete or replace this host's state: {exposure}"
            );
        }
        let is_ours = |name: &OsStr| [AGENT, AGENT_LOCK, NODE_LOCK].iter().any(|our| name == *our);
        if let Some(path) = data::check(&owned.root, is_ours)? {
            return Err(muster_files::Error::CannotRestrict(path).into());
        }
        // It is no error if access to a file in the node's directory can't be restricted. The
        // directory holds no key, and the node itself reports such files.
        data::check(&owned.root, |name| name == NODE)?;
        Ok(owned)
    }

    /// Removes temporary files of killed writers. The caller must hold the agent's lock.
    pub fn remove_temporary_files(&self) -> Result<(), StateError> {
        for folder in [&self.agent(), &self.tls()] {
            data::sweep(folder)?;
        }
        Ok(())
    }
}

/// Maximum size in bytes of a file of the state. No such file grows so large.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Reads a file of the state; `None` if it doesn't exist.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, StateError> {
    Ok(data::read(path, MAX_FILE_BYTES)?)
}

/// Converts a state error into an end of the agent.
pub(crate) fn state_exit_error(error: StateError) -> ExitError {
    if error.is_retryable() {
        ExitError::Failed(error_chain(&error))
    } else {
        ExitError::DoNotRestart(error_chain(&error))
    }
}
