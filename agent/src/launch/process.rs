//! Identifies the node's process. A pid alone doesn't identify it: another process may have that
//! pid by now.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// Identity of a process within one boot. A pid may be reused, but not with an equal start time.
/// The executed program is not compared: a node's program may be a script that executes another
/// one. The lock that the node inherits shows whether the node runs at all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The process's id (pid).
    pub pid: i32,
    /// When the process started, in clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start_ticks: u64,
    /// Id of the boot in which the process started (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The program that the process was started to execute; for messages only.
    pub program: PathBuf,
}

impl ProcessIdentity {
    /// Returns the identity of this process, which is about to execute `program`.
    pub fn of_current_process(program: &Path) -> io::Result<Self> {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        Ok(Self {
            pid,
            start_ticks: start_ticks(pid)?,
            boot_id: boot_id()?,
            program: program.to_owned(),
        })
    }

    /// Serialises the identity for the pid file.
    pub fn to_text(&self) -> String {
        let json = serde_json::to_string(self).expect("numbers and texts always serialise");
        json + "\n"
    }

    /// Parses a pid file. `None` if it is malformed.
    pub fn from_text(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok().filter(|identity: &Self| identity.pid > 1)
    }

    /// Opens the process, or returns `None` if it has ended.
    pub fn open(&self) -> io::Result<Option<OpenProcess>> {
        let Some(pid) = Pid::from_raw(self.pid) else { return Ok(None) };
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Compare after opening: while the pidfd is open, a reused pid can't be mistaken for the
        // process.
        Ok(self.is_alive()?.then_some(OpenProcess { fd }))
    }

    fn is_alive(&self) -> io::Result<bool> {
        Ok(self.has_start_ticks()? && boot_id()? == self.boot_id)
    }

    /// Whether a process with this pid and this start time runs. Doesn't compare boot ids, because
    /// a container, and a unit in it with its own `/proc`, see different ones. So the caller must
    /// know that the process started in this boot, for example because its lock is held.
    pub fn has_start_ticks(&self) -> io::Result<bool> {
        match start_ticks(self.pid) {
            Ok(ticks) => Ok(ticks == self.start_ticks),
            Err(error) if is_gone(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A process that can be signalled and waited for without being a child.
#[derive(Debug)]
pub struct OpenProcess {
    fd: OwnedFd,
}

impl OpenProcess {
    /// Sends a signal. Does nothing if the process has already ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the process has ended. The future may be dropped: its thread checks every second
    /// whether anyone still waits.
    pub async fn ended(&self) -> io::Result<()> {
        let (hold, dropped) = std::sync::mpsc::sync_channel::<()>(0);
        let fd = self.fd.try_clone()?;
        let waiting = tokio::task::spawn_blocking(move || wait_readable(&fd, &dropped));
        let result = waiting.await.map_err(io::Error::other)?;
        drop(hold);
        result
    }
}

/// Waits until the pidfd is readable, which means that its process has ended. Also returns once the
/// other end of `dropped` is gone.
fn wait_readable(fd: &OwnedFd, dropped: &std::sync::mpsc::Receiver<()>) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let look_again = Timespec { tv_sec: 1, tv_nsec: 0 };
    loop {
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&look_again)) {
            Ok(0) => {
                let nobody = Err(std::sync::mpsc::TryRecvError::Disconnected);
                if dropped.try_recv() == nobody {
                    return Ok(());
                }
            }
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

fn start_ticks(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_ticks(&stat).ok_or_else(|| io::Error::other("unexpected format of stat"))
}

/// Clock ticks per second (USER_HZ) in `/proc`: 100 on all architectures that we build for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Returns when a process started, in seconds since 1970.
pub(crate) fn started_at(pid: i32) -> io::Result<f64> {
    let kernel = std::fs::read_to_string("/proc/stat")?;
    let booted = kernel.lines().find_map(|line| line.strip_prefix("btime ")?.parse::<f64>().ok());
    let booted = booted.ok_or_else(|| io::Error::other("no time of the boot in /proc/stat"))?;
    Ok(booted + start_ticks(pid)? as f64 / TICKS_PER_SECOND)
}

/// Parses field 22 of `/proc/PID/stat`. Fields are counted from the last `)`, because field 2, the
/// program's name in parentheses, may contain spaces and parentheses.
fn parse_start_ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_is_found_behind_any_program_name() {
        let fields = (3..=30).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(parse_start_ticks(&format!("7 (a) b (c) ) {fields}")), Some(22));
        assert_eq!(parse_start_ticks("junk"), None);
    }

    #[test]
    fn a_new_process_has_started_now() {
        let seconds = || {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since.unwrap().as_secs_f64()
        };
        let before = seconds();
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let started = started_at(i32::try_from(child.id()).unwrap());
        let after = seconds();
        child.kill().unwrap();
        child.wait().unwrap();
        // `started_at` may be wrong by a second, because the kernel shows the time of its boot in
        // whole seconds.
        let (started, slack) = (started.unwrap(), 2.0);
        assert!((before - slack..after + slack).contains(&started), "{before} {started} {after}");
    }

    #[test]
    fn the_pid_file_is_read_back() {
        let own = ProcessIdentity::of_current_process(Path::new("/usr/bin/etcd")).unwrap();
        assert_eq!(ProcessIdentity::from_text(&own.to_text()), Some(own));
        let init = ProcessIdentity {
            pid: 1,
            ..ProcessIdentity::of_current_process(Path::new("/usr/bin/etcd")).unwrap()
        };
        assert_eq!(ProcessIdentity::from_text(&init.to_text()), None);
        assert_eq!(ProcessIdentity::from_text("junk"), None);
    }

    fn identity_of(child: &std::process::Child, program: &str) -> ProcessIdentity {
        let pid = i32::try_from(child.id()).unwrap();
        ProcessIdentity {
            pid,
            start_ticks: start_ticks(pid).unwrap(),
            boot_id: boot_id().unwrap(),
            program: PathBuf::from(program),
        }
    }

    fn sleeper() -> std::process::Child {
        std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap()
    }

    #[tokio::test]
    async fn a_process_is_opened_signalled_and_waited_for() {
        let mut child = sleeper();
        let open = identity_of(&child, "/bin/sleep").open().unwrap().unwrap();
        open.signal(Signal::TERM).unwrap();
        open.ended().await.unwrap();
        let status = child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(15));
    }

    #[test]
    fn another_start_time_or_boot_is_another_process() {
        let mut child = sleeper();
        let right = identity_of(&child, "/bin/sleep");
        assert!(right.open().unwrap().is_some());
        let reused = ProcessIdentity { start_ticks: right.start_ticks + 1, ..right.clone() };
        assert!(reused.open().unwrap().is_none());
        let rebooted = ProcessIdentity { boot_id: "another".to_owned(), ..right };
        assert!(rebooted.open().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_is_gone_is_not_opened() {
        let mut child = sleeper();
        let identity = identity_of(&child, "/bin/sleep");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(identity.open().unwrap().is_none());
    }
}
