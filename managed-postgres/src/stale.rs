//! Cleans up after a service that was killed.
//!
//! Usually there is nothing to do: the kernel signals Postgres when the service dies. A machine
//! that lost power, however, leaves a `postmaster.pid` whose process id may now belong to another
//! process. Postgres would then refuse to start. The file is removed only if no process works in
//! the data directory.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::ManagedPostgresError;

/// How long a left-over server may take to shut down before it gets SIGQUIT.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Stops a server that runs in `data`, and removes a `postmaster.pid` that no server holds.
pub(super) fn clear(data: &Path) -> Result<(), ManagedPostgresError> {
    let lock = data.join("postmaster.pid");
    let Ok(text) = std::fs::read_to_string(&lock) else { return Ok(()) };
    let Ok(data) = data.canonicalize() else { return Ok(()) };
    let postmaster = text.lines().next().and_then(|line| line.trim().parse::<i32>().ok());
    if let Some(pid) = postmaster.and_then(Pid::from_raw)
        && is_process_in(pid.as_raw_nonzero().get(), &data)
    {
        tracing::warn!(
            pid = pid.as_raw_nonzero().get(),
            "stopping a Postgres left by a dead service"
        );
        stop(pid, &data);
    }
    // Wait until all backends have ended. A backend notices the death of its postmaster only when
    // it next waits for something.
    let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
    while Instant::now() < deadline && has_process_in(&data) {
        std::thread::sleep(CHECK_INTERVAL);
    }
    if has_process_in(&data) {
        // Leave `postmaster.pid`: Postgres itself checks its shared memory, and reports why it
        // doesn't start.
        return Ok(());
    }
    match std::fs::remove_file(&lock) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(ManagedPostgresError::io("can't remove a stale postmaster.pid")(error))
        }
        _ => Ok(()),
    }
}

fn stop(pid: Pid, data: &Path) {
    for (signal, patience) in [(Signal::INT, SHUTDOWN_TIMEOUT), (Signal::QUIT, SHUTDOWN_TIMEOUT)] {
        let _ = rustix::process::kill_process(pid, signal);
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if !is_process_in(pid.as_raw_nonzero().get(), data) {
                return;
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
    }
}

/// Whether process `pid` belongs to Postgres. Only Postgres' processes have the data directory as
/// working directory.
fn is_process_in(pid: i32, data: &Path) -> bool {
    std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == data)
}

fn has_process_in(data: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else { return true };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .any(|pid| is_process_in(pid, data))
}
