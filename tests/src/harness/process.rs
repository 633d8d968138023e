//! A child process with its output in a file, killed by its process id.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::wait::wait_for;

/// A running child process, killed when this value is dropped.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    name: String,
    log: PathBuf,
}

impl ChildProcess {
    /// Starts `command` in its own process group, and appends its output to `log`.
    pub fn spawn(name: &str, mut command: Command, log: &Path) -> Result<Self> {
        let out = fs_err::OpenOptions::new().create(true).append(true).open(log)?.into_file();
        let err = out.try_clone().context("duplicating the log's descriptor")?;
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {name}: {command:?}"))?;
        Ok(Self { child, name: name.to_owned(), log: log.to_path_buf() })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the content of the log file.
    pub fn output(&self) -> String {
        fs_err::read(&self.log)
            .map(|b| String::from_utf8_lossy(&b).into_owned())
            .unwrap_or_default()
    }

    /// Returns the file with the process's output.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Kills the process with SIGKILL, and reaps it.
    pub fn kill(&mut self) {
        send_signal(self.child.id(), Signal::KILL);
        // Reap the process. Its exit status doesn't matter.
        let _ = self.child.wait();
    }

    /// Sends SIGTERM, and waits until the process ends.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        send_signal(self.child.id(), Signal::TERM);
        self.wait(limit)
    }

    /// Waits until the process ends, and returns its exit status.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let name = self.name.clone();
        wait_for(&format!("{name} to end"), limit, || self.child.try_wait().ok().flatten())
            .with_context(|| format!("its output:\n{}", last_lines(&self.output(), 30)))
    }

    /// Waits until the process ends, and returns its exit code, or 128 plus the number of the
    /// signal that ended it.
    pub fn exit_code(&mut self, limit: Duration) -> Result<i32> {
        let status = self.wait(limit)?;
        Ok(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default()))
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until the output contains `text`. Fails at once if the process ends before that.
    pub fn wait_for_output(&mut self, text: &str, limit: Duration) -> Result<()> {
        let name = self.name.clone();
        let ended = wait_for(&format!("{name} to print {text:?}"), limit, || {
            if self.output().contains(text) {
                return Some(false);
            }
            (!self.is_running()).then(|| !self.output().contains(text))
        });
        match ended {
            Ok(false) => Ok(()),
            Ok(true) => Err(anyhow::anyhow!("{name} ended before it printed {text:?}")),
            Err(error) => Err(error),
        }
        .with_context(|| format!("its output:\n{}", last_lines(&self.output(), 30)))
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends `signal` to a process. Does nothing if the process is already gone.
pub fn send_signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Whether a process with this id exists and is not a zombie.
pub fn is_alive(pid: u32) -> bool {
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    test_kill_process(raw).is_ok()
        && fs_err::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim().starts_with('Z'))
}

/// Returns the last `lines` lines of `text`.
pub fn last_lines(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
