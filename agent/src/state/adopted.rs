//! The file about an adopted etcd, which ran before this agent: its settings, and who runs it now.
//!
//! The agent keeps the etcd's data directory, program and settings. The file is written when the
//! host enrols, and says from then on whether the agent or somebody else runs the etcd.

use std::path::{Path, PathBuf};

use discovery_types::leaves::Leaves;
use serde::{Deserialize, Serialize};

use zeroize::Zeroizing;

use super::{Layout, MAX_FILE_BYTES, StateError, read};

/// Version of the file's format.
const VERSION: u32 = 1;
/// Version of a file with [`AdoptedNode::wal_directory`]. An older agent must not start such an
/// etcd: without its log, it would be a member that has forgotten its votes.
const VERSION_WITH_WAL_DIRECTORY: u32 = 2;
/// Newest version that this program reads.
const NEWEST_VERSION: u32 = VERSION_WITH_WAL_DIRECTORY;
/// Default directory of etcd's log, in the data directory.
pub(crate) const WAL_FOLDER: &str = "member/wal";

/// Stage of an etcd's adoption by an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdoptionStage {
    /// The host enrols, or has enrolled. The etcd still runs as it did before.
    Enrolled,
    /// This agent runs the etcd.
    TakenOver,
}

/// Files of the certificates with which an etcd ran before this agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateFiles {
    /// Value of the flag `--cert-file`.
    pub cert: PathBuf,
    /// Value of the flag `--key-file`.
    pub key: PathBuf,
    /// Value of the flag `--trusted-ca-file`.
    pub trusted_ca: PathBuf,
    /// Value of the flag `--peer-cert-file`.
    pub peer_cert: PathBuf,
    /// Value of the flag `--peer-key-file`.
    pub peer_key: PathBuf,
    /// Value of the flag `--peer-trusted-ca-file`.
    pub peer_trusted_ca: PathBuf,
    /// Client certificate for the agent's requests, until the members accept the agent's own.
    pub client_cert: PathBuf,
    /// The private key of the certificate `client_cert`.
    pub client_key: PathBuf,
}

/// Settings of an adopted etcd, and the stage of its adoption.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedNode {
    /// Version of the file's format.
    pub version: u32,
    pub stage: AdoptionStage,
    /// Path of the etcd's program.
    pub program: PathBuf,
    /// Value of `--data-dir`, as an absolute path.
    pub directory: PathBuf,
    /// Value of `--wal-dir`, as an absolute path; `None` if the log is in the data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wal_directory: Option<PathBuf>,
    /// Value of `--name`. It may contain characters that discovery doesn't allow in names.
    pub etcd_name: String,
    /// Value of the flag `--listen-peer-urls`.
    pub listen_peer_urls: String,
    /// Value of the flag `--listen-client-urls`.
    pub listen_client_urls: String,
    /// Value of the flag `--client-cert-auth`.
    pub client_cert_auth: bool,
    /// Value of the flag `--peer-client-cert-auth`.
    pub peer_client_cert_auth: bool,
    /// The other flags, as the agent passes them to the etcd.
    pub flags: Vec<String>,
    pub certificates: CertificateFiles,
    /// The systemd unit that ran the etcd; `None` if no unit ran it.
    pub unit: Option<String>,
    /// Whether the etcd serves certificates of the cluster's own CAs instead of its earlier ones.
    pub has_new_certificates: bool,
}

impl AdoptedNode {
    /// Returns the version of the format that can express whether the log lies apart from the data.
    pub(crate) fn version_for(wal_directory: Option<&Path>) -> u32 {
        if wal_directory.is_some() { VERSION_WITH_WAL_DIRECTORY } else { VERSION }
    }
}

impl Layout {
    /// File about an etcd that ran before this agent.
    pub fn adopted_file(&self) -> PathBuf {
        self.agent().join("adopted.json")
    }

    /// File that marks this host's member as released: no agent runs it.
    pub fn released_file(&self) -> PathBuf {
        self.agent().join("released.json")
    }
}

/// Reads the file about an etcd that ran before this agent; `None` if there is none.
pub fn read_adopted(layout: &Layout) -> Result<Option<AdoptedNode>, StateError> {
    let path = layout.adopted_file();
    let Some(bytes) = read(&path)? else { return Ok(None) };
    let damaged = |error: serde_json::Error| StateError::Damaged {
        path: path.clone(),
        what: error.to_string(),
    };
    let json: serde_json::Value = serde_json::from_slice(&bytes).map_err(damaged)?;
    let found = json["version"].as_u64().unwrap_or(0);
    if found > u64::from(NEWEST_VERSION) {
        return Err(StateError::Newer { path, found, known: u64::from(NEWEST_VERSION) });
    }
    serde_json::from_value(json).map(Some).map_err(damaged)
}

/// Writes the file about an adopted etcd durably.
pub fn write_adopted(layout: &Layout, node: &AdoptedNode) -> Result<(), StateError> {
    let text = serde_json::to_vec_pretty(node).expect("plain structs always serialise");
    Ok(muster_files::data::replace(&layout.adopted_file(), &text)?)
}

/// Certificate and key files that an adopted etcd uses, in the agent's `tls` directory.
pub(crate) struct ServedFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub peer_cert: PathBuf,
    pub peer_key: PathBuf,
}

impl ServedFiles {
    pub(crate) fn of(layout: &Layout) -> Self {
        let file = |name: &str| layout.tls().join(name);
        Self {
            cert: file("served-client.crt"),
            key: file("served-client.key"),
            peer_cert: file("served-peer.crt"),
            peer_key: file("served-peer.key"),
        }
    }

    /// Copies the certificates and keys with which the etcd ran before its adoption.
    pub(crate) fn copy_from(&self, before: &CertificateFiles) -> Result<(), StateError> {
        for (from, to) in [
            (&before.cert, &self.cert),
            (&before.key, &self.key),
            (&before.peer_cert, &self.peer_cert),
            (&before.peer_key, &self.peer_key),
        ] {
            let bytes = muster_files::read_named(from, MAX_FILE_BYTES);
            let bytes = Zeroizing::new(bytes.map_err(StateError::io("read", from))?);
            write_if_changed(to, &bytes)?;
        }
        Ok(())
    }

    /// Writes the host's certificates from the cluster's own CAs, and the node's key. etcd reads
    /// these files at each handshake. Only the first call changes the keys. A handshake between its
    /// writes can fail, and the peer or client then tries again.
    pub(crate) fn write_own(&self, layout: &Layout, leaves: &Leaves) -> Result<(), StateError> {
        let path = layout.node_key();
        let damaged = || StateError::Damaged { path: path.clone(), what: "it is missing".into() };
        let key = Zeroizing::new(read(&path)?.ok_or_else(damaged)?);
        for (to, bytes) in [
            (&self.cert, leaves.client.as_bytes()),
            (&self.key, &key[..]),
            (&self.peer_cert, leaves.peer.as_bytes()),
            (&self.peer_key, &key[..]),
        ] {
            write_if_changed(to, bytes)?;
        }
        Ok(())
    }
}

fn write_if_changed(path: &Path, bytes: &[u8]) -> Result<(), StateError> {
    if read(path)?.as_deref() == Some(bytes) {
        return Ok(());
    }
    Ok(muster_files::data::replace(path, bytes)?)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn node(directory: &Path) -> AdoptedNode {
        let file = |name: &str| directory.join(name);
        AdoptedNode {
            version: VERSION,
            stage: AdoptionStage::Enrolled,
            program: "/usr/bin/etcd".into(),
            directory: directory.to_owned(),
            wal_directory: None,
            etcd_name: "Node_1".to_owned(),
            listen_peer_urls: "https://10.0.0.1:2380".to_owned(),
            listen_client_urls: "https://127.0.0.1:2379,https://10.0.0.1:2379".to_owned(),
            client_cert_auth: true,
            peer_client_cert_auth: true,
            flags: vec!["--quota-backend-bytes=4294967296".to_owned()],
            certificates: CertificateFiles {
                cert: file("server.crt"),
                key: file("server.key"),
                trusted_ca: file("ca.crt"),
                peer_cert: file("peer.crt"),
                peer_key: file("peer.key"),
                peer_trusted_ca: file("ca.crt"),
                client_cert: file("server.crt"),
                client_key: file("server.key"),
            },
            unit: Some("etcd.service".to_owned()),
            has_new_certificates: false,
        }
    }

    #[test]
    fn only_a_taken_over_etcd_is_the_agents_node() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let mut node = node(Path::new("/var/lib/etcd"));
        write_adopted(&layout, &node).unwrap();
        assert_eq!(Layout::new(dir.path()).unwrap().node(), dir.path().join("node"));
        node.stage = AdoptionStage::TakenOver;
        write_adopted(&layout, &node).unwrap();
        let taken = Layout::new(dir.path()).unwrap();
        assert_eq!(taken.node(), Path::new("/var/lib/etcd"));
        assert_eq!(taken.adopted(), Some(&node));
        assert_eq!(taken.create().unwrap().node(), taken.node(), "also of the claimed layout");
        let newer = std::fs::read_to_string(layout.adopted_file()).unwrap();
        std::fs::write(layout.adopted_file(), newer.replacen("1", "3", 1)).unwrap();
        assert!(matches!(read_adopted(&layout), Err(StateError::Newer { found: 3, .. })));
    }

    #[test]
    fn an_older_agent_refuses_an_etcd_whose_log_lies_apart() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let (wal, stage) = (dir.path().join("wal"), AdoptionStage::TakenOver);
        let version = AdoptedNode::version_for(Some(&wal));
        assert!(version > AdoptedNode::version_for(None));
        let before = node(dir.path());
        let node = AdoptedNode { version, stage, wal_directory: Some(wal.clone()), ..before };
        write_adopted(&layout, &node).unwrap();
        assert_eq!(read_adopted(&layout).unwrap(), Some(node));
        let taken = Layout::new(dir.path()).unwrap();
        assert_eq!(taken.separate_wal(), Some(&*wal));
        assert!(!taken.has_log());
    }

    #[test]
    fn the_served_files_are_those_of_before_until_they_are_exchanged() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let node = node(dir.path());
        let served = ServedFiles::of(&layout);
        assert!(served.copy_from(&node.certificates).is_err(), "they are missing");
        for name in ["server.crt", "server.key", "peer.crt", "peer.key"] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        served.copy_from(&node.certificates).unwrap();
        assert_eq!(std::fs::read(&served.peer_key).unwrap(), b"peer.key");
        let leaves = Leaves { peer: "p".to_owned(), client: "c".to_owned() };
        assert!(served.write_own(&layout, &leaves).is_err(), "there is no node key");
        std::fs::write(layout.node_key(), "k").unwrap();
        served.write_own(&layout, &leaves).unwrap();
        let read = [&served.cert, &served.key, &served.peer_cert, &served.peer_key];
        assert_eq!(read.map(|path| std::fs::read_to_string(path).unwrap()), ["c", "k", "p", "k"]);
    }
}
