//! The true history of the hosts, and what has to hold in it.

use super::*;

/// A sentence that has to hold in every history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Invariant {
    /// A policy that was revoked or has expired begins nothing.
    PolicyInForce,
    /// No more replacements begin within the policy's time than it allows.
    Limit,
    /// A replacement begins only after the leader and a quorum of the voters have missed the member
    /// for the policy's time.
    Agreement,
    /// A replacement begins only while all other voters are reachable.
    OthersReachable,
    /// At most one replacement is under way.
    OneAtATime,
    /// A member that has come back is not removed unless the newcomer votes.
    StillDead,
    /// The cluster has no more voters than it was made for, and one more during a replacement.
    Size,
    /// A newcomer that has never started has no vote.
    StartedBeforeVote,
    /// A replacement removes no started voter apart from the dead member, and when it is done, the
    /// cluster has as many started voters as before.
    NoFewerStartedVoters,
    /// At most one newcomer takes a dead member's place.
    OneNewcomerForOneDeath,
    /// A replacement that has ended takes no step.
    NoStepAfterEnd,
    /// If a replacement has removed its member and fails, the store says that the place is vacant.
    VacancyIsNoted,
}

/// True history of one host's connection to another.
#[derive(Clone, Copy, Default)]
pub(super) struct TruePath {
    /// Time since which the path has been cut; `None` if it isn't cut.
    pub cut_since: Option<u64>,
    /// End and length of the last cut that has ended.
    last: Option<(u64, u64)>,
}

impl Simulation {
    /// Records the first violation. Ignores later violations, and those of invariants that aren't
    /// watched.
    pub(super) fn violate(&mut self, invariant: Invariant, violation: String) {
        if self.watched.is_none_or(|watched| watched == invariant) {
            self.violation.get_or_insert((invariant, violation));
        }
    }

    /// Records the true state of all paths.
    pub(super) fn note_paths(&mut self) {
        let all: Vec<MemberId> = self.hosts.keys().copied().collect();
        for from in &all {
            for to in &all {
                let is_cut = !self.reaches(*from, *to);
                let now = self.now;
                let path = self.paths.entry((*from, *to)).or_default();
                match (is_cut, path.cut_since) {
                    (true, None) => path.cut_since = Some(now),
                    (false, Some(since)) => {
                        (path.cut_since, path.last) = (None, Some((now, now - since)));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Whether the path was cut for nearly `LIMITS.after_seconds`, until now or a short time ago.
    fn was_cut_for_long(&self, from: MemberId, to: MemberId) -> bool {
        let slack = 3 * TICK;
        let enough = LIMITS.after_seconds - slack;
        let recent = OBSERVATION_LIFETIME.as_secs() + (MAX_DELAY + 3) * TICK;
        let path = self.paths.get(&(from, to)).copied().unwrap_or_default();
        let is_cut = path.cut_since.is_some_and(|since| self.now - since >= enough);
        let was_cut =
            path.last.is_some_and(|(end, length)| self.now - end <= recent && length >= enough);
        is_cut || was_cut
    }

    /// Whether the path is cut, or was cut `slack` seconds ago or later.
    fn was_cut_lately(&self, from: MemberId, to: MemberId, slack: u64) -> bool {
        let path = self.paths.get(&(from, to)).copied().unwrap_or_default();
        path.cut_since.is_some() || path.last.is_some_and(|(end, _)| self.now - end <= slack)
    }

    /// Checks the beginning of a replacement. `ended` says why the policy was no longer in force;
    /// `None` if it was in force.
    pub(super) fn check_beginning(
        &mut self,
        own: MemberId,
        new: &PolicyUse,
        ended: Option<&'static str>,
    ) {
        let (voters, dead) = (self.voters(), new.member);
        if let Some(how) = ended {
            let violation = format!("a policy that {how} has begun a replacement");
            self.violate(Invariant::PolicyInForce, violation);
        }
        let window = LIMITS.per_seconds - 2 * MAX_SKEW - (MAX_DELAY + 1) * TICK;
        let recent = self.begun.iter().filter(|at| **at + window > self.now).count();
        if recent > usize::from(LIMITS.at_most) {
            let violation = format!("{recent} replacements have begun within the policy's time");
            self.violate(Invariant::Limit, violation);
        }
        if !new.fills_vacancy {
            let saw = voters.iter().filter(|from| self.was_cut_for_long(**from, dead)).count();
            if saw < voters.len() / 2 + 1 {
                let violation = format!("{saw} of {} voters have missed the member", voters.len());
                self.violate(Invariant::Agreement, violation);
            }
            // The leader's own connection to the member must have been cut for the policy's time,
            // too.
            if !self.was_cut_for_long(own, dead) {
                let violation = "the leader has not missed the member".to_owned();
                self.violate(Invariant::Agreement, violation);
            }
        }
        let slack = (MAX_DELAY + 3) * TICK;
        let was_away = |id: &&MemberId| {
            let path = self.paths.get(&(own, **id)).copied().unwrap_or_default();
            path.cut_since.is_some_and(|since| self.now - since > slack)
        };
        let away = voters.iter().filter(|id| **id != dead).filter(was_away).count();
        if away > 0 {
            let violation = format!("{away} voters that stay were away, too");
            self.violate(Invariant::OthersReachable, violation);
        }
    }

    /// Checks that the member `old` had not been back for long when its replacement took this step.
    /// A member is back if the leader reaches it, or if no quorum of the voters misses it. `lost`
    /// says what the step did to the member, as a word of a sentence. Once the newcomer votes, the
    /// old member is removed in any case.
    pub(super) fn check_still_dead(&mut self, own: MemberId, old: MemberId, lost: &str) {
        if self.members.of_id(old).is_none() {
            return;
        }
        if !self.was_cut_lately(own, old, (MAX_DELAY + 4) * TICK) {
            let violation = format!("{old} was {lost} although it had come back");
            self.violate(Invariant::StillDead, violation);
        }
        // The leader may first notice an observation's number one lifetime after it was written. It
        // then counts the observation for another lifetime. The observer may have looked some time
        // before it wrote.
        let slack = 2 * OBSERVATION_LIFETIME.as_secs() + (MAX_DELAY + 8) * TICK;
        let voters = self.voters();
        let others = voters.iter().filter(|from| **from != old);
        let missing = others.filter(|from| self.was_cut_lately(**from, old, slack)).count();
        if missing < voters.len() / 2 + 1 {
            let of = voters.len();
            let violation =
                format!("{old} was {lost} although only {missing} of {of} voters missed it");
            self.violate(Invariant::StillDead, violation);
        }
    }

    /// Notes how many started voters the cluster has to keep while a replacement is under way.
    pub(super) fn require_started_voters(&mut self, new: &PolicyUse) {
        let voters = self.voters();
        let stay = voters.iter().filter(|id| new.fills_vacancy || **id != new.member);
        self.least_started = stay.filter(|id| self.started.contains(id)).count();
    }

    /// Checks that the store calls the place vacant that a failed replacement has freed.
    pub(super) fn check_vacancy(&mut self, ended: &PolicyUse) {
        let voters = self.voters().len();
        let is_freed = self.removed_by.contains_key(&ended.member) && voters < ended.voters;
        if is_freed && self.uses.0.vacancy(voters, self.members.cluster_id).is_none() {
            let dead = ended.member;
            let violation = format!("the place of {dead} is free, and the store doesn't say so");
            self.violate(Invariant::VacancyIsNoted, violation);
        }
    }

    /// Checks the list of members.
    pub(super) fn check_members(&mut self) {
        let (voters, under_way) = (self.voters(), self.uses.0.under_way().cloned());
        if voters.len() > self.size + usize::from(under_way.is_some()) {
            let violation = format!("{} voters of {}", voters.len(), self.size);
            self.violate(Invariant::Size, violation);
        }
        if let Some(idle) = voters.iter().find(|voter| !self.started.contains(*voter)) {
            self.violate(
                Invariant::StartedBeforeVote,
                format!("{idle} votes and has never started"),
            );
        }
        let old = under_way.filter(|each| !each.fills_vacancy).map(|each| each.member);
        let stay = voters.iter().filter(|id| Some(**id) != old);
        let started = stay.filter(|id| self.started.contains(id)).count();
        if started < self.least_started {
            let least = self.least_started;
            let violation = format!("{started} started voters, and there were {least} before");
            self.violate(Invariant::NoFewerStartedVoters, violation);
        }
    }
}
