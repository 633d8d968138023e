//! The manifest beside a stored snapshot: the snapshot's content, and the hashes that prove the
//! file.

use std::fmt::Debug;

use data_encoding::HEXLOWER;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::name::{BackupName, ClusterFolder};
use super::signature::ManifestSignature;

/// Version of the manifest's format.
const VERSION: u32 = 1;
/// Maximum size in bytes of a manifest.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 64 << 10;
/// Maximum length of the texts in a manifest that came from the cluster.
const MAX_TEXT: usize = 1024;

/// Why a manifest can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManifestError {
    /// The file is no manifest, or its text is damaged.
    #[error("the manifest can't be read")]
    Syntax(#[source] serde_json::Error),
    /// A newer version of this program wrote the manifest.
    #[error(
        "the manifest has version {0}, this program knows {VERSION}: use the newer muster-agent"
    )]
    Newer(u32),
    /// A value is impossible, or belongs to another backup.
    #[error("the manifest is damaged or not this backup's: {0}")]
    Value(String),
}

/// How a snapshot is encrypted in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Encryption {
    /// The format of <https://age-encryption.org>.
    Age,
}

/// The member whose node sent a backup's snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupMember {
    /// Member id, in hexadecimal.
    pub id: String,
    pub name: String,
}

/// Contents of a snapshot, as counted by reading all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotFacts {
    /// Size of the snapshot in bytes, including the SHA-256 at its end.
    pub bytes: u64,
    /// SHA-256 of the database, in hexadecimal: the file's last 32 bytes.
    pub sha256: String,
    /// Hash over all rows, as `etcdutl snapshot status` shows it.
    pub hash: u32,
    /// Newest revision of the store.
    pub revision: u64,
    /// Number of records: each put and each delete that no compaction has removed.
    pub records: u64,
    /// Number of keys that exist at the newest revision.
    pub keys: u64,
}

/// The snapshot's file in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredFile {
    /// Name of the file, beside the manifest.
    pub file: String,
    pub bytes: u64,
    /// SHA-256 of the whole file, in hexadecimal.
    pub sha256: String,
    /// How the file is encrypted; `None` if it isn't.
    pub encryption: Option<Encryption>,
    /// Public keys for which the file is encrypted.
    pub recipients: Vec<String>,
}

/// Everything that is known of one backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Version of the format.
    pub version: u32,
    pub name: String,
    /// Name of the cluster's folder in the store (`ClusterFolder`).
    pub cluster: String,
    /// The cluster's name at discovery, if it is known there.
    pub cluster_name: Option<String>,
    /// Raft cluster id, in hexadecimal. A recovery changes it.
    pub raft_cluster_id: String,
    /// The member whose node sent the snapshot.
    pub member: BackupMember,
    /// Version of etcd's API in the node that sent the snapshot.
    pub node_version: String,
    /// Version of the agent that saved the backup.
    pub agent_version: String,
    /// When the agent began to save this backup.
    pub begun_at: Timestamp,
    /// When the snapshot had been checked and stored.
    pub stored_at: Timestamp,
    pub snapshot: SnapshotFacts,
    pub stored: StoredFile,
    /// Signature of the agent that saved the backup. `None` if an older version saved it, or a host
    /// without an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signature: Option<ManifestSignature>,
}

#[derive(Deserialize)]
struct VersionOnly {
    version: u32,
}

impl Manifest {
    /// The present version of the format.
    pub(crate) const VERSION: u32 = VERSION;

    /// Parses the manifest of the backup `name` of `cluster`. The bytes come from a store and count
    /// as untrusted.
    pub(crate) fn parse(
        bytes: &[u8],
        cluster: &ClusterFolder,
        name: &BackupName,
    ) -> Result<Self, ManifestError> {
        let VersionOnly { version } =
            serde_json::from_slice(bytes).map_err(ManifestError::Syntax)?;
        if version > VERSION {
            return Err(ManifestError::Newer(version));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(ManifestError::Syntax)?;
        manifest.check(cluster, name).map_err(ManifestError::Value)?;
        Ok(manifest)
    }

    fn check(&self, cluster: &ClusterFolder, name: &BackupName) -> Result<(), String> {
        fn expect<T: PartialEq + Debug>(what: &str, found: &T, expected: &T) -> Result<(), String> {
            let wrong = || format!("{what} is {found:?} in place of {expected:?}");
            if found == expected { Ok(()) } else { Err(wrong()) }
        }
        let is_encrypted = self.stored.encryption.is_some();
        expect("version", &self.version, &VERSION)?;
        expect("name", &self.name, &name.to_string())?;
        expect("cluster", &self.cluster.as_str(), &cluster.as_str())?;
        expect("stored.file", &self.stored.file, &name.data_file(is_encrypted))?;
        expect("snapshot.revision", &self.snapshot.revision, &name.revision())?;
        for (what, hash) in
            [("snapshot.sha256", &self.snapshot.sha256), ("stored.sha256", &self.stored.sha256)]
        {
            if HEXLOWER.decode(hash.as_bytes()).map_or(true, |hash| hash.len() != 32) {
                return Err(format!("{what} is no SHA-256"));
            }
        }
        if !is_encrypted {
            expect("stored.bytes", &self.stored.bytes, &self.snapshot.bytes)?;
        }
        let texts = [&self.member.name, &self.member.id, &self.node_version, &self.agent_version];
        if texts.iter().any(|text| text.len() > MAX_TEXT) {
            return Err("a text is too long".to_owned());
        }
        Ok(())
    }

    /// Returns the content of the manifest's file.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a manifest always serialises");
        bytes.push(b'\n');
        bytes
    }
}

#[cfg(test)]
impl Manifest {
    /// Returns the manifest of a backup of 544 bytes, encrypted for `recipient` if there is one.
    pub(crate) fn fixture(
        name: &BackupName,
        cluster: &ClusterFolder,
        recipient: Option<&str>,
    ) -> Self {
        let sha256 = "ab".repeat(32);
        Self {
            version: Self::VERSION,
            name: name.to_string(),
            cluster: cluster.to_string(),
            cluster_name: None,
            raft_cluster_id: "00000000000000a1".to_owned(),
            member: BackupMember { id: "b2".to_owned(), name: "db-1".to_owned() },
            node_version: "3.6.0".to_owned(),
            agent_version: "0.1.0".to_owned(),
            begun_at: name.begun_at(),
            stored_at: name.begun_at(),
            snapshot: SnapshotFacts {
                bytes: 544,
                sha256: sha256.clone(),
                hash: 7,
                revision: name.revision(),
                records: 1,
                keys: 1,
            },
            stored: StoredFile {
                file: name.data_file(recipient.is_some()),
                bytes: 544,
                sha256,
                encryption: recipient.map(|_| Encryption::Age),
                recipients: recipient.into_iter().map(str::to_owned).collect(),
            },
            signature: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "20261128T101500Z-r42-0000000a";
    const CLUSTER: &str = "0198c2a4-6f1e-7abc-8def-0123456789ab";

    fn manifest() -> Manifest {
        Manifest {
            version: VERSION,
            name: NAME.to_owned(),
            cluster: CLUSTER.to_owned(),
            cluster_name: Some("demo".to_owned()),
            raft_cluster_id: "00000000000000a1".to_owned(),
            member: BackupMember { id: "b2".to_owned(), name: "db-1".to_owned() },
            node_version: "3.6.0".to_owned(),
            agent_version: "0.1.0".to_owned(),
            begun_at: "2026-11-28T10:15:00Z".parse().unwrap(),
            stored_at: "2026-11-28T10:15:09Z".parse().unwrap(),
            snapshot: SnapshotFacts {
                bytes: 544,
                sha256: "ab".repeat(32),
                hash: 7,
                revision: 42,
                records: 50,
                keys: 40,
            },
            stored: StoredFile {
                file: format!("{NAME}.db.age"),
                bytes: 700,
                sha256: "cd".repeat(32),
                encryption: Some(Encryption::Age),
                recipients: vec!["age1x".to_owned()],
            },
            signature: None,
        }
    }

    fn parse(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        Manifest::parse(bytes, &CLUSTER.parse().unwrap(), &NAME.parse().unwrap())
    }

    #[test]
    fn a_manifest_survives_a_round_trip() {
        assert_eq!(parse(&manifest().to_bytes()).unwrap(), manifest());
        assert!((manifest().to_bytes().len() as u64) < MAX_MANIFEST_BYTES);
    }

    #[test]
    fn a_manifest_that_leads_elsewhere_is_refused() {
        type Change = fn(&mut Manifest);
        let changes: [(&str, Change); 9] = [
            ("another file", |m| m.stored.file = "../../../etc/shadow".to_owned()),
            ("another backup's file", |m| m.stored.file = NAME.replace("r42", "r43") + ".db.age"),
            ("a plain file", |m| m.stored.file = format!("{NAME}.db")),
            ("another name", |m| m.name = NAME.replace("r42", "r43")),
            ("another cluster", |m| m.cluster = CLUSTER.replace('a', "b")),
            ("another revision", |m| m.snapshot.revision = 43),
            ("no hash", |m| m.stored.sha256 = "../".repeat(21) + "x"),
            ("a short hash", |m| m.snapshot.sha256 = "ab".to_owned()),
            ("a huge name", |m| m.member.name = "x".repeat(MAX_TEXT + 1)),
        ];
        for (what, change) in changes {
            let mut changed = manifest();
            change(&mut changed);
            let error = parse(&changed.to_bytes());
            assert!(matches!(error, Err(ManifestError::Value(_))), "{what}: {error:?}");
        }
    }

    #[test]
    fn a_plain_snapshot_is_stored_as_it_is() {
        let mut plain = manifest();
        plain.stored.encryption = None;
        plain.stored.file = format!("{NAME}.db");
        assert!(matches!(parse(&plain.to_bytes()), Err(ManifestError::Value(_))), "other sizes");
        plain.stored.bytes = plain.snapshot.bytes;
        assert!(parse(&plain.to_bytes()).is_ok());
    }

    #[test]
    fn a_newer_manifest_is_refused_by_its_version_and_junk_by_its_syntax() {
        let newer = br#"{"version": 2, "content": "unknown"}"#;
        assert!(matches!(parse(newer), Err(ManifestError::Newer(2))));
        for junk in [&b""[..], b"{}", b"[1]", b"\xff\xfe", b"{\"version\": 1}"] {
            assert!(matches!(parse(junk), Err(ManifestError::Syntax(_))), "{junk:?}");
        }
        let nested = "[".repeat(100_000);
        assert!(matches!(parse(nested.as_bytes()), Err(ManifestError::Syntax(_))));
    }

    #[test]
    fn a_new_field_of_a_later_build_is_ignored() {
        let text = String::from_utf8(manifest().to_bytes()).unwrap();
        let extended = text.replacen('{', "{\"later\": 1,", 1);
        assert_eq!(parse(extended.as_bytes()).unwrap(), manifest());
    }
}
