//! Whether a folder is ours alone.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::Error;
use crate::write::sync;

const ROOT: u32 = 0;
const WRITABLE_BY_OTHERS: u32 = 0o022;
const WRITABLE_BY_ALL: u32 = 0o002;
/// Who may write to such a folder can still not rename or remove what is another's.
const STICKY: u32 = 0o1000;
/// As the kernel's own limit on the links of one path (path_resolution(7)).
const MAX_LINKS: u32 = 40;

/// Opens the folder at `path`; makes it and what is missing above it (0700, durably) first.
///
/// # Errors
/// Refuses a folder that isn't ours or that others may write to; and one that they could swap for
/// another, because a folder above it, or a link on the way to it, is neither root's nor ours, or
/// everybody may write there.
pub fn own_folder(path: &Path) -> Result<File, Error> {
    let us = rustix::process::geteuid().as_raw();
    let real = walk(path, us)?;
    let file = open_folder(&real).map_err(|source| match source.kind() {
        ErrorKind::NotADirectory => Error::NotAFolder(path.to_owned()),
        _ => Error::io("open", path)(source),
    })?;
    let found = file.metadata().map_err(Error::io("look at", path))?;
    check_own(path, Facts::of(&found), us)?;
    Ok(file)
}

/// Opens a folder and nothing else: a device may act on being opened.
///
/// # Errors
/// What the system says; `NotADirectory` for anything else.
pub fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// What decides.
#[derive(Clone, Copy)]
struct Facts {
    owner: u32,
    mode: u32,
    is_link: bool,
}

impl Facts {
    fn of(found: &Metadata) -> Self {
        Self { owner: found.uid(), mode: found.mode() & 0o7777, is_link: found.is_symlink() }
    }
}

/// The folder itself.
fn check_own(path: &Path, found: Facts, us: u32) -> Result<(), Error> {
    if found.owner != us {
        return Err(Error::NotOurs { path: path.to_owned(), owner: found.owner, us });
    }
    if found.mode & WRITABLE_BY_OTHERS != 0 {
        return Err(Error::OthersMayWrite { path: path.to_owned(), mode: found.mode });
    }
    Ok(())
}

/// A folder above it, or a link on the way. A group is whom an administrator has put into it, and
/// many people's umask lets their own group write: that alone is no reason here.
fn check_above(path: &Path, found: Facts, us: u32) -> Result<(), Error> {
    if found.owner != us && found.owner != ROOT {
        return Err(Error::NotOurs { path: path.to_owned(), owner: found.owner, us });
    }
    let open_to_all = found.mode & WRITABLE_BY_ALL != 0 && found.mode & STICKY == 0;
    if open_to_all && !found.is_link {
        return Err(Error::OthersMayWrite { path: path.to_owned(), mode: found.mode });
    }
    Ok(())
}

/// Goes to `path` step by step, looks at each folder and link before going through it, and makes
/// what is missing. Returns where it led to, free of links.
fn walk(path: &Path, us: u32) -> Result<PathBuf, Error> {
    let absolute = std::path::absolute(path).map_err(Error::io("find", path))?;
    let mut ahead = steps(&absolute);
    let mut at = PathBuf::from("/");
    let mut links = 0;
    while let Some(step) = ahead.pop_front() {
        if step == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&step);
        let found = match next.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                make(&next)?;
                next.symlink_metadata()
            }
            found => found,
        };
        let found = found.map_err(Error::io("look at", &next))?;
        if !ahead.is_empty() || found.is_symlink() {
            check_above(&next, Facts::of(&found), us)?;
        }
        if !found.is_symlink() {
            at = next;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Error::io("follow", path)(io::Error::other("too many links")));
        }
        let target = next.read_link().map_err(Error::io("follow", &next))?;
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        let mut through = steps(&target);
        through.append(&mut ahead);
        ahead = through;
    }
    Ok(at)
}

fn steps(path: &Path) -> VecDeque<OsString> {
    let named = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    named.collect()
}

fn make(path: &Path) -> Result<(), Error> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => sync(path.parent().unwrap_or(Path::new("/"))),
        // Somebody else was faster; it is looked at like any other.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(Error::io("create", path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const US: u32 = 1000;
    const THEM: u32 = 1001;

    fn folder(owner: u32, mode: u32) -> Facts {
        Facts { owner, mode, is_link: false }
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn ours_alone_is_taken() {
        let path = Path::new("/x");
        for mode in [0o700, 0o750, 0o755] {
            check_own(path, folder(US, mode), US).unwrap();
        }
        for mode in [0o770, 0o702, 0o1777] {
            let refused = check_own(path, folder(US, mode), US);
            assert!(matches!(refused, Err(Error::OthersMayWrite { .. })), "{mode:o}");
        }
        for owner in [THEM, ROOT] {
            let refused = check_own(path, folder(owner, 0o700), US);
            assert!(matches!(refused, Err(Error::NotOurs { .. })), "{owner}");
        }
    }

    #[test]
    fn above_it_may_be_root_and_we_and_a_sticky_folder() {
        let path = Path::new("/x");
        for good in [folder(ROOT, 0o755), folder(US, 0o775), folder(ROOT, 0o1777)] {
            check_above(path, good, US).unwrap();
        }
        assert!(check_above(path, folder(ROOT, 0o777), US).is_err());
        assert!(check_above(path, folder(THEM, 0o755), US).is_err());
        let link = |owner| Facts { owner, mode: 0o777, is_link: true };
        check_above(path, link(US), US).unwrap();
        assert!(check_above(path, link(THEM), US).is_err());
    }

    #[test]
    fn what_is_missing_is_made_private() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b/c");
        own_folder(&deep).unwrap();
        own_folder(&deep).unwrap();
        for made in ["a", "a/b", "a/b/c"] {
            let mode = std::fs::metadata(dir.path().join(made)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "{made}");
        }
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused_here_and_above() {
        let dir = tempfile::tempdir().unwrap();
        let (above, inner) = (dir.path().join("above"), dir.path().join("above/inner"));
        own_folder(&inner).unwrap();
        set_mode(&inner, 0o770);
        let refused = own_folder(&inner).unwrap_err();
        assert!(refused.to_string().contains("chmod go-w"), "{refused}");
        set_mode(&inner, 0o700);
        set_mode(&above, 0o707);
        let refused = own_folder(&inner).unwrap_err();
        assert!(matches!(refused, Error::OthersMayWrite { path, .. } if path == above));
    }

    #[test]
    fn links_are_followed_through_what_is_ours_only() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real");
        own_folder(&real.join("inner")).unwrap();
        symlink("real", dir.path().join("link")).unwrap();
        own_folder(&dir.path().join("link/inner/../inner")).unwrap();
        set_mode(&real, 0o703);
        assert!(own_folder(&dir.path().join("link/inner")).is_err());
        symlink("loop", dir.path().join("loop")).unwrap();
        assert!(own_folder(&dir.path().join("loop")).is_err());
    }

    #[test]
    fn a_link_of_anothers_is_not_followed_to_what_anybody_may_use() {
        // Where everybody may put one.
        let link = tempfile::Builder::new().make_in("/tmp", |path| symlink("/", path)).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::lchown(link.path(), Some(THEM), None).unwrap();
        }
        let owner = link.path().symlink_metadata().unwrap().uid();
        // Whoever else we are, it is not ours.
        let refused = walk(link.path(), owner + 1).unwrap_err();
        assert!(matches!(refused, Error::NotOurs { path, .. } if path == link.path()));
        assert_eq!(walk(link.path(), owner).unwrap(), Path::new("/"));
    }

    #[test]
    fn an_absolute_link_leads_away_from_where_it_stands() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real");
        own_folder(&real.join("inner")).unwrap();
        symlink(&real, dir.path().join("link")).unwrap();
        let opened = own_folder(&dir.path().join("link/inner")).unwrap().metadata().unwrap();
        assert_eq!(opened.ino(), real.join("inner").metadata().unwrap().ino());
    }

    #[test]
    fn a_file_is_no_folder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(own_folder(file.path()), Err(Error::NotAFolder(_))));
    }
}
