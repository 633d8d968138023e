//! Adopts a whole commit document that an agent sent or a ledger holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::service::cluster::{Applicant, EndCause, FrozenList, Phase, Seating, Split};
use crate::service::outcome::{Alarm, ClusterChange};
use crate::service::refusal::Refusal;
use crate::service::settings::MAX_EPOCH;
use crate::service::step::{EventResult, StepState};
use crate::values::{CommitDocument, Seat, UnixMicros};

impl StepState<'_> {
    pub(super) fn adopt(&mut self, document: CommitDocument) -> EventResult {
        if document.proposal.cluster != self.cluster.id {
            return Err(Refusal::ForeignDocument);
        }
        // The commit document's epoch may exceed the cluster's by any distance, because every
        // member of the list signed it.
        if document.proposal.epoch > MAX_EPOCH {
            return Err(Refusal::EpochTooFar { sent: document.proposal.epoch, limit: MAX_EPOCH });
        }
        let ended_by_db_accept = self
            .cluster
            .ended
            .as_ref()
            .is_some_and(|ended| ended.cause == EndCause::DatabaseAccepted);
        match self.cluster.phase {
            Phase::Open | Phase::Preparing => self.commit_document(document),
            Phase::Abandoned if ended_by_db_accept => self.commit_document(document),
            Phase::Committed | Phase::Formed => {
                let decided = self.cluster.frozen.as_ref().map(|frozen| frozen.proposal_hash);
                if let Some(decided) = decided.filter(|&decided| decided != document.proposal_hash)
                {
                    let other = document.proposal_hash;
                    self.cluster.split = Some(Split { other, epoch: document.proposal.epoch });
                    self.alarms.push(Alarm::Split { decided, other });
                    self.record_change(ClusterChange::Split { other });
                    return Err(Refusal::Split { decided, other });
                }
            }
            Phase::Expired | Phase::Abandoned | Phase::Retired => self.refuse_if_ended()?,
        }
        Ok(None)
    }

    /// Commits the list of `document`: its members get the seats, and every other agent loses its
    /// own.
    fn commit_document(&mut self, document: CommitDocument) {
        for agent in self.cluster.agents.values_mut() {
            if let Seating::Seat(_) = agent.seating {
                agent.seating = Seating::Absent;
            }
        }
        for (seat, record) in (1 as Seat..).zip(&document.proposal.records) {
            let agent = self.cluster.agents.entry(record.key).or_insert_with(|| Applicant {
                record: Arc::clone(record),
                uses: u32::from(self.cluster.statement.size),
                seating: Seating::Absent,
                lease_until: UnixMicros(0),
                session: None,
                highest_epoch: 0,
                failed_lists: 0,
                backoff_until: UnixMicros(0),
                release: None,
                approval: None,
            });
            agent.record = Arc::clone(record);
            agent.seating = Seating::Seat(seat);
        }
        let (epoch, h) = (document.proposal.epoch, document.proposal_hash);
        self.cluster.phase = Phase::Committed;
        self.cluster.ended = None;
        self.cluster.epoch = self.cluster.epoch.max(epoch);
        self.cluster.floor = self.cluster.floor.max(epoch);
        self.cluster.frozen = Some(FrozenList {
            proposal: document.proposal,
            proposal_hash: h,
            at: self.now,
            acks: BTreeMap::new(),
            probes: BTreeMap::new(),
        });
        self.committed = Some(h);
        self.record_change(ClusterChange::Adopted { epoch, h });
    }
}
