//! Classifies a node's data directory from a listing of its entries.

use crate::rules::{Rule, Rules};
use crate::values::Incarnation;

/// Name of the marker file: the agent writes the node's incarnation into it before the first start.
pub const MARKER: &str = "muster-incarnation";
/// Name of the tombstone file: it shows that the incarnation was removed from its cluster.
pub const TOMBSTONE: &str = "muster-tombstone.json";
/// Name of the node's own folder; the node's log is the folder `wal` inside it.
pub const MEMBER_FOLDER: &str = "member";
/// Name of the folder that mkfs creates in a new file system.
pub const LOST_AND_FOUND: &str = "lost+found";

/// Listing of a node's data directory, made by the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectoryListing {
    /// Names of the directory's entries; empty if the directory doesn't exist.
    pub entries: Vec<String>,
    /// Incarnation in the marker file; `None` if there is no such file, or it isn't 32 hex digits.
    pub marker: Option<Incarnation>,
    /// Whether the log folder `member/wal` exists in the directory.
    pub has_log: bool,
}

/// Kind of a node's data directory, as [`classify`] determines it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DirectoryKind {
    /// Directory that is absent, empty, or has only `lost+found`.
    Blank,
    /// Directory with a marker of this incarnation, and no log yet.
    Marked(Incarnation),
    /// Directory with a log. The value is the marker's incarnation, if there is a marker.
    Log(Option<Incarnation>),
    /// Directory with the tombstone of a removed member.
    Tombstone,
    /// Directory with entries that no node of Muster has made. The value is the name of one such
    /// entry.
    Foreign(String),
}

/// Classifies the directory in `listing`: a tombstone outranks a log, and a log outranks a marker.
#[must_use]
pub fn classify(rules: &Rules, listing: &DirectoryListing) -> DirectoryKind {
    let has = |name: &str| listing.entries.iter().any(|entry| entry == name);
    if has(TOMBSTONE) {
        return DirectoryKind::Tombstone;
    }
    if listing.has_log {
        return DirectoryKind::Log(listing.marker);
    }
    // A directory with a marker file belongs to this agent's node. Other entries in the directory
    // come from a start of the node that didn't finish.
    if let Some(incarnation) = listing.marker {
        return DirectoryKind::Marked(incarnation);
    }
    let ignored = |entry: &&String| {
        rules.is_on(Rule::LostAndFoundIsBlank) && entry.as_str() == LOST_AND_FOUND
    };
    match listing.entries.iter().find(|entry| !ignored(entry)) {
        Some(entry) => DirectoryKind::Foreign(entry.clone()),
        None => DirectoryKind::Blank,
    }
}

impl std::fmt::Display for DirectoryKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DirectoryKind::Blank => write!(f, "blank"),
            DirectoryKind::Marked(incarnation) => write!(f, "marked for incarnation {incarnation}"),
            DirectoryKind::Log(Some(incarnation)) => {
                write!(f, "the log of incarnation {incarnation}")
            }
            DirectoryKind::Log(None) => write!(f, "a log without a marker"),
            DirectoryKind::Tombstone => write!(f, "the tombstone of a removed member"),
            DirectoryKind::Foreign(entry) => write!(f, "{entry:?}, which no node of ours made"),
        }
    }
}
