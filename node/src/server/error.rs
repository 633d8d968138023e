//! Reasons why a node doesn't run, and what its supervisor should do about them.

use std::{io, net::SocketAddr, path::PathBuf};

use node_engine::{driver, log::LogError, tls::TlsError, transport};
use node_state::{
    disk,
    identity::{DataDirError, Incarnation},
    mvcc::StoreError,
};

use super::join::JoinRefusal;
use crate::{config::ConfigError, recovery::ForceError};

/// Reason why the node stopped or didn't start.
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
        /// Path of the store's file.
        path: PathBuf,
        /// Reason why the store can't be used.
        #[source]
        source: StoreError,
    },
    /// The consensus driver can't start.
    #[error("consensus cannot start")]
    Driver(#[source] driver::StartError),
    /// The listener or the streams for peers can't start.
    #[error("peer streams cannot start")]
    Transport(#[from] transport::TransportStartError),
    /// The certificates or keys can't be used.
    #[error("TLS cannot be set up")]
    Tls(#[from] TlsError),
    /// The node can't listen on a client address.
    #[error("cannot listen for clients on {address}")]
    Listen {
        /// Client address that could not be bound.
        address: SocketAddr,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot {action}")]
    System {
        /// Attempted action, as it appears in the error's text.
        action: &'static str,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The log belongs to another incarnation than the data directory.
    #[error("the log in {} belongs to incarnation {found}, its directory to {expected}", path.display())]
    ForeignLog {
        /// Path of the data directory.
        path: PathBuf,
        /// Incarnation in the log.
        found: Incarnation,
        /// Incarnation in the directory's marker.
        expected: Incarnation,
    },
    /// There is a log, but its store is missing or empty.
    #[error(
        "{} is missing or empty, but there is a log: this member has lost data; its cluster must remove it and add a new one",
        .0.display()
    )]
    StoreGone(PathBuf),
    /// The file with the votes and acknowledgements that peers have sent can't be read.
    #[error("cannot read the votes and acknowledgements of peers in {}", path.display())]
    Marks {
        /// Path of the file.
        path: PathBuf,
        /// Reason why the file can't be read.
        #[source]
        source: transport::WitnessFileError,
    },
    /// The flags for a new cluster are invalid.
    #[error("cannot begin a cluster")]
    Bootstrap(#[source] ConfigError),
    /// Two members of the initial cluster have the same ID.
    #[error("member exists with identical ID: {0} and {1}")]
    IdenticalIds(String, String),
    /// The member, as it was started, can't join the running cluster.
    #[error(transparent)]
    Join(#[from] JoinRefusal),
    /// Peers know this member with another incarnation, with a higher boot counter, or with more
    /// data than its disk has.
    #[error(
        "the other members refuse this one for good, because {0}. Writes that the member has acknowledged may be missing here. Replace this member: remove it from the cluster (member remove), then add a new one with an empty data directory (member add). If the member's own, newest data directory is elsewhere, start it on that instead. If this happens to a majority of the members, the cluster has lost acknowledged writes: look at every member's data directory (muster-node data status DIR), and keep the one that goes furthest. Nothing here was changed"
    )]
    Disowned(transport::StreamRefusal),
    /// This directory's data can't be turned into a new cluster.
    #[error("cannot make a new cluster of this member's data")]
    Force(#[from] ForceError),
    /// A peer reported that this member was removed from the cluster.
    #[error("this member has been permanently removed from the cluster")]
    Removed,
}

impl ServerError {
    /// Whether every further start would fail in the same way.
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
            Self::Force(ForceError::NoLog(_) | ForceError::Start(_) | ForceError::Disk { .. }) => {
                false
            }
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

    /// Whether the command line is wrong, so that only another command line can solve the problem.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Bootstrap(_) | Self::IdenticalIds(..) | Self::Force(ForceError::NoLog(_))
        )
    }

    /// Returns advice for the operator, if the error's text doesn't contain any.
    #[must_use]
    pub fn advice(&self) -> Option<&'static str> {
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
            what: node_engine::log::Damage::Checksum,
        };
        assert!(ServerError::Log(corrupt).is_final());
        assert!(ServerError::Log(LogError::Compacted { low: 1 }).is_final());
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
    fn data_of_a_later_version_is_a_final_error_with_advice() {
        let path = PathBuf::from("f");
        let log = |error| ServerError::Driver(driver::StartError::Log(error));
        for error in [
            log(LogError::Version { path: path.clone(), version: 9, known: 1 }),
            log(LogError::Newer { path, offset: 0, kind: 9 }),
            store(StoreError::Format { found: 9, known: 1 }),
        ] {
            let text = node_engine::causes::error_chain(&error);
            assert!(error.is_final(), "{text}");
            assert!(text.contains("start this member with"), "{text}");
        }
        let newer = StoreError::from(redb::DatabaseError::UpgradeRequired(9));
        assert!(store(newer).is_final());
    }

    #[test]
    fn a_corrupt_store_is_a_final_error() {
        let inside = StoreError::from(redb::StorageError::Corrupted("here".to_owned()));
        assert!(store(inside).is_final());
    }

    #[test]
    fn a_full_disk_at_the_start_is_not_final_and_has_advice() {
        let full = || rustix::io::Errno::NOSPC.into();
        let log =
            LogError::Disk { action: "write", path: PathBuf::new(), offset: 0, source: full() };
        for error in [ServerError::Log(log), store(StoreError::Disk(full()))] {
            assert!(!error.is_final());
            assert!(error.advice().is_some_and(|next| next.contains("free space")));
        }
    }
}
