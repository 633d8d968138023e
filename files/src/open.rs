//! Opens files in folders that only our user may write to. Doesn't follow links, and doesn't wait
//! on a pipe.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::Error;

/// Opens a file in a folder that only our user may write to, with `options`. A new file gets mode
/// 0600.
///
/// # Errors
/// Fails if it is no regular file, or has more than one hard link.
pub fn open(path: &Path, options: &mut OpenOptions) -> Result<File, Error> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.mode(0o600).custom_flags(flags.bits().cast_signed()).open(path);
    let file = file.map_err(|source| match rustix::io::Errno::from_io_error(&source) {
        // The path is a link, a pipe without a reader, or a socket.
        Some(rustix::io::Errno::LOOP | rustix::io::Errno::NXIO) => {
            Error::NotPlainFile(path.to_owned())
        }
        _ => Error::io("open", path)(source),
    })?;
    let found = file.metadata().map_err(Error::io("look at", path))?;
    // A link count of 0 is accepted: the file was removed since it was opened.
    if !found.is_file() || found.nlink() > 1 {
        return Err(Error::NotPlainFile(path.to_owned()));
    }
    Ok(file)
}

/// Reads a file in a folder that only our user may write to. Returns `None` if there is no such
/// file.
///
/// # Errors
/// Fails as [`open`] does, and if the file has more than `max_bytes`.
pub fn read(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, Error> {
    let file = match open(path, OpenOptions::new().read(true)) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    read_content(path, file, max_bytes).map(Some)
}

/// Reads all of an open file, of at most `max_bytes`. `path` is for messages.
pub(crate) fn read_content(path: &Path, file: File, max_bytes: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let read = file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(Error::io("read", path))?;
    if bytes.len() as u64 > max_bytes {
        return Err(Error::io("read", path)(ErrorKind::FileTooLarge.into()));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const LIMIT: u64 = 8;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(read(&path, LIMIT).unwrap(), None);
        std::fs::write(&path, "12345678").unwrap();
        assert_eq!(read(&path, LIMIT).unwrap().unwrap(), b"12345678");
        std::fs::write(&path, "123456789").unwrap();
        assert!(read(&path, LIMIT).is_err());
    }

    #[test]
    fn links_hard_links_folders_and_pipes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "").unwrap();
        std::fs::write(path("target"), "").unwrap();
        symlink("target", path("link")).unwrap();
        std::fs::hard_link(path("file"), path("second")).unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        for name in ["link", "second", "folder", "pipe"] {
            let refused = read(&path(name), LIMIT);
            assert!(matches!(refused, Err(Error::NotPlainFile(_))), "{name}: {refused:?}");
        }
        let refused = open(&path("link"), OpenOptions::new().create(true).append(true));
        assert!(matches!(refused, Err(Error::NotPlainFile(_))), "{refused:?}");
    }
}
