//! Carries out the actions that the protocol's state machine returns.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use discovery_formation::agent::{AgentAction, AgentEvent, ProposalObjection};
use discovery_formation::service::{ProbeOutcome, ProbeResults};
use discovery_formation::{AgentKey, Rules};
use discovery_types::api::{AdoptRequest, NackRequest, ProbeResult, ProbesRequest};
use discovery_types::convert;
use discovery_types::jws::Jws;
use discovery_types::proposal::{Ack, Release};
use discovery_types::text::truncate_reason;

use super::outgoing::OutgoingMessage;
use super::{Bootstrap, FormationResult};
use crate::crash;
use crate::exit::ExitError;
use crate::probe::Answer;
use crate::probe::server::ProbePolicy;
use crate::state::node_dir;
use crate::state::state_exit_error;

impl Bootstrap<'_> {
    /// Carries out `actions` in order, and the actions that follow from them.
    pub(super) async fn carry_out_actions(
        &mut self,
        actions: Vec<AgentAction>,
    ) -> Result<(), ExitError> {
        let mut queue = VecDeque::from(actions);
        while let Some(action) = queue.pop_front() {
            queue.extend(self.carry_out_action(action).await?);
        }
        let waits_for = self.protocol.agent.unmet_release_condition(&Rules::ALL);
        self.progress.set_own_wait(waits_for.map(|objection| objection.to_string()));
        self.update_policy();
        Ok(())
    }

    async fn carry_out_action(
        &mut self,
        action: AgentAction,
    ) -> Result<Vec<AgentAction>, ExitError> {
        let cluster = self.join.cluster;
        match action {
            AgentAction::Redeem => {
                self.contact.wanted = true;
                self.contact.redeemed = false;
                self.contact.revision = None;
            }
            AgentAction::Probe { epoch, targets } => {
                let bound = self.protocol.agent.journal.signed_lists.values();
                let wanted: BTreeSet<AgentKey> =
                    bound.flat_map(|bound| bound.members.iter().map(|member| member.key)).collect();
                // The targets are members of the proposed list that the state machine was offered
                // last.
                if let Some(offered) = &self.current_proposal {
                    self.probers.start((epoch, offered.h), targets, &wanted);
                }
            }
            AgentAction::SendProbeResults { epoch, row } => self.send_row(epoch, &row),
            AgentAction::SignAck { epoch, h } => {
                let ack = Ack { cluster, epoch, h: convert::digest(h) };
                self.send(OutgoingMessage::Ack(ack.sign(&self.protocol.key)));
                // This host's row of probe results is only shown to people, so the ack is sent
                // first.
                self.send_row(epoch, &ProbeResults::new());
                tracing::info!(epoch, "signed the list of epoch {epoch}");
            }
            AgentAction::Nack { epoch, reason } => self.nack(epoch, &reason),
            AgentAction::SignRelease { epoch } => {
                let release = Release { cluster, epoch };
                self.send(OutgoingMessage::Release(release.sign(&self.protocol.key)));
            }
            AgentAction::SendDocument { .. } => self.show_document(),
            // The etcd runs, so its directory isn't classified. The agent starts it after `adopt
            // take-over`.
            AgentAction::ExamineDirectory if self.context.etcd.is_some() => {
                self.outcome = Some(FormationResult::Enrolled);
            }
            AgentAction::ExamineDirectory => return self.classify_directory(),
            AgentAction::WriteMarker { incarnation } => {
                node_dir::write_marker(&self.protocol.layout.node(), incarnation)
                    .map_err(state_exit_error)?;
                crash::at(crash::Failpoint::Marker);
                return self.protocol.step(AgentEvent::MarkerWritten);
            }
            AgentAction::Launch(_) => {
                self.probers.stop();
                if let Some(listener) = self.listener.take() {
                    listener.close().await;
                }
                self.outcome = Some(FormationResult::Launch);
            }
            // Nothing is sent here: `operate::report` sends the report once the node knows its Raft
            // cluster.
            AgentAction::Report => {}
            AgentAction::RequestReplacement { why } => {
                self.outcome = Some(FormationResult::ReplacementWanted(why));
            }
            AgentAction::Stop { exit, reason } => return Err(self.stop_error(exit, reason)),
        }
        Ok(Vec::new())
    }

    fn stop_error(&self, exit: u8, reason: String) -> ExitError {
        /// The exit code for "a person has to decide".
        const DO_NOT_RESTART: u8 = 3;
        let text = match &self.contact.last_refusal {
            Some(refusal) => format!("{reason}: {refusal}"),
            None => reason,
        };
        match exit {
            DO_NOT_RESTART if self.contact.is_boot_closed => ExitError::NeedsTicket(text),
            DO_NOT_RESTART => ExitError::DoNotRestart(text),
            _ => ExitError::Failed(text),
        }
    }

    /// Classifies the node's directory and passes the result to the state machine.
    pub(super) fn classify_directory(&mut self) -> Result<Vec<AgentAction>, ExitError> {
        let directory = self.protocol.layout.classify_node().map_err(state_exit_error)?;
        self.protocol.step(AgentEvent::DirectoryExamined(directory))
    }

    fn send_row(&mut self, epoch: u64, row: &ProbeResults) {
        let session = self.session();
        let Some(offered) = self.current_proposal.as_ref().filter(|offered| offered.epoch == epoch)
        else {
            return;
        };
        let results =
            matrix_row(&offered.seats, &offered.results, row, self.protocol.agent.journal.key);
        let h = convert::digest(offered.h);
        self.send(OutgoingMessage::Row(ProbesRequest { session, epoch, h, results }));
    }

    fn nack(&mut self, epoch: u64, reason: &ProposalObjection) {
        tracing::warn!(epoch, "the list of epoch {epoch} is not signed: {reason}");
        self.context.board.set_error(format!("the list of epoch {epoch}: {reason}"), None);
        let Some(offered) = self.current_proposal.as_ref().filter(|offered| offered.epoch == epoch)
        else {
            return;
        };
        let nack = NackRequest {
            session: self.session(),
            epoch,
            h: convert::digest(offered.h),
            reason: convert::nack_reason(reason),
            detail: truncate_reason(reason.to_string()),
        };
        self.send(OutgoingMessage::Nack(nack));
    }

    fn show_document(&mut self) {
        let Some(document) = &self.protocol.document else { return };
        let adopt = AdoptRequest {
            cluster: self.join.cluster,
            document: document.jws().clone(),
            statements: self.protocol.extras.statements.clone(),
        };
        self.send(OutgoingMessage::Adopt(Box::new(adopt)));
    }

    /// Sets the probe listener's answer, and the keys that get it, as the state machine decides.
    pub(super) fn update_policy(&self) {
        let agent = &self.protocol.agent;
        let seats = self.current_proposal.iter().flat_map(|offered| offered.seats.keys().copied());
        let bound = agent.journal.signed_lists.values();
        let members = bound.flat_map(|bound| bound.members.iter().map(|member| member.key));
        let admitted: Vec<AgentKey> =
            seats.chain(members).filter(|key| agent.answer_probe(*key).is_some()).collect();
        let answer = admitted.first().and_then(|key| agent.answer_probe(*key));
        let policy = ProbePolicy {
            allowed_keys: admitted.iter().map(|key| convert::public_key(*key)).collect(),
            answer: answer.map(|answer| Answer {
                key: convert::public_key(answer.key),
                incarnation: convert::wire_incarnation(answer.incarnation),
                released: self.signed_release(answer.released_epoch),
            }),
        };
        self.policy.send_if_modified(|now| {
            let changed = *now != policy;
            *now = policy;
            changed
        });
    }

    /// Signs a release. Ed25519 is deterministic: signing again gives the same signature, so none
    /// is stored.
    fn signed_release(&self, epoch: u64) -> Option<Jws> {
        let release = Release { cluster: self.join.cluster, epoch };
        (epoch > 0).then(|| release.sign(&self.protocol.key))
    }
}

/// Returns this host's row of the probe matrix: the measured results, with round-trip times. If the
/// state machine counts a probe as failed, its result replaces the measured one.
fn matrix_row(
    seats: &BTreeMap<AgentKey, u8>,
    measured: &BTreeMap<AgentKey, ProbeResult>,
    row: &ProbeResults,
    own: AgentKey,
) -> Vec<ProbeResult> {
    let mut results = Vec::with_capacity(seats.len());
    for (&key, &seat) in seats.iter().filter(|(key, _)| **key != own) {
        let known = measured.get(&key).cloned();
        let mut result = known.unwrap_or(ProbeResult {
            seat,
            reached: false,
            error: Some("not probed yet".to_owned()),
            round_trip_us: None,
        });
        if let Some(ProbeOutcome::Failed(why)) = row.get(&key) {
            result = ProbeResult {
                seat,
                reached: false,
                error: Some(truncate_reason(why.clone())),
                round_trip_us: None,
            };
        }
        results.push(result);
    }
    results.sort_by_key(|result| result.seat);
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_every_other_seat_and_failures_of_the_state_machine_win() {
        let (own, a, b) = (AgentKey([0; 32]), AgentKey([1; 32]), AgentKey([2; 32]));
        let seats = BTreeMap::from([(own, 1), (b, 2), (a, 3)]);
        let reached =
            |seat| ProbeResult { seat, reached: true, error: None, round_trip_us: Some(900) };
        let measured = BTreeMap::from([(a, reached(3)), (b, reached(2))]);
        let row = ProbeResults::from([(
            b,
            ProbeOutcome::Failed("another agent answered there".to_owned()),
        )]);
        let results = matrix_row(&seats, &measured, &row, own);
        let short: Vec<_> = results.iter().map(|r| (r.seat, r.reached)).collect();
        assert_eq!(short, [(2, false), (3, true)]);
        assert_eq!(results[1].round_trip_us, Some(900));
    }
}
