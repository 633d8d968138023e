//! The view of this host from outside: status, metrics, logs, the service manager, and the health
//! and the log of the node.

pub(crate) mod backup;
pub(crate) mod contact;
pub(crate) mod health;
pub(crate) mod logging;
pub(crate) mod metrics;
pub(crate) mod node_log;
pub(crate) mod service_manager;
pub(crate) mod status;
