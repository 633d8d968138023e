//! A disk that gets full soon.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A small file system in memory, as long as it is kept.
pub(crate) struct Small(pub PathBuf);

impl Small {
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

    /// Somebody else takes all space but so many bytes, with the file whose path is returned.
    pub(crate) fn fill_up_to(&self, left: u64) -> PathBuf {
        let filler = self.0.join("filler");
        let space = rustix::fs::statvfs(&self.0).unwrap();
        let bytes = space.f_bavail * space.f_frsize - left;
        let file = std::fs::File::create(&filler).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
        filler
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
