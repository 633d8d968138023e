//! Applies one event to one agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::agent::event::{
    AgentAction, AgentEvent, AgentOutput, ClusterStatus, ProbeAnswer, ProposalObjection,
};
use crate::agent::journal::{Journal, LaunchState};
use crate::agent::offers::PendingProposal;
use crate::agent::sign;
use crate::rules::{Rule, Rules};
use crate::service::{Phase, RefusalCode};
use crate::values::{AgentKey, AgentRecord, AgentSession, Epoch, Millis};

/// Largest difference between this host's clock and the service's that signing rule S4 of `sign.rs`
/// allows.
pub const MAX_CLOCK_SKEW: Millis = Millis(30_000);

/// Returns how long a proposal may wait for releases (rule S6 of `sign.rs`) before the agent
/// refuses it. The service gives the proposal up after `left`. Half of that time remains for the
/// refusal to arrive.
#[must_use]
pub fn release_wait_limit(left: Millis) -> Millis {
    Millis(left.0 / 2)
}

/// Exit code for a fault that a person has to fix.
pub(super) const EXIT_FAILED: u8 = 1;
/// Exit code for a state that no restart changes.
const EXIT_FOR_GOOD: u8 = 3;

/// One running agent: its journal as it is on disk, and the state that a restart forgets.
#[derive(Clone, Debug)]
pub struct Agent {
    /// Journal, equal to the one on disk once the last [`AgentOutput::journal`] is written.
    pub journal: Journal,
    /// Session of this run of the agent.
    pub session: AgentSession,
    /// Proposal that the agent is deciding on.
    pub(super) pending_proposal: Option<PendingProposal>,
    /// Verified releases of other agents. Each value is the agent's highest released epoch.
    pub(super) releases: BTreeMap<AgentKey, Epoch>,
}

impl Agent {
    /// Creates the agent at its start. The caller has written `journal` to disk with the boot
    /// counter of this start. `nonce` is random and new.
    #[must_use]
    pub fn new(journal: Journal, nonce: u128) -> Agent {
        let session = AgentSession { boot: journal.boot, nonce };
        Agent { journal, session, pending_proposal: None, releases: BTreeMap::new() }
    }

    /// Applies one event. If `self.journal` changes, [`AgentOutput::journal`] is a copy of it. If
    /// the caller can't write that copy to disk, it must throw this agent away and end the process.
    pub fn step(&mut self, rules: &Rules, event: AgentEvent) -> AgentOutput {
        let mut output = AgentOutput::default();
        match event {
            AgentEvent::RecordReady(record) => self.handle_record(record, &mut output),
            AgentEvent::StatusReceived(shown) => self.handle_status(rules, shown, &mut output),
            AgentEvent::ProposalReceived(offer) => self.handle_proposal(rules, offer, &mut output),
            AgentEvent::ProbeEnded { epoch, peer, result } => {
                self.handle_probe_result(rules, epoch, peer, result, &mut output);
            }
            AgentEvent::ReleaseSeen { key, epoch } => {
                self.note_release(key, epoch);
                self.try_to_sign(rules, false, &mut output);
            }
            AgentEvent::ReleaseTimeout { epoch } => {
                self.handle_release_timeout(rules, epoch, &mut output)
            }
            AgentEvent::DocumentReceived { document, machine } => {
                self.handle_document(rules, document, &machine, &mut output);
            }
            AgentEvent::Admitted => self.handle_admission(&mut output),
            AgentEvent::DirectoryExamined(directory) => {
                self.handle_directory(rules, &directory, &mut output)
            }
            AgentEvent::MarkerWritten => {
                if self.journal.may_launch() && self.journal.launch_state == LaunchState::NotStarted
                {
                    self.launch(rules, &mut output);
                }
            }
            AgentEvent::LogSeen => {
                if self.journal.launch_state != LaunchState::Ran {
                    self.journal.launch_state = LaunchState::Ran;
                    self.persist(&mut output);
                }
                output.actions.push(AgentAction::Report);
            }
            AgentEvent::RequestRefused { code, retryable } => {
                self.handle_refusal(code, retryable, &mut output)
            }
            AgentEvent::TombstoneSeen => {
                self.journal.is_removed = true;
                self.persist(&mut output);
                let reason = "this member was removed from its cluster".to_owned();
                output.actions.push(AgentAction::Stop { exit: EXIT_FOR_GOOD, reason });
            }
        }
        let broken = self.journal.violated_invariant(rules);
        assert_eq!(broken, None, "an agent must not go on, nor write such a journal");
        output
    }

    /// Whether the agent listens for probes on the node's peer address: from before its first
    /// redeem until the launch.
    #[must_use]
    pub fn is_listening(&self) -> bool {
        self.journal.launch_state == LaunchState::NotStarted && !self.journal.is_removed
    }

    /// Answers a probe by `asker`, the key of its TLS certificate. `None` closes the connection:
    /// `asker` is neither in the proposal nor in a list of members that this agent signed, or the
    /// agent no longer listens.
    #[must_use]
    pub fn answer_probe(&self, asker: AgentKey) -> Option<ProbeAnswer> {
        let proposed = self
            .pending_proposal
            .as_ref()
            .is_some_and(|considered| considered.offer.proposal.seat_of(asker).is_some());
        let signed = || {
            let mut members = self.journal.signed_lists.values().flat_map(|bound| &bound.members);
            members.any(|member| member.key == asker)
        };
        (self.is_listening() && (proposed || signed())).then_some(ProbeAnswer {
            key: self.journal.key,
            incarnation: self.journal.incarnation,
            released_epoch: self.journal.released_epoch,
        })
    }

    /// Returns the objection by rule S6 of `sign.rs`, with the releases that the agent waits for
    /// before it signs the present proposal.
    #[must_use]
    pub fn unmet_release_condition(&self, rules: &Rules) -> Option<ProposalObjection> {
        let considered =
            self.pending_proposal.as_ref().filter(|considered| !considered.is_answered)?;
        sign::check_s6_releases(rules, &self.journal, &considered.offer, &self.releases).err()
    }

    pub(super) fn persist(&self, output: &mut AgentOutput) {
        output.journal = Some(Box::new(self.journal.clone()));
    }

    fn handle_record(&mut self, record: Arc<AgentRecord>, output: &mut AgentOutput) {
        let known = self.journal.record.as_ref().map(|known| known.hash);
        if known.is_none() || (known != Some(record.hash) && self.journal.may_change_record()) {
            self.journal.record = Some(record);
            self.persist(output);
        }
        output.actions.push(AgentAction::Redeem);
    }

    fn handle_status(&mut self, rules: &Rules, shown: ClusterStatus, output: &mut AgentOutput) {
        if matches!(shown.phase, Phase::Open | Phase::Preparing) {
            self.release_epochs_below(rules, shown.epoch, output);
            let is_obsolete = |considered: &mut PendingProposal| {
                considered.offer.proposal.epoch < shown.epoch || shown.phase == Phase::Open
            };
            self.pending_proposal.take_if(is_obsolete);
        }
        if let (Some(held), true) = (&self.journal.held_document, shown.wants_document) {
            output.actions.push(AgentAction::SendDocument { h: held.proposal_hash });
        }
    }

    /// Releases all epochs below `epoch`, the epoch in the service's answer. A release is a promise
    /// never to sign a list of a released epoch, nor to hold its commit document. An agent that
    /// holds a document releases nothing, and an epoch above [`Journal::epoch_limit`] is ignored.
    pub(super) fn release_epochs_below(
        &mut self,
        rules: &Rules,
        epoch: Epoch,
        output: &mut AgentOutput,
    ) {
        let holds = self.journal.held_document.is_some() && rules.is_on(Rule::HeldReleasesNothing);
        let below = epoch.saturating_sub(1);
        if holds || below <= self.journal.released_epoch || epoch > self.journal.epoch_limit() {
            return;
        }
        self.journal.released_epoch = below;
        self.persist(output);
        output.actions.push(AgentAction::SignRelease { epoch: below });
    }

    fn handle_refusal(
        &mut self,
        code: Option<RefusalCode>,
        retryable: bool,
        output: &mut AgentOutput,
    ) {
        if self.journal.launch_state != LaunchState::NotStarted {
            return;
        }
        if let Some(held) = &self.journal.held_document {
            // The held commit document makes this agent a member, even if the service doesn't know
            // that. So no refusal ends the agent.
            if let Some(
                RefusalCode::BootClosed | RefusalCode::Abandoned | RefusalCode::UnknownKey,
            ) = code
            {
                output.actions.push(AgentAction::SendDocument { h: held.proposal_hash });
            }
            return;
        }
        let stop = |exit, reason: &str| AgentAction::Stop { exit, reason: reason.to_owned() };
        output.actions.push(match code {
            Some(RefusalCode::UnknownKey) => AgentAction::Redeem,
            Some(
                RefusalCode::BootClosed
                | RefusalCode::Expired
                | RefusalCode::Abandoned
                | RefusalCode::Retired,
            ) => stop(EXIT_FOR_GOOD, "the cluster has no place for this host"),
            // Two hosts use this key, because one has a copy of the other's disk. The agent must
            // not be restarted: after each restart, one host would take the key over from the
            // other.
            Some(RefusalCode::KeyElsewhere) => {
                stop(EXIT_FOR_GOOD, "another session holds this agent's key: this host is a copy")
            }
            // Refusals of the token, the record or the statement: only a person can resolve them,
            // with another bundle or another address.
            Some(
                RefusalCode::GrantUnknown
                | RefusalCode::GrantExpired
                | RefusalCode::GrantRevoked
                | RefusalCode::GrantBinding
                | RefusalCode::GrantExhausted
                | RefusalCode::RecordRefused
                | RefusalCode::StatementRefused,
            ) => stop(EXIT_FOR_GOOD, "the service has refused this host's token or record"),
            // Refusals that need no action: the next poll shows the cluster's current state.
            Some(
                RefusalCode::StaleEpoch
                | RefusalCode::Split
                | RefusalCode::DatabaseChanged
                | RefusalCode::Conflict
                | RefusalCode::VoteRefused
                | RefusalCode::WrongState
                | RefusalCode::Committed
                | RefusalCode::DocumentRefused,
            )
            | None => {
                if retryable {
                    return;
                }
                stop(EXIT_FAILED, "the service has refused this host's request")
            }
        });
    }
}
