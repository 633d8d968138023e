//! A server process that is killed by its process id, however the run ends.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

/// Clock ticks per second in `/proc/PID/stat` (USER_HZ), which is 100 on Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Shell script that kills the process with the id `$0` when its standard input is closed. That
/// happens at the latest when this program ends.
const WATCHDOG: &str = "read -r never; kill -9 $0";

/// A running server. Dropping it kills the process and waits for its end. If this program is killed
/// first, the watchdog kills the server.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    watchdog: Child,
}

impl ServerProcess {
    /// Starts `program` with `args`, and appends its output to `log`.
    pub(crate) fn start(program: &Path, args: &[String], log: &Path) -> Result<Self> {
        let log = File::options().create(true).append(true).open(log)?;
        let child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let watchdog = Command::new("/bin/sh")
            .args(["-c", WATCHDOG, &child.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start the watchdog")?;
        Ok(Self { child, watchdog })
    }

    /// Kills the process at once with SIGKILL, as a power failure would.
    pub(super) fn kill(&mut self) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("a pid")?;
        kill_process(pid, Signal::KILL)?;
        self.dismiss();
        self.child.wait()?;
        Ok(())
    }

    /// Returns the exit status, if the process has exited.
    pub(crate) fn exit_status(&mut self) -> Result<Option<std::process::ExitStatus>> {
        let ended = self.child.try_wait()?;
        if ended.is_some() {
            self.dismiss();
        }
        Ok(ended)
    }

    /// Ends the watchdog. Once the server has been waited for, another process may get its id, and
    /// must not be killed.
    fn dismiss(&mut self) {
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns user and system time that the process has used.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let stat = fs_err::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        cpu_of(&stat).context("the kernel's /proc/PID/stat")
    }

    /// Returns the number of context switches of all threads that run now, voluntary and forced.
    pub(super) fn context_switches(&self) -> Result<u64> {
        let mut switches = 0;
        for thread in fs_err::read_dir(format!("/proc/{}/task", self.child.id()))? {
            // A thread may end after the directory was listed. Its context switches are then left
            // out.
            let status = fs_err::read_to_string(thread?.path().join("status")).unwrap_or_default();
            switches += switches_of(&status);
        }
        Ok(switches)
    }

    /// Returns the current resident memory in bytes.
    pub(crate) fn resident_bytes(&self) -> Result<u64> {
        let status = fs_err::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        bytes_of(&status, "VmRSS:").context("the kernel's /proc/PID/status")
    }

    /// Returns the peak resident memory in bytes.
    pub(super) fn peak_bytes(&self) -> Result<u64> {
        let status = fs_err::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        bytes_of(&status, "VmHWM:").context("the kernel's /proc/PID/status")
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.dismiss();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns user and system time of a process, given its `/proc/PID/stat`.
pub(crate) fn cpu_of(stat: &str) -> Option<Duration> {
    sum_of_ticks(stat, [11, 12])
}

/// Returns user and system time of the children of a process that have ended, given the
/// `/proc/PID/stat` of that process.
pub(crate) fn cpu_of_ended_children(stat: &str) -> Option<Duration> {
    sum_of_ticks(stat, [13, 14])
}

fn sum_of_ticks(stat: &str, fields_to_add: [usize; 2]) -> Option<Duration> {
    // The program's name is in brackets, and may itself contain brackets and spaces.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |n: usize| fields.get(n)?.parse::<f64>().ok();
    let [first, second] = fields_to_add;
    Some(Duration::from_secs_f64((ticks(first)? + ticks(second)?) / TICKS_PER_SECOND))
}

/// Returns the number of context switches of a thread, given its `/proc/PID/task/TID/status`.
fn switches_of(status: &str) -> u64 {
    let lines = status.lines().filter(|line| line.contains("voluntary_ctxt_switches:"));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

fn bytes_of(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_system_time_are_added_whatever_the_program_is_called() {
        let stat = "42 (a) b) S 1 42 42 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 3 0 9 1 1";
        assert_eq!(cpu_of(stat), Some(Duration::from_secs(2)));
        assert_eq!(cpu_of_ended_children(stat), Some(Duration::ZERO));
    }

    #[test]
    fn voluntary_and_forced_context_switches_are_added() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t3\n";
        assert_eq!(switches_of(status), 10);
    }

    #[test]
    fn resident_memory_is_read_in_bytes() {
        assert_eq!(bytes_of("VmPeak:\t  9 kB\nVmRSS:\t  2048 kB\n", "VmRSS:"), Some(2 << 20));
    }
}
