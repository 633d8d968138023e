//! Why a node doesn't run, and what its supervisor should do about it.

use std::{io, net::SocketAddr, path::PathBuf};

use super::join::JoinRefusal;
use crate::{
    config::ConfigError,
    disk, driver,
    identity::{DataDirError, Incarnation},
    log::LogError,
    mvcc::StoreError,
    recovery::ForceError,
    tls::TlsError,
    transport,
};

/// Why the node stopped, or never started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The data directory can't be used.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// The log can't be used.
    #[error("the log cannot be used")]
    Log(#[source] LogError),
    /// The store can't be used.
    #[error("the store {} cannot be used", path.display())]
    Store {
        /// Its file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: StoreError,
    },
    /// The driver can't start.
    #[error("consensus cannot start")]
    Driver(#[source] driver::StartError),
    /// Peers can't be talked to.
    #[error("peer streams cannot start")]
    Transport(#[from] transport::StartError),
    /// Certificates can't be used.
    #[error("TLS cannot be set up")]
    Tls(#[from] TlsError),
    /// A client address can't be listened on.
    #[error("cannot listen for clients on {address}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Something of the operating system is missing.
    #[error("cannot {action}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// The log is of another incarnation than its directory.
    #[error("the log in {} belongs to incarnation {found}, its directory to {expected}", path.display())]
    ForeignLog {
        /// The data directory.
        path: PathBuf,
        /// In the log.
        found: Incarnation,
        /// In the marker.
        expected: Incarnation,
    },
    /// There is a log, but the store that it belongs to is gone.
    #[error(
        "{} is missing or empty, but there is a log: this member has lost data; its cluster must remove it and add a new one",
        .0.display()
    )]
    StoreGone(PathBuf),
    /// What this member remembers of its peers can't be read.
    #[error("cannot read what this member remembers of its peers in {}", path.display())]
    Marks {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: transport::MarksError,
    },
    /// What a new cluster would begin with can't be.
    #[error("cannot begin a cluster")]
    Bootstrap(#[source] ConfigError),
    /// Two first members have one id.
    #[error("member exists with identical ID: {0} and {1}")]
    IdenticalIds(String, String),
    /// The running cluster doesn't have this member as it was started.
    #[error(transparent)]
    Join(#[from] JoinRefusal),
    /// Peers know this member under another incarnation, a later start, or as having more.
    #[error(
        "the other members refuse this one for good, because {0}. Writes that the member has acknowledged may be missing here. Replace this member: remove it from the cluster (member remove), then add a new one with an empty data directory (member add). If the member's own, newest data directory is elsewhere, start it on that instead. If this happens to a majority of the members, the cluster has lost acknowledged writes: look at every member's data directory (muster-node data status DIR), and keep the one that goes furthest. Nothing here was changed"
    )]
    Disowned(transport::Refusal),
    /// No cluster can be made of what is here.
    #[error("cannot make a new cluster of this member's data")]
    Force(#[from] ForceError),
    /// A peer said that this member is no longer one.
    #[error("this member has been permanently removed from the cluster")]
    Removed,
}

impl ServerError {
    /// Whether a restart can never help.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::DataDir(error) => error.is_final(),
            Self::Log(error) | Self::Driver(driver::StartError::Log(error)) => error.is_final(),
            Self::Store { source, .. } | Self::Force(ForceError::Store(source)) => {
                source.is_final()
            }
            Self::Force(ForceError::DataDir(error)) => error.is_final(),
            Self::Force(
                ForceError::Log(error) | ForceError::Start(driver::StartError::Log(error)),
            ) => error.is_final(),
            Self::Force(ForceError::Removed(_) | ForceError::NoMember(_)) => true,
            Self::Force(
                ForceError::Nothing(_) | ForceError::Start(_) | ForceError::Disk { .. },
            ) => false,
            Self::Marks { source, .. } => source.is_final(),
            Self::ForeignLog { .. } | Self::StoreGone(_) | Self::Removed | Self::Disowned(_) => {
                true
            }
            Self::Driver(_)
            | Self::Transport(_)
            | Self::Tls(_)
            | Self::Listen { .. }
            | Self::System { .. }
            | Self::Bootstrap(_)
            | Self::IdenticalIds(..)
            | Self::Join(_) => false,
        }
    }

    /// Whether another command line would help, and nothing else.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Bootstrap(_) | Self::IdenticalIds(..) | Self::Force(ForceError::Nothing(_))
        )
    }

    /// What to do about it, where the error doesn't say so itself.
    #[must_use]
    pub fn next(&self) -> Option<&'static str> {
        match self {
            Self::Log(error) | Self::Driver(driver::StartError::Log(error)) => {
                matches!(error, LogError::Disk { .. }).then(|| disk::advice(error))
            }
            Self::Store { source, .. } => {
                matches!(source, StoreError::Disk(_)).then(|| disk::advice(source))
            }
            Self::Marks { .. } => Some(
                "put the file back, or move it away: this member then relies on what the others remember of each other",
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(source: StoreError) -> ServerError {
        ServerError::Store { path: PathBuf::from("db"), source }
    }

    #[test]
    fn lost_data_and_removal_are_final_and_a_busy_port_is_not() {
        let corrupt = LogError::Corrupt {
            path: PathBuf::new(),
            offset: 0,
            what: crate::log::Damage::Checksum,
        };
        assert!(ServerError::Log(corrupt).is_final());
        assert!(ServerError::Log(LogError::NotThere { low: 1 }).is_final());
        assert!(ServerError::StoreGone(PathBuf::new()).is_final());
        assert!(ServerError::Removed.is_final());
        let busy = ServerError::Listen {
            address: "127.0.0.1:1".parse().unwrap(),
            source: io::ErrorKind::AddrInUse.into(),
        };
        assert!(!busy.is_final());
        assert!(!ServerError::DataDir(DataDirError::InUse(PathBuf::new())).is_final());
    }

    #[test]
    fn what_a_later_version_wrote_is_final_and_says_what_to_do() {
        let path = PathBuf::from("f");
        let log = |error| ServerError::Driver(driver::StartError::Log(error));
        for error in [
            log(LogError::Version { path: path.clone(), version: 9, known: 1 }),
            log(LogError::Newer { path, offset: 0, kind: 9 }),
            store(StoreError::Format { found: 9, known: 1 }),
        ] {
            let text = crate::causes::chain(&error);
            assert!(error.is_final(), "{text}");
            assert!(text.contains("start this member with"), "{text}");
        }
        let newer = StoreError::from(redb::DatabaseError::UpgradeRequired(9));
        assert!(store(newer).is_final());
    }

    #[test]
    fn a_store_that_is_corrupt_inside_is_final_too() {
        let inside = StoreError::from(redb::StorageError::Corrupted("here".to_owned()));
        assert!(store(inside).is_final());
    }

    #[test]
    fn a_full_disk_at_the_start_may_come_free_and_says_what_to_do() {
        let full = || rustix::io::Errno::NOSPC.into();
        let log =
            LogError::Disk { action: "write", path: PathBuf::new(), offset: 0, source: full() };
        for error in [ServerError::Log(log), store(StoreError::Disk(full()))] {
            assert!(!error.is_final());
            assert!(error.next().is_some_and(|next| next.contains("free space")));
        }
    }
}
