//! Messages of agents about the frozen list of members, and about the cluster that forms from it.

use std::sync::Arc;

use crate::rules::Rule;
use crate::service::cluster::{FrozenList, Phase, ProbeOutcome, ProbeResults};
use crate::service::outcome::{ClusterChange, ReopenReason};
use crate::service::refusal::Refusal;
use crate::service::step::{EventResult, StepState};
use crate::values::{AgentKey, Epoch, Hash, Release, quorum};

/// Number of bytes that are kept of a text from an agent. The API accepts 300 characters, and puts
/// a code for the reason in front of them.
const MAX_SENTENCE_BYTES: usize = 400;

impl StepState<'_> {
    pub(super) fn ack(
        &mut self,
        key: AgentKey,
        epoch: Epoch,
        h: Hash,
        jws: Arc<str>,
    ) -> EventResult {
        self.refuse_if_ended()?;
        if self.is_forming() {
            let size = usize::from(self.cluster.statement.size);
            let frozen = self.frozen_at(key, epoch)?;
            if frozen.proposal_hash != h {
                return Err(Refusal::OtherProposal { sent: h, h: frozen.proposal_hash, epoch });
            }
            if frozen.acks.insert(key, jws).is_none() {
                let complete = frozen.acks.len() == size;
                self.record_change(ClusterChange::Acked { key, epoch });
                if complete {
                    self.cluster.phase = Phase::Committed;
                    self.committed = Some(h);
                    self.record_change(ClusterChange::Committed { epoch, h });
                }
            }
            return Ok(Some(key));
        }
        match &self.cluster.frozen {
            Some(frozen) if self.cluster.is_listed(key) => {
                if frozen.proposal_hash != h {
                    return Err(Refusal::OtherProposal { sent: h, h: frozen.proposal_hash, epoch });
                }
                if !self.context.rules.is_on(Rule::AckAgain) {
                    return Err(self.stale(epoch));
                }
                Ok(Some(key))
            }
            _ => Err(Refusal::BootClosed { key }),
        }
    }

    fn stale(&self, sent: Epoch) -> Refusal {
        Refusal::StaleEpoch { sent, epoch: self.cluster.epoch, phase: self.cluster.phase }
    }

    /// Returns the present proposal if it has this epoch and `key` has a seat in it.
    fn frozen_at(&mut self, key: AgentKey, epoch: Epoch) -> Result<&mut FrozenList, Refusal> {
        let stale = self.stale(epoch);
        if self.cluster.phase != Phase::Preparing || self.cluster.epoch != epoch {
            return Err(stale);
        }
        match &mut self.cluster.frozen {
            Some(frozen) if frozen.proposal.seat_of(key).is_some() => Ok(frozen),
            Some(_) => Err(Refusal::NotSeated { key, epoch }),
            None => Err(stale),
        }
    }

    pub(super) fn nack(&mut self, key: AgentKey, epoch: Epoch, reason: &str) -> EventResult {
        self.refuse_if_ended()?;
        self.frozen_at(key, epoch)?;
        let reason = truncate_text(reason);
        self.note_error(key, reason.clone());
        self.reopen(ReopenReason::Refused { key, reason });
        self.count_failed_list(key);
        Ok(Some(key))
    }

    pub(super) fn probes(
        &mut self,
        key: AgentKey,
        epoch: Epoch,
        mut row: ProbeResults,
    ) -> EventResult {
        self.refuse_if_ended()?;
        let frozen = self.frozen_at(key, epoch)?;
        row.retain(|&peer, _| peer != key && frozen.proposal.seat_of(peer).is_some());
        for probe in row.values_mut() {
            if let ProbeOutcome::Failed(why) = probe {
                *why = truncate_text(why);
            }
        }
        if frozen.probes.get(&key) != Some(&row) {
            frozen.probes.insert(key, row);
            self.record_change(ClusterChange::Probed { key, epoch });
        }
        Ok(Some(key))
    }

    pub(super) fn release(&mut self, key: AgentKey, release: Release) -> EventResult {
        self.refuse_if_ended()?;
        if !self.cluster.agents.contains_key(&key) {
            return Err(Refusal::UnknownKey { key });
        }
        let epoch = release.epoch;
        self.check_epoch(epoch)?;
        let agent = self.agent_mut(key);
        if agent.release.as_ref().is_none_or(|known| known.epoch < epoch) {
            agent.release = Some(release);
            agent.highest_epoch = agent.highest_epoch.max(epoch);
            self.cluster.floor = self.cluster.floor.max(epoch);
            self.record_change(ClusterChange::Released { key, epoch });
        }
        Ok(Some(key))
    }

    /// Checks that `key` is a member of the decided list.
    fn check_member(&self, key: AgentKey) -> Result<(), Refusal> {
        self.refuse_if_ended()?;
        if self.is_forming() {
            return Err(Refusal::NotCommitted { phase: self.cluster.phase });
        }
        if self.cluster.is_listed(key) { Ok(()) } else { Err(Refusal::BootClosed { key }) }
    }

    pub(super) fn trouble(&mut self, key: AgentKey, text: String) -> EventResult {
        self.check_member(key)?;
        self.note_error(key, text);
        Ok(Some(key))
    }

    pub(super) fn report(&mut self, key: AgentKey, raft_cluster: u64) -> EventResult {
        self.check_member(key)?;
        if self.cluster.reports.insert(key, raft_cluster) != Some(raft_cluster) {
            self.record_change(ClusterChange::Reported { key, raft_cluster });
        }
        let agreeing = self.cluster.reports.values().filter(|&&id| id == raft_cluster).count();
        let size = usize::from(self.cluster.statement.size);
        if self.cluster.phase == Phase::Committed && agreeing >= quorum(size) {
            self.cluster.phase = Phase::Formed;
            self.record_change(ClusterChange::Formed { raft_cluster });
        }
        Ok(Some(key))
    }
}

/// Cuts a text from an agent to at most [`MAX_SENTENCE_BYTES`] bytes.
fn truncate_text(text: &str) -> String {
    text.chars()
        .scan(0, |length, c| {
            *length += c.len_utf8();
            (*length <= MAX_SENTENCE_BYTES).then_some(c)
        })
        .collect()
}
