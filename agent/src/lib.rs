//! The agent, Muster's program on each host. It finds the other hosts through discovery, then runs
//! and supervises the node.
//!
//! | module | owns |
//! |---|---|
//! | `cli`, `settings` | the command line as typed, and the settings that result from it |
//! | `commands/` | one file per command |
//! | `state/` | the files of the data directory: the journal, locks, the node's directory |
//! | `host/`, `machine` | access to the machine behind one small trait; the facts that identify it |
//! | `bootstrap/` | drives the pure machine of `discovery-formation`: signatures, polls, probes |
//! | `probe/` | the listener and the prober between agents |
//! | `supervisor/`, `launcher`, `tail` | the node's process, its start, and its log |
//! | `door`, `cluster/` | a node's client port, and the Cluster API behind it |
//! | `plan/` | effect and next step of a membership change (pure) |
//! | `recover/` | the survivors of a lost cluster, and the choice of the one for a new cluster (pure) |
//! | `join/` | joining a running cluster with a ticket |
//! | `steward/`, `leaves` | duties of a voter's agent for its cluster; renewal of certificates |
//! | `removal` | what remains on the host of a removed member |
//! | `health`, `status`, `metrics` | the node's health; the agent's status and metrics |
//! | `service_manager` | readiness, status line and watchdog for systemd |

mod addressing;
mod bootstrap;
mod cli;
mod cluster;
mod commands;
mod crash;
mod door;
pub mod exit;
mod health;
mod host;
mod join;
mod joining;
mod keys;
mod launcher;
mod leaves;
mod logging;
mod machine;
mod metrics;
mod node_command;
mod place;
mod plan;
mod printer;
mod probe;
mod protocol;
mod recover;
mod removal;
mod report;
mod retry;
mod service_manager;
mod settings;
pub mod state;
mod status;
mod steward;
mod supervise;
pub mod supervisor;
mod tail;

use std::process::ExitCode;

use clap::Parser;
use discovery_types::text::printable;

use crate::cli::{AgentCli, AgentCommand};
use crate::exit::ExitError;
use crate::printer::Printer;

/// Runs the program: parses the command line, runs one command, returns the exit code.
pub fn main() -> ExitCode {
    if std::env::args_os().any(|argument| holds_secret(&argument.to_string_lossy())) {
        // Checked before clap parses: clap's error messages would print the secret.
        let text = "muster-agent: there is a secret on the command line, where every user of this \
                    host can read it: revoke it (muster-discovery token revoke), and hand the next \
                    one over in a file (--bundle-file FILE) or on standard input\n";
        let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
        return ExitCode::from(&ExitError::Usage(String::new()));
    }
    let command = AgentCli::parse().command;
    if let AgentCommand::LaunchNode(arguments) = &command {
        let (code, reason) = launcher::launch(arguments);
        // The agent logs what this prints; there is no logger here.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{reason}\n").as_bytes());
        return ExitCode::from(code);
    }
    // A core dump would contain private keys.
    let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, no_core);
    let (json, logs) = (command.is_for_programs(), matches!(command, AgentCommand::Run(_)));
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
    ["mst_boot_", "mst_join_", "PRIVATE KEY"].iter().any(|secret| argument.contains(secret))
}

fn dispatch(command: AgentCommand) -> Result<(), ExitError> {
    let mut out = std::io::stdout();
    let mut printer = Printer::new(&mut out);
    match command {
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
        AgentCommand::Recover(typed) => commands::recover::run(&typed, &mut printer),
        AgentCommand::Reset(typed) => commands::reset::run(&typed, &mut printer),
        AgentCommand::Member(typed) => on_runtime(commands::member::run(&typed, &mut printer)),
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
    fn tokens_and_private_keys_are_known_wherever_they_stand() {
        assert!(holds_secret("muster1 urls=https://d:1 mst_boot_a_b_c"));
        assert!(holds_secret("-----BEGIN PRIVATE KEY-----"));
        assert!(!holds_secret("--bundle-file=/root/demo.bundle"));
    }
}
