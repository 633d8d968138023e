//! Adopts a whole document that an agent or a ledger shows.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::service::cluster::{Applicant, EndCause, Frozen, Phase, Seating, Split};
use crate::service::outcome::{Alarm, Change};
use crate::service::refusal::Refusal;
use crate::service::settings::EPOCH_MAX;
use crate::service::step::{Applied, Turn};
use crate::values::{Document, Micros, Seat};

impl Turn<'_> {
    pub(super) fn adopt(&mut self, document: Document) -> Applied {
        if document.proposal.cluster != self.cluster.id {
            return Err(Refusal::ForeignDocument);
        }
        // The epoch may be any distance ahead: every member of the list signed it.
        if document.proposal.epoch > EPOCH_MAX {
            return Err(Refusal::EpochTooFar { sent: document.proposal.epoch, limit: EPOCH_MAX });
        }
        let accepted_away = self
            .cluster
            .ended
            .as_ref()
            .is_some_and(|ended| ended.cause == EndCause::DatabaseAccepted);
        match self.cluster.phase {
            Phase::Open | Phase::Preparing => self.take(document),
            Phase::Abandoned if accepted_away => self.take(document),
            Phase::Committed | Phase::Formed => {
                let decided = self.cluster.frozen.as_ref().map(|frozen| frozen.h);
                if let Some(decided) = decided.filter(|&decided| decided != document.h) {
                    let other = document.h;
                    self.cluster.split = Some(Split { other, epoch: document.proposal.epoch });
                    self.alarms.push(Alarm::Split { decided, other });
                    self.record_change(Change::Split { other });
                    return Err(Refusal::Split { decided, other });
                }
            }
            Phase::Expired | Phase::Abandoned | Phase::Retired => self.refuse_if_ended()?,
        }
        Ok(None)
    }

    /// Commits the list of `document`: its members get the seats, and every other agent loses its
    /// own.
    fn take(&mut self, document: Document) {
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
                lease_until: Micros(0),
                session: None,
                highest_epoch: 0,
                counts: 0,
                held_until: Micros(0),
                release: None,
            });
            agent.record = Arc::clone(record);
            agent.seating = Seating::Seat(seat);
        }
        let (epoch, h) = (document.proposal.epoch, document.h);
        self.cluster.phase = Phase::Committed;
        self.cluster.ended = None;
        self.cluster.epoch = self.cluster.epoch.max(epoch);
        self.cluster.floor = self.cluster.floor.max(epoch);
        self.cluster.frozen = Some(Frozen {
            proposal: document.proposal,
            h,
            at: self.now,
            acks: BTreeMap::new(),
            probes: BTreeMap::new(),
        });
        self.committed = Some(h);
        self.record_change(Change::Adopted { epoch, h });
    }
}
