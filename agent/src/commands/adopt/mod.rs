//! `adopt` and `release`: bring a running etcd under an agent's management, and end that again.

mod certificates;
mod enrol;
mod host;
pub(crate) mod release;
mod survey;
mod take_over;

use std::time::Duration;

use discovery_types::text::printable;
use tokio::time::{Instant, sleep};

use crate::cli::AdoptCommand;
use crate::cluster::{ClusterApiClient, MemberId};
use crate::commands::member::survey::Survey;
use crate::commands::member::wait::describe_unhealthy;
use crate::commands::printer::Printer;
use crate::exit::{ExitError, error_chain};
use crate::state::adopted::{AdoptionStage, read_adopted};
use crate::state::{Layout, state_exit_error};

/// Pause between two checks while a command waits.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Time after which a wait repeats an unchanged note.
const NOTE_INTERVAL: Duration = Duration::from_secs(5);

/// Runs the command `adopt`.
pub(crate) async fn run(typed: &AdoptCommand, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    match typed {
        AdoptCommand::Survey(typed) => survey::run(typed, printer).await,
        AdoptCommand::Enrol(typed) => enrol::run(typed, printer).await,
        AdoptCommand::TakeOver(typed) => take_over::run(typed, printer).await,
        AdoptCommand::Certificates(typed) => certificates::run(typed, printer).await,
    }
}

/// Fails if this host's member must not run under the agent: its etcd isn't taken over yet, or the
/// member was released.
pub(crate) fn check_may_run(layout: &Layout) -> Result<(), ExitError> {
    if layout.released_file().exists() {
        return Err(ExitError::DoNotRestart(format!(
            "the member in {} was released (muster-agent release): its node runs without an agent. \
             For another member on this host, say another --data-dir",
            layout.root().display()
        )));
    }
    match read_adopted(layout).map_err(state_exit_error)? {
        Some(node) if node.stage == AdoptionStage::Enrolled => {
            Err(ExitError::DoNotRestart(format!(
                "the etcd of this host is not taken over yet, so this agent doesn't run it: say \
                 muster-agent adopt take-over --data-dir {}",
                layout.root().display()
            )))
        }
        _ => Ok(()),
    }
}

/// Prints a note to standard error.
fn note(text: &str, json: bool) {
    let text = printable(text);
    let line =
        if json { serde_json::json!({ "note": text }).to_string() } else { text.into_owned() };
    // If standard error is closed, the note is lost and the command goes on.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{line}\n").as_bytes());
}

/// Prints the result of a command.
fn print(printer: &mut Printer<'_>, text: &str) -> Result<(), ExitError> {
    printer.line(text).map_err(|error| ExitError::Failed(error.to_string()))
}

/// Repeats `look` until it returns `None`. While it returns a text, prints the text as a note.
/// After `patience`, fails with that text.
async fn wait_until(
    patience: Duration,
    json: bool,
    mut look: impl AsyncFnMut() -> Result<Option<String>, ExitError>,
) -> Result<(), ExitError> {
    let began = Instant::now();
    let (mut said, mut said_at) = (String::new(), began);
    while let Some(awaited) = look().await? {
        if began.elapsed() >= patience {
            let seconds = patience.as_secs();
            return Err(ExitError::Failed(format!("given up after {seconds} s: {awaited}")));
        }
        if awaited != said || said_at.elapsed() >= NOTE_INTERVAL {
            note(&format!("waiting: {awaited}"), json);
            (said, said_at) = (awaited, Instant::now());
        }
        sleep(CHECK_INTERVAL).await;
    }
    Ok(())
}

/// Waits until all members except the member `but` answer and are in sync.
async fn wait_until_all_in_sync(
    cluster: &ClusterApiClient,
    but: Option<MemberId>,
    patience: Duration,
    json: bool,
) -> Result<(), ExitError> {
    wait_until(patience, json, async || {
        Ok(match Survey::take(cluster).await {
            Ok(survey) => describe_unhealthy(&survey, but),
            Err(error) => Some(error_chain(&error)),
        })
    })
    .await
}
