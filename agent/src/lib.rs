//! The agent, Muster's program on each host. It finds the other hosts through discovery, then runs
//! and supervises the node.
//!
//! The entry point, `main`, parses the command line and calls one file of `commands/`. The life of
//! a host is in `commands/run.rs`, which decides from the state on disk whether to enrol or to
//! operate.
//!
//! Each row uses only rows below it, and the files `endpoint`, `exit`, `retry` and `crash`.
//!
//! | module | owns |
//! |---|---|
//! | `commands/` | one file per command |
//! | `operate/` | a member's agent at work: supervision, reports, renewal of certificates, removal |
//! | `backup/` | backups of the cluster: their schedule, proof and stores |
//! | `recover/` | data left of a lost cluster; the choice of a survivor (`choose`, pure) |
//! | `adopt/` | an etcd that ran before its agent: how it runs, and who may restart it |
//! | `enrol/` | becoming a member: bundle, protocol, `bootstrap/` and `join/` |
//! | `steward/` | duties of a voter's agent for its cluster |
//! | `launch/` | the node's process: command line, launcher, supervisor |
//! | `observe/` | status, metrics and logs; the node's health and log; systemd |
//! | `cli/` | the command line as typed, and the settings that result from it |
//! | `plan/` | effect and next step of a membership change (pure) |
//! | `state/` | the files of the data directory: the journal, locks, the node's directory |
//! | `cluster/` | the Cluster API behind a node's client port |
//! | `probe/`, `host/` | the listener and the prober between agents; the machine behind one trait |

mod adopt;
mod backup;
mod cli;
mod cluster;
mod commands;
mod crash;
mod endpoint;
mod enrol;
pub mod exit;
mod host;
pub mod launch;
mod observe;
mod operate;
mod plan;
mod probe;
mod recover;
mod retry;
pub mod state;
mod steward;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use discovery_types::text::printable;

use crate::cli::{AgentCli, AgentCommand, AgentLogFormat};
use crate::commands::printer::Printer;
use crate::exit::ExitError;
use crate::launch::launcher;
use crate::observe::logging;

/// Returns the description of the command line, for manual pages and completions.
pub fn command() -> clap::Command {
    AgentCli::command()
}

/// Runs the program: parses the command line, runs one command, returns the exit code.
pub fn main() -> ExitCode {
    if std::env::args_os().any(|argument| holds_secret(&argument.to_string_lossy())) {
        // Check this before clap parses the arguments: clap's error messages would print the
        // secret.
        let text = "muster-agent: there is a secret on the command line, where every user of this \
                    host can read it: revoke it (muster-discovery token revoke), and hand the next \
                    one over in a file (--bundle-file FILE) or on standard input\n";
        let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
        return ExitCode::from(&ExitError::Usage(String::new()));
    }
    let command = AgentCli::parse().command;
    if let AgentCommand::LaunchNode(arguments) = &command {
        let (code, reason) = launcher::launch(arguments);
        // The agent logs the launcher's output; the launcher has no logger of its own.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{reason}\n").as_bytes());
        return ExitCode::from(code);
    }
    // Turn off core dumps, since they would contain private keys.
    let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, no_core);
    let json = command.is_for_programs();
    let logs = matches!(&command, AgentCommand::Run(run) if !run.check);
    match dispatch(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(end) => {
            let text = if json && logs {
                format!("{}\n", logging::exit_error_object(&end))
            } else if json {
                format!("{}\n", end.json())
            } else {
                format!("muster-agent: {}\n", printable(&end.to_string()))
            };
            let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
            ExitCode::from(&end)
        }
    }
}

/// Returns whether a command-line argument contains a join token or a private key.
fn holds_secret(argument: &str) -> bool {
    ["mst_boot_", "mst_join_", "mst_heal_", "PRIVATE KEY", "AGE-SECRET-KEY-"]
        .iter()
        .any(|secret| argument.contains(secret))
}

fn dispatch(command: AgentCommand) -> Result<(), ExitError> {
    let mut out = std::io::stdout();
    let mut printer = Printer::new(&mut out);
    match command {
        AgentCommand::Run(typed) if typed.check => {
            logging::start(&typed.log, typed.log_format)?;
            on_runtime(commands::check::run(*typed, &mut printer))
        }
        AgentCommand::Run(typed) => {
            logging::start(&typed.log, typed.log_format)?;
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .map_err(|error| ExitError::Failed(format!("can't start: {error}")))?;
            let result = runtime.block_on(commands::run::run(*typed));
            // A blocked thread (for example one that reads the node's log) must not delay the exit.
            runtime.shutdown_timeout(std::time::Duration::from_secs(1));
            result
        }
        AgentCommand::Status(typed) => on_runtime(commands::status::run(&typed, &mut printer)),
        AgentCommand::Recover(typed) => on_runtime(commands::recover::run(&typed, &mut printer)),
        AgentCommand::Adopt(typed) => {
            logging::start("info", AgentLogFormat::Text)?;
            on_runtime(commands::adopt::run(&typed, &mut printer))
        }
        AgentCommand::Release(typed) => {
            on_runtime(commands::adopt::release::run(&typed, &mut printer))
        }
        AgentCommand::Reset(typed) => commands::reset::run(&typed, &mut printer),
        AgentCommand::Address(typed) => commands::address::run(&typed, &mut printer),
        AgentCommand::Context(typed) => commands::context::run(&typed, &mut printer),
        AgentCommand::Member(typed) => on_runtime(commands::member::run(&typed, &mut printer)),
        AgentCommand::Policy(typed) => on_runtime(commands::policy::run(&typed, &mut printer)),
        AgentCommand::Backup(typed) => on_runtime(commands::backup::run(&typed, &mut printer)),
        AgentCommand::LaunchNode(arguments) => {
            Err(ExitError::Failed(launcher::launch(&arguments).1))
        }
    }
}

fn on_runtime<T>(work: impl Future<Output = Result<T, ExitError>>) -> Result<T, ExitError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| ExitError::Failed(format!("can't start: {error}")))?
        .block_on(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_private_keys_are_found_anywhere_in_an_argument() {
        assert!(holds_secret("muster1 urls=https://d:1 mst_boot_a_b_c"));
        assert!(holds_secret("-----BEGIN PRIVATE KEY-----"));
        assert!(!holds_secret("--bundle-file=/root/demo.bundle"));
    }
}
