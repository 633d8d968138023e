//! Checks whether a folder may be used for the managed Postgres. The server's user gets parts of
//! the folder, and other users lose access to the folder. That must never happen to somebody else's
//! files.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

use super::ManagedPostgresError;

/// Entries that we make in the folder. An interrupted first start leaves at most `lock`,
/// `data.new`, `run` and `postgres.log`.
const OWN_ENTRIES: [&str; 5] = ["lock", "data.new", "data", "run", "postgres.log"];
/// Name of the folder that ext file systems put into their root.
const LOST_AND_FOUND: &str = "lost+found";

/// Accepts a folder that doesn't exist yet, that is empty, or that the managed Postgres has used
/// before.
pub(super) fn check(dir: &Path) -> Result<(), ManagedPostgresError> {
    let foreign = |why: String| Err(ManagedPostgresError::Foreign { dir: dir.to_owned(), why });
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            return foreign("is no folder".into());
        }
        Err(error) => {
            return Err(ManagedPostgresError::io(format!("can't read {}", dir.display()))(error));
        }
    };
    let mut names = BTreeSet::new();
    for entry in entries {
        let entry = entry.map_err(ManagedPostgresError::io("can't read the folder"))?;
        names.insert(entry.file_name());
    }
    let finished = names.contains("lock".as_ref() as &std::ffi::OsStr)
        && dir.join("data").join("PG_VERSION").is_file();
    let stranger = names.iter().find(|name| {
        !OWN_ENTRIES.iter().chain([&LOST_AND_FOUND]).any(|ours| name.as_os_str() == *ours)
    });
    match stranger {
        // Extra files are allowed beside a complete database that the managed Postgres has made.
        _ if finished => Ok(()),
        Some(name) => foreign(format!(
            "isn't empty and holds no database of ours, but `{}`",
            name.to_string_lossy()
        )),
        // The folder is empty, or holds the remains of an interrupted first start.
        None => match names.contains("data".as_ref() as &std::ffi::OsStr) {
            true => foreign("holds a `data` that is no database of ours".into()),
            false => Ok(()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(entries: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for entry in entries {
            let path = folder.path().join(entry);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            match entry.ends_with('/') {
                true => std::fs::create_dir_all(path).unwrap(),
                false => std::fs::write(path, "x").unwrap(),
            }
        }
        folder
    }

    #[test]
    fn a_new_an_empty_and_our_own_folder_are_accepted() {
        assert!(check(&folder_with(&[]).path().join("new")).is_ok());
        assert!(check(folder_with(&[]).path()).is_ok());
        assert!(check(folder_with(&["lost+found/"]).path()).is_ok());
        assert!(
            check(folder_with(&["lock", "data/PG_VERSION", "run/", "postgres.log"]).path()).is_ok()
        );
        assert!(check(folder_with(&["lock", "data/PG_VERSION", "README"]).path()).is_ok());
        // Remains of a start that was killed while initdb ran.
        assert!(check(folder_with(&["lock", "run/", "data.new/PG_VERSION"]).path()).is_ok());
    }

    #[test]
    fn somebody_elses_folder_is_refused_with_its_path() {
        for entries in [
            &["passwd"][..],
            &["lock", "run/", "log/"],
            &["data/letters.txt"],
            &["data/PG_VERSION"],
            &["run/", "lock", "data/letters.txt"],
            &["16/main/PG_VERSION"],
        ] {
            let folder = folder_with(entries);
            let refused = check(folder.path()).unwrap_err();
            assert!(matches!(refused, ManagedPostgresError::Foreign { .. }), "{entries:?}");
            assert!(refused.to_string().contains(folder.path().to_str().unwrap()), "{refused}");
        }
    }

    #[test]
    fn a_path_that_is_no_folder_is_refused() {
        let folder = folder_with(&["file"]);
        let refused = check(&folder.path().join("file"));
        assert!(matches!(refused, Err(ManagedPostgresError::Foreign { .. })), "{refused:?}");
        let device = check(Path::new("/dev/null"));
        assert!(matches!(device, Err(ManagedPostgresError::Foreign { .. })), "{device:?}");
    }
}
