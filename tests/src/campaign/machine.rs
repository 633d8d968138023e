//! Description of the machine and of the tested commit, without names of hosts or folders.

use std::path::Path;
use std::process::Command;

use serde::Serialize;

/// Machine that runs a campaign, and the commit that it tests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TestedCommit {
    /// Hash of the commit, and whether files differ from it.
    pub commit: String,
    /// Number of processors that the campaign may use.
    pub processors: usize,
    /// Memory of the machine in MiB.
    pub memory_mib: u64,
    /// Name and release of the kernel, and the processor architecture.
    pub kernel: String,
}

impl TestedCommit {
    /// Reads the description from git and `/proc`. An unknown commit is called "unknown"; an
    /// unknown number is 0.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let release = fs_err::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let memory = fs_err::read_to_string("/proc/meminfo").unwrap_or_default();
        let commit = git(root, &["rev-parse", "--short=12", "HEAD"]);
        let changes = git(root, &["status", "--porcelain", "--untracked-files=no"]);
        let changed = changes.is_some_and(|changes| !changes.is_empty());
        let commit = commit.unwrap_or_else(|| "unknown".to_owned());
        Self {
            commit: if changed { format!("{commit}, with later changes") } else { commit },
            processors: std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
            memory_mib: memory_mib(&memory).unwrap_or_default(),
            kernel: format!("Linux {}, {}", release.trim(), std::env::consts::ARCH),
        }
    }
}

/// Returns the memory that the text of `/proc/meminfo` names, in MiB.
fn memory_mib(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib / 1024)
}

fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let done = Command::new("git").args(arguments).current_dir(root).output().ok()?;
    let text = String::from_utf8_lossy(&done.stdout).trim().to_owned();
    done.status.success().then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_mebibytes() {
        assert_eq!(memory_mib("MemTotal:       16384000 kB\nMemFree: 1 kB\n"), Some(16_000));
        assert_eq!(memory_mib("MemFree: 1 kB\n"), None);
    }
}
