//! One event.

use crate::rules::Rules;
use crate::service::cluster::Cluster;
use crate::service::event::Event;
use crate::service::outcome::{Answer, Outcome};
use crate::service::settings::Settings;
use crate::values::{Hash, KeyId, Micros, Proposal};

/// What a step needs beside cluster, time and event.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// [`Rules::ALL`].
    pub rules: &'a Rules,
    /// Times and limits.
    pub settings: &'a Settings,
    /// The hash of a proposal: SHA-256 as the protocol writes it. Called at most once in a step.
    pub hash: &'a dyn Fn(&Proposal) -> Hash,
}

/// Applies one event to `cluster`, whose row is locked, at the database's time `now`.
pub fn step(cluster: &mut Cluster, context: &Context<'_>, now: Micros, event: Event) -> Outcome {
    let _ = (cluster, context.rules, context.settings, context.hash, now, event);
    todo!()
}

/// How `cluster` looks to `key`: the answer to a read-only poll.
#[must_use]
pub fn view(cluster: &Cluster, key: Option<KeyId>) -> Answer {
    let _ = (cluster, key);
    todo!()
}
