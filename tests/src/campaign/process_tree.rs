//! Ends the processes that a child has started, and removes what they leave behind.

use std::collections::BTreeMap;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, waitpid};

use crate::harness::process::send_signal;

/// Number of attempts to end the processes that a child left behind.
const MAX_SWEEPS: usize = 100;
/// Time between two attempts to end the processes that a child left behind.
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);

/// Kills a child and all processes that it has started, whatever process groups they are in.
/// Removes the network namespaces that any of them has created.
pub(super) fn stop(child: &mut Child) {
    let started = descendants(child.id());
    send_signal(child.id(), Signal::KILL);
    // Send all signals before waiting for any process. Once a killed process has been waited for,
    // another process can get its id.
    for &process in &started {
        send_signal(process, Signal::KILL);
    }
    // Reap the child. Its exit status doesn't matter.
    let _ = child.wait();
    started.into_iter().for_each(remove_namespaces);
}

/// Returns whether this process has children. It may have some that it didn't start: those of a
/// shell that it has replaced (`exec`).
#[must_use]
pub fn has_children() -> bool {
    !descendants(std::process::id()).is_empty()
}

/// Returns the parent of each process that exists now.
fn parents() -> BTreeMap<u32, u32> {
    let mut found = BTreeMap::new();
    for entry in fs_err::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = fs_err::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // The program's name in parentheses may contain any characters, so only the text behind it
        // is read.
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let parent = fields.split_whitespace().nth(1).and_then(|parent| parent.parse().ok());
        if let Some(parent) = parent {
            found.insert(id, parent);
        }
    }
    found
}

/// Returns all processes that `ancestor` has started, directly or through others.
fn descendants(ancestor: u32) -> Vec<u32> {
    let all = parents();
    let mut found = vec![ancestor];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(all.iter().filter(|(_, its)| **its == parent).map(|(id, _)| *id));
        next += 1;
    }
    found.split_off(1)
}

/// Kills all processes that this process has started or adopted.
pub(super) fn end_orphans() {
    for _ in 0..MAX_SWEEPS {
        let left = descendants(std::process::id());
        if left.is_empty() {
            return;
        }
        for process in left {
            send_signal(process, Signal::KILL);
            // Only a direct child can be reaped. Another descendant becomes a direct child once its
            // parent has ended, and is reaped then.
            if let Some(id) = i32::try_from(process).ok().and_then(Pid::from_raw) {
                let _ = waitpid(Some(id), WaitOptions::NOHANG);
            }
        }
        std::thread::sleep(SWEEP_INTERVAL);
    }
}

/// Removes the network namespaces of a killed test. Their names contain the test's process id.
pub(super) fn remove_namespaces(process: u32) {
    let prefix = format!("mu{process}x");
    for entry in fs_err::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(&prefix)) {
            let _ = Command::new("ip").args(["netns", "del"]).arg(&name).output();
        }
    }
}
