//! Commands of `muster-node` other than running a member. They examine data directories, and save,
//! examine and restore snapshots. Results go to standard output, everything else to standard error.

mod connection;
mod data;
mod save;
mod snapshot;

use std::{
    fmt::Write as _,
    io::{self, Write as _},
};

use clap::{CommandFactory as _, Parser, Subcommand};

use node_engine::causes::error_chain;

/// Exit code of a failed command. Running it again may help.
const FAILED: u8 = 1;
/// Exit code of a wrong command line.
const USAGE: u8 = 2;

#[derive(Debug, Parser)]
#[command(name = "muster-node", disable_version_flag = true, args_override_self = true)]
struct CommandLine {
    #[command(subcommand)]
    command: ToolCommand,
}

#[derive(Debug, Subcommand)]
enum ToolCommand {
    /// Examine a data directory, or recover a cluster from it.
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Save, examine and restore snapshots, in etcd's format.
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
}

/// Returns the description of these commands.
pub(crate) fn command() -> clap::Command {
    CommandLine::command()
}

/// Runs the command in `args`, which lack the program's name, and returns its exit code. Returns
/// `None` if `args` contain no command. In that case the caller runs a member.
#[must_use]
pub fn run(args: &[String]) -> Option<u8> {
    if !matches!(args.first().map(String::as_str), Some("data" | "snapshot")) {
        return None;
    }
    let args = std::iter::once("muster-node".to_owned()).chain(args.iter().cloned());
    Some(match CommandLine::try_parse_from(args) {
        Ok(CommandLine { command: ToolCommand::Data(command) }) => data::run(&command),
        Ok(CommandLine { command: ToolCommand::Snapshot(command) }) => snapshot::run(&command),
        Err(error) => {
            let code = if error.use_stderr() { USAGE } else { 0 };
            // If printing fails, there is no other place to report that.
            let _ = error.print();
            code
        }
    })
}

/// Prints a line or a JSON document on standard output, and returns the exit code.
fn print(text: &str) -> u8 {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => 0,
        // A reader such as `| head` has closed the pipe, which is no failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => 0,
        Err(_) => FAILED,
    }
}

/// Prints an error with its causes on standard error.
fn print_error(error: &(dyn std::error::Error + 'static)) {
    print_to_stderr(&format!("Error: {}", error_chain(error)));
}

/// Prints a line on standard error.
fn print_to_stderr(text: &str) {
    // If printing fails, there is no other place to report that.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Lines of the form `name value`, with the values aligned in a column.
#[derive(Default)]
struct AlignedLines(String);

impl AlignedLines {
    fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{name:<20} {value}");
    }

    fn add_if_present(&mut self, name: &str, value: Option<impl std::fmt::Display>) {
        if let Some(value) = value {
            self.add(name, value);
        }
    }
}
