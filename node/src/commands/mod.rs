//! Commands of `muster-node` other than running a member. They examine data directories, and save,
//! examine and restore snapshots. They also compare two clusters, and guide a move between them.
//! Results go to standard output, everything else to standard error.

mod cluster;
mod compare;
mod comparison;
mod connection;
mod data;
mod moving;
mod save;
mod snapshot;
mod users;

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
    /// Compare every key of two running clusters, and their users and roles.
    #[command(
        long_about = "Compares every key of two running clusters, each at one revision: value, \
            version, create and modification revision, and whether the key's lease exists. The keys \
            are read in pages, so memory stays small. The first differences are printed, without \
            values. Changes after the compared revision are counted, and don't count as differences. \
            Users, roles and permissions are compared as they are now, without passwords.",
        after_long_help = "EXIT CODES\n  \
            0  equal    1  different, or a cluster can't be read    2  wrong usage"
    )]
    Compare(Box<compare::CompareArgs>),
    /// Move a running cluster's data to another cluster, step by step.
    #[command(
        long_about = "Moves a running cluster's data to another cluster, from etcd to muster-node or \
            back. It checks that the source is healthy and takes no writes, saves its snapshot, and \
            prints the command that restores it on each host of the target. Then it waits until you \
            have started the target, compares every key, user and role, and says for how many \
            seconds the data was read-only. After an interruption, run it again: the snapshot file is found.",
        after_long_help = "STOPPING THE WRITES\n  \
            --freeze raises the source's NOSPACE alarm: no member takes puts any more, and clients \
            get `etcdserver: mvcc: database space exceeded`. Deletions are not stopped, but found: \
            then the move fails. `etcdctl alarm disarm` lets the source take writes again. The \
            target takes writes as soon as all is equal.\n\n\
            EXIT CODES\n  \
            0  moved    1  failed, or something differs    2  wrong usage"
    )]
    Move(Box<moving::MoveArgs>),
}

/// Returns clap's description of the commands other than running a member.
pub(crate) fn command() -> clap::Command {
    CommandLine::command()
}

/// Runs the command in `args`, which lack the program's name, and returns its exit code. Returns
/// `None` if `args` contain no command. In that case the caller runs a member.
#[must_use]
pub fn run(args: &[String]) -> Option<u8> {
    let command = args.first().map(String::as_str);
    if !matches!(command, Some("data" | "snapshot" | "compare" | "move")) {
        return None;
    }
    let args = std::iter::once("muster-node".to_owned()).chain(args.iter().cloned());
    Some(match CommandLine::try_parse_from(args) {
        Ok(CommandLine { command: ToolCommand::Data(command) }) => data::run(&command),
        Ok(CommandLine { command: ToolCommand::Snapshot(command) }) => snapshot::run(&command),
        Ok(CommandLine { command: ToolCommand::Compare(args) }) => compare::run(&args),
        Ok(CommandLine { command: ToolCommand::Move(args) }) => moving::run(&args),
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
