//! Derives the backups in a store from its file names; pure.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::name::{BackupFile, BackupName};

/// A file that an interrupted backup has left, and when that backup began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leftover {
    pub file: String,
    pub begun_at: Timestamp,
}

/// The backups of one cluster in a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackupListing {
    /// Backups with a manifest and a snapshot, oldest first.
    pub published: Vec<BackupName>,
    /// Snapshots without a manifest, and files that were being written.
    pub leftovers: Vec<Leftover>,
    /// Manifests whose snapshot is missing, because somebody has removed it.
    pub incomplete: Vec<BackupName>,
}

impl BackupListing {
    /// Groups the files of a cluster's folder into backups, by their names. Leaves out files of
    /// other programs.
    pub(crate) fn of(files: impl IntoIterator<Item = String>) -> Self {
        let (mut manifests, mut data) = (Vec::new(), BTreeMap::<BackupName, Vec<String>>::new());
        let mut listing = Self::default();
        for file in files {
            match BackupFile::parse(&file) {
                Some(BackupFile::Manifest(name)) => manifests.push(name),
                Some(BackupFile::Data(name, _)) => data.entry(name).or_default().push(file),
                Some(BackupFile::Unfinished(name)) => {
                    listing.leftovers.push(Leftover { file, begun_at: name.begun_at() });
                }
                None => {}
            }
        }
        manifests.sort();
        for name in manifests {
            match data.remove(&name) {
                Some(_) => listing.published.push(name),
                None => listing.incomplete.push(name),
            }
        }
        for (name, files) in data {
            let begun_at = name.begun_at();
            let left = files.into_iter().map(|file| Leftover { file, begun_at });
            listing.leftovers.extend(left);
        }
        listing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_counts_once_its_manifest_and_its_snapshot_are_there() {
        let [a, b, c, d] =
            ["1", "2", "3", "4"].map(|n| format!("2026010{n}T000000Z-r{n}-0000000{n}"));
        let files = [
            format!("{b}.json"),
            format!("{b}.db.age"),
            format!("{a}.db"),
            format!("{a}.json"),
            format!("{c}.db.age"),
            format!("{c}.json.part"),
            format!("{d}.json"),
            "README.txt".to_owned(),
        ];
        let listing = BackupListing::of(files);
        let names =
            |names: &[BackupName]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names(&listing.published), [a, b]);
        assert_eq!(names(&listing.incomplete), [d]);
        let left: Vec<&str> = listing.leftovers.iter().map(|left| left.file.as_str()).collect();
        assert_eq!(left, [format!("{c}.json.part"), format!("{c}.db.age")]);
    }
}
