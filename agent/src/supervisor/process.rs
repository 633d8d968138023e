//! Which process is the node: a pid alone may by now belong to somebody else.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// A process for the life of this boot: pids are reused, but not with one start time. Which program
/// it executes is not compared: a node's program may be a script that executes another one, and
/// whether a node runs at all is told by the lock that it inherits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its pid.
    pub pid: i32,
    /// When it started, in clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start_ticks: u64,
    /// Which boot that was (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The program that it was started to become, for people.
    pub program: PathBuf,
}

impl Identity {
    /// This process, which is about to become `program`.
    pub fn of_self(program: &Path) -> io::Result<Self> {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        Ok(Self {
            pid,
            start_ticks: start_ticks(pid)?,
            boot_id: boot_id()?,
            program: program.to_owned(),
        })
    }

    /// For the pid file.
    pub fn to_text(&self) -> String {
        let json = serde_json::to_string(self).expect("numbers and texts always serialise");
        json + "\n"
    }

    /// From the pid file.
    pub fn from_text(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok().filter(|identity: &Self| identity.pid > 1)
    }

    /// Opens the process that this names, if it is still that one.
    pub fn open(&self) -> io::Result<Option<OpenProcess>> {
        let Some(pid) = Pid::from_raw(self.pid) else { return Ok(None) };
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Only now: the open file keeps the pid from being given to another process unseen.
        Ok(self.is_alive()?.then_some(OpenProcess { fd }))
    }

    fn is_alive(&self) -> io::Result<bool> {
        let same = match start_ticks(self.pid) {
            Ok(ticks) => ticks == self.start_ticks && boot_id()? == self.boot_id,
            Err(error) if is_gone(&error) => false,
            Err(error) => return Err(error),
        };
        Ok(same)
    }
}

/// A process that can be signalled and waited for without being a child.
#[derive(Debug)]
pub struct OpenProcess {
    fd: OwnedFd,
}

impl OpenProcess {
    /// Sends a signal; a process that is gone needs none.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until it has ended. Safe to drop: the thread looks again every second whether anybody
    /// still waits.
    pub async fn ended(&self) -> io::Result<()> {
        let (hold, dropped) = std::sync::mpsc::sync_channel::<()>(0);
        let fd = self.fd.try_clone()?;
        let waiting = tokio::task::spawn_blocking(move || wait_readable(&fd, &dropped));
        let result = waiting.await.map_err(io::Error::other)?;
        drop(hold);
        result
    }
}

/// A pidfd is readable once its process has ended.
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

/// Field 22; the second one is the program's name in parentheses, which may itself hold spaces and
/// parentheses.
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
    fn the_pid_file_is_read_back() {
        let own = Identity::of_self(Path::new("/usr/bin/etcd")).unwrap();
        assert_eq!(Identity::from_text(&own.to_text()), Some(own));
        let init = Identity { pid: 1, ..Identity::of_self(Path::new("/usr/bin/etcd")).unwrap() };
        assert_eq!(Identity::from_text(&init.to_text()), None);
        assert_eq!(Identity::from_text("junk"), None);
    }

    fn identity_of(child: &std::process::Child, program: &str) -> Identity {
        let pid = i32::try_from(child.id()).unwrap();
        Identity {
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
        let reused = Identity { start_ticks: right.start_ticks + 1, ..right.clone() };
        assert!(reused.open().unwrap().is_none());
        let rebooted = Identity { boot_id: "another".to_owned(), ..right };
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
