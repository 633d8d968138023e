//! `context set`: tells this host's agent where the discovery service is, by a service statement
//! that an owner signed.
//!
//! The command only writes the statement to a file for the agent. The agent reads that file, since
//! only the agent changes the statement that it follows. The command makes the agent's checks
//! beforehand, in order to tell a person at once what is wrong.

use std::io::Read;
use std::path::Path;

use discovery_types::service::{
    MAX_SERVICE_FILE, ServiceOrder, VerifiedService, find_service_line,
};
use discovery_types::statement::StatementChain;
use serde::Serialize;

use crate::cli::{ContextCommand, ContextSetArguments};
use crate::commands::printer::Printer;
use crate::exit::{ExitError, error_chain};
use crate::operate::service::CHECK_INTERVAL;
use crate::state::journal::{self, VerifiedJournal};
use crate::state::lock;
use crate::state::{Layout, service, state_exit_error};

/// The output of `--json`.
#[derive(Serialize)]
struct ContextOutput {
    /// Number of the service statement.
    sequence: u64,
    /// URLs of the service.
    urls: Vec<String>,
    /// Whether the agent followed this statement before.
    is_known: bool,
    /// Whether an agent runs here. If none runs, the next one reads the statement when it starts.
    agent_running: bool,
}

/// Runs the command `context`.
pub(crate) fn run(typed: &ContextCommand, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    match typed {
        ContextCommand::Set(typed) => set(typed, printer),
    }
}

fn set(typed: &ContextSetArguments, printer: &mut Printer<'_>) -> Result<(), ExitError> {
    let layout = Layout::new(&typed.data_dir.data_dir)
        .map_err(|error| ExitError::Usage(format!("--data-dir: {error}")))?;
    if !layout.root().is_dir() {
        return Err(ExitError::Failed(format!(
            "{}: no such folder; say where the state lies with --data-dir",
            layout.root().display()
        )));
    }
    let text = read(&typed.file)
        .map_err(|error| ExitError::Failed(format!("{}: {error}", typed.file.display())))?;
    let layout = layout.claim().map_err(state_exit_error)?;
    let (_, journal) =
        journal::read(&layout).map_err(state_exit_error)?.ok_or_else(|| no_member(&layout))?;
    let (found, chain) = verify(&text, &journal, &layout)?;
    let known = service::read_known(&layout, &chain);
    let order = found.compare(known.as_ref(), &chain);
    match (order, &known) {
        (ServiceOrder::Older | ServiceOrder::Conflict, Some(known)) => {
            return Err(ExitError::Failed(format!(
                "the statement has the number {}, and this host's agent follows another one with \
                 the number {}. An owner announces again: muster-discovery service announce … \
                 --out FILE",
                found.sequence(),
                known.sequence()
            )));
        }
        (ServiceOrder::Same, _) => {}
        (_, _) => service::write_offer(&layout, &found).map_err(state_exit_error)?,
    }
    let agent_running = lock::holder(&layout.agent_lock()).map_err(state_exit_error)?.is_some();
    let urls: Vec<String> = found.statement().urls.iter().map(ToString::to_string).collect();
    let is_known = order == ServiceOrder::Same;
    let text = if typed.json {
        let sequence = found.sequence();
        serde_json::to_string(&ContextOutput { sequence, urls, is_known, agent_running })
            .map_err(|error| ExitError::Failed(error.to_string()))?
    } else {
        let when = match (is_known, agent_running) {
            (true, _) => "The agent follows it already".to_owned(),
            (false, true) => {
                format!("The running agent takes it within {} s", CHECK_INTERVAL.as_secs())
            }
            (false, false) => "The agent takes it at its next start".to_owned(),
        };
        format!("Discovery is at {} (number {}). {when}.", urls.join(", "), found.sequence())
    };
    printer.line(&text).map_err(|error| ExitError::Failed(error.to_string()))
}

/// Reads a file of service statements, or standard input (`-`).
fn read(file: &Path) -> std::io::Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().take(MAX_SERVICE_FILE).read_to_string(&mut text)?;
        return Ok(text);
    }
    let bytes = muster_files::read_named(file, MAX_SERVICE_FILE)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Finds the service statement of this cluster in `text`, and verifies it with the journalled
/// statement chain.
fn verify(
    text: &str,
    journal: &VerifiedJournal,
    layout: &Layout,
) -> Result<(VerifiedService, StatementChain), ExitError> {
    let join = journal.extras.join.as_ref().filter(|_| journal.document.is_some());
    let join = join.ok_or_else(|| no_member(layout))?;
    let failed = |error: &dyn std::error::Error| ExitError::Failed(error_chain(error));
    let chain = StatementChain::verify_from_pin(&journal.extras.statements, &join.statement)
        .map_err(|error| failed(&error))?;
    let jws = find_service_line(text, join.cluster).map_err(|error| failed(&error))?;
    let found = VerifiedService::verify(&jws, &chain).map_err(|error| {
        ExitError::Failed(format!(
            "{}. Only an owner of the statement that this host knows may sign it",
            error_chain(&error)
        ))
    })?;
    Ok((found, chain))
}

fn no_member(layout: &Layout) -> ExitError {
    ExitError::Failed(format!(
        "{}: this host is no member yet: give it a new join bundle (muster-agent run --bundle-file \
         FILE)",
        layout.root().display()
    ))
}
