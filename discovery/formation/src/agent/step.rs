//! One agent, one event.

use std::collections::BTreeMap;

use crate::agent::event::{Event, Offer, Output, ProbeAnswer};
use crate::agent::journal::Journal;
use crate::rules::Rules;
use crate::service::Row;
use crate::values::{Epoch, KeyId, Millis, Session};

/// How far this host's clock may be off the service's (S4).
pub const SKEW_ALLOWED: Millis = Millis(30_000);

/// How long a proposal may wait for releases before the agent says so (S6): half of the time that
/// the service waits for acks.
pub const PATIENCE: Millis = Millis(30_000);

/// One running agent: its journal as it is on disk, and what a restart forgets.
#[derive(Clone, Debug)]
pub struct Agent {
    /// As on disk, once the last [`Output::durable`] is.
    pub journal: Journal,
    /// This run.
    pub session: Session,
    /// The proposal that is being looked at.
    considered: Option<Considered>,
    /// Others' releases, verified: the highest of each.
    releases: BTreeMap<KeyId, Epoch>,
}

#[derive(Clone, Debug)]
struct Considered {
    offer: Box<Offer>,
    row: Row,
    answered: bool,
}

impl Agent {
    /// An agent that has decided to go on at its start; `journal` is on disk with this boot counter.
    #[must_use]
    pub fn new(journal: Journal, nonce: u128) -> Agent {
        let session = Session { boot: journal.boot, nonce };
        Agent { journal, session, considered: None, releases: BTreeMap::new() }
    }

    /// Applies one event.
    pub fn step(&mut self, rules: &Rules, event: Event) -> Output {
        let _ = (rules, event, &self.considered, &self.releases);
        todo!()
    }

    /// Whether it listens for probes: from before its first redeem until the launch.
    #[must_use]
    pub fn listens(&self) -> bool {
        todo!()
    }

    /// The answer to a probe by `asker` (the key of its TLS certificate): none, and the connection
    /// is closed, unless it is in the proposal or in a list that this agent signed.
    #[must_use]
    pub fn answer_probe(&self, asker: KeyId) -> Option<ProbeAnswer> {
        let _ = asker;
        todo!()
    }
}
