//! Fault injection into the system calls of a running member.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::WAIT_LIMIT;

/// A strace process attached to a member. It makes system calls fail, or kills the member at one.
pub(crate) struct FaultInjector(Child);

impl FaultInjector {
    /// Attaches to `process` and applies the action `what` (in strace's syntax) to `calls`. Returns
    /// `None` if strace can't be used.
    pub(crate) fn attach(process: u32, calls: &str, what: &str) -> Option<Self> {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={calls}")]);
        strace.args(["-e", &format!("inject={calls}:{what}")]);
        strace.arg("-p").arg(process.to_string()).stdin(Stdio::null()).stderr(Stdio::null());
        let mut child = strace.spawn().ok()?;
        let traced = || {
            let status = std::fs::read_to_string(format!("/proc/{process}/status"));
            status
                .unwrap_or_default()
                .lines()
                .any(|line| line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() != "0"))
        };
        let start = Instant::now();
        while !traced() {
            match child.try_wait().unwrap() {
                // strace has exited with 0. The traced process has ended before this loop saw that
                // it is traced.
                Some(status) if status.success() => break,
                None if start.elapsed() < WAIT_LIMIT => {
                    std::thread::sleep(Duration::from_millis(10))
                }
                _ => {
                    let _ = child.kill();
                    return None;
                }
            }
        }
        Some(Self(child))
    }
}

impl Drop for FaultInjector {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
