//! Classifies the node's directory: blank, marked for an incarnation, with a log, or foreign.

use std::path::{Path, PathBuf};

use discovery_formation::agent::{self, DirectoryKind, DirectoryListing, MARKER, TOMBSTONE};
use discovery_formation::{Incarnation, Rules};
use serde::{Deserialize, Serialize};

use super::{Layout, StateError};

/// File that is in the node's directory after a new cluster was made from that directory.
pub const FORCED_FILE: &str = "muster-forced.json";

/// File that is in the node's directory while a new cluster is being made from that directory. No
/// node starts then.
pub const FORCING_FILE: &str = "muster-forcing.json";

/// Suffix of the files of etcd's log.
const WAL_SUFFIX: &str = "wal";

impl Layout {
    /// Lists the node's directory and returns its kind.
    pub fn classify_node(&self) -> Result<DirectoryKind, StateError> {
        classify(&self.node(), self.separate_wal())
    }

    /// Returns whether the node's own log exists under its final name.
    pub fn has_log(&self) -> bool {
        has_log(&self.node(), self.separate_wal())
    }

    /// Returns the directory of the node's log, if it isn't in the node's directory.
    pub(crate) fn separate_wal(&self) -> Option<&Path> {
        self.adopted()?.wal_directory.as_deref()
    }
}

/// Lists the node's directory. An unfinished marker, which a crash may leave behind, is left out.
fn list_directory(node: &Path, wal: Option<&Path>) -> Result<DirectoryListing, StateError> {
    let mut found = DirectoryListing::default();
    let entries = match std::fs::read_dir(node) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(StateError::io("read", node)(error)),
    };
    for entry in entries {
        let name = entry.map_err(StateError::io("read", node))?.file_name();
        if !muster_files::is_temporary_name(&name) {
            found.entries.push(name.to_string_lossy().into_owned());
        }
    }
    found.entries.sort();
    found.has_log = has_log(node, wal);
    let marker = super::read(&node.join(MARKER))?;
    found.marker = marker.and_then(|bytes| parse_marker(&String::from_utf8_lossy(&bytes)));
    Ok(found)
}

fn classify(node: &Path, wal: Option<&Path>) -> Result<DirectoryKind, StateError> {
    Ok(agent::classify(&Rules::ALL, &list_directory(node, wal)?))
}

/// Whether the node has a log. An empty directory `wal` counts as no log: it may be the mount point
/// of a volume that isn't mounted yet.
fn has_log(node: &Path, wal: Option<&Path>) -> bool {
    let Some(wal) = wal else { return node.join("member/wal").is_dir() };
    let mut entries = std::fs::read_dir(wal).into_iter().flatten().flatten();
    entries.any(|entry| is_log_file(&entry.path()))
}

/// Whether a path has the name of a file of etcd's log.
pub(crate) fn is_log_file(path: &Path) -> bool {
    path.extension().is_some_and(|suffix| suffix == WAL_SUFFIX)
}

fn parse_marker(text: &str) -> Option<Incarnation> {
    let text = text.trim();
    let valid = text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    u128::from_str_radix(text, 16).ok().filter(|_| valid).map(Incarnation)
}

/// Creates the node's directory and its marker, durably.
pub fn write_marker(node: &Path, incarnation: Incarnation) -> Result<(), StateError> {
    muster_files::open_data_folder(node)?;
    Ok(muster_files::data::replace(&node.join(MARKER), format!("{incarnation}\n").as_bytes())?)
}

/// Removes the marker of a node that no agent runs any more.
pub fn remove_marker(node: &Path) -> Result<(), StateError> {
    let marker = node.join(MARKER);
    if super::read(&marker)?.is_none() {
        return Ok(());
    }
    muster_files::data::remove(&marker)?;
    Ok(muster_files::data::sync(node)?)
}

/// Record of a member's removal. The node writes it. If the node is a stock etcd, which writes
/// none, the agent writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// Version of this format: 1.
    pub version: u32,
    /// The incarnation that was removed.
    #[serde(default)]
    pub incarnation: String,
    /// Member id, in hexadecimal.
    #[serde(default)]
    pub member_id: String,
    /// Raft cluster id, in hexadecimal.
    #[serde(default)]
    pub cluster_id: String,
    /// Time of the removal, RFC 3339.
    #[serde(default)]
    pub at: String,
    /// How the node learned of the removal: `log` if it applied the removal from its log, else the
    /// id of the peer that reported it.
    #[serde(default)]
    pub by: String,
}

impl Tombstone {
    /// Describes the removal in one sentence, for operators to read.
    pub fn sentence(&self) -> String {
        let part = |before: &str, value: &str| {
            if value.is_empty() { String::new() } else { format!("{before}{value}") }
        };
        format!(
            "this member{} has been permanently removed from the cluster{}{}{}",
            part(" ", &self.member_id),
            part(" ", &self.cluster_id),
            part(" at ", &self.at),
            part(" by ", &self.by),
        )
    }
}

/// Returns the tombstone in the node's directory, if there is one. An unreadable tombstone is not
/// treated as absent: a damaged tombstone must not bring a removed member back.
pub fn read_tombstone(node: &Path) -> Result<Option<Tombstone>, StateError> {
    let path: PathBuf = node.join(TOMBSTONE);
    let Some(bytes) = super::read(&path)? else { return Ok(None) };
    Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default()))
}

/// Writes a tombstone durably, for a node that wrote none. From then on nothing starts in this
/// directory.
pub fn write_tombstone(node: &Path, tombstone: &Tombstone) -> Result<(), StateError> {
    let text = serde_json::to_vec_pretty(tombstone).expect("plain texts always serialise");
    Ok(muster_files::data::replace(&node.join(TOMBSTONE), &text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INCARNATION: Incarnation = Incarnation(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff);

    fn classify(node: &Path) -> Result<DirectoryKind, StateError> {
        super::classify(node, None)
    }

    #[test]
    fn absent_empty_and_lost_and_found_are_blank() {
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("node");
        assert_eq!(classify(&node).unwrap(), DirectoryKind::Blank);
        std::fs::create_dir(&node).unwrap();
        assert_eq!(classify(&node).unwrap(), DirectoryKind::Blank);
        std::fs::create_dir(node.join("lost+found")).unwrap();
        assert_eq!(classify(&node).unwrap(), DirectoryKind::Blank);
    }

    #[test]
    fn a_foreign_file_makes_the_directory_foreign() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("PG_VERSION"), "15").unwrap();
        assert_eq!(classify(dir.path()).unwrap(), DirectoryKind::Foreign("PG_VERSION".to_owned()));
    }

    #[test]
    fn a_marker_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("node");
        write_marker(&node, INCARNATION).unwrap();
        assert_eq!(classify(&node).unwrap(), DirectoryKind::Marked(INCARNATION));
        assert_eq!(
            std::fs::read_to_string(node.join(MARKER)).unwrap(),
            "00112233445566778899aabbccddeeff\n"
        );
    }

    #[test]
    fn a_crash_while_the_marker_was_written_leaves_a_blank_directory() {
        let dir = tempfile::tempdir().unwrap();
        let unfinished = format!("{MARKER}.unfinished-{}", "0a".repeat(16));
        std::fs::write(dir.path().join(unfinished), "0011").unwrap();
        assert_eq!(classify(dir.path()).unwrap(), DirectoryKind::Blank);
    }

    #[test]
    fn a_damaged_marker_is_not_treated_as_missing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(MARKER), "what?").unwrap();
        assert_eq!(classify(dir.path()).unwrap(), DirectoryKind::Foreign(MARKER.to_owned()));
    }

    #[test]
    fn the_log_is_seen_once_its_folder_has_its_final_name() {
        let dir = tempfile::tempdir().unwrap();
        write_marker(dir.path(), INCARNATION).unwrap();
        std::fs::create_dir_all(dir.path().join("member/wal.tmp")).unwrap();
        assert_eq!(classify(dir.path()).unwrap(), DirectoryKind::Marked(INCARNATION));
        std::fs::create_dir_all(dir.path().join("member/wal")).unwrap();
        assert_eq!(classify(dir.path()).unwrap(), DirectoryKind::Log(Some(INCARNATION)));
    }

    #[test]
    fn a_log_in_a_directory_of_its_own_is_seen_by_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let (node, wal) = (dir.path().join("node"), dir.path().join("wal"));
        write_marker(&node, INCARNATION).unwrap();
        let kind = || super::classify(&node, Some(&wal)).unwrap();
        assert_eq!(kind(), DirectoryKind::Marked(INCARNATION), "the directory is missing");
        std::fs::create_dir_all(wal.join("lost+found")).unwrap();
        assert_eq!(kind(), DirectoryKind::Marked(INCARNATION), "a volume isn't mounted");
        std::fs::create_dir_all(node.join("member/wal")).unwrap();
        assert_eq!(kind(), DirectoryKind::Marked(INCARNATION), "etcd reads no log there");
        std::fs::write(wal.join("0000000000000000-0000000000000000.wal"), "").unwrap();
        assert_eq!(kind(), DirectoryKind::Log(Some(INCARNATION)));
    }

    #[test]
    fn a_damaged_tombstone_is_still_a_tombstone() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read_tombstone(dir.path()).unwrap(), None);
        std::fs::write(dir.path().join(TOMBSTONE), "{").unwrap();
        assert!(read_tombstone(dir.path()).unwrap().is_some());
    }

    #[test]
    fn the_sentence_of_a_tombstone_contains_time_and_source() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join(TOMBSTONE),
            r#"{"version":1,"incarnation":"00","member_id":"a1","cluster_id":"c2","at":"2026-01-02T03:04:05Z","by":"ada"}"#,
        )
        .unwrap();
        let sentence = read_tombstone(dir.path()).unwrap().unwrap().sentence();
        assert_eq!(
            sentence,
            "this member a1 has been permanently removed from the cluster c2 at 2026-01-02T03:04:05Z by ada"
        );
    }
}
