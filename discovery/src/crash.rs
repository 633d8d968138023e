//! Crash points: places where a test may make the process die, as by `kill -9`. Debug builds only.
//!
//! The environment variable `MUSTER_CRASH_AT` names one of these points:
//!
//! - There are two points for each change of a cluster (`domain::describe` has the names).
//!   `before-seated` dies in the transaction that would seat an applicant, `after-seated` right
//!   after its COMMIT.
//! - There are two points for each new state of an intent, such as `before-added` and
//!   `after-added`.
//! - `before-commit` and `after-commit` are around the COMMIT of a decision.
//! - `before-ledger` and `after-ledger` are around the ledger's fsync.
//!
//! With `MUSTER_CRASH_PID_FILE=…/postmaster.pid` the process whose id is in that file dies instead,
//! once. In this way a test can stop Postgres in the middle of any step.

/// Dies here if `MUSTER_CRASH_AT` names this point.
#[cfg(debug_assertions)]
pub(crate) fn point(when: &str, what: &str) {
    use std::sync::OnceLock;
    static WANTED: OnceLock<Option<String>> = OnceLock::new();
    let wanted = WANTED.get_or_init(|| std::env::var("MUSTER_CRASH_AT").ok());
    let Some(wanted) = wanted else { return };
    if wanted.strip_prefix(when).and_then(|rest| rest.strip_prefix('-')) == Some(what) {
        match std::env::var_os("MUSTER_CRASH_PID_FILE") {
            Some(file) => kill_once(std::path::Path::new(&file), wanted),
            None => {
                tracing::error!(at = wanted, "dying, as the environment asks");
                let own = rustix::process::getpid();
                let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
                std::thread::park();
            }
        }
    }
}

/// Kills the process whose id is the first line of `file`, on the first call only.
#[cfg(debug_assertions)]
fn kill_once(file: &std::path::Path, at: &str) {
    use std::sync::atomic::{AtomicBool, Ordering};
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    let text = fs_err::read_to_string(file).unwrap_or_default();
    let pid = text.lines().next().and_then(|line| line.trim().parse().ok());
    if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
        tracing::error!(at, pid = pid.as_raw_nonzero().get(), "killing, as the environment asks");
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Does nothing in a release build.
#[cfg(not(debug_assertions))]
#[inline]
pub(crate) fn point(_when: &str, _what: &str) {}
