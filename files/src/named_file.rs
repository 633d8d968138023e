//! Reads files that a person named. Links are followed, because that person chose the path. Only
//! regular files are read: a read from another kind of file may block, or never end.

use std::fs::{File, FileType, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a file for reading.
///
/// # Errors
/// Fails at once if it is no regular file: a pipe or a terminal may block forever, a device may
/// never end.
pub fn open_named(path: &Path) -> Result<File> {
    // Opening a device can have side effects, so the type is checked first.
    check(std::fs::metadata(path)?.file_type())?;
    // The file may have been replaced since its type was checked.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    check(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads a whole file.
///
/// # Errors
/// Fails as [`open_named`] does, and if the file has more than `max_bytes`.
pub fn read_named(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_named(path)?.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let text = format!("it is longer than the {max_bytes} bytes that such a file may have");
        return Err(Error::new(ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

fn check(found: FileType) -> Result<()> {
    if found.is_file() {
        return Ok(());
    }
    if found.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    let what = match found {
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    let text = format!("it is {what}: write what it gives to a regular file, and name that");
    Err(Error::new(ErrorKind::InvalidInput, text))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const LIMIT: u64 = 8;

    #[test]
    fn a_file_and_a_link_to_it_are_read_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        symlink("file", path("link")).unwrap();
        assert_eq!(read_named(&path("link"), LIMIT).unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::write(path("file"), "12345678").unwrap();
        std::fs::hard_link(path("file"), path("second")).unwrap();
        for name in ["file", "link", "second"] {
            assert_eq!(read_named(&path(name), LIMIT).unwrap(), b"12345678");
        }
        std::fs::write(path("file"), "123456789").unwrap();
        let refused = read_named(&path("file"), LIMIT).unwrap_err();
        assert!(refused.to_string().contains("longer than the 8 bytes"), "{refused}");
    }

    #[test]
    fn files_that_are_not_regular_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
        symlink("pipe", path("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        let cases = [
            (dir.path().to_owned(), "is a directory"),
            (path("pipe"), "it is a pipe"),
            (path("link"), "it is a pipe"),
            (path("socket"), "it is a socket"),
            ("/dev/zero".into(), "it is a device"),
        ];
        for (path, says) in cases {
            let refused = open_named(&path).unwrap_err();
            assert!(refused.to_string().contains(says), "{}: {refused}", path.display());
        }
    }
}
