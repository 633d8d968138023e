//! Opens folders for state, and checks each folder and link on the path to them.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    Access, AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, mkdirat, openat, readlinkat,
};
use rustix::io::Errno;

use crate::Error;

const ROOT_USER_ID: u32 = 0;
const WRITABLE_BY_OTHERS: u32 = 0o022;
const WRITABLE_BY_ALL: u32 = 0o002;
/// Mode bit of a folder in which nobody may rename or remove another user's files.
const STICKY: u32 = 0o1000;
/// Maximum number of links on one path, as in the kernel (path_resolution(7)).
const MAX_LINKS: u32 = 40;

/// Opens the folder at `path` for keys and secrets. Creates it and missing parents (0700, durably)
/// first.
///
/// # Errors
/// Fails if the folder belongs to another user, or if group or others may write to it.
///
/// Fails also if another user could swap the folder. That is possible in two cases. A parent, or a
/// link on the path, belongs to a user other than root and us. Or everybody may write to a parent
/// that has no sticky bit.
pub fn open_own_folder(path: &Path) -> Result<File, Error> {
    let own_user = effective_user_id();
    let walked = PathWalker::creating_missing(ParentRule::Protected, own_user).walk(path)?;
    let (file, found) = walked.open(path)?;
    check_own_folder(path, FileAttributes::from_stat(&found), own_user)?;
    Ok(file)
}

/// Checks the folder at `path` as [`open_own_folder`] does, and changes nothing. Returns `false` if
/// it doesn't exist and could be made.
///
/// # Errors
/// Fails as [`open_own_folder`] does, also if the folder doesn't exist and can't be made.
pub fn inspect_own_folder(path: &Path) -> Result<bool, Error> {
    let own_user = effective_user_id();
    match PathWalker::existing_only(ParentRule::Protected, own_user).walk(path) {
        Ok(walked) => {
            let (_, found) = walked.open(path)?;
            check_own_folder(path, FileAttributes::from_stat(&found), own_user)?;
            check_writable(path)?;
            Ok(true)
        }
        Err(error) => check_missing(path, error).map(|()| false),
    }
}

/// Checks the folder at `path` as [`open_data_folder`] does, and changes nothing. Returns `None` if
/// it doesn't exist and could be made.
///
/// # Errors
/// Fails as [`open_data_folder`] does, also if the folder doesn't exist and can't be made.
pub fn inspect_data_folder(path: &Path) -> Result<Option<DataFolder>, Error> {
    let own_user = effective_user_id();
    match PathWalker::existing_only(ParentRule::AllowWritable, own_user).walk(path) {
        Ok(mut walked) => {
            let (file, found) = walked.open(path)?;
            check_writable(path)?;
            let exposure = find_exposure(&walked.path, FileAttributes::from_stat(&found), own_user)
                .or(walked.exposure.take());
            Ok(Some(DataFolder { file, path: walked.path, exposure }))
        }
        Err(error) => check_missing(path, error).map(|()| None),
    }
}

/// Accepts the error of a walk to `path` if a folder on the path is missing, but could be made.
fn check_missing(path: &Path, error: Error) -> Result<(), Error> {
    match &error {
        Error::Io { source, .. } if source.kind() == ErrorKind::NotFound => {
            let absolute = std::path::absolute(path).map_err(Error::io("find", path))?;
            check_writable(existing_ancestor(&absolute))
        }
        _ => Err(error),
    }
}

/// Returns the nearest folder on an absolute path that exists.
pub fn existing_ancestor(path: &Path) -> &Path {
    path.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"))
}

fn check_writable(folder: &Path) -> Result<(), Error> {
    let access = Access::WRITE_OK | Access::EXEC_OK;
    rustix::fs::accessat(CWD, folder, access, AtFlags::EACCESS)
        .map_err(|errno| Error::io("write to", folder)(errno.into()))
}

/// An open folder for data. Its content must be accessed through [`DataFolder::path`].
#[derive(Debug)]
pub struct DataFolder {
    /// Descriptor of the folder, to lock or sync it.
    pub file: File,
    /// Absolute path without links.
    pub path: PathBuf,
    /// Reason why other users may replace files in the folder, if they may.
    pub exposure: Option<Exposure>,
}

/// Why other users may rename, remove and create files in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exposure {
    /// Another user (the id) owns the folder at this path.
    Owner(PathBuf, u32),
    /// The mode of the folder at this path gives group or others write permission.
    Mode(PathBuf, u32),
}

impl fmt::Display for Exposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owner(path, owner) => {
                write!(f, "{} belongs to user {owner}", path.display())
            }
            Self::Mode(path, mode) => write!(
                f,
                "{} may be written by others than its owner (mode {mode:04o}); if no volume needs \
                 that, chmod go-w it",
                path.display()
            ),
        }
    }
}

/// Opens the folder at `path` for data, which may be a volume that others may write to. Creates it
/// and missing parents (0700, durably) first.
///
/// A user with write permission on the folder can replace files in it. So the caller must check the
/// content with [`crate::data::check`], and use only [`crate::data`] to access it.
///
/// # Errors
/// Fails if the path leads through another user's folder or link, or through a link in a folder
/// that everybody may write to.
pub fn open_data_folder(path: &Path) -> Result<DataFolder, Error> {
    let own_user = effective_user_id();
    let mut walked =
        PathWalker::creating_missing(ParentRule::AllowWritable, own_user).walk(path)?;
    let (file, found) = walked.open(path)?;
    let exposure = find_exposure(&walked.path, FileAttributes::from_stat(&found), own_user)
        .or(walked.exposure.take());
    Ok(DataFolder { file, path: walked.path, exposure })
}

/// Opens `path` only if it is a folder: opening a device can have side effects.
///
/// # Errors
/// `NotADirectory` if `path` is no folder, otherwise the error of the system call.
pub fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// Opens the folder at `path` with `O_PATH`, so the descriptor can only be used to reach files in
/// the folder. Follows only links that root or our user owns, in folders that no other user may
/// write to.
pub(crate) fn open_resolved_folder(path: &Path) -> Result<OwnedFd, Error> {
    let mut walked =
        PathWalker::existing_only(ParentRule::AlreadyChecked, effective_user_id()).walk(path)?;
    let (folder, _) = walked.folders.pop().expect("the root at least");
    Ok(folder)
}

/// Returns the user id that this process runs as.
pub(crate) fn effective_user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether `owner` is another user, that is neither root nor `own_user`.
pub(crate) fn is_other_user(owner: u32, own_user: u32) -> bool {
    ![own_user, ROOT_USER_ID].contains(&owner)
}

/// Owner, mode and type of a file, folder or link. They decide whether it is trusted.
#[derive(Clone, Copy)]
pub(crate) struct FileAttributes {
    pub owner: u32,
    pub mode: u32,
    pub is_link: bool,
}

impl FileAttributes {
    pub(crate) fn from_stat(found: &Stat) -> Self {
        let is_link = FileType::from_raw_mode(found.st_mode) == FileType::Symlink;
        Self { owner: found.st_uid, mode: found.st_mode & 0o7777, is_link }
    }

    /// Whether the mode lets group or others create, rename and remove entries of this folder.
    pub(crate) fn is_writable_by_others(self) -> bool {
        self.mode & WRITABLE_BY_OTHERS != 0
    }

    /// Whether every user may rename entries of this folder. The mode of a link means nothing.
    fn is_writable_by_all(self) -> bool {
        self.mode & WRITABLE_BY_ALL != 0 && self.mode & STICKY == 0 && !self.is_link
    }
}

/// Checks the last folder of a path; `check_parent` checks the folders above it.
fn check_own_folder(path: &Path, found: FileAttributes, own_user: u32) -> Result<(), Error> {
    if found.owner != own_user {
        return Err(Error::OtherOwner { path: path.to_owned(), owner: found.owner, us: own_user });
    }
    if found.mode & WRITABLE_BY_OTHERS != 0 {
        return Err(Error::OthersMayWrite { path: path.to_owned(), mode: found.mode });
    }
    Ok(())
}

/// Returns the reason why others may write to a data folder, if they may.
fn find_exposure(path: &Path, found: FileAttributes, own_user: u32) -> Option<Exposure> {
    if is_other_user(found.owner, own_user) {
        return Some(Exposure::Owner(path.to_owned(), found.owner));
    }
    found.is_writable_by_others().then(|| Exposure::Mode(path.to_owned(), found.mode))
}

/// Checks a parent folder, or a link on the path. Write permission for the group is accepted: an
/// administrator chooses its members, and many users' umask grants it to their own group.
fn check_parent(path: &Path, found: FileAttributes, own_user: u32) -> Result<(), Error> {
    check_parent_owner(path, found, own_user)?;
    if found.is_writable_by_all() {
        return Err(Error::OthersMayWrite { path: path.to_owned(), mode: found.mode });
    }
    Ok(())
}

fn check_parent_owner(path: &Path, found: FileAttributes, own_user: u32) -> Result<(), Error> {
    if found.owner != own_user && found.owner != ROOT_USER_ID {
        return Err(Error::OtherOwner { path: path.to_owned(), owner: found.owner, us: own_user });
    }
    Ok(())
}

/// Rule for the folders and links on the path to a folder.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ParentRule {
    /// Accepts only folders and links that no other user could swap.
    Protected,
    /// Accepts what `Protected` accepts, and folders that everybody may write to. Refuses links in
    /// folders that everybody may write to.
    AllowWritable,
    /// Accepts any folder, because the path was checked earlier. Refuses links in folders that
    /// others may write to.
    AlreadyChecked,
}

/// Walks to a folder step by step. Each step starts from an open folder, so that nobody can swap a
/// folder between check and use.
#[derive(Clone, Copy)]
struct PathWalker {
    rule: ParentRule,
    user: u32,
    /// Whether missing folders are made. Otherwise they are an error.
    makes_missing: bool,
}

/// State of a walk: the folder that was reached, and all folders above it.
struct ResolvedPath {
    /// Open folders from the root on, each with its owner and mode.
    folders: Vec<(OwnedFd, FileAttributes)>,
    /// Absolute path without links.
    path: PathBuf,
    /// A folder on the path that everybody may write to, if there is one.
    exposure: Option<Exposure>,
}

impl ResolvedPath {
    fn current(&self) -> &(OwnedFd, FileAttributes) {
        self.folders.last().expect("the root is never left")
    }

    fn go_to_parent(&mut self) {
        if self.folders.len() > 1 {
            self.folders.pop();
        }
        self.path.pop();
    }

    fn return_to_root(&mut self) {
        self.folders.truncate(1);
        self.path = PathBuf::from("/");
    }

    /// Opens the last folder for reading: descriptors opened with `O_PATH` can't be synced.
    fn open(&self, named: &Path) -> Result<(File, Stat), Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat(&self.current().0, ".", flags, Mode::empty());
        let opened = opened.map_err(|errno| match errno {
            Errno::NOTDIR => Error::NotAFolder(named.to_owned()),
            _ => Error::io("open", named)(errno.into()),
        })?;
        let found = fstat(&opened).map_err(|errno| Error::io("look at", named)(errno.into()))?;
        Ok((opened.into(), found))
    }
}

impl PathWalker {
    fn creating_missing(rule: ParentRule, user: u32) -> Self {
        PathWalker { rule, user, makes_missing: true }
    }

    fn existing_only(rule: ParentRule, user: u32) -> Self {
        PathWalker { rule, user, makes_missing: false }
    }

    /// Walks to `path`. Checks each folder and link before going through it. Creates missing
    /// folders, or fails with `NotFound` at the first one.
    fn walk(self, path: &Path) -> Result<ResolvedPath, Error> {
        let absolute = std::path::absolute(path).map_err(Error::io("find", path))?;
        let root =
            open_component(CWD, OsStr::new("/")).map_err(Error::io("open", Path::new("/")))?;
        let mut walked = ResolvedPath { folders: vec![root], path: "/".into(), exposure: None };
        let mut ahead = path_components(&absolute);
        let mut links = 0;
        while let Some(step) = ahead.pop_front() {
            if step == ".." {
                walked.go_to_parent();
                continue;
            }
            let next = walked.path.join(&step);
            let (opened, found) = self.open_or_create(&walked.current().0, &step, &next)?;
            if !ahead.is_empty() || found.is_link {
                self.check(&next, found, &mut walked)?;
            }
            if !found.is_link {
                walked.folders.push((opened, found));
                walked.path = next;
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(Error::io("follow", path)(io::Error::other("too many links")));
            }
            let target = readlinkat(&opened, "", Vec::new());
            let target = target.map_err(|errno| Error::io("follow", &next)(errno.into()))?;
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            if target.is_absolute() {
                walked.return_to_root();
            }
            let mut through = path_components(&target);
            through.append(&mut ahead);
            ahead = through;
        }
        Ok(walked)
    }

    fn open_or_create(
        self,
        at: &OwnedFd,
        step: &OsStr,
        next: &Path,
    ) -> Result<(OwnedFd, FileAttributes), Error> {
        match open_component(at, step) {
            Err(error) if error.kind() == ErrorKind::NotFound && self.makes_missing => {
                make_folder(at, step, next)?;
                open_component(at, step)
            }
            opened => opened,
        }
        .map_err(Error::io("look at", next))
    }

    /// Checks a parent folder, or a link, by the rule in `self.rule`.
    fn check(
        self,
        path: &Path,
        found: FileAttributes,
        walked: &mut ResolvedPath,
    ) -> Result<(), Error> {
        let stands_in = walked.current().1;
        let refuse_link = || Err(Error::NotPlainFile(path.to_owned()));
        match self.rule {
            ParentRule::Protected => check_parent(path, found, self.user),
            ParentRule::AllowWritable => {
                check_parent_owner(path, found, self.user)?;
                if found.is_link && stands_in.is_writable_by_all() {
                    return refuse_link();
                }
                if found.is_writable_by_all() {
                    walked.exposure = Some(Exposure::Mode(path.to_owned(), found.mode));
                }
                Ok(())
            }
            ParentRule::AlreadyChecked if !found.is_link => Ok(()),
            ParentRule::AlreadyChecked => {
                if find_exposure(path, stands_in, self.user).is_some() {
                    return refuse_link();
                }
                check_parent_owner(path, found, self.user)
            }
        }
    }
}

fn open_component(
    at: impl std::os::fd::AsFd,
    step: &OsStr,
) -> io::Result<(OwnedFd, FileAttributes)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(at, step, flags, Mode::empty())?;
    let found = fstat(&opened)?;
    Ok((opened, FileAttributes::from_stat(&found)))
}

fn path_components(path: &Path) -> VecDeque<OsString> {
    let named = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    named.collect()
}

fn make_folder(at: &OwnedFd, step: &OsStr, path: &Path) -> Result<(), Error> {
    match mkdirat(at, step, Mode::RWXU) {
        Ok(()) => sync_at(at, path.parent().unwrap_or(Path::new("/"))),
        // Another process has created the folder meanwhile. The caller checks it like any existing
        // folder.
        Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(Error::io("create", path)(errno.into())),
    }
}

/// Syncs the folder `at`, so that files created, renamed or removed in it are durable. `path` is
/// for messages.
pub(crate) fn sync_at(at: impl std::os::fd::AsFd, path: &Path) -> Result<(), Error> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let synced = openat(at, ".", flags, Mode::empty()).and_then(rustix::fs::fsync);
    synced.map_err(|errno| Error::io("sync", path)(errno.into()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    const US: u32 = 1000;
    const THEM: u32 = 1001;

    fn folder(owner: u32, mode: u32) -> FileAttributes {
        FileAttributes { owner, mode, is_link: false }
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_folder_is_accepted_only_if_it_is_ours_and_nobody_else_may_write_to_it() {
        let path = Path::new("/x");
        for mode in [0o700, 0o750, 0o755] {
            check_own_folder(path, folder(US, mode), US).unwrap();
        }
        for mode in [0o770, 0o702, 0o1777] {
            let refused = check_own_folder(path, folder(US, mode), US);
            assert!(matches!(refused, Err(Error::OthersMayWrite { .. })), "{mode:o}");
        }
        for owner in [THEM, ROOT_USER_ID] {
            let refused = check_own_folder(path, folder(owner, 0o700), US);
            assert!(matches!(refused, Err(Error::OtherOwner { .. })), "{owner}");
        }
    }

    #[test]
    fn parents_may_belong_to_root_or_to_us_and_may_be_sticky() {
        let path = Path::new("/x");
        for good in [folder(ROOT_USER_ID, 0o755), folder(US, 0o775), folder(ROOT_USER_ID, 0o1777)] {
            check_parent(path, good, US).unwrap();
        }
        assert!(check_parent(path, folder(ROOT_USER_ID, 0o777), US).is_err());
        assert!(check_parent(path, folder(THEM, 0o755), US).is_err());
        let link = |owner| FileAttributes { owner, mode: 0o777, is_link: true };
        check_parent(path, link(US), US).unwrap();
        assert!(check_parent(path, link(THEM), US).is_err());
    }

    #[test]
    fn missing_folders_are_created_with_mode_0700() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b/c");
        open_own_folder(&deep).unwrap();
        open_own_folder(&deep).unwrap();
        for made in ["a", "a/b", "a/b/c"] {
            let mode = std::fs::metadata(dir.path().join(made)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "{made}");
        }
    }

    #[test]
    fn a_folder_or_parent_that_others_may_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (above, inner) = (dir.path().join("above"), dir.path().join("above/inner"));
        open_own_folder(&inner).unwrap();
        set_mode(&inner, 0o770);
        let refused = open_own_folder(&inner).unwrap_err();
        assert!(refused.to_string().contains("chmod go-w"), "{refused}");
        set_mode(&inner, 0o700);
        set_mode(&above, 0o707);
        let refused = open_own_folder(&inner).unwrap_err();
        assert!(matches!(refused, Error::OthersMayWrite { path, .. } if path == above));
    }

    #[test]
    fn links_are_followed_only_through_protected_folders() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real");
        open_own_folder(&real.join("inner")).unwrap();
        symlink("real", dir.path().join("link")).unwrap();
        open_own_folder(&dir.path().join("link/inner/../inner")).unwrap();
        set_mode(&real, 0o703);
        assert!(open_own_folder(&dir.path().join("link/inner")).is_err());
        symlink("loop", dir.path().join("loop")).unwrap();
        assert!(open_own_folder(&dir.path().join("loop")).is_err());
    }

    #[test]
    fn a_link_of_another_user_is_not_followed() {
        // In /tmp every user may create links.
        let link = tempfile::Builder::new().make_in("/tmp", |path| symlink("/", path)).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::lchown(link.path(), Some(THEM), None).unwrap();
        }
        let owner = link.path().symlink_metadata().unwrap().uid();
        // Run the check as a user who is not the owner of the link.
        let closed = |own_user| PathWalker::creating_missing(ParentRule::Protected, own_user);
        let refused = closed(owner + 1).walk(link.path()).err().unwrap();
        assert!(matches!(refused, Error::OtherOwner { path, .. } if path == link.path()));
        assert_eq!(closed(owner).walk(link.path()).unwrap().path, Path::new("/"));
    }

    #[test]
    fn an_absolute_link_is_followed_from_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real");
        open_own_folder(&real.join("inner")).unwrap();
        symlink(&real, dir.path().join("link")).unwrap();
        let opened = open_own_folder(&dir.path().join("link/inner")).unwrap().metadata().unwrap();
        assert_eq!(opened.ino(), real.join("inner").metadata().unwrap().ino());
    }

    #[test]
    fn an_inspection_changes_nothing_and_refuses_what_a_start_refuses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        assert!(!inspect_own_folder(&path).unwrap());
        assert!(inspect_data_folder(&path).unwrap().is_none());
        assert!(!dir.path().join("a").exists(), "nothing was made");
        open_own_folder(&path).unwrap();
        assert!(inspect_own_folder(&path).unwrap());
        assert_eq!(inspect_data_folder(&path).unwrap().unwrap().exposure, None);
        set_mode(&path, 0o777);
        assert!(matches!(inspect_own_folder(&path), Err(Error::OthersMayWrite { .. })));
        assert!(inspect_data_folder(&path).unwrap().unwrap().exposure.is_some());
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(inspect_own_folder(&file).is_err() && inspect_own_folder(&file.join("x")).is_err());
    }

    #[test]
    fn a_file_is_no_folder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(open_own_folder(file.path()), Err(Error::NotAFolder(_))));
    }
}
