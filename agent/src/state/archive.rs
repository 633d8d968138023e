//! Moves old state aside, into a directory named by the time. Nothing is deleted.

use std::path::{Path, PathBuf};

use super::{Layout, StateError};

/// Moves `which` (names directly under the data directory) into a new `quarantine-<time>` directory
/// there, durably. Returns the new directory's path. Names that don't exist are skipped. If none
/// exists, makes no directory and returns `None`.
pub fn move_to_quarantine(
    layout: &Layout,
    which: &[&str],
    reason: &str,
    now: jiff::Timestamp,
) -> Result<Option<PathBuf>, StateError> {
    let present: Vec<_> = which.iter().filter(|name| exists(&layout.root().join(name))).collect();
    if present.is_empty() {
        return Ok(None);
    }
    let target = fresh_folder(layout.root(), now)?;
    // Write the reason first, so that a crash halfway leaves a directory that explains itself.
    muster_files::data::replace(&target.join("reason.txt"), format!("{reason}\n").as_bytes())?;
    for name in present {
        muster_files::data::rename(&layout.root().join(name), &target.join(name))?;
    }
    Ok(Some(target))
}

fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn fresh_folder(root: &Path, now: jiff::Timestamp) -> Result<PathBuf, StateError> {
    let stamp = now.strftime("%Y%m%dT%H%M%SZ").to_string();
    let mut target = root.join(format!("quarantine-{stamp}"));
    let mut again = 1;
    while exists(&target) {
        again += 1;
        target = root.join(format!("quarantine-{stamp}-{again}"));
    }
    muster_files::data::make_folder(&target)?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_state_is_moved_with_its_reason_and_nothing_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        std::fs::write(layout.journal(), "{}").unwrap();
        let now = jiff::Timestamp::from_second(1_700_000_000).unwrap();
        let to = move_to_quarantine(&layout, &["agent", "node"], "a test", now).unwrap().unwrap();
        assert_eq!(to.file_name().unwrap(), "quarantine-20231114T221320Z");
        assert_eq!(std::fs::read_to_string(to.join("agent/journal.json")).unwrap(), "{}");
        assert_eq!(std::fs::read_to_string(to.join("reason.txt")).unwrap(), "a test\n");
        assert!(!layout.agent().exists());
    }

    #[test]
    fn two_moves_in_one_second_get_folders_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        let now = jiff::Timestamp::from_second(1_700_000_000).unwrap();
        layout.create().unwrap();
        let first = move_to_quarantine(&layout, &["agent"], "", now).unwrap().unwrap();
        layout.create().unwrap();
        let second = move_to_quarantine(&layout, &["agent"], "", now).unwrap().unwrap();
        assert_ne!(first, second);
    }

    #[test]
    fn nothing_to_move_makes_no_folder() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        let now = jiff::Timestamp::from_second(1_700_000_000).unwrap();
        assert_eq!(move_to_quarantine(&layout, &["agent"], "", now).unwrap(), None);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
