//! One server process, ended by its own id however the run ends.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

/// `/proc/PID/stat` counts in hundredths of a second on every Linux (USER_HZ).
const TICKS_PER_SECOND: f64 = 100.0;

/// Waits for the end of its input, which comes with the end of whoever holds the other end; then
/// ends the process.
const WATCHDOG: &str = "read -r never; kill -9 $0";

/// A running server; dropping it kills it and waits for its end. If this program is killed first,
/// the watchdog does that.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    watchdog: Child,
}

impl Server {
    /// Starts `program` with `args`; what it prints is appended to `log`.
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

    /// Ends it at once, as a power failure of its host would end the process.
    pub(super) fn kill(&mut self) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("a pid")?;
        kill_process(pid, Signal::KILL)?;
        self.dismiss();
        self.child.wait()?;
        Ok(())
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Result<Option<std::process::ExitStatus>> {
        let ended = self.child.try_wait()?;
        if ended.is_some() {
            self.dismiss();
        }
        Ok(ended)
    }

    /// Ends the watchdog: once the server is waited for, its id may be another's.
    fn dismiss(&mut self) {
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
    }

    /// User and system time that it has used so far.
    pub(super) fn cpu(&self) -> Result<Duration> {
        let stat = fs_err::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        cpu_of(&stat).context("the kernel's /proc/PID/stat")
    }

    /// Resident memory, in bytes.
    pub(super) fn resident_bytes(&self) -> Result<u64> {
        let status = fs_err::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        bytes_of(&status, "VmRSS:").context("the kernel's /proc/PID/status")
    }

    /// The most resident memory that it has ever had, in bytes.
    pub(super) fn peak_bytes(&self) -> Result<u64> {
        let status = fs_err::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        bytes_of(&status, "VmHWM:").context("the kernel's /proc/PID/status")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.dismiss();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn cpu_of(stat: &str) -> Option<Duration> {
    // The program's name stands in brackets and may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |n: usize| fields.get(n)?.parse::<f64>().ok();
    Some(Duration::from_secs_f64((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND))
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
    }

    #[test]
    fn resident_memory_is_read_in_bytes() {
        assert_eq!(bytes_of("VmPeak:\t  9 kB\nVmRSS:\t  2048 kB\n", "VmRSS:"), Some(2 << 20));
    }
}
