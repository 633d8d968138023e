//! What lies in a node's directory, from a listing of it.

use crate::rules::{Rule, Rules};
use crate::values::Incarnation;

/// The agent's marker.
pub const MARKER: &str = "muster-incarnation";
/// Says that the incarnation was removed.
pub const TOMBSTONE: &str = "muster-tombstone.json";
/// The node's own folder; its log is `wal` in it.
pub const MEMBER: &str = "member";
/// What mkfs leaves behind.
pub const LOST_AND_FOUND: &str = "lost+found";

/// A look at the directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Names of its entries; none also if the directory doesn't exist.
    pub entries: Vec<String>,
    /// The marker's content: none if there is no such file, or it isn't 32 hex digits.
    pub marker: Option<Incarnation>,
    /// `member/wal` exists.
    pub log: bool,
}

/// What kind of directory it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Directory {
    /// Absent, empty, or only `lost+found`.
    Blank,
    /// A marker, and no log.
    Marked(Incarnation),
    /// A log, with its marker if there is one.
    Log(Option<Incarnation>),
    /// A tombstone.
    Tombstone,
    /// Something else; the name of one entry.
    Foreign(String),
}

/// The class of what `listing` shows.
#[must_use]
pub fn classify(rules: &Rules, listing: &Listing) -> Directory {
    let has = |name: &str| listing.entries.iter().any(|entry| entry == name);
    if has(TOMBSTONE) {
        return Directory::Tombstone;
    }
    if listing.log {
        return Directory::Log(listing.marker);
    }
    // With a marker the rest is the node's own, begun and not finished.
    if let Some(incarnation) = listing.marker {
        return Directory::Marked(incarnation);
    }
    let ignored =
        |entry: &&String| rules.on(Rule::LostAndFoundIsBlank) && entry.as_str() == LOST_AND_FOUND;
    match listing.entries.iter().find(|entry| !ignored(entry)) {
        Some(entry) => Directory::Foreign(entry.clone()),
        None => Directory::Blank,
    }
}

impl std::fmt::Display for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Directory::Blank => write!(f, "blank"),
            Directory::Marked(whose) => write!(f, "marked for incarnation {whose}"),
            Directory::Log(Some(whose)) => write!(f, "the log of incarnation {whose}"),
            Directory::Log(None) => write!(f, "a log without a marker"),
            Directory::Tombstone => write!(f, "the tombstone of a removed member"),
            Directory::Foreign(entry) => write!(f, "{entry:?}, which no node of ours made"),
        }
    }
}
