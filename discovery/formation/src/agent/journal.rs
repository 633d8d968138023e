//! The agent's journal: state that must be on disk, as plain data that is written whole each time.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::rules::{Rule, Rules};
use crate::service::{MAX_EPOCH, MAX_EPOCH_DISTANCE};
use crate::values::{
    AgentKey, AgentRecord, CommitDocument, Epoch, Hash, Incarnation, MachineIdentity, ProposedList,
    quorum,
};

/// Durable state of an agent. Each version is written to a temporary file, fsynced, and renamed
/// over the previous version; then the folder is fsynced. Before that, the agent sends nothing that
/// depends on the new version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    /// Public key of the agent. The private key lies beside the journal and was fsynced before it.
    pub key: AgentKey,
    /// Incarnation of the node: random, and made together with the key.
    pub incarnation: Incarnation,
    /// Machine on which the agent made its key and its incarnation.
    pub machine: MachineIdentity,
    /// Number of times that this agent has started.
    pub boot: u64,
    /// Record that the agent sends about itself; `None` until the first one is built.
    pub record: Option<Arc<AgentRecord>>,
    /// Every list of members that the agent signed, by epoch. Never pruned, since the lists are
    /// few.
    pub signed_lists: BTreeMap<Epoch, SignedList>,
    /// Highest epoch of which the agent has signed a release; 0 for none. The agent has promised
    /// never to be in a list of members of this epoch or a lower one.
    pub released_epoch: Epoch,
    /// Commit document that the agent holds: it makes the agent a member.
    pub held_document: Option<Arc<CommitDocument>>,
    /// Whether the running cluster has added this incarnation. Its node may then start without a
    /// commit document, as a member that joins later.
    pub is_admitted: bool,
    /// Progress of the node's first start.
    pub launch_state: LaunchState,
    /// Whether the incarnation was removed from its cluster, so that it never runs again.
    pub is_removed: bool,
}

/// Progress of a node's first start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LaunchState {
    /// The node's first start has not begun.
    NotStarted,
    /// The marker file is written, and the node's program may have been started.
    Launching,
    /// The agent has seen that the node created its Raft log. From now on the node starts from that
    /// log.
    Ran,
}

/// List of members that this agent has signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedList {
    /// Hash of the proposal that was signed.
    pub proposal_hash: Hash,
    /// Members of the list, seat 1 first: the agents to ask for a release, with their addresses.
    pub members: Vec<SignedListMember>,
}

/// One member of a signed list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedListMember {
    /// Key of the member's agent.
    pub key: AgentKey,
    /// Incarnation of the member when the list was signed.
    pub incarnation: Incarnation,
    /// Peer URLs of the member when the list was signed.
    pub peer_urls: Vec<String>,
}

impl SignedList {
    /// Returns the members of `proposal`, whose hash is `h`, as a signed list.
    #[must_use]
    pub fn from_proposal(proposal: &ProposedList, h: Hash) -> SignedList {
        let member = |record: &Arc<AgentRecord>| SignedListMember {
            key: record.key,
            incarnation: record.incarnation,
            peer_urls: record.peer_urls.clone(),
        };
        SignedList { proposal_hash: h, members: proposal.records.iter().map(member).collect() }
    }

    /// Number of the list's members that must have signed a release before the agent may sign
    /// another list. Then fewer members than a quorum can still hold the commit document of this
    /// list.
    #[must_use]
    pub fn releases_needed(&self, rules: &Rules) -> usize {
        let leaves_a_quorum = self.members.len() - quorum(self.members.len());
        leaves_a_quorum + usize::from(rules.is_on(Rule::EnoughReleases))
    }
}

impl Journal {
    /// Returns the journal of a new agent at its first start; key and incarnation were just made.
    #[must_use]
    pub fn new(key: AgentKey, incarnation: Incarnation, machine: MachineIdentity) -> Journal {
        Journal {
            key,
            incarnation,
            machine,
            boot: 1,
            record: None,
            signed_lists: BTreeMap::new(),
            released_epoch: 0,
            held_document: None,
            is_admitted: false,
            launch_state: LaunchState::NotStarted,
            is_removed: false,
        }
    }

    /// Returns the journal with the boot counter of the next start. The agent persists it before it
    /// sends the new session to anybody.
    #[must_use]
    pub fn with_next_boot(mut self) -> Journal {
        self.boot += 1;
        self
    }

    /// Highest epoch of which the agent has signed a list or a release; 0 for none. The agent
    /// reports it to the service in each redeem and poll.
    #[must_use]
    pub fn highest_epoch(&self) -> Epoch {
        self.signed_lists.keys().next_back().copied().unwrap_or(0).max(self.released_epoch)
    }

    /// Highest epoch that this agent accepts from the service. An honest service proposes no higher
    /// one. Without this limit, a hostile service could ask for a release of the highest possible
    /// epoch. The agent could then never sign a list again.
    #[must_use]
    pub fn epoch_limit(&self) -> Epoch {
        self.highest_epoch().saturating_add(MAX_EPOCH_DISTANCE).min(MAX_EPOCH)
    }

    /// Checks the conditions that every journal fulfils after any events. Returns the first one
    /// that doesn't hold.
    #[must_use]
    pub fn violated_invariant(&self, rules: &Rules) -> Option<&'static str> {
        let bound = |held: &CommitDocument| {
            let bound = self.signed_lists.get(&held.proposal.epoch);
            bound.is_some_and(|bound| bound.proposal_hash == held.proposal_hash)
        };
        let held = self.held_document.as_deref();
        let kept = rules.is_on(Rule::HoldAboveReleased) && rules.is_on(Rule::HeldReleasesNothing);
        let broken = [
            (
                rules.is_on(Rule::HoldWhatWasSigned) && held.is_some_and(|held| !bound(held)),
                "a document is held that was not signed",
            ),
            (
                kept && held.is_some_and(|held| held.proposal.epoch <= self.released_epoch),
                "a document is held that was released",
            ),
            (
                self.launch_state != LaunchState::NotStarted && !self.may_launch(),
                "a node was launched from nothing",
            ),
            (self.is_admitted && held.is_some(), "it began with the cluster, and came later"),
            (
                !self.signed_lists.is_empty() && self.record.is_none(),
                "a list was signed without a record",
            ),
            (self.boot == 0, "it was shown before the first start was counted"),
        ];
        broken.into_iter().find_map(|(is_broken, what)| is_broken.then_some(what))
    }

    /// Whether this incarnation is a member, so that its node may start.
    #[must_use]
    pub fn may_launch(&self) -> bool {
        self.held_document.is_some() || self.is_admitted
    }

    /// Whether the agent may replace its record, for instance by one with a new address. The agent
    /// must keep the old record while a list with that record can still be committed, and after
    /// such a commit.
    #[must_use]
    pub fn may_change_record(&self) -> bool {
        !self.may_launch()
            && self.signed_lists.keys().next_back().is_none_or(|&e| e <= self.released_epoch)
    }
}
