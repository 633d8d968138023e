//! What time does to a cluster: leases lapse, lists time out, deadlines pass.

use crate::rules::Rule;
use crate::service::cluster::{Cluster, EndCause, Frozen, LastError, Phase, Place, Probe};
use crate::service::outcome::{Change, Reopen};
use crate::service::settings::Settings;
use crate::service::step::Turn;
use crate::values::{KeyId, Micros};

/// When to step `cluster` with [`Event::Tick`](super::Event::Tick) next, if nothing else happens;
/// none from the commit on. A time at or before `now` means at once.
#[must_use]
pub fn next_deadline(cluster: &Cluster, settings: &Settings, now: Micros) -> Option<Micros> {
    if !matches!(cluster.phase, Phase::Open | Phase::Preparing) {
        return None;
    }
    let live = cluster.agents.values().filter(|agent| agent.place != Place::Absent);
    let leases = live.map(|agent| agent.lease_until);
    // The end of a hold-back that has passed was judged by the step before.
    let seated = cluster.agents.values().filter(|agent| matches!(agent.place, Place::Seat(_)));
    let holds = seated.map(|agent| agent.held_until).filter(|&until| until > now);
    let times_out = cluster.frozen.iter().map(|frozen| frozen.at.after(settings.prepare));
    // It doesn't expire before the ledgers have been compared, and that is an event of its own.
    let expires = (!cluster.unsettled).then_some(cluster.deadline);
    leases.chain(holds).chain(times_out).chain(expires).min()
}

impl Turn<'_> {
    /// Everything that has become due by now, in one go.
    pub(super) fn pass_time(&mut self) {
        if !matches!(self.cluster.phase, Phase::Open | Phase::Preparing)
            || self.cluster.split.is_some()
        {
            return;
        }
        let may_end = !self.cluster.unsettled || !self.context.rules.on(Rule::EndWhenSettled);
        if self.cluster.deadline <= self.now && may_end {
            self.end(Phase::Expired, EndCause::Deadline, "its deadline passed".to_owned());
            return;
        }
        if let Some(key) = self.lapse() {
            self.reopen(Reopen::Lapsed(key));
        }
        self.time_out();
    }

    /// Frees what lapsed leases held; a member of the frozen list, if one of them was.
    fn lapse(&mut self) -> Option<KeyId> {
        let due = |agent: &crate::service::cluster::Agent| {
            agent.place != Place::Absent && agent.lease_until <= self.now
        };
        let lapsed: Vec<KeyId> = self
            .cluster
            .agents
            .iter()
            .filter(|(_, agent)| due(agent))
            .map(|(&key, _)| key)
            .collect();
        let mut member = None;
        for key in lapsed {
            if self.cluster.phase == Phase::Preparing && self.cluster.lists(key) {
                member = Some(key);
            }
            self.agent_mut(key).place = Place::Absent;
            self.record_change(Change::Lapsed { key });
        }
        member
    }

    /// A list whose time is over: back to open, and whoever held it up is counted.
    fn time_out(&mut self) {
        let Some(frozen) = &self.cluster.frozen else { return };
        if frozen.at.after(self.context.settings.prepare) > self.now {
            return;
        }
        let at_fault = at_fault(frozen);
        let missing = frozen.proposal.records.len() - frozen.acks.len();
        let text = format!("epoch {} timed out with {missing} acks missing", self.cluster.epoch);
        self.cluster.last_error =
            Some(LastError { at: self.now, key: at_fault.first().copied(), text });
        self.reopen(Reopen::TimedOut);
        for key in at_fault {
            self.count(key);
        }
    }
}

/// Whom most of the matrix misses, and who answered nothing.
fn at_fault(frozen: &Frozen) -> Vec<KeyId> {
    let members = || frozen.proposal.records.iter().map(|record| record.key);
    let others = frozen.proposal.records.len().saturating_sub(1);
    let misses =
        |peer: KeyId, row: &super::cluster::Row| matches!(row.get(&peer), Some(Probe::Failed(_)));
    members()
        .filter(|key| {
            let missed = frozen
                .probes
                .iter()
                .filter(|(prober, row)| *prober != key && misses(*key, row))
                .count();
            let silent = !frozen.acks.contains_key(key) && !frozen.probes.contains_key(key);
            silent || missed * 2 > others
        })
        .collect()
}
