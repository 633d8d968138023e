//! How an agent handles a proposed list of members: it probes the members, then signs or refuses.

use std::collections::BTreeMap;

use crate::agent::event::{AgentAction, AgentOutput, ExaminedProposal, ProbeAnswer, ProbeTarget};
use crate::agent::journal::{Journal, SignedList};
use crate::agent::sign;
use crate::agent::step::Agent;
use crate::rules::Rules;
use crate::service::{ProbeOutcome, ProbeResults};
use crate::values::{AgentKey, Epoch, Incarnation};

/// Proposal that the agent is deciding on.
#[derive(Clone, Debug)]
pub(super) struct PendingProposal {
    pub(super) offer: Box<ExaminedProposal>,
    /// Results of the probes so far: this agent's row of the probe matrix.
    probe_results: ProbeResults,
    /// Whether the agent has signed or refused the proposal. The agent then sends no other answer
    /// to it.
    pub(super) is_answered: bool,
}

impl Agent {
    pub(super) fn handle_proposal(
        &mut self,
        rules: &Rules,
        offer: Box<ExaminedProposal>,
        output: &mut AgentOutput,
    ) {
        self.release_epochs_below(rules, offer.proposal.epoch, output);
        let epoch = offer.proposal.epoch;
        if let Some(held) = &self.journal.held_document
            && held.proposal_hash == offer.proposal_hash
        {
            output.actions.push(AgentAction::SendDocument { h: held.proposal_hash });
            return;
        }
        match self.pending_proposal.take() {
            // The service sent the same list of members again, because more releases have come in.
            // The results of earlier probes stay valid.
            Some(known) if known.offer.proposal_hash == offer.proposal_hash => {
                self.pending_proposal = Some(PendingProposal { offer, ..known });
                if has_answer(&self.pending_proposal) {
                    return;
                }
            }
            _ => {
                self.pending_proposal = Some(PendingProposal {
                    offer,
                    probe_results: ProbeResults::new(),
                    is_answered: false,
                });
            }
        }
        let Some(considered) = &mut self.pending_proposal else { return };
        if let Err(reason) = sign::check_proposal(rules, &self.journal, &considered.offer) {
            considered.is_answered = true;
            output.actions.push(AgentAction::Nack { epoch, reason });
            return;
        }
        if sign::is_signed(&self.journal, &considered.offer) {
            considered.is_answered = true;
            let h = considered.offer.proposal_hash;
            output.actions.push(AgentAction::SignAck { epoch, h });
            return;
        }
        let targets = probe_targets(&self.journal, &considered.offer);
        if !targets.is_empty() {
            output.actions.push(AgentAction::Probe { epoch, targets });
        }
        self.try_to_sign(rules, false, output);
    }

    pub(super) fn handle_probe_result(
        &mut self,
        rules: &Rules,
        epoch: Epoch,
        peer: AgentKey,
        result: Result<ProbeAnswer, String>,
        output: &mut AgentOutput,
    ) {
        let expected = self.expected_incarnation(peer);
        let probe = match result {
            Ok(answer) if answer.key == peer && expected == Some(answer.incarnation) => {
                self.note_release(peer, answer.released_epoch);
                ProbeOutcome::Reached
            }
            Ok(answer) => {
                ProbeOutcome::Failed(format!("another agent answered there: {}", answer.key))
            }
            Err(why) => ProbeOutcome::Failed(why),
        };
        let Some(considered) = &mut self.pending_proposal else { return };
        let proposal = &considered.offer.proposal;
        if proposal.epoch != epoch || considered.is_answered {
            return;
        }
        let mut changed = false;
        if proposal.seat_of(peer).is_some() && peer != self.journal.key {
            changed = considered.probe_results.get(&peer) != Some(&probe);
            considered.probe_results.insert(peer, probe);
        }
        self.try_to_sign(rules, changed, output);
    }

    /// Incarnation that `peer` must have: the one in the proposal, or else in an earlier signed
    /// list.
    fn expected_incarnation(&self, peer: AgentKey) -> Option<Incarnation> {
        let proposal = self.pending_proposal.as_ref().map(|considered| &considered.offer.proposal);
        let proposed = proposal.and_then(|proposal| proposal.record_of(peer));
        proposed.map(|record| record.incarnation).or_else(|| {
            let mut members = self.journal.signed_lists.values().flat_map(|bound| &bound.members);
            members.find(|member| member.key == peer).map(|member| member.incarnation)
        })
    }

    pub(super) fn note_release(&mut self, key: AgentKey, epoch: Epoch) {
        if epoch > 0 {
            let known = self.releases.entry(key).or_insert(epoch);
            *known = epoch.max(*known);
        }
    }

    /// Signs the proposal if all probes succeeded and enough members have released each earlier
    /// signed list. Otherwise sends the row of the probe matrix, if it changed and every peer has
    /// been tried.
    pub(super) fn try_to_sign(
        &mut self,
        rules: &Rules,
        row_changed: bool,
        output: &mut AgentOutput,
    ) {
        let Some(considered) = &mut self.pending_proposal else { return };
        if considered.is_answered {
            return;
        }
        let offer = &considered.offer;
        let (epoch, h) = (offer.proposal.epoch, offer.proposal_hash);
        let complete = considered.probe_results.len() + 1 >= offer.proposal.records.len();
        let green = complete
            && considered.probe_results.values().all(|probe| *probe == ProbeOutcome::Reached);
        let released = sign::check_s6_releases(rules, &self.journal, offer, &self.releases).is_ok();
        if green && released {
            considered.is_answered = true;
            self.journal
                .signed_lists
                .insert(epoch, SignedList::from_proposal(&considered.offer.proposal, h));
            self.persist(output);
            output.actions.push(AgentAction::SignAck { epoch, h });
        } else if complete && row_changed {
            output.actions.push(AgentAction::SendProbeResults {
                epoch,
                row: considered.probe_results.clone(),
            });
        }
    }

    pub(super) fn handle_release_timeout(
        &mut self,
        rules: &Rules,
        epoch: Epoch,
        output: &mut AgentOutput,
    ) {
        let Some(considered) = &mut self.pending_proposal else { return };
        if considered.is_answered || considered.offer.proposal.epoch != epoch {
            return;
        }
        let check =
            sign::check_s6_releases(rules, &self.journal, &considered.offer, &self.releases);
        if let Err(reason) = check {
            considered.is_answered = true;
            output.actions.push(AgentAction::Nack { epoch, reason });
        }
    }
}

fn has_answer(considered: &Option<PendingProposal>) -> bool {
    considered.as_ref().is_some_and(|considered| considered.is_answered)
}

/// Agents to probe: every other member of the list, and members of earlier signed lists that are
/// not in it. Members of earlier lists are asked for their releases only.
fn probe_targets(journal: &Journal, offer: &ExaminedProposal) -> Vec<ProbeTarget> {
    let mut targets: BTreeMap<AgentKey, ProbeTarget> = BTreeMap::new();
    for member in journal.signed_lists.values().flat_map(|bound| &bound.members) {
        let target = ProbeTarget {
            key: member.key,
            incarnation: member.incarnation,
            peer_urls: member.peer_urls.clone(),
            is_in_proposal: false,
        };
        targets.insert(member.key, target);
    }
    // If an agent is in an earlier list and in the proposal, probe it as the proposal's record
    // describes it.
    for record in &offer.proposal.records {
        let target = ProbeTarget {
            key: record.key,
            incarnation: record.incarnation,
            peer_urls: record.peer_urls.clone(),
            is_in_proposal: true,
        };
        targets.insert(record.key, target);
    }
    targets.remove(&journal.key);
    targets.into_values().collect()
}
