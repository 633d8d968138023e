//! Tests of the built agent's messages to the service manager.

#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(60);
/// Interval in microseconds, the unit of `WATCHDOG_USEC`, which `WatchdogSec=` sets.
const WATCHDOG_INTERVAL: &str = "400000";

#[test]
fn the_service_manager_gets_ready_status_watchdog_and_stopping_messages() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let next = || {
        let mut message = [0; 1024];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    // The agent waits for a bundle that never comes through the pipe.
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&pipe).status().unwrap().success());
    let mut agent = Command::new(env!("CARGO_BIN_EXE_muster-agent"));
    agent.args(["run", "--node-binary", "/bin/true", "--data-dir"]).arg(dir.path().join("data"));
    agent.arg("--bundle-file").arg(&pipe).stdin(Stdio::null()).stderr(Stdio::null());
    agent.env("NOTIFY_SOCKET", &socket).env("WATCHDOG_USEC", WATCHDOG_INTERVAL);
    let mut agent = agent.spawn().unwrap();

    assert_eq!(next(), "READY=1\n");
    assert_eq!(next(), "STATUS=starting\n");
    let signs = std::iter::repeat_with(next).filter(|message| message == "WATCHDOG=1\n");
    assert_eq!(signs.take(3).count(), 3, "without any news, too");
    kill_process(Pid::from_child(&agent), Signal::TERM).unwrap();
    let mut rest = std::iter::repeat_with(next);
    assert!(rest.any(|message| message == "STOPPING=1\n"));
    assert_eq!(agent.wait().unwrap().code(), Some(0));
}
