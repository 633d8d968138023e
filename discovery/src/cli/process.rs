//! `process`: lists the discovery processes that share the database, and declares lost ones
//! forgotten.

use clap::Subcommand;
use discovery_types::api::{ProcessList, ProcessView};
use uuid::Uuid;

use super::confirm::IrreversibleAct;
use super::printer::{Printer, time};
use super::session::AdminSession;
use super::{CliError, RemoteArgs};

#[derive(Debug, clap::Args)]
pub(super) struct ProcessArgs {
    #[command(flatten)]
    pub(super) remote: RemoteArgs,
    #[command(subcommand)]
    command: ProcessCommand,
}

#[derive(Debug, Subcommand)]
enum ProcessCommand {
    /// List the processes that use, or used, the database
    List,
    /// Declare that a process won't come back, so that the service stops waiting for its ledger
    #[command(after_help = "\
Example:
  muster-discovery process forget 01a1fe71-a005-71eb-9397-f0632e0d7b61 --yes

Use it only once the process's ledger is lost for good: commits that the database has lost can't be
put back from the ledger after this. If the ledger file still exists, start a process on it instead.")]
    Forget {
        /// The process's id, as `process list` prints it
        id: Uuid,
        /// Skip the confirmation prompt
        #[arg(long)]
        yes: bool,
    },
}

pub(super) async fn run(args: ProcessArgs, printer: &mut Printer) -> Result<(), CliError> {
    let session = AdminSession::open(&args.remote)?;
    let list = match args.command {
        ProcessCommand::List => session.client.list_processes().await?,
        ProcessCommand::Forget { id, yes } => {
            let ends = vec![describe_loss(&session.client.list_processes().await?, id)?];
            IrreversibleAct { consequences: ends, name: &id.to_string() }.confirm(yes, printer)?;
            session.client.forget_process(id).await?
        }
    };
    show(printer, &list)
}

/// Describes which commits could be lost by forgetting a process.
fn describe_loss(list: &ProcessList, id: Uuid) -> Result<String, CliError> {
    let Some(process) = list.processes.iter().find(|process| process.id == id) else {
        let none = format!("there is no process {id}: muster-discovery process list");
        return Err(CliError::Usage(none));
    };
    let counted = process.ledger_entries;
    let holds = match process.missing {
        true => {
            format!(
                "Its ledger may hold commits that this database has lost, beside {counted} known"
            )
        }
        false => format!("Its ledger holds {counted} commit(s)"),
    };
    Ok(format!(
        "{holds}; they can't be put back from it once it is forgotten. It was last seen {}.",
        time(process.last_seen_ms)
    ))
}

/// Formats the number of commits in a process's ledger. In a restored database the number can be
/// too low.
fn format_commit_count(process: &ProcessView) -> String {
    match process.missing {
        true => format!("{} or more", process.ledger_entries),
        false => process.ledger_entries.to_string(),
    }
}

/// Formats a process's state. A running process is seen at each of its sweeps, more often than once
/// a minute.
fn state(process: &ProcessView, now_ms: i64) -> String {
    const SILENT_MS: i64 = 60_000;
    let silent_ms = now_ms.saturating_sub(process.last_seen_ms);
    match (process.forgotten_at_ms, process.missing, process.answering) {
        (Some(_), ..) => "forgotten".into(),
        (None, true, _) => "missing".into(),
        (None, false, true) => "answering".into(),
        (None, false, false) if silent_ms >= SILENT_MS => {
            format!("silent for {}", rounded(silent_ms / 1_000))
        }
        (None, false, false) => "running".into(),
    }
}

/// Formats a duration with one unit: `90 s`, `12 min`, `5 h`, `3 d`.
fn rounded(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

fn show(printer: &mut Printer, list: &ProcessList) -> Result<(), CliError> {
    // Use the service's clock: the process that answered was seen at the time of its answer.
    let now_ms = list.processes.iter().map(|process| process.last_seen_ms).max().unwrap_or(0);
    printer.print_value(list, |out| {
        let rows = list.processes.iter().map(|process| {
            [
                process.id.to_string(),
                state(process, now_ms),
                format_commit_count(process),
                time(process.first_seen_ms),
                time(process.last_seen_ms),
            ]
        });
        out.table(["PROCESS", "STATE", "COMMITS", "FIRST SEEN", "LAST SEEN"], rows);
    })?;
    match &list.explain {
        Some(explain) if !list.settled => printer.warn(explain),
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_not_seen_for_a_minute_is_shown_as_silent() {
        let process = |last_seen_ms| ProcessView {
            id: Uuid::nil(),
            answering: false,
            ledger_entries: 1,
            first_seen_ms: 0,
            last_seen_ms,
            missing: false,
            forgotten_at_ms: None,
        };
        let now = 1_000_000_000;
        assert_eq!(state(&process(now - 30_000), now), "running");
        assert_eq!(state(&process(now - 90_000), now), "silent for 90 s");
        assert_eq!(state(&process(now - 3 * 3_600_000), now), "silent for 3 h");
        let forgotten = ProcessView { forgotten_at_ms: Some(now), ..process(0) };
        assert_eq!(state(&forgotten, now), "forgotten");
    }
}
