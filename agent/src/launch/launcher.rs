//! The launcher: a hidden subcommand that runs between agent and node.
//!
//! The node must outlive its agent. So it gets a session of its own, writes to a file instead of a
//! pipe, and is found again by the next agent. All of that has to be arranged in the new process,
//! before it becomes the node. Therefore the agent starts its own program as this launcher, which
//! arranges it and then executes the node's program with the same pid.
//!
//! The node's lock alone tells whether a node runs. The launcher takes that lock, and the node
//! inherits the open file. So the lock is released when the node dies and at no other time,
//! whatever happens to agents meanwhile. The pid file only tells which process to signal.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use muster_files::data;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};

use super::process::ProcessIdentity;
use crate::cli::LaunchNodeArguments;
use crate::crash;
use crate::exit::{ExitError, error_chain};
use crate::observe::node_log::KEEP_BYTES;
use crate::state::{StateError, lock};

/// The launcher's exit code when another node already holds the lock (EX_TEMPFAIL).
pub(crate) const ALREADY_RUNNING: u8 = 75;
/// The launcher's exit code when the node's program can't be executed (the code that shells use).
pub(crate) const CANNOT_EXECUTE: u8 = 126;

/// Number of attempts to take the lock.
const LOCK_TRIES: u32 = 5;
/// Pause between two attempts to take the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Executes the node in place of this process. Returns only on failure: the exit code and the
/// reason.
pub(crate) fn launch(arguments: &LaunchNodeArguments) -> (u8, String) {
    match prepare(arguments) {
        Ok(Some(mut node)) => {
            crash::at(crash::Failpoint::Launcher);
            let error = node.exec();
            (CANNOT_EXECUTE, format!("can't execute {}: {error}", arguments.program.display()))
        }
        Ok(None) => (ALREADY_RUNNING, "a node already runs here".to_owned()),
        Err(end) => (end.code(), end.to_string()),
    }
}

fn prepare(arguments: &LaunchNodeArguments) -> Result<Option<Command>, ExitError> {
    // setsid fails only for the leader of a process group. The agent doesn't make the launcher such
    // a leader.
    let _ = rustix::process::setsid();
    if !take_inherited_lock(&arguments.lock_file).map_err(failed)? {
        return Ok(None);
    }
    let log = open_log(&arguments.log_file).map_err(failed)?;
    let identity = ProcessIdentity::of_current_process(&arguments.program)
        .map_err(|error| ExitError::Failed(format!("can't read /proc/self/stat: {error}")))?;
    write_pid_file(&arguments.pid_file, &identity.to_text()).map_err(failed)?;
    let mut node = Command::new(&arguments.program);
    let errors = log.try_clone().map_err(|error| ExitError::Failed(error.to_string()))?;
    node.args(&arguments.arguments).stdin(Stdio::null()).stdout(log).stderr(errors);
    Ok(Some(node))
}

fn failed(error: StateError) -> ExitError {
    ExitError::Failed(error_chain(&error))
}

/// Writes the pid file. On a full disk it overwrites the existing file in place, which needs no
/// space. So a node that has data starts even if the disk is full.
fn write_pid_file(path: &Path, text: &str) -> Result<(), StateError> {
    data::replace(path, text.as_bytes()).or_else(|error| {
        let Ok(file) = data::open(path, data::OpenMode::ReadWrite) else {
            return Err(error.into());
        };
        let written = file.write_all_at(text.as_bytes(), 0);
        written.and_then(|()| file.set_len(text.len() as u64)).map_err(|_| error.into())
    })
}

/// Locks `path` through a file that stays open across exec. Returns false if the lock is taken.
/// Tries several times, because a process that tests the lock holds it for an instant.
fn take_inherited_lock(path: &Path) -> Result<bool, StateError> {
    for _ in 1..LOCK_TRIES {
        if try_inherited_lock(path)? {
            return Ok(true);
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    try_inherited_lock(path)
}

fn try_inherited_lock(path: &Path) -> Result<bool, StateError> {
    let file = lock::open(path)?;
    // Clears close-on-exec, so that the node's program keeps the locked file open.
    fcntl_setfd(&file, FdFlags::empty())
        .map_err(|error| StateError::io("keep open", path)(error.into()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            // Leave the file open on purpose, so that this process, and the program that it
            // executes, hold the lock as long as they live.
            std::mem::forget(file);
            Ok(true)
        }
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(StateError::io("lock", path)(error.into())),
    }
}

/// Opens the node's log for appending. A log that has grown too long is renamed first; no process
/// writes to it now.
fn open_log(path: &Path) -> Result<File, StateError> {
    let grown = std::fs::metadata(path).is_ok_and(|log| log.len() > KEEP_BYTES);
    if grown {
        let before = path.with_extension("log.1");
        data::rename_volatile(path, &before)?;
    }
    Ok(data::open(path, data::OpenMode::Append)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pid_file_is_overwritten_if_no_new_file_can_be_made() {
        let dir = tempfile::tempdir().unwrap();
        // Simulates a full disk: no temporary file can be made, since its name would be too long.
        let path = dir.path().join("node.pid".repeat(30));
        std::fs::write(&path, "a longer text of an earlier node\n").unwrap();
        write_pid_file(&path, "7 8 x\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "7 8 x\n");
        assert!(write_pid_file(&dir.path().join("absent/node.pid"), "7\n").is_err());
    }
}
