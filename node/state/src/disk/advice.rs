//! Advice for the operator after a disk error.

use std::error::Error;
use std::io::{self, ErrorKind};

const FULL: &str = "the disk is full: free space or enlarge the volume, then start this member again; \
    nothing that was acknowledged is lost";
const READ_ONLY: &str = "the file system is read-only, most often because its disk failed: look into the \
    kernel's log, repair or replace the disk, then start this member again";
const FAILED: &str = "the disk failed: look into the kernel's log; if the disk is sound, start this member \
    again (it reads again what the disk really holds), else replace the disk and then this member \
    from its peers";
const OTHER: &str = "start this member again; if it ends the same way, replace it from its peers";

/// Returns advice about an error of the log or the store, by the first I/O error among its causes.
#[must_use]
pub fn advice(error: &(dyn Error + 'static)) -> &'static str {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return match io.kind() {
                // A file size limit (`ulimit -f`) has the effect of a full disk.
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => FULL,
                ErrorKind::ReadOnlyFilesystem => READ_ONLY,
                _ => FAILED,
            };
        }
        next = error.source();
    }
    OTHER
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::mvcc::StoreError;

    #[derive(Debug, thiserror::Error)]
    #[error("can't sync")]
    struct SyncError(#[source] io::Error);

    #[test]
    fn advice_distinguishes_a_full_disk_from_a_failed_one() {
        for (errno, expected) in [
            (Errno::NOSPC, FULL),
            (Errno::DQUOT, FULL),
            (Errno::FBIG, FULL),
            (Errno::IO, FAILED),
            (Errno::ROFS, READ_ONLY),
        ] {
            assert_eq!(advice(&SyncError(errno.into())), expected, "{errno}");
            let of_store = StoreError::from(redb::StorageError::Io(errno.into()));
            assert_eq!(advice(&of_store), expected, "{errno}");
        }
        assert_eq!(advice(&std::fmt::Error), OTHER);
    }
}
