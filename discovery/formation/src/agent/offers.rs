//! How an agent handles a proposed list: it probes the members, then signs or refuses.

use std::collections::BTreeMap;

use crate::agent::event::{Action, Offer, Output, ProbeAnswer, Target};
use crate::agent::journal::{Bound, Journal};
use crate::agent::sign;
use crate::agent::step::Agent;
use crate::rules::Rules;
use crate::service::{Probe, Row};
use crate::values::{Epoch, Incarnation, KeyId};

/// Proposal that the agent is deciding on.
#[derive(Clone, Debug)]
pub(super) struct Considered {
    pub(super) offer: Box<Offer>,
    /// Results of the probes so far: this agent's row of the matrix.
    row: Row,
    /// Whether the agent has signed or refused the proposal; it then says nothing more about it.
    pub(super) answered: bool,
}

impl Agent {
    pub(super) fn offered(&mut self, rules: &Rules, offer: Box<Offer>, output: &mut Output) {
        self.release_below(rules, offer.proposal.epoch, output);
        let epoch = offer.proposal.epoch;
        if let Some(held) = &self.journal.held
            && held.h == offer.h
        {
            output.then.push(Action::ShowDocument { h: held.h });
            return;
        }
        match self.considered.take() {
            // The service shows the same list again, with newer releases: the probes so far still
            // count.
            Some(known) if known.offer.h == offer.h => {
                self.considered = Some(Considered { offer, ..known });
                if known_answer_stands(&self.considered) {
                    return;
                }
            }
            _ => {
                self.considered = Some(Considered { offer, row: Row::new(), answered: false });
            }
        }
        let Some(considered) = &mut self.considered else { return };
        if let Err(reason) = sign::judge(rules, &self.journal, &considered.offer) {
            considered.answered = true;
            output.then.push(Action::Nack { epoch, reason });
            return;
        }
        if sign::is_signed(&self.journal, &considered.offer) {
            considered.answered = true;
            let h = considered.offer.h;
            output.then.push(Action::SignAck { epoch, h });
            return;
        }
        let targets = targets(&self.journal, &considered.offer);
        if !targets.is_empty() {
            output.then.push(Action::Probe { epoch, targets });
        }
        self.try_to_sign(rules, false, output);
    }

    pub(super) fn probed(
        &mut self,
        rules: &Rules,
        epoch: Epoch,
        peer: KeyId,
        result: Result<ProbeAnswer, String>,
        output: &mut Output,
    ) {
        let expected = self.incarnation_of(peer);
        let probe = match result {
            Ok(answer) if answer.key == peer && expected == Some(answer.incarnation) => {
                self.note_release(peer, answer.released);
                Probe::Reached
            }
            Ok(answer) => Probe::Failed(format!("another agent answered there: {}", answer.key)),
            Err(why) => Probe::Failed(why),
        };
        let Some(considered) = &mut self.considered else { return };
        let proposal = &considered.offer.proposal;
        if proposal.epoch != epoch || considered.answered {
            return;
        }
        let mut changed = false;
        if proposal.seat_of(peer).is_some() && peer != self.journal.key {
            changed = considered.row.get(&peer) != Some(&probe);
            considered.row.insert(peer, probe);
        }
        self.try_to_sign(rules, changed, output);
    }

    /// Incarnation that `peer` must have, by the proposal or else by an earlier signed list.
    fn incarnation_of(&self, peer: KeyId) -> Option<Incarnation> {
        let proposal = self.considered.as_ref().map(|considered| &considered.offer.proposal);
        let proposed = proposal.and_then(|proposal| proposal.record_of(peer));
        proposed.map(|record| record.incarnation).or_else(|| {
            let mut members = self.journal.bound.values().flat_map(|bound| &bound.members);
            members.find(|member| member.key == peer).map(|member| member.incarnation)
        })
    }

    pub(super) fn note_release(&mut self, key: KeyId, epoch: Epoch) {
        if epoch > 0 {
            let known = self.releases.entry(key).or_insert(epoch);
            *known = epoch.max(*known);
        }
    }

    /// Signs the proposal if all probes succeeded and every earlier list is released. Otherwise
    /// sends the matrix row, once every peer has been tried.
    pub(super) fn try_to_sign(&mut self, rules: &Rules, row_changed: bool, output: &mut Output) {
        let Some(considered) = &mut self.considered else { return };
        if considered.answered {
            return;
        }
        let offer = &considered.offer;
        let (epoch, h) = (offer.proposal.epoch, offer.h);
        let complete = considered.row.len() + 1 >= offer.proposal.records.len();
        let green = complete && considered.row.values().all(|probe| *probe == Probe::Reached);
        let released = sign::s6_releases(rules, &self.journal, offer, &self.releases).is_ok();
        if green && released {
            considered.answered = true;
            self.journal.bound.insert(epoch, Bound::to(&considered.offer.proposal, h));
            self.persist(output);
            output.then.push(Action::SignAck { epoch, h });
        } else if complete && row_changed {
            output.then.push(Action::SendRow { epoch, row: considered.row.clone() });
        }
    }

    pub(super) fn impatient(&mut self, rules: &Rules, epoch: Epoch, output: &mut Output) {
        let Some(considered) = &mut self.considered else { return };
        if considered.answered || considered.offer.proposal.epoch != epoch {
            return;
        }
        let check = sign::s6_releases(rules, &self.journal, &considered.offer, &self.releases);
        if let Err(reason) = check {
            considered.answered = true;
            output.then.push(Action::Nack { epoch, reason });
        }
    }
}

fn known_answer_stands(considered: &Option<Considered>) -> bool {
    considered.as_ref().is_some_and(|considered| considered.answered)
}

/// Agents to probe: every other member of the list, and members of earlier signed lists that are
/// not in it. The latter are asked for their releases only.
fn targets(journal: &Journal, offer: &Offer) -> Vec<Target> {
    let mut targets: BTreeMap<KeyId, Target> = BTreeMap::new();
    for member in journal.bound.values().flat_map(|bound| &bound.members) {
        let target = Target {
            key: member.key,
            incarnation: member.incarnation,
            peer_urls: member.peer_urls.clone(),
            in_proposal: false,
        };
        targets.insert(member.key, target);
    }
    // The proposal's record of an agent replaces the entry from an earlier list.
    for record in &offer.proposal.records {
        let target = Target {
            key: record.key,
            incarnation: record.incarnation,
            peer_urls: record.peer_urls.clone(),
            in_proposal: true,
        };
        targets.insert(record.key, target);
    }
    targets.remove(&journal.key);
    targets.into_values().collect()
}
