//! A Raft key-value node with etcd's v3 API: its configuration, start and stop, recovery, and
//! commands.

pub mod commands;
pub mod config;
pub mod logging;
pub mod recovery;
pub mod server;

/// Returns the description of the command line, for manual pages and completions.
#[must_use]
pub fn command() -> clap::Command {
    config::describe(commands::command())
}
