//! Names of backups and of their files.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use rustix::rand::{GetRandomFlags, getrandom};
use uuid::Uuid;

/// Format of the time in a name, in UTC.
const TIME_FORMAT: &str = "%Y%m%dT%H%M%SZ";
/// Ending of the manifest's file.
const MANIFEST: &str = ".json";
/// Ending of a snapshot that is stored as the node sent it.
const PLAIN: &str = ".db";
/// Ending of an encrypted snapshot.
const ENCRYPTED: &str = ".db.age";
/// Ending of a file that is being written to a directory.
const UNFINISHED: &str = ".part";

/// The text is no name of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no name of a backup: muster-agent backup list shows the names")]
pub(crate) struct NoBackupName;

/// Name of a backup, such as `20261128T101500Z-r1234-ab12cd34`: when it was begun, the newest
/// revision in it, and random digits. Names are ordered by time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BackupName {
    begun_at: Timestamp,
    revision: u64,
    random: u32,
}

impl BackupName {
    /// Makes a new name. Fractions of the second are cut off.
    pub(crate) fn new(begun_at: Timestamp, revision: u64) -> Self {
        let mut random = [0; 4];
        // Without random bytes, the digits are zeros. The digits matter only if two agents begin a
        // backup within one second.
        let _ = getrandom(&mut random, GetRandomFlags::empty());
        Self {
            begun_at: Timestamp::from_second(begun_at.as_second()).unwrap_or(begun_at),
            revision,
            random: u32::from_le_bytes(random),
        }
    }

    /// Returns when the backup was begun. All writes acknowledged before that are in it.
    pub(crate) fn begun_at(&self) -> Timestamp {
        self.begun_at
    }

    /// Returns the newest revision in the snapshot.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the name of the manifest's file.
    pub(crate) fn manifest_file(&self) -> String {
        format!("{self}{MANIFEST}")
    }

    /// Returns the name of the snapshot's file.
    pub(crate) fn data_file(&self, is_encrypted: bool) -> String {
        format!("{self}{}", if is_encrypted { ENCRYPTED } else { PLAIN })
    }
}

impl fmt::Display for BackupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = self.begun_at.strftime(TIME_FORMAT);
        write!(f, "{time}-r{}-{:08x}", self.revision, self.random)
    }
}

impl FromStr for BackupName {
    type Err = NoBackupName;

    fn from_str(text: &str) -> Result<Self, NoBackupName> {
        let parse = || {
            let mut parts = text.split('-');
            let time = DateTime::strptime(TIME_FORMAT, parts.next()?).ok()?;
            let revision = parts.next()?.strip_prefix('r')?.parse().ok()?;
            let random = u32::from_str_radix(parts.next()?, 16).ok()?;
            let begun_at = time.to_zoned(TimeZone::UTC).ok()?.timestamp();
            Some(Self { begun_at, revision, random })
        };
        // Accept only the canonical spelling, so that no two file names mean one backup.
        parse().filter(|name: &Self| name.to_string() == text).ok_or(NoBackupName)
    }
}

/// A file that this program may have written to a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BackupFile {
    /// The manifest, which is written last.
    Manifest(BackupName),
    /// A snapshot, and whether it is encrypted.
    Data(BackupName, bool),
    /// A file that was being written to a directory.
    Unfinished(BackupName),
}

impl BackupFile {
    /// Parses the name of a file. Returns `None` for a file that isn't ours.
    pub(crate) fn parse(file: &str) -> Option<Self> {
        if let Some(rest) = file.strip_suffix(UNFINISHED) {
            return match Self::parse(rest)? {
                Self::Manifest(name) | Self::Data(name, _) => Some(Self::Unfinished(name)),
                Self::Unfinished(_) => None,
            };
        }
        let name = |ending| file.strip_suffix(ending)?.parse().ok();
        name(MANIFEST)
            .map(Self::Manifest)
            .or_else(|| name(ENCRYPTED).map(|name| Self::Data(name, true)))
            .or_else(|| name(PLAIN).map(|name| Self::Data(name, false)))
    }

    /// Returns the name that a file has in a directory until it is written completely.
    pub(crate) fn unfinished(file: &str) -> String {
        format!("{file}{UNFINISHED}")
    }
}

/// Name of a cluster's folder in a store. For a cluster with agents, it is the id at discovery,
/// which survives recoveries. For any other cluster, it is the Raft cluster id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClusterFolder(String);

impl ClusterFolder {
    /// Returns the folder of a cluster that discovery knows.
    pub(crate) fn of_cluster(id: Uuid) -> Self {
        Self(id.to_string())
    }

    /// Whether the folder is named by an id at discovery. Only such a cluster has agents that sign.
    pub(crate) fn has_agents(&self) -> bool {
        self.0.parse::<Uuid>().is_ok()
    }

    /// Returns the folder of a cluster without agents.
    pub(crate) fn of_raft_cluster(id: u64) -> Self {
        Self(format!("{id:016x}"))
    }

    /// Returns a folder that belongs to no cluster, for checks of a store.
    pub(super) fn for_check() -> Self {
        Self("muster-check".to_owned())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ClusterFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ClusterFolder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_uuid = Uuid::parse_str(text).is_ok_and(|id| id.to_string() == text);
        let is_raft_id = text.len() == 16
            && u64::from_str_radix(text, 16).is_ok_and(|id| format!("{id:016x}") == text);
        match is_uuid || is_raft_id {
            true => Ok(Self(text.to_owned())),
            false => Err("no id of a cluster: say it as backup list shows it".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_a_round_trip_and_has_one_spelling() {
        let at = "2026-11-28T10:15:00.9Z".parse().unwrap();
        let name = BackupName { random: 0xab12_cd34, ..BackupName::new(at, 1234) };
        assert_eq!(name.to_string(), "20261128T101500Z-r1234-ab12cd34");
        assert_eq!(name.to_string().parse(), Ok(name));
        for wrong in [
            "",
            "20261128T101500Z-r1234",
            "20261128T101500Z-r1234-AB12CD34",
            "20261128T101500Z-r01234-ab12cd34",
            "20261128T101500Z-r-1-ab12cd34",
            "20261328T101500Z-r1234-ab12cd34",
            "20261128T101500Z-r1234-ab12cd34-x",
            "../20261128T101500Z-r1234-ab12cd34",
            "20261128T101500Z-r1234-ab12cd34/..",
            "20261128T101500Z-r99999999999999999999-ab12cd34",
        ] {
            assert_eq!(wrong.parse::<BackupName>(), Err(NoBackupName), "{wrong}");
        }
    }

    #[test]
    fn names_are_ordered_by_time() {
        let at = |second| BackupName::new(Timestamp::from_second(second).unwrap(), 9);
        assert!(at(99) < at(100) && at(999) < at(1000));
    }

    #[test]
    fn files_of_others_are_not_ours() {
        let name: BackupName = "20261128T101500Z-r1-00000001".parse().unwrap();
        for is_encrypted in [false, true] {
            let file = name.data_file(is_encrypted);
            let unfinished = BackupFile::unfinished(&file);
            assert_eq!(
                BackupFile::parse(&file),
                Some(BackupFile::Data(name.clone(), is_encrypted))
            );
            assert_eq!(BackupFile::parse(&unfinished), Some(BackupFile::Unfinished(name.clone())));
            assert_eq!(BackupFile::parse(&BackupFile::unfinished(&unfinished)), None);
        }
        let manifest = BackupFile::Manifest(name.clone());
        assert_eq!(BackupFile::parse(&name.manifest_file()), Some(manifest));
        for other in
            ["README", "snapshot.db", "x.json", "20261128T101500Z-r1-00000001.tar", ".part"]
        {
            assert_eq!(BackupFile::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_clusters_folder_is_an_id_and_no_path() {
        let uuid = "0198c2a4-6f1e-7abc-8def-0123456789ab";
        assert!(uuid.parse::<ClusterFolder>().is_ok());
        assert!(ClusterFolder::of_raft_cluster(7).to_string().parse::<ClusterFolder>().is_ok());
        assert!(!ClusterFolder::of_raft_cluster(7).has_agents());
        assert!(ClusterFolder::of_cluster(Uuid::from_u128(7)).has_agents());
        for wrong in ["", "..", "demo", "a/b", "0198C2A4-6F1E-7ABC-8DEF-0123456789AB", "7"] {
            assert!(wrong.parse::<ClusterFolder>().is_err(), "{wrong}");
        }
    }
}
