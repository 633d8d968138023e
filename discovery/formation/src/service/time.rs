//! What time does to a cluster.

use crate::service::cluster::Cluster;
use crate::service::settings::Settings;
use crate::values::Micros;

/// When to step `cluster` with [`Event::Tick`](super::Event::Tick) next, if nothing else happens.
#[must_use]
pub fn next_deadline(cluster: &Cluster, settings: &Settings) -> Option<Micros> {
    let _ = (cluster, settings);
    todo!()
}
