//! Access to data in a folder that other users may also write to, such as a container volume or a
//! group's folder.
//!
//! Those users can rename, remove and create files in the folder at any time, also while this
//! program runs. So each function here does three things:
//!
//! * It reaches its file step by step through open folders.
//! * It follows no link that such a user can have put on the path.
//! * It refuses a link, a pipe, or a file with more than one hard link.
//!
//! Call [`check`] before anything is read or written: it refuses files that another user may have
//! prepared.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::io::Errno;

use crate::Error;
use crate::folder::{FileAttributes, effective_user_id, is_other_user, open_resolved_folder};
use crate::location::FileLocation;
use crate::write::{is_temporary_name, rename_at, replace_at, replace_volatile_at};

/// Maximum depth of this program's files below a data folder.
const MAX_DEPTH: u32 = 16;
/// Mode bits to keep when group and others lose all permissions: the owner's bits, set-user-id,
/// set-group-id and sticky.
const OWNER_MODE_BITS: u32 = 0o7700;
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Folder that fsck makes at the root of a file system for recovered files.
const LOST_AND_FOUND: &str = "lost+found";

/// Mode in which a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Opens an existing file for reading.
    Read,
    /// Opens an existing file for reading and writing.
    ReadWrite,
    /// Opens a file for reading and writing, and creates it (0600) if it is missing.
    ReadWriteOrNew,
    /// Creates a file (0600) for reading and writing; fails if it exists.
    New,
    /// Opens a file for appending, and creates it (0600) if it is missing.
    Append,
}

impl OpenMode {
    fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::ReadWrite => OFlags::RDWR,
            Self::ReadWriteOrNew => OFlags::RDWR | OFlags::CREATE,
            Self::New => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
            Self::Append => OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND,
        }
    }
}

/// Opens a file that belongs to the user of this process.
///
/// # Errors
/// Fails if it is no regular file, has more than one hard link, or belongs to another user.
pub fn open(path: &Path, how: OpenMode) -> Result<File, Error> {
    let file = open_of_any_owner(path, how)?;
    let owner = file.metadata().map_err(Error::io("look at", path))?.uid();
    if owner == effective_user_id() {
        Ok(file)
    } else {
        Err(Error::foreign_entry(path, owner, effective_user_id()))
    }
}

fn open_of_any_owner(path: &Path, how: OpenMode) -> Result<File, Error> {
    let place = FileLocation::resolve_safely(path)?;
    let file = place.open(how.flags(), Mode::RUSR | Mode::WUSR);
    let file = file.map_err(|source| match Errno::from_io_error(&source) {
        // The path is a link, a socket, or a pipe that nobody reads.
        Some(Errno::LOOP | Errno::NXIO) => Error::NotPlainFile(path.to_owned()),
        _ => Error::io("open", path)(source),
    })?;
    let found = file.metadata().map_err(Error::io("look at", path))?;
    // A file with link count 0 was removed after it was opened. That is accepted.
    if !found.is_file() || found.nlink() > 1 {
        return Err(Error::NotPlainFile(path.to_owned()));
    }
    Ok(file)
}

/// Reads a file that belongs to the user of this process. Returns `None` if the file is missing.
///
/// # Errors
/// Fails as [`open`] does, and if the file has more than `max_bytes`.
pub fn read_own(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, Error> {
    read_content(path, open(path, OpenMode::Read), max_bytes)
}

/// Reads a file of any owner, to inspect another user's data. Returns `None` if there is no such
/// file.
///
/// # Errors
/// Fails if it is no regular file, has more than one hard link, or has more than `max_bytes`.
pub fn read(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, Error> {
    read_content(path, open_of_any_owner(path, OpenMode::Read), max_bytes)
}

/// Opens a file of any owner for reading, to inspect another user's data. Returns `None` if there
/// is no such file.
///
/// # Errors
/// Fails if it is no regular file or has more than one hard link.
pub fn open_for_inspection(path: &Path) -> Result<Option<File>, Error> {
    match open_of_any_owner(path, OpenMode::Read) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

fn read_content(
    path: &Path,
    opened: Result<File, Error>,
    max_bytes: u64,
) -> Result<Option<Vec<u8>>, Error> {
    let file = match opened {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    crate::open::read_content(path, file, max_bytes).map(Some)
}

/// Replaces a file in a data folder durably and atomically, as [`crate::replace`] does.
///
/// # Errors
/// If the file system refuses; `path` then holds the old or the new content.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    replace_at(&FileLocation::resolve_safely(path)?, bytes)
}

/// Replaces a file as [`replace`] does, without fsync: for content that can be computed again.
///
/// # Errors
/// If the file system refuses.
pub fn replace_volatile(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    replace_volatile_at(&FileLocation::resolve_safely(path)?, bytes)
}

/// Creates an empty file (0600). Before that, removes any file that has this name.
///
/// # Errors
/// If the file system refuses.
pub fn recreate(path: &Path) -> Result<File, Error> {
    match remove(path) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
        removed => removed?,
    }
    open(path, OpenMode::New)
}

/// Renames a file or folder durably.
///
/// # Errors
/// If the file system refuses.
pub fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    rename_at(&FileLocation::resolve_safely(from)?, &FileLocation::resolve_safely(to)?)
}

/// Renames a file or folder without fsync.
///
/// # Errors
/// If the file system refuses.
pub fn rename_volatile(from: &Path, to: &Path) -> Result<(), Error> {
    FileLocation::resolve_safely(from)?
        .rename(&FileLocation::resolve_safely(to)?)
        .map_err(Error::io("move", from))
}

/// Removes a file, without fsync.
///
/// # Errors
/// If the file system refuses.
pub fn remove(path: &Path) -> Result<(), Error> {
    FileLocation::resolve_safely(path)?.remove().map_err(Error::io("remove", path))
}

/// Creates a folder (0700) if it is missing. Its parent must exist.
///
/// # Errors
/// If the file system refuses, or `path` is not a folder.
pub fn make_folder(path: &Path) -> Result<(), Error> {
    match FileLocation::resolve_safely(path)?.make_folder() {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => open_folder(path).map(drop),
        made => made.map_err(Error::io("create", path)),
    }
}

/// Opens a folder, to lock or sync it.
///
/// # Errors
/// If the folder can't be reached or opened.
pub fn open_folder(path: &Path) -> Result<File, Error> {
    Ok(open_folder_at(&open_resolved_folder(path)?, ".").map_err(Error::io("open", path))?.into())
}

/// Syncs `folder`, which makes files created, renamed or removed in it durable.
///
/// # Errors
/// If the file system refuses.
pub fn sync(folder: &Path) -> Result<(), Error> {
    open_folder(folder)?.sync_all().map_err(Error::io("sync", folder))
}

/// Removes unfinished files of killed writers from `folder`, as [`crate::sweep`] does. Keeps files
/// of other users.
///
/// # Errors
/// If the file system refuses.
pub fn sweep(folder: &Path) -> Result<(), Error> {
    let at = open_resolved_folder(folder)?;
    for name in list_names(&at, folder)? {
        let name = OsStr::from_bytes(&name);
        let is_ours = || {
            statat(&at, name, AtFlags::SYMLINK_NOFOLLOW).map(|at| at.st_uid == effective_user_id())
        };
        if is_temporary_name(name) && is_ours().unwrap_or(false) {
            let removed = rustix::fs::unlinkat(&at, name, AtFlags::empty());
            removed.map_err(|errno| Error::io("remove", &folder.join(name))(errno.into()))?;
        }
    }
    Ok(())
}

/// Checks all entries of `folder` whose names `is_data` accepts, and everything below them.
///
/// A volume's driver may have given group and others write permission. This function removes all
/// their permissions from such entries below `folder`. Returns the first path where that failed.
///
/// # Errors
/// Fails on entries that another user may have prepared:
/// - another user's files and folders;
/// - links and sockets in folders that others may write to;
/// - pipes and devices;
/// - files with more than one hard link.
pub fn check(folder: &Path, is_data: impl Fn(&OsStr) -> bool) -> Result<Option<PathBuf>, Error> {
    let at = open_resolved_folder(folder)?;
    let found = fstat(&at).map_err(|errno| Error::io("look at", folder)(errno.into()))?;
    let mut check = FolderChecker { user: effective_user_id(), first_writable: None };
    let is_exposed = check.is_exposed(FileAttributes::from_stat(&found));
    let top = CheckedFolder { at: &at, path: folder, is_exposed, depth: 0 };
    for name in list_names(&at, folder)? {
        let name = OsStr::from_bytes(&name);
        if is_data(name) && !is_temporary_name(name) {
            check.check_entry(&top, name)?;
        }
    }
    Ok(check.first_writable)
}

struct FolderChecker {
    user: u32,
    /// First path that group or others may still write to although `remove_others_permissions` was
    /// called.
    first_writable: Option<PathBuf>,
}

/// An open folder whose entries are being checked.
#[derive(Clone, Copy)]
struct CheckedFolder<'a> {
    at: &'a OwnedFd,
    path: &'a Path,
    /// Whether other users may write to the folder, or could do so before this check.
    is_exposed: bool,
    depth: u32,
}

impl FolderChecker {
    fn check_entry(&mut self, folder: &CheckedFolder<'_>, name: &OsStr) -> Result<(), Error> {
        let path = folder.path.join(name);
        let found = match statat(folder.at, name, AtFlags::SYMLINK_NOFOLLOW) {
            // The entry was removed after the folder was listed.
            Err(Errno::NOENT) => return Ok(()),
            found => found.map_err(|errno| Error::io("look at", &path)(errno.into()))?,
        };
        let facts = FileAttributes::from_stat(&found);
        let prepared = || Err(Error::foreign_entry(&path, facts.owner, self.user));
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Symlink if !folder.is_exposed && !is_other_user(facts.owner, self.user) => {
                Ok(())
            }
            // Sockets are accepted: a killed program leaves its own behind, as etcd does with
            // unix:// URLs.
            FileType::Socket if !folder.is_exposed && facts.owner == self.user => Ok(()),
            FileType::Directory if is_other_user(facts.owner, self.user) => prepared(),
            FileType::Directory if folder.depth < MAX_DEPTH => {
                self.check_folder(folder, name, &path)
            }
            FileType::RegularFile if facts.owner != self.user => prepared(),
            FileType::RegularFile if found.st_nlink == 1 => {
                if facts.is_writable_by_others() {
                    self.check_file(folder, name, &path)
                } else {
                    Ok(())
                }
            }
            _ => Err(Error::NotPlainFile(path)),
        }
    }

    fn check_file(
        &mut self,
        folder: &CheckedFolder<'_>,
        name: &OsStr,
        path: &Path,
    ) -> Result<(), Error> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(folder.at, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            opened => opened.map_err(|errno| Error::io("open", path)(errno.into()))?,
        };
        let file = File::from(file);
        let found = file.metadata().map_err(Error::io("look at", path))?;
        if found.uid() != self.user {
            return Err(Error::foreign_entry(path, found.uid(), self.user));
        }
        if !found.is_file() || found.nlink() > 1 {
            return Err(Error::NotPlainFile(path.to_owned()));
        }
        self.remove_others_permissions(&file, path);
        Ok(())
    }

    fn check_folder(
        &mut self,
        above: &CheckedFolder<'_>,
        name: &OsStr,
        path: &Path,
    ) -> Result<(), Error> {
        let opened = match open_folder_at(above.at, name) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened.map_err(Error::io("open", path))?,
        };
        let found = fstat(&opened).map_err(|errno| Error::io("look at", path)(errno.into()))?;
        let facts = FileAttributes::from_stat(&found);
        if is_other_user(facts.owner, self.user) {
            return Err(Error::foreign_entry(path, facts.owner, self.user));
        }
        let is_exposed = self.is_exposed(facts);
        if is_exposed {
            // Remove the permissions before the listing, so that no other user can add an entry
            // afterwards.
            self.remove_others_permissions(
                &opened.try_clone().map_err(Error::io("open", path))?.into(),
                path,
            );
        }
        let folder = CheckedFolder { at: &opened, path, is_exposed, depth: above.depth + 1 };
        for name in list_names(&opened, path)? {
            let name = OsStr::from_bytes(&name);
            if name != LOST_AND_FOUND {
                self.check_entry(&folder, name)?;
            }
        }
        Ok(())
    }

    fn is_exposed(&self, folder: FileAttributes) -> bool {
        is_other_user(folder.owner, self.user) || folder.is_writable_by_others()
    }

    /// Removes all permissions of group and others from an open file or folder. Records the path if
    /// they may still write to it.
    fn remove_others_permissions(&mut self, file: &File, path: &Path) {
        let is_closed = file.metadata().is_ok_and(|found| {
            let closed = std::fs::Permissions::from_mode(found.mode() & OWNER_MODE_BITS);
            file.set_permissions(closed).is_ok()
        }) && file.metadata().is_ok_and(|now| now.mode() & WRITABLE_BY_OTHERS == 0);
        if !is_closed && self.first_writable.is_none() {
            self.first_writable = Some(path.to_owned());
        }
    }
}

fn open_folder_at(at: &OwnedFd, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, name, flags, Mode::empty())?)
}

/// Returns the names in an open folder, sorted.
fn list_names(at: &OwnedFd, path: &Path) -> Result<Vec<Vec<u8>>, Error> {
    let failed = |errno: Errno| Error::io("read", path)(errno.into());
    let opened = open_folder_at(at, ".").map_err(Error::io("read", path))?;
    let mut names = Vec::new();
    for entry in Dir::new(opened).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::{Exposure, open_data_folder};

    const THEM: u32 = 12_345;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Makes a folder with a node's data, and gives the folder `mode`, as a volume's driver would.
    fn volume(mode: u32) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("volume");
        std::fs::create_dir_all(folder.join("member/wal")).unwrap();
        std::fs::write(folder.join("member/wal/1.wal"), "records").unwrap();
        set_mode(&folder, mode);
        (root, folder)
    }

    fn check_member(folder: &Path) -> Result<Option<PathBuf>, Error> {
        check(folder, |name| name == "member")
    }

    #[test]
    fn a_folder_that_others_may_write_to_is_accepted_and_reported() {
        for mode in [0o2770, 0o777, 0o1777, 0o775] {
            let (_root, folder) = volume(mode);
            let found = open_data_folder(&folder).unwrap();
            assert_eq!(found.exposure, Some(Exposure::Mode(folder.clone(), mode)));
            check_member(&folder).unwrap();
            replace(&folder.join("muster-boot"), b"1").unwrap();
            make_folder(&folder.join("made")).unwrap();
            assert_eq!(self::mode(&folder.join("muster-boot")), 0o600);
            assert_eq!(self::mode(&folder.join("made")) & 0o777, 0o700);
        }
        let (_root, folder) = volume(0o755);
        assert_eq!(open_data_folder(&folder).unwrap().exposure, None);
    }

    #[test]
    fn a_folder_below_one_that_everybody_may_write_to_is_accepted_and_reported() {
        let (root, folder) = volume(0o700);
        set_mode(root.path(), 0o777);
        let found = open_data_folder(&folder).unwrap();
        assert_eq!(found.exposure, Some(Exposure::Mode(root.path().to_owned(), 0o777)));
        // Another user may have created a link in a folder that everybody may write to, so the link
        // is refused.
        symlink(&folder, root.path().join("link")).unwrap();
        assert!(matches!(open_data_folder(&root.path().join("link")), Err(Error::NotPlainFile(_))));
    }

    #[test]
    fn group_permissions_that_a_volumes_driver_gave_are_removed() {
        let (_root, folder) = volume(0o2770);
        let (log, segment) = (folder.join("member/wal"), folder.join("member/wal/1.wal"));
        for (path, mode) in [(&log, 0o2770), (&folder.join("member"), 0o2770), (&segment, 0o660)] {
            set_mode(path, mode);
        }
        assert_eq!(check_member(&folder).unwrap(), None);
        assert_eq!(mode(&log), 0o2700);
        assert_eq!(mode(&segment), 0o600);
        assert_eq!(mode(&folder), 0o2770);
    }

    #[test]
    fn links_hard_links_and_pipes_are_refused_where_others_may_write() {
        let place = |prepare: &dyn Fn(&Path)| {
            let (root, folder) = volume(0o777);
            prepare(&folder);
            (root, check_member(&folder))
        };
        let cases: [&dyn Fn(&Path); 4] = [
            &|folder| {
                std::fs::rename(folder.join("member"), folder.join("moved")).unwrap();
                symlink("moved", folder.join("member")).unwrap();
            },
            &|folder| {
                set_mode(&folder.join("member"), 0o770);
                symlink("/etc/passwd", folder.join("member/db")).unwrap();
            },
            &|folder| {
                std::fs::hard_link(folder.join("member/wal/1.wal"), folder.join("second")).unwrap();
            },
            &|folder| {
                let fifo = FileType::Fifo;
                let at = folder.join("member/db");
                rustix::fs::mknodat(rustix::fs::CWD, at, fifo, Mode::RUSR, 0).unwrap();
            },
        ];
        for (index, prepare) in cases.into_iter().enumerate() {
            let (_root, refused) = place(prepare);
            assert!(matches!(refused, Err(Error::NotPlainFile(_))), "case {index}: {refused:?}");
        }
    }

    #[test]
    fn a_socket_of_ones_own_is_accepted_only_where_nobody_else_may_write() {
        let leave_socket = |folder: &Path| {
            drop(std::os::unix::net::UnixListener::bind(folder.join("client:1")).unwrap());
        };
        let (_root, folder) = volume(0o755);
        leave_socket(&folder.join("member"));
        assert_eq!(check_member(&folder).unwrap(), None);
        let (_root, folder) = volume(0o755);
        set_mode(&folder.join("member"), 0o770);
        leave_socket(&folder.join("member"));
        let refused = check_member(&folder);
        assert!(matches!(refused, Err(Error::NotPlainFile(_))), "{refused:?}");
    }

    #[test]
    fn another_users_files_and_folders_are_refused_with_their_path() {
        if !rustix::process::geteuid().is_root() {
            let _ = std::io::Write::write(&mut io::stderr(), b"SKIPPED: only root can chown\n");
            return;
        }
        for name in ["member", "member/wal", "member/wal/1.wal"] {
            let (_root, folder) = volume(0o2770);
            let theirs = folder.join(name);
            std::os::unix::fs::chown(&theirs, Some(THEM), None).unwrap();
            let refused = check_member(&folder).unwrap_err();
            assert!(refused.is_refusal());
            assert!(
                matches!(&refused, Error::ForeignEntry { path, owner: THEM, .. } if *path == theirs)
            );
        }
        let (_root, folder) = volume(0o755);
        std::os::unix::fs::chown(&folder, Some(THEM), None).unwrap();
        let found = open_data_folder(&folder).unwrap();
        assert_eq!(found.exposure, Some(Exposure::Owner(folder.clone(), THEM)));
        assert!(matches!(open_data_folder(&folder.join("deeper")), Err(Error::OtherOwner { .. })));
        std::fs::write(folder.join("muster-boot"), "7").unwrap();
        std::os::unix::fs::chown(folder.join("muster-boot"), Some(THEM), None).unwrap();
        let refused = read_own(&folder.join("muster-boot"), 10);
        assert!(matches!(refused, Err(Error::ForeignEntry { .. })), "{refused:?}");
        assert_eq!(read(&folder.join("muster-boot"), 10).unwrap().unwrap(), b"7");
    }

    /// Acts as another user, who replaces a folder by a link between the check and the next access.
    #[test]
    fn a_link_that_replaced_a_folder_after_the_check_is_not_followed() {
        let (root, folder) = volume(0o777);
        check_member(&folder).unwrap();
        let victim = root.path().join("victim");
        std::fs::create_dir_all(victim.join("wal")).unwrap();
        std::fs::rename(folder.join("member"), folder.join("moved")).unwrap();
        symlink(&victim, folder.join("member")).unwrap();
        let file = folder.join("member/wal/2.wal");
        assert!(open(&file, OpenMode::New).unwrap_err().is_refusal());
        assert!(replace(&file, b"").unwrap_err().is_refusal());
        assert!(make_folder(&folder.join("member/new")).unwrap_err().is_refusal());
        assert!(sync(&folder.join("member")).unwrap_err().is_refusal());
        assert!(rename(&folder.join("moved/wal/1.wal"), &file).unwrap_err().is_refusal());
        assert_eq!(std::fs::read_dir(victim.join("wal")).unwrap().count(), 0);
    }

    #[test]
    fn our_own_links_are_followed_where_nobody_else_may_write() {
        let (root, folder) = volume(0o755);
        std::fs::rename(folder.join("member/wal"), root.path().join("fast")).unwrap();
        symlink(root.path().join("fast"), folder.join("member/wal")).unwrap();
        check_member(&folder).unwrap();
        open(&folder.join("member/wal/1.wal"), OpenMode::ReadWrite).unwrap();
        make_folder(&folder.join("member/wal")).unwrap();
    }

    #[test]
    fn recreating_a_file_replaces_a_link_and_leaves_its_target_unchanged() {
        let (root, folder) = volume(0o777);
        let (victim, body) = (root.path().join("victim"), folder.join("body"));
        std::fs::write(&victim, "kept").unwrap();
        symlink(&victim, &body).unwrap();
        assert!(matches!(open(&body, OpenMode::ReadWriteOrNew), Err(Error::NotPlainFile(_))));
        recreate(&body).unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
        assert_eq!(mode(&body), 0o600);
    }
}
