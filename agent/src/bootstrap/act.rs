//! Carries out the actions that the protocol's state machine returns.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use discovery_formation::agent::{Action, Event, Objection};
use discovery_formation::service::{Probe, Row};
use discovery_formation::{KeyId, Rules};
use discovery_types::api::{AdoptRequest, NackRequest, ProbeResult, ProbesRequest};
use discovery_types::convert;
use discovery_types::jws::Jws;
use discovery_types::proposal::{Ack, Release};

use super::errand::Errand;
use super::shown::cut;
use super::{Bootstrap, Formed};
use crate::crash;
use crate::exit::End;
use crate::probe::Answer;
use crate::probe::server::Policy;
use crate::protocol::state_end;
use crate::state::node_dir;

impl Bootstrap<'_> {
    /// Carries out `actions` in order, and the actions that follow from them.
    pub(super) async fn act(&mut self, actions: Vec<Action>) -> Result<(), End> {
        let mut queue = VecDeque::from(actions);
        while let Some(action) = queue.pop_front() {
            queue.extend(self.act_once(action).await?);
        }
        let waits_for = self.protocol.agent.waits_for(&Rules::ALL);
        self.progress.waits_for(waits_for.map(|objection| objection.to_string()));
        self.update_policy();
        Ok(())
    }

    async fn act_once(&mut self, action: Action) -> Result<Vec<Action>, End> {
        let cluster = self.join.cluster;
        match action {
            Action::Redeem => {
                self.contact.wanted = true;
                self.contact.redeemed = false;
                self.contact.revision = None;
            }
            Action::Probe { epoch, targets } => {
                let bound = self.protocol.agent.journal.bound.values();
                let wanted: BTreeSet<KeyId> =
                    bound.flat_map(|bound| bound.members.iter().map(|member| member.key)).collect();
                // The targets are those of the list that the machine was offered last.
                if let Some(offered) = &self.offered {
                    self.mesh.start((epoch, offered.h), targets, &wanted);
                }
            }
            Action::SendRow { epoch, row } => self.send_row(epoch, &row),
            Action::SignAck { epoch, h } => {
                let ack = Ack { cluster, epoch, h: convert::digest(h) };
                self.send(Errand::Ack(ack.sign(&self.protocol.key)));
                // The matrix is only shown to people, so the ack doesn't wait for the row.
                self.send_row(epoch, &Row::new());
                tracing::info!(epoch, "signed the list of epoch {epoch}");
            }
            Action::Nack { epoch, reason } => self.nack(epoch, &reason),
            Action::SignRelease { epoch } => {
                let release = Release { cluster, epoch };
                self.send(Errand::Release(release.sign(&self.protocol.key)));
            }
            Action::ShowDocument { .. } => self.show_document(),
            Action::LookAtDirectory => return self.look(),
            Action::WriteMarker { incarnation } => {
                node_dir::write_marker(&self.protocol.layout.node(), incarnation)
                    .map_err(state_end)?;
                crash::at(crash::Step::Marker);
                return self.protocol.step(Event::MarkerWritten);
            }
            Action::Launch(_) => {
                self.mesh.stop();
                if let Some(listener) = self.listener.take() {
                    listener.close().await;
                }
                self.outcome = Some(Formed::Launch);
            }
            // Supervision reports later, once the node tells its Raft cluster.
            Action::Report => {}
            Action::ReplacementWanted { why } => {
                self.outcome = Some(Formed::ReplacementWanted(why));
            }
            Action::Stop { exit, reason } => return Err(self.stopped(exit, reason)),
        }
        Ok(Vec::new())
    }

    fn stopped(&self, exit: u8, reason: String) -> End {
        /// The exit code for "a person has to decide".
        const FOR_GOOD: u8 = 3;
        let text = match &self.contact.last_refusal {
            Some(refusal) => format!("{reason}: {refusal}"),
            None => reason,
        };
        match exit {
            FOR_GOOD if self.contact.is_boot_closed => End::NoPlace(text),
            FOR_GOOD => End::DoNotRestart(text),
            _ => End::Failed(text),
        }
    }

    /// Classifies the node's directory and passes the result to the state machine.
    pub(super) fn look(&mut self) -> Result<Vec<Action>, End> {
        let directory = node_dir::classify(&self.protocol.layout.node()).map_err(state_end)?;
        self.protocol.step(Event::Looked(directory))
    }

    fn send_row(&mut self, epoch: u64, row: &Row) {
        let session = self.session();
        let Some(offered) = self.offered.as_ref().filter(|offered| offered.epoch == epoch) else {
            return;
        };
        let results =
            results(&offered.seats, &offered.results, row, self.protocol.agent.journal.key);
        let h = convert::digest(offered.h);
        self.send(Errand::Row(ProbesRequest { session, epoch, h, results }));
    }

    fn nack(&mut self, epoch: u64, reason: &Objection) {
        tracing::warn!(epoch, "the list of epoch {epoch} is not signed: {reason}");
        self.surroundings.board.error(format!("the list of epoch {epoch}: {reason}"), None);
        let Some(offered) = self.offered.as_ref().filter(|offered| offered.epoch == epoch) else {
            return;
        };
        let nack = NackRequest {
            session: self.session(),
            epoch,
            h: convert::digest(offered.h),
            reason: convert::nack_reason(reason),
            detail: cut(reason.to_string()),
        };
        self.send(Errand::Nack(nack));
    }

    fn show_document(&mut self) {
        let Some(document) = &self.protocol.document else { return };
        let adopt = AdoptRequest {
            cluster: self.join.cluster,
            document: document.jws().clone(),
            statements: self.protocol.keepsakes.statements.clone(),
        };
        self.send(Errand::Adopt(Box::new(adopt)));
    }

    /// Sets the probe listener's answer, and the keys that get it, as the state machine decides.
    pub(super) fn update_policy(&self) {
        let agent = &self.protocol.agent;
        let seats = self.offered.iter().flat_map(|offered| offered.seats.keys().copied());
        let bound = agent.journal.bound.values();
        let members = bound.flat_map(|bound| bound.members.iter().map(|member| member.key));
        let admitted: Vec<KeyId> =
            seats.chain(members).filter(|key| agent.answer_probe(*key).is_some()).collect();
        let answer = admitted.first().and_then(|key| agent.answer_probe(*key));
        let policy = Policy {
            askers: admitted.iter().map(|key| convert::public_key(*key)).collect(),
            answer: answer.map(|answer| Answer {
                key: convert::public_key(answer.key),
                incarnation: convert::wire_incarnation(answer.incarnation),
                released: self.signed_release(answer.released),
            }),
        };
        self.policy.send_if_modified(|now| {
            let changed = *now != policy;
            *now = policy;
            changed
        });
    }

    /// Signs a release. Ed25519 is deterministic, so the signature needn't be stored.
    fn signed_release(&self, epoch: u64) -> Option<Jws> {
        let release = Release { cluster: self.join.cluster, epoch };
        (epoch > 0).then(|| release.sign(&self.protocol.key))
    }
}

/// Returns this host's row of the matrix: the machine's verdicts, with the round-trip times that it
/// doesn't know.
fn results(
    seats: &BTreeMap<KeyId, u8>,
    measured: &BTreeMap<KeyId, ProbeResult>,
    row: &Row,
    own: KeyId,
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
        if let Some(Probe::Failed(why)) = row.get(&key) {
            result = ProbeResult {
                seat,
                reached: false,
                error: Some(cut(why.clone())),
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
    fn a_row_has_every_other_seat_and_the_machines_word_wins() {
        let (own, a, b) = (KeyId([0; 32]), KeyId([1; 32]), KeyId([2; 32]));
        let seats = BTreeMap::from([(own, 1), (b, 2), (a, 3)]);
        let reached =
            |seat| ProbeResult { seat, reached: true, error: None, round_trip_us: Some(900) };
        let measured = BTreeMap::from([(a, reached(3)), (b, reached(2))]);
        let row = Row::from([(b, Probe::Failed("another agent answered there".to_owned()))]);
        let results = results(&seats, &measured, &row, own);
        let short: Vec<_> = results.iter().map(|r| (r.seat, r.reached)).collect();
        assert_eq!(short, [(2, false), (3, true)]);
        assert_eq!(results[1].round_trip_us, Some(900));
    }
}
