//! The file with the result of the last verification of stored backups.
//!
//! A restarted agent shows this result again. So the alert about a damaged backup stays until the
//! backup is whole or gone. Only this agent uses the file. If the file is missing, damaged or of a
//! newer version, there is no result, and the next verification is due at once.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::settings::StoreSettings;
use crate::observe::backup::VerificationStatus;
use crate::state::{self, Layout, StateError};

/// Version of the file's format.
const VERSION: u32 = 1;

/// Content of the file about the last verification.
#[derive(Serialize, Deserialize)]
struct LastVerification {
    version: u32,
    /// Directory, or URL of bucket and prefix.
    store: String,
    result: VerificationStatus,
}

/// The file with the last result about one store.
pub(super) struct VerificationFile {
    path: PathBuf,
    /// Directory, or URL of bucket and prefix. A result about another store is ignored.
    store: String,
}

impl VerificationFile {
    pub(super) fn new(layout: &Layout, store: &StoreSettings) -> Self {
        Self { path: layout.backup_verification(), store: store.to_string() }
    }

    /// Returns the last result about this store. `None` if the file has no readable result about
    /// it.
    pub(super) fn read(&self) -> Option<VerificationStatus> {
        let bytes = state::read(&self.path).ok().flatten()?;
        let last: LastVerification = serde_json::from_slice(&bytes).ok()?;
        (last.version == VERSION && last.store == self.store).then_some(last.result)
    }

    /// Writes the last result durably.
    pub(super) fn write(&self, result: VerificationStatus) -> Result<(), StateError> {
        let last = LastVerification { version: VERSION, store: self.store.clone(), result };
        let text = serde_json::to_vec_pretty(&last).expect("plain structs always serialise");
        Ok(muster_files::data::replace(&self.path, &text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_readable_result_about_the_same_store_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let at = |store: &str| {
            VerificationFile::new(&layout, &StoreSettings::Directory(PathBuf::from(store)))
        };
        let file = at("/backups");
        assert_eq!(file.read(), None);
        let result =
            VerificationStatus { damaged: vec!["A".to_owned()], ..VerificationStatus::default() };
        file.write(result.clone()).unwrap();
        assert_eq!(file.read(), Some(result));
        assert_eq!(at("/other-backups").read(), None);
        let text = std::fs::read_to_string(layout.backup_verification()).unwrap();
        let newer = text.replacen("\"version\": 1", "\"version\": 2", 1);
        for unreadable in [newer.as_str(), &text[..text.len() / 2]] {
            std::fs::write(layout.backup_verification(), unreadable).unwrap();
            assert_eq!(file.read(), None, "{unreadable}");
        }
    }
}
