//! What goes wrong in a member that runs.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::PATIENCE;

/// strace, attached to a member, which makes its system calls fail, or kills it at one.
pub(crate) struct Saboteur(Child);

impl Saboteur {
    /// Does `what` (strace's words) at these calls of `process`; `None` where there is no strace.
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
                // It ends well when whom it traces has ended: something synced at once.
                Some(status) if status.success() => break,
                None if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(10)),
                _ => {
                    let _ = child.kill();
                    return None;
                }
            }
        }
        Some(Self(child))
    }
}

impl Drop for Saboteur {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
