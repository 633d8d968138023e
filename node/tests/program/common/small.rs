//! A small file system, for tests with a full disk.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A small tmpfs, mounted until this value is dropped.
pub(crate) struct SmallFilesystem(pub PathBuf);

impl SmallFilesystem {
    pub(crate) fn mount(at: &Path, mebibytes: u32) -> Option<Self> {
        std::fs::create_dir(at).unwrap();
        let size = format!("size={mebibytes}m");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(at)
            .stderr(Stdio::null())
            .status();
        mounted.is_ok_and(|status| status.success()).then(|| Self(at.to_owned()))
    }

    /// Fills the file system up to `left` bytes with a file, and returns that file's path.
    pub(crate) fn fill_up_to(&self, left: u64) -> PathBuf {
        let filler = self.0.join("filler");
        let space = rustix::fs::statvfs(&self.0).unwrap();
        let bytes = space.f_bavail * space.f_frsize - left;
        let file = std::fs::File::create(&filler).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
        filler
    }
}

impl Drop for SmallFilesystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
