//! What an agent must have on disk: plain data, written whole each time.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::rules::{Rule, Rules};
use crate::service::{EPOCH_DISTANCE, EPOCH_MAX};
use crate::values::{Document, Epoch, Hash, Incarnation, KeyId, Machine, Proposal, Record, quorum};

/// The agent's journal. Written to a temporary file, fsynced, renamed over the old one, and the
/// folder fsynced, before anything that depends on it is shown to anybody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    /// The agent's public key; the private one lies beside the journal and was fsynced before.
    pub key: KeyId,
    /// The node's incarnation: random, as old as the key.
    pub incarnation: Incarnation,
    /// The machine that both were made on.
    pub machine: Machine,
    /// How often this agent has started.
    pub boot: u64,
    /// What it says of itself, once it has said it.
    pub record: Option<Arc<Record>>,
    /// Every list that it signed, by epoch: `bound(e, h, L)`. Never pruned: the lists are few.
    pub bound: BTreeMap<Epoch, Bound>,
    /// It has promised never to be in a list of an epoch up to this one; 0 for none.
    pub released: Epoch,
    /// The document that it holds.
    pub held: Option<Arc<Document>>,
    /// The running cluster has added this incarnation: its node may start without a document, as
    /// one that comes later.
    pub admitted: bool,
    /// How far the first start has come.
    pub start: Start,
    /// The incarnation was removed from its cluster: it never runs again.
    pub tombstone: bool,
}

/// How far the node's first start has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Start {
    /// Not begun.
    NotYet,
    /// The marker is written; the node may have been executed.
    Launching,
    /// The node's own log has been seen.
    Ran,
}

/// A list that was signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The hash that was signed.
    pub h: Hash,
    /// Its members, seat 1 first: whom to ask for a release, and where.
    pub members: Vec<Member>,
}

/// One member of a signed list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its agent's key.
    pub key: KeyId,
    /// Its incarnation then.
    pub incarnation: Incarnation,
    /// Where it listened.
    pub peer_urls: Vec<String>,
}

impl Bound {
    /// The list of `proposal`, whose hash is `h`.
    #[must_use]
    pub fn to(proposal: &Proposal, h: Hash) -> Bound {
        let member = |record: &Arc<Record>| Member {
            key: record.key,
            incarnation: record.incarnation,
            peer_urls: record.peer_urls.clone(),
        };
        Bound { h, members: proposal.records.iter().map(member).collect() }
    }

    /// How many of its members must have released it before another list may be signed: one more
    /// than leaves a quorum that could still hold its document.
    #[must_use]
    pub fn releases_needed(&self, rules: &Rules) -> usize {
        let leaves_a_quorum = self.members.len() - quorum(self.members.len());
        leaves_a_quorum + usize::from(rules.on(Rule::EnoughReleases))
    }
}

impl Journal {
    /// A new agent's: key and incarnation just made, first start.
    #[must_use]
    pub fn new(key: KeyId, incarnation: Incarnation, machine: Machine) -> Journal {
        Journal {
            key,
            incarnation,
            machine,
            boot: 1,
            record: None,
            bound: BTreeMap::new(),
            released: 0,
            held: None,
            admitted: false,
            start: Start::NotYet,
            tombstone: false,
        }
    }

    /// The journal to persist at the next start, before the session is shown to anybody.
    #[must_use]
    pub fn rebooted(mut self) -> Journal {
        self.boot += 1;
        self
    }

    /// The highest epoch signed or released: what redeem and poll tell the service.
    #[must_use]
    pub fn highest_epoch(&self) -> Epoch {
        self.bound.keys().next_back().copied().unwrap_or(0).max(self.released)
    }

    /// The highest epoch that this agent follows the service to: what lies beyond was never
    /// reached by a cluster, and a promise about it could not be kept apart from "never again".
    #[must_use]
    pub fn epoch_limit(&self) -> Epoch {
        self.highest_epoch().saturating_add(EPOCH_DISTANCE).min(EPOCH_MAX)
    }

    /// What must hold of every journal, whatever came in; the name of the first thing that doesn't.
    #[must_use]
    pub fn broken(&self, rules: &Rules) -> Option<&'static str> {
        let bound = |held: &Document| {
            let bound = self.bound.get(&held.proposal.epoch);
            bound.is_some_and(|bound| bound.h == held.h)
        };
        let held = self.held.as_deref();
        let kept = rules.on(Rule::HoldAboveReleased) && rules.on(Rule::HeldReleasesNothing);
        let broken = [
            (
                rules.on(Rule::HoldWhatWasSigned) && held.is_some_and(|held| !bound(held)),
                "a document is held that was not signed",
            ),
            (
                kept && held.is_some_and(|held| held.proposal.epoch <= self.released),
                "a document is held that was released",
            ),
            (self.start != Start::NotYet && !self.may_launch(), "a node was launched from nothing"),
            (self.admitted && held.is_some(), "it began with the cluster, and came later"),
            (!self.bound.is_empty() && self.record.is_none(), "a list was signed without a record"),
            (self.boot == 0, "it was shown before the first start was counted"),
        ];
        broken.into_iter().find_map(|(is_broken, what)| is_broken.then_some(what))
    }

    /// Whether this incarnation is a member, so that its node may start.
    #[must_use]
    pub fn may_launch(&self) -> bool {
        self.held.is_some() || self.admitted
    }

    /// Whether the record may be replaced by another one (an address changed): not while a list
    /// with the old one could still be committed, nor after it was.
    #[must_use]
    pub fn may_change_record(&self) -> bool {
        !self.may_launch() && self.bound.keys().next_back().is_none_or(|&e| e <= self.released)
    }
}
