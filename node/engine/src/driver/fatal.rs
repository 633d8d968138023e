//! Ways in which a thread of the driver ends the process.

use std::error::Error;
use std::thread::{Builder, JoinHandle};

use node_state::disk::advice;
use node_state::state_machine::StateMachine;

use super::StartError;
use crate::log::LogError;

/// Exit code after a failure that a restart may repair. A restart reads again what the disk really
/// holds.
const EXIT_FAILURE: i32 = 1;
/// Exit code after damage that every restart would find again.
const EXIT_DO_NOT_RESTART: i32 = 3;

/// Ends the process because the log or the store failed. A retry could report success for data that
/// is lost. Waiting requests get no answer.
#[expect(
    clippy::disallowed_methods,
    reason = "no destructor may run: those of log and store would go on writing to the disk that failed"
)]
fn fatal(what: &str, error: &(dyn Error + 'static), is_final: bool) -> ! {
    // The text of a final error already tells the operator what to do.
    let next = (!is_final).then(|| advice(error));
    // Other threads run until the process has ended, but can't report anything more as durable.
    tracing::error!(fatal = true, error, next, "{what} failed; stopping at once");
    std::process::exit(if is_final { EXIT_DO_NOT_RESTART } else { EXIT_FAILURE });
}

pub(super) fn exit_on_log_failure(error: &LogError) -> ! {
    fatal("the log", error, error.is_final())
}

pub(super) fn exit_on_store_failure<M: StateMachine>(error: &M::Error) -> ! {
    fatal("the store", error, M::is_final(error))
}

/// Ends the process because the next start may open another store file than the one in use.
pub fn exit_on_defragmentation_failure(error: &(dyn Error + 'static)) -> ! {
    fatal("putting a smaller file in the store's place", error, false)
}

pub(super) fn exit_on_snapshot_failure(error: &std::io::Error) -> ! {
    fatal("reading a received snapshot", error, false)
}

/// Aborts the process when its thread panics. A panic is a broken invariant, and a restart recovers
/// from the log.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(fatal = true, "a thread of the driver panicked; aborting");
            std::process::abort();
        }
    }
}

pub(super) fn spawn(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, StartError> {
    let body = || {
        let _guard = AbortOnPanic;
        body();
    };
    Builder::new().name(name.to_owned()).spawn(body).map_err(StartError::Thread)
}
