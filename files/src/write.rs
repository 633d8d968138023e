//! Durable writing: write a temporary file, sync it, rename it, sync the folder.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::Error;
use crate::folder::open_folder;
use crate::location::FileLocation;

/// Part between a file's name and the random digits in the name of its temporary file.
const ASIDE: &str = ".unfinished-";
const RANDOM_BYTES: usize = 16;
/// Mode of the files that we create: only their owner may read and write them.
const PRIVATE: u32 = 0o600;

/// Replaces the file at `path` by one with `bytes` (0600), atomically and durably.
///
/// # Errors
/// If the file system refuses; `path` then holds the old or the new content.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    replace_at(&FileLocation::resolve(path)?, bytes)
}

/// Replaces a file as [`replace`] does, with the content that `bytes` returns. `bytes` gets the
/// open temporary file, so the content can depend on it: for example on its inode number.
///
/// # Errors
/// Fails as [`replace`] does, and if `bytes` fails.
pub fn replace_by(
    path: &Path,
    bytes: impl FnOnce(&File) -> std::io::Result<Vec<u8>>,
) -> Result<(), Error> {
    let place = FileLocation::resolve(path)?;
    let aside = write_temporary_by(&place, PRIVATE, true, bytes)?;
    rename_into_place(&aside, &place)?;
    place.sync()
}

pub(crate) fn replace_at(place: &FileLocation, bytes: &[u8]) -> Result<(), Error> {
    let aside = write_temporary(place, bytes, PRIVATE, true)?;
    rename_into_place(&aside, place)?;
    place.sync()
}

pub(crate) fn replace_volatile_at(place: &FileLocation, bytes: &[u8]) -> Result<(), Error> {
    let aside = write_temporary(place, bytes, PRIVATE, false)?;
    rename_into_place(&aside, place)
}

/// Creates a file durably that doesn't exist yet.
///
/// # Errors
/// [`Error::Exists`] if `path` exists; it is left unchanged.
pub fn create(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    let place = FileLocation::resolve(path)?;
    let aside = write_temporary(&place, bytes, mode, true)?;
    // link(2) fails if the name exists; rename(2) would silently replace the file.
    let linked = aside.link(&place);
    aside.remove().map_err(Error::io("remove", aside.path()))?;
    linked.map_err(|source| match source.kind() {
        ErrorKind::AlreadyExists => Error::Exists(path.to_owned()),
        _ => Error::io("write", path)(source),
    })?;
    place.sync()
}

/// Renames a file or folder durably.
///
/// # Errors
/// If the file system refuses.
pub fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    rename_at(&FileLocation::resolve(from)?, &FileLocation::resolve(to)?)
}

pub(crate) fn rename_at(from: &FileLocation, to: &FileLocation) -> Result<(), Error> {
    from.rename(to).map_err(Error::io("move", from.path()))?;
    to.sync()?;
    if from.path().parent() == to.path().parent() { Ok(()) } else { from.sync() }
}

/// Syncs `folder`, which makes files created, renamed or removed in it durable.
///
/// # Errors
/// If the file system refuses.
pub fn sync(folder: &Path) -> Result<(), Error> {
    let synced = open_folder(folder).and_then(|folder| folder.sync_all());
    synced.map_err(Error::io("sync", folder))
}

/// Syncs the folder that contains `path`; see [`sync`].
///
/// # Errors
/// If the file system refuses.
pub fn sync_folder(path: &Path) -> Result<(), Error> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync(parent),
        _ => sync(Path::new(".")),
    }
}

/// Whether `name` is the name of a temporary file. A file is written under such a name, and then
/// renamed.
#[must_use]
pub fn is_temporary_name(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let random = name.rsplit_once(ASIDE).map(|(_, random)| random.as_bytes());
    random.is_some_and(|random| {
        random.len() == 2 * RANDOM_BYTES && random.iter().all(u8::is_ascii_hexdigit)
    })
}

/// Removes the temporary files that killed writers left in `folder`. The caller must hold the
/// folder's lock: otherwise a living writer would lose its file.
///
/// # Errors
/// If the file system refuses.
pub fn sweep(folder: &Path) -> Result<(), Error> {
    for entry in std::fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let entry = entry.map_err(Error::io("read", folder))?;
        if is_temporary_name(&entry.file_name()) {
            let path = entry.path();
            std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
    }
    Ok(())
}

fn write_temporary(
    place: &FileLocation,
    bytes: &[u8],
    mode: u32,
    keep: bool,
) -> Result<FileLocation, Error> {
    write_temporary_by(place, mode, keep, |_| Ok(bytes))
}

fn write_temporary_by<B: AsRef<[u8]>>(
    place: &FileLocation,
    mode: u32,
    keep: bool,
    bytes: impl FnOnce(&File) -> std::io::Result<B>,
) -> Result<FileLocation, Error> {
    let aside = temporary_location(place)?;
    // O_EXCL: nothing is written through a link, or to a file that another process has open.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let opened = aside.open(flags, Mode::from_raw_mode(mode));
    let written = opened.map_err(Error::io("create", aside.path())).and_then(|mut file| {
        let result =
            bytes(&file).and_then(|bytes| write_content(&mut file, bytes.as_ref(), mode, keep));
        let result = result.map_err(Error::io("write", aside.path()));
        if result.is_err() {
            // A partial file is useless, and takes space on a disk that may be full.
            let _ = aside.remove();
        }
        result
    });
    written.map(|()| aside)
}

fn write_content(file: &mut File, bytes: &[u8], mode: u32, keep: bool) -> std::io::Result<()> {
    // The kernel has applied the umask to the mode given to open(2), so set the mode again.
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    if keep { file.sync_all() } else { Ok(()) }
}

fn rename_into_place(aside: &FileLocation, place: &FileLocation) -> Result<(), Error> {
    aside.rename(place).map_err(|source| {
        let _ = aside.remove();
        Error::io("replace", place.path())(source)
    })
}

fn temporary_location(place: &FileLocation) -> Result<FileLocation, Error> {
    let mut aside = place.name().clone();
    let mut random = [0; RANDOM_BYTES];
    getrandom(&mut random[..], GetRandomFlags::empty())
        .map_err(|error| Error::io("get randomness for", place.path())(error.into()))?;
    aside.push(ASIDE);
    aside.push(data_encoding::HEXLOWER.encode(&random));
    place.sibling(aside).map_err(Error::io("write", place.path()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_replaced_file_is_whole_and_private_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        replace(&path, b"one").unwrap();
        replace_volatile_at(&FileLocation::resolve(&path).unwrap(), b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_that_somebody_prepared_is_replaced_and_not_written_through() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("agent.key"), dir.path().join("victim"));
        std::fs::write(&victim, "kept").unwrap();
        for name in ["agent.key", "agent.key.tmp"] {
            symlink(&victim, dir.path().join(name)).unwrap();
        }
        replace(&path, b"secret").unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
        assert_eq!(mode(&path), 0o600);
        assert!(!path.is_symlink());
    }

    #[test]
    fn creating_a_file_never_replaces_an_existing_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("owner.pem");
        create(&path, b"first", 0o644).unwrap();
        assert_eq!(mode(&path), 0o644);
        assert!(matches!(create(&path, b"second", 0o600), Err(Error::Exists(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_new_file_has_the_requested_mode_whatever_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        create(&path, b"", 0o666).unwrap();
        assert_eq!(mode(&path), 0o666);
    }

    #[test]
    fn temporary_files_that_a_crash_left_are_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        replace(&path, b"whole").unwrap();
        let left =
            write_temporary(&FileLocation::resolve(&path).unwrap(), b"ha", PRIVATE, true).unwrap();
        assert!(is_temporary_name(left.name()));
        let hex = "0123456789abcdef0123456789abcdef";
        assert!(is_temporary_name(OsStr::new(&format!("x{ASIDE}{hex}"))));
        for other in [&hex[1..], "these are 32 bytes, but not hex.", "business"] {
            assert!(!is_temporary_name(OsStr::new(&format!("x{ASIDE}{other}"))), "{other}");
        }
        sweep(dir.path()).unwrap();
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(names.len(), 1);
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
    }

    #[test]
    fn a_failed_write_names_the_file_and_leaves_no_temporary_file() {
        let error = replace(Path::new("/proc/no-such-folder/file"), b"").unwrap_err();
        assert!(error.to_string().contains("/proc/no-such-folder/file"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let taken = dir.path().join("folder");
        std::fs::create_dir(&taken).unwrap();
        replace(&taken, b"").unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_rename_moves_between_folders() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("a"), dir.path().join("b/c"));
        std::fs::write(&from, "x").unwrap();
        std::fs::create_dir(dir.path().join("b")).unwrap();
        rename(&from, &to).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"x");
    }
}
