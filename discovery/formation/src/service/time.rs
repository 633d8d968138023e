//! Effects of time on a cluster: leases lapse, lists time out, deadlines pass.

use crate::rules::Rule;
use crate::service::cluster::{Cluster, EndCause, LastError, Phase, Seating};
use crate::service::links;
use crate::service::outcome::{ClusterChange, ReopenReason};
use crate::service::settings::FormationSettings;
use crate::service::step::StepState;
use crate::values::{AgentKey, UnixMicros};

/// Returns when to step `cluster` with [`ClusterEvent::Tick`](super::ClusterEvent::Tick) next, if
/// nothing else happens; `None` from the commit on. A time at or before `now` means at once.
#[must_use]
pub fn next_deadline(
    cluster: &Cluster,
    settings: &FormationSettings,
    now: UnixMicros,
) -> Option<UnixMicros> {
    if !matches!(cluster.phase, Phase::Open | Phase::Preparing) {
        return None;
    }
    let live = cluster.agents.values().filter(|agent| agent.seating != Seating::Absent);
    let leases = live.map(|agent| agent.lease_until);
    // A backoff is the time for which an agent is kept out of frozen lists of members. Backoffs
    // that have ended need no deadline: the previous step has taken their end into account.
    let seated = cluster.agents.values().filter(|agent| matches!(agent.seating, Seating::Seat(_)));
    let holds = seated.map(|agent| agent.backoff_until).filter(|&until| until > now);
    let times_out = cluster.frozen.iter().map(|frozen| frozen.at.after(settings.ack_timeout));
    // A step may leave the cluster open although its deadline has passed, because the clock wasn't
    // steady. The deadline is then checked again at the time at which the clock may have become
    // steady.
    let expires =
        if cluster.deadline > now { cluster.deadline } else { now.after(settings.steady_after()) };
    // A cluster in a changed database doesn't expire before the ledgers have been compared. Another
    // event reports their result.
    let expires = (!cluster.is_unsettled).then_some(expires);
    leases.chain(holds).chain(times_out).chain(expires).min()
}

impl StepState<'_> {
    /// Corrects times that a fast clock has stored. Afterwards no lease ends later than a lease
    /// that begins now, and no backoff later than the longest backoff that begins now. No list was
    /// frozen in the future. So once the clock is set right, no wait takes longer than one lease,
    /// backoff or ack timeout.
    pub(super) fn clamp_stored_times(&mut self) {
        let (now, settings) = (self.now, self.context.settings);
        let (lease, hold) = (now.after(settings.lease), now.after(settings.max_backoff));
        let frozen = self.cluster.frozen.as_mut().map(|frozen| (&mut frozen.at, now));
        let agents = self.cluster.agents.values_mut();
        let stored = agents
            .flat_map(|agent| [(&mut agent.lease_until, lease), (&mut agent.backoff_until, hold)]);
        for (time, latest) in stored.chain(frozen) {
            if *time > latest {
                *time = latest;
                self.changed = true;
            }
        }
    }

    /// Applies everything that has become due by now, in one step.
    pub(super) fn pass_time(&mut self) {
        if !matches!(self.cluster.phase, Phase::Open | Phase::Preparing)
            || self.cluster.split.is_some()
        {
            return;
        }
        if self.context.rules.is_on(Rule::ClampStoredTimes) {
            self.clamp_stored_times();
        }
        let may_end = !self.cluster.is_unsettled || !self.context.rules.is_on(Rule::EndWhenSettled);
        if self.cluster.deadline <= self.now && may_end && self.context.is_clock_steady {
            self.end(Phase::Expired, EndCause::Deadline, "its deadline passed".to_owned());
            return;
        }
        if let Some(key) = self.lapse() {
            self.reopen(ReopenReason::Lapsed(key));
        }
        self.time_out();
    }

    /// Frees the seats of agents whose leases have lapsed. If any of these agents is in the frozen
    /// list of members, returns one such agent.
    fn lapse(&mut self) -> Option<AgentKey> {
        let due = |agent: &crate::service::cluster::Applicant| {
            agent.seating != Seating::Absent && agent.lease_until <= self.now
        };
        let lapsed: Vec<AgentKey> = self
            .cluster
            .agents
            .iter()
            .filter(|(_, agent)| due(agent))
            .map(|(&key, _)| key)
            .collect();
        let mut member = None;
        for key in lapsed {
            if self.cluster.phase == Phase::Preparing && self.cluster.is_listed(key) {
                member = Some(key);
            }
            self.agent_mut(key).seating = Seating::Absent;
            self.record_change(ClusterChange::Lapsed { key });
        }
        member
    }

    /// Reopens the cluster if the frozen list of members has timed out, and counts the list against
    /// the members at fault.
    fn time_out(&mut self) {
        let Some(frozen) = &self.cluster.frozen else { return };
        if frozen.at.after(self.context.settings.ack_timeout) > self.now {
            return;
        }
        let counts = |key| self.cluster.agents.get(&key).map_or(0, |agent| agent.failed_lists);
        let at_fault = links::find_members_at_fault(self.context.rules, frozen, counts);
        let missing = frozen.proposal.records.len() - frozen.acks.len();
        let text = format!("epoch {} timed out with {missing} acks missing", self.cluster.epoch);
        // A broken link is not the fault of one agent alone, so the error names no agent.
        let (key, text) = match links::describe_links(&links::find_broken_links(frozen)) {
            Some(broken) => (None, format!("{text}; {broken}")),
            None => (at_fault.first().copied(), text),
        };
        self.cluster.last_error = Some(LastError { at: self.now, key, text });
        self.reopen(ReopenReason::TimedOut);
        for key in at_fault {
            self.count_failed_list(key);
        }
    }
}
