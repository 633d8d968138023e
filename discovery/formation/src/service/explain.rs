//! Every wait explains itself.

use crate::service::cluster::Cluster;
use crate::service::settings::Settings;
use crate::values::{KeyId, Micros};

/// One thing that the cluster waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// A stable name for programs.
    pub code: &'static str,
    /// The agents that hold it up.
    pub who: Vec<KeyId>,
    /// What is missing: one sentence, with names.
    pub what: String,
    /// The last error about it.
    pub last_error: Option<String>,
    /// When it is tried or judged again.
    pub next: Option<Micros>,
    /// The command to run, or what to do.
    pub way_out: String,
}

/// What `cluster` waits for, most important first; empty if for nothing.
#[must_use]
pub fn explain(cluster: &Cluster, settings: &Settings, now: Micros) -> Vec<Line> {
    let _ = (cluster, settings, now);
    todo!()
}
