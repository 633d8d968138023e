//! The member document, which binds each member of the first configuration to an incarnation and a
//! key.
//!
//! `muster-agent` writes it from the commit document that it has verified. The member document
//! contains nothing secret, and is trusted like the command line.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Incarnation, NodeKey};

/// Maximum size of a member document in bytes. A document of nine members needs less, and a file of
/// this size can be read into memory.
const MAX_DOCUMENT_BYTES: u64 = 1 << 20;
const VERSION: u64 = 1;

/// Contents of the file that `--muster-document` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberDocument {
    /// Hash of the committed proposal, in lower-case hex; equals `--initial-cluster-token`.
    pub proposal_hash: String,
    /// Name of the cluster, for operators.
    pub cluster_name: String,
    /// Seat number of this member, from 1.
    pub seat: u32,
    /// All members of the first configuration, in seat order.
    pub members: Vec<DocumentMember>,
}

/// A member of the first configuration, with the incarnation and key to which it is bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentMember {
    /// Seat number of the member, from 1.
    pub seat: u32,
    pub name: String,
    /// URLs under which peers reach the member.
    pub peer_urls: Vec<String>,
    /// URLs under which clients reach the member.
    pub client_urls: Vec<String>,
    /// The only incarnation that may act as this member.
    pub incarnation: Incarnation,
    /// The key with which the member authenticates.
    pub node_key: NodeKey,
}

/// Why a member document can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The member document can't be read.
    #[error("cannot read the member document {}", path.display())]
    Read {
        /// Path of the member document.
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The file is not valid JSON, or its JSON is not a member document.
    #[error("the member document is not valid JSON of version {VERSION}")]
    Syntax(#[source] serde_json::Error),
    /// The member document has another version, for example because a later program wrote it.
    #[error("the member document has version {0}, this program reads version {VERSION}")]
    Version(u64),
    /// A field has an invalid value.
    #[error("the member document is wrong: {0}")]
    Invalid(String),
}

#[derive(Deserialize)]
struct RawDocument {
    version: u64,
    document: String,
    cluster_name: String,
    #[serde(rename = "self")]
    own: RawSelf,
    members: Vec<RawMember>,
}

#[derive(Deserialize)]
struct RawSelf {
    seat: u32,
}

#[derive(Deserialize)]
struct RawMember {
    seat: u32,
    name: String,
    peer_urls: Vec<String>,
    #[serde(default)]
    client_urls: Vec<String>,
    incarnation: String,
    node_key: String,
}

impl MemberDocument {
    /// Reads and checks the member document at `path`.
    ///
    /// # Errors
    /// Fails if the file can't be read or its contents are invalid.
    pub fn read(path: &Path) -> Result<Self, DocumentError> {
        let bytes = muster_files::read_named(path, MAX_DOCUMENT_BYTES)
            .map_err(|source| DocumentError::Read { path: path.to_owned(), source })?;
        Self::parse(&bytes)
    }

    /// Parses and checks a member document.
    ///
    /// # Errors
    /// Fails if the contents are invalid.
    pub fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        #[derive(Deserialize)]
        struct Version {
            version: u64,
        }
        let version: Version = serde_json::from_slice(bytes).map_err(DocumentError::Syntax)?;
        if version.version != VERSION {
            return Err(DocumentError::Version(version.version));
        }
        let raw: RawDocument = serde_json::from_slice(bytes).map_err(DocumentError::Syntax)?;
        debug_assert_eq!(raw.version, VERSION);
        let members = raw
            .members
            .into_iter()
            .enumerate()
            .map(|(n, member)| member.check(n))
            .collect::<Result<Vec<_>, _>>()?;
        let document = Self {
            proposal_hash: raw.document,
            cluster_name: raw.cluster_name,
            seat: raw.own.seat,
            members,
        };
        document.check()?;
        Ok(document)
    }

    /// Returns the member called `name`, if the member document has one.
    #[must_use]
    pub fn member(&self, name: &str) -> Option<&DocumentMember> {
        self.members.iter().find(|member| member.name == name)
    }

    fn check(&self) -> Result<(), DocumentError> {
        let invalid = |what: String| Err(DocumentError::Invalid(what));
        if !is_hash(&self.proposal_hash) {
            return invalid("\"document\" is not 64 lower-case hex digits".to_owned());
        }
        if self.seat == 0 || self.seat as usize > self.members.len() {
            return invalid(format!("there is no seat {}", self.seat));
        }
        for (n, member) in self.members.iter().enumerate() {
            for earlier in &self.members[..n] {
                let shared = [
                    ("the name", earlier.name == member.name),
                    ("the incarnation", earlier.incarnation == member.incarnation),
                    ("the key", earlier.node_key == member.node_key),
                    ("a peer URL", earlier.peer_urls.iter().any(|u| member.peer_urls.contains(u))),
                ];
                if let Some((what, _)) = shared.iter().find(|(_, same)| *same) {
                    return invalid(format!(
                        "seats {} and {} have {what} in common",
                        earlier.seat, member.seat
                    ));
                }
            }
        }
        Ok(())
    }
}

impl RawMember {
    fn check(self, n: usize) -> Result<DocumentMember, DocumentError> {
        let invalid = |what: String| DocumentError::Invalid(format!("seat {}: {what}", n + 1));
        if self.seat as usize != n + 1 {
            return Err(invalid(format!("it calls itself seat {}", self.seat)));
        }
        if self.name.is_empty() || self.peer_urls.is_empty() {
            return Err(invalid("it has no name or no peer URL".to_owned()));
        }
        Ok(DocumentMember {
            seat: self.seat,
            incarnation: self
                .incarnation
                .parse()
                .map_err(|e| invalid(format!("incarnation: {e}")))?,
            node_key: self.node_key.parse().map_err(|e| invalid(format!("node_key: {e}")))?,
            name: self.name,
            peer_urls: self.peer_urls,
            client_urls: self.client_urls,
        })
    }
}

fn is_hash(text: &str) -> bool {
    text.len() == 64 && data_encoding::HEXLOWER.decode(text.as_bytes()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> serde_json::Value {
        serde_json::json!({
            "version": 1,
            "document": "ab".repeat(32),
            "cluster_name": "demo",
            "self": {"seat": 2},
            "members": [
                {"seat": 1, "name": "a", "peer_urls": ["https://a:2380"], "client_urls": ["https://a:2379"],
                 "incarnation": "11".repeat(16), "node_key": "aa".repeat(32)},
                {"seat": 2, "name": "b", "peer_urls": ["https://b:2380"], "client_urls": [],
                 "incarnation": "22".repeat(16), "node_key": "bb".repeat(32)},
            ],
        })
    }

    fn parse(value: &serde_json::Value) -> Result<MemberDocument, String> {
        MemberDocument::parse(value.to_string().as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_valid_document_is_read() {
        let document = parse(&sample()).expect("it is good");
        assert_eq!(document.seat, 2);
        let record = document.member("b").expect("it is listed");
        assert_eq!(record.incarnation.to_string(), "22".repeat(16));
        assert_eq!(record.node_key.to_string(), "bb".repeat(32));
        assert!(document.member("c").is_none());
    }

    #[test]
    fn a_field_that_two_members_share_is_refused() {
        for (field, what) in [
            ("name", "the name"),
            ("incarnation", "the incarnation"),
            ("node_key", "the key"),
            ("peer_urls", "a peer URL"),
        ] {
            let mut value = sample();
            value["members"][1][field] = value["members"][0][field].clone();
            let error = parse(&value).expect_err("it is shared");
            assert!(error.contains(&format!("seats 1 and 2 have {what}")), "{error}");
        }
    }

    #[test]
    fn a_later_version_is_refused_with_its_number() {
        let mut value = sample();
        value["version"] = 2.into();
        value["members"] = "in a form of tomorrow".into();
        let error = parse(&value).expect_err("it is of tomorrow");
        assert!(error.contains("version 2"), "{error}");
    }

    #[test]
    fn malformed_fields_are_refused() {
        for (pointer, wrong) in [
            ("/document", "abc"),
            ("/members/0/incarnation", "11"),
            ("/members/0/node_key", "AA"),
            ("/members/1/name", ""),
        ] {
            let mut value = sample();
            *value.pointer_mut(pointer).expect("the field exists") = wrong.into();
            assert!(parse(&value).is_err(), "{pointer}");
        }
        let mut value = sample();
        value["self"]["seat"] = 3.into();
        assert!(parse(&value).is_err());
        let mut value = sample();
        value["members"][1]["seat"] = 1.into();
        assert!(parse(&value).is_err());
    }
}
