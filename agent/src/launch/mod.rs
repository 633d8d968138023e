//! The node's process: how it is started, kept running and stopped, across restarts of the agent.

pub mod environment;
pub(crate) mod launcher;
pub(crate) mod node_command;
pub mod process;
pub mod restart_policy;
pub mod running_node;
pub mod supervisor;
