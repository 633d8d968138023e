//! What `muster-node` does besides running a member: it looks at data directories, and saves, shows
//! and restores snapshots. Results go to standard output, everything else to standard error.

mod data;
mod save;
mod snapshot;

use std::{
    fmt::Write as _,
    io::{self, Write as _},
};

use clap::{Parser, Subcommand};

use crate::causes::chain;

/// It failed; trying again may help.
const FAILED: u8 = 1;
/// The command line is wrong.
const USAGE: u8 = 2;

#[derive(Debug, Parser)]
#[command(name = "muster-node", disable_version_flag = true, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Tool,
}

#[derive(Debug, Subcommand)]
enum Tool {
    /// Look at a data directory.
    #[command(subcommand)]
    Data(data::Data),
    /// Save, look at and restore snapshots, in etcd's format.
    #[command(subcommand)]
    Snapshot(snapshot::Snapshot),
}

/// Runs the command that `args` (without the program's name) ask for, and returns the exit code;
/// `None` if they ask for none, but for a member.
#[must_use]
pub fn run(args: &[String]) -> Option<u8> {
    if !matches!(args.first().map(String::as_str), Some("data" | "snapshot")) {
        return None;
    }
    let args = std::iter::once("muster-node".to_owned()).chain(args.iter().cloned());
    Some(match Cli::try_parse_from(args) {
        Ok(Cli { command: Tool::Data(command) }) => data::run(&command),
        Ok(Cli { command: Tool::Snapshot(command) }) => snapshot::run(&command),
        Err(error) => {
            let code = if error.use_stderr() { USAGE } else { 0 };
            // There is nowhere left to say that it failed.
            let _ = error.print();
            code
        }
    })
}

/// One line, or one JSON document, on standard output.
fn print(text: &str) -> u8 {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => 0,
        // Whoever reads us has had enough (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => 0,
        Err(_) => FAILED,
    }
}

/// Says why it failed.
fn complain(error: &(dyn std::error::Error + 'static)) {
    say(&format!("Error: {}", chain(error)));
}

/// One line on standard error.
fn say(text: &str) {
    // There is nowhere left to say that it failed.
    let _ = writeln!(io::stderr(), "{text}");
}

/// `name: value`, one a line.
#[derive(Default)]
struct Lines(String);

impl Lines {
    fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{name:<20} {value}");
    }

    fn some(&mut self, name: &str, value: Option<impl std::fmt::Display>) {
        if let Some(value) = value {
            self.add(name, value);
        }
    }
}
