//! Places where a test may ask the process to die, as by `kill -9`.
//!
//! `MUSTER_CRASH_AT=before-commit` and the like; in debug builds alone. Each change of a cluster
//! (`domain::describe` names them) has two: `before-seated` dies in the transaction that would
//! seat somebody, `after-seated` right behind its COMMIT. `before-commit` and `after-commit` are
//! those of the decision, `before-ledger` and `after-ledger` stand around its fsync.

/// Dies here if the environment says so.
#[cfg(debug_assertions)]
pub fn point(when: &str, what: &str) {
    use std::sync::OnceLock;
    static WANTED: OnceLock<Option<String>> = OnceLock::new();
    let wanted = WANTED.get_or_init(|| std::env::var("MUSTER_CRASH_AT").ok());
    let Some(wanted) = wanted else { return };
    if wanted.strip_prefix(when).and_then(|rest| rest.strip_prefix('-')) == Some(what) {
        tracing::error!(at = wanted, "dying, as the environment asks");
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        std::thread::park();
    }
}

/// Nothing, in a release build.
#[cfg(not(debug_assertions))]
#[inline]
pub fn point(_when: &str, _what: &str) {}
