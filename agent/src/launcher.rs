//! The hidden subcommand between agent and node.
//!
//! The node must outlive its agent: it gets a session of its own, writes to a file and not to a
//! pipe, and is found again by the next agent. All of that has to be arranged in the new process,
//! before it becomes the node; so the agent starts itself once more as this launcher, which
//! arranges it and then executes the node in its own place, with the same pid.
//!
//! The node's lock is the truth about whether a node runs: the launcher takes it and the node
//! inherits the open file, so it is given back at the node's death and at no other time, whatever
//! happens to agents in between. The pid file only says whom to signal.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use muster_files::data;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::cli::LaunchNode;
use crate::crash;
use crate::exit::End;
use crate::state::{StateError, lock};
use crate::supervisor::process::Identity;

/// The launcher's exit code when another node already holds the lock (EX_TEMPFAIL).
pub(crate) const ALREADY_RUNNING: u8 = 75;
/// The launcher's exit code when the node's program can't be executed (as shells do it).
pub(crate) const CANNOT_EXECUTE: u8 = 126;

/// How often a lock that is held is tried, and the pause between.
const LOCK_TRIES: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Becomes the node. Returns only on failure: the exit code and the reason.
pub(crate) fn launch(arguments: &LaunchNode) -> (u8, String) {
    match prepare(arguments) {
        Ok(Some(mut node)) => {
            crash::at(crash::Step::Launcher);
            let error = node.exec();
            (CANNOT_EXECUTE, format!("can't execute {}: {error}", arguments.program.display()))
        }
        Ok(None) => (ALREADY_RUNNING, "a node already runs here".to_owned()),
        Err(end) => (end.code(), end.to_string()),
    }
}

fn prepare(arguments: &LaunchNode) -> Result<Option<Command>, End> {
    // It fails only for a process that already leads its group, and then the session is its own.
    let _ = rustix::process::setsid();
    if !take_inherited_lock(&arguments.lock_file).map_err(failed)? {
        return Ok(None);
    }
    let log = open_log(&arguments.log_file).map_err(failed)?;
    let identity = Identity::of_self(&arguments.program)
        .map_err(|error| End::Failed(format!("can't read /proc/self/stat: {error}")))?;
    write_pid_file(&arguments.pid_file, &identity.to_text()).map_err(failed)?;
    let mut node = Command::new(&arguments.program);
    let errors = log.try_clone().map_err(|error| End::Failed(error.to_string()))?;
    node.args(&arguments.arguments).stdin(Stdio::null()).stdout(log).stderr(errors);
    Ok(Some(node))
}

fn failed(error: StateError) -> End {
    End::Failed(crate::exit::chain(&error))
}

/// On a full disk an earlier file is overwritten in place, which takes no space: a node that has
/// data starts whatever room the agent has.
fn write_pid_file(path: &Path, text: &str) -> Result<(), StateError> {
    data::replace(path, text.as_bytes()).or_else(|error| {
        let Ok(file) = data::open(path, data::Open::ReadWrite) else {
            return Err(error.into());
        };
        let written = file.write_all_at(text.as_bytes(), 0);
        written.and_then(|()| file.set_len(text.len() as u64)).map_err(|_| error.into())
    })
}

/// Locks `path` through a file that executing another program doesn't close. False if it is taken.
/// Whoever only looks whether it is held has it for an instant, so it is tried more than once.
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
    fcntl_setfd(&file, FdFlags::empty())
        .map_err(|error| StateError::io("keep open", path)(error.into()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            // Kept open on purpose, for the life of this process and of the program it becomes.
            std::mem::forget(file);
            Ok(true)
        }
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(StateError::io("lock", path)(error.into())),
    }
}

/// Opens the node's log for appending. A log of an earlier run that has grown is put beside it
/// first; nobody writes to it now.
fn open_log(path: &Path) -> Result<File, StateError> {
    let grown = std::fs::metadata(path).is_ok_and(|log| log.len() > crate::tail::KEEP_BYTES);
    if grown {
        let before = path.with_extension("log.1");
        data::rename_volatile(path, &before)?;
    }
    Ok(data::open(path, data::Open::Append)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_no_new_file_can_be_made_the_pid_file_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        // As on a full disk no file can be made beside it: its name would be too long.
        let path = dir.path().join("node.pid".repeat(30));
        std::fs::write(&path, "a longer text of an earlier node\n").unwrap();
        write_pid_file(&path, "7 8 x\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "7 8 x\n");
        assert!(write_pid_file(&dir.path().join("absent/node.pid"), "7\n").is_err());
    }
}
