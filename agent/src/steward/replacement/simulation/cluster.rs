//! The simulated cluster and its store: carries out what agents have decided.

use super::*;

impl Simulation {
    /// An operator fills a vacant place, and removes a learner that a replacement has left. Stock
    /// etcd can't refuse an agent's step because of the operator's change, so the operator waits
    /// for the end of a replacement there.
    pub(super) fn change_by_hand(&mut self) {
        let is_idle = self.uses.0.under_way().is_none();
        if self.voters().len() < self.size && (is_idle || self.node == NodeKind::Muster) {
            let host = self.add_host();
            self.members.list.push(member(host, false));
            self.configuration += 1;
            self.started.insert(host);
            // The operator's member takes the place that a replacement has left, if any.
            let uses = self.uses.0.clone().into_uses();
            for vacant in uses.iter().filter(|each| each.left_vacancy) {
                let successor = Successor { voter: host, is_added_by_hand: true };
                self.successors.entry(vacant.member).or_insert(successor);
            }
        }
        if is_idle {
            let before = self.members.list.len();
            self.members.list.retain(|each| !each.is_learner);
            self.configuration += u64::from(self.members.list.len() < before);
        }
    }

    /// Carries out an agent's pending change, once it is due.
    pub(super) fn act(&mut self, own: MemberId) {
        let now = self.now;
        let host = self.hosts.get_mut(&own).expect("a host");
        let Some(pending) = host.pending.take_if(|pending| pending.due <= now) else { return };
        let age = Duration::from_secs(now - pending.decided_at);
        let is_limited = match &pending.decision {
            Decision::Begin { .. } | Decision::GiveUp { .. } => true,
            Decision::Step(decision) => !decision.newcomer_votes,
        };
        if is_limited && age > STEP_LIFETIME && !self.is_off(Guard::StepAge) {
            return;
        }
        if !self.has_quorum(own) {
            return;
        }
        let is_stale = pending.configuration != self.configuration;
        match pending.decision {
            Decision::Begin { new, revision, ended } => self.begin(own, new, revision, ended),
            _ if is_stale && self.node == NodeKind::Muster => return,
            Decision::GiveUp { operation } => self.give_up(own, operation),
            Decision::Step(decision) => self.take(own, pending.decided_at, &decision),
        }
        self.events += 1;
    }

    /// Counts a use. `ended` says why the policy was no longer in force when the agent decided;
    /// `None` if it was in force.
    fn begin(&mut self, own: MemberId, new: PolicyUse, revision: u64, ended: Option<&'static str>) {
        if revision != self.uses.1 && !self.is_off(Guard::CompareAndSwap) {
            return;
        }
        if self.is_off(Guard::CompareAndSwap) && self.uses.0.under_way().is_some() {
            let violation = "two replacements are under way".to_owned();
            return self.violate(Invariant::OneAtATime, violation);
        }
        if self.uses.0.begin(new.clone(), new.began_at).is_err() {
            return;
        }
        self.uses.1 += 1;
        self.begun.push(self.now);
        self.require_started_voters(&new);
        self.check_beginning(own, &new, ended);
    }

    /// Notes in the store that a use has ended.
    fn end(&mut self, operation: OperationId, how: &str, leaves_vacancy: bool) {
        let policy_use = self.uses.0.of(&operation).cloned();
        if !self.uses.0.end(&operation, how, leaves_vacancy) {
            return;
        }
        self.uses.1 += 1;
        let is_promoted = how == "promoted";
        self.finished += u64::from(is_promoted);
        for host in self.hosts.values_mut() {
            host.is_addition_refused = false;
        }
        self.waiting.retain(|(waits, _)| *waits != operation);
        let policy_use = policy_use.expect("it has just ended");
        if is_promoted {
            self.least_started = policy_use.voters;
        } else {
            self.check_vacancy(&policy_use);
        }
    }

    /// Removes the newcomer of a replacement again, and ends the replacement.
    fn give_up(&mut self, own: MemberId, operation: OperationId) {
        let newcomer = host_of(operation);
        if self.members.of_id(newcomer).is_some() {
            self.members.list.retain(|each| each.id != newcomer);
            self.configuration += 1;
            self.removed_newcomers.insert(newcomer);
        }
        let Some(policy_use) = self.uses.0.of(&operation).cloned() else { return };
        let known = self.hosts[&own].removal_origin.filter(|(of, _)| *of == operation);
        let mut origin = known.map(|(_, origin)| origin).unwrap_or_default();
        if self.is_off(Guard::FindRemover) && origin == RemovalOrigin::Unknown {
            origin = RemovalOrigin::Foreign;
        }
        match leaves_vacancy(&policy_use, false, &self.members, origin) {
            Some(is_vacant) => self.end(operation, "stalled", is_vacant),
            None => self.find_remover(own, &policy_use),
        }
    }

    /// Tells an agent whether a use's operation has removed its dead member.
    fn find_remover(&mut self, own: MemberId, policy_use: &PolicyUse) {
        let PolicyUse { operation, member, .. } = policy_use;
        let by = match self.node {
            NodeKind::Muster => self.removed_by.get(member),
            NodeKind::StockEtcd => self.announced.get(member),
        };
        let is_own = by == Some(operation);
        let origin = if is_own { RemovalOrigin::Own } else { RemovalOrigin::Foreign };
        let host = self.hosts.get_mut(&own).expect("a host");
        host.removal_origin = Some((*operation, origin));
    }

    /// Carries out an agent's step, unless the cluster refuses it.
    fn take(&mut self, own: MemberId, decided_at: u64, decision: &StepDecision) {
        let operation = decision.operation;
        let Some(policy_use) = self.uses.0.of(&operation).cloned() else { return };
        let changed = match decision.step {
            ReplacementStep::Add => self.add(own, operation),
            ReplacementStep::Promote(id) => self.promote(own, id, decided_at, &policy_use),
            ReplacementStep::Remove(id) => self.remove(own, id, operation),
            ReplacementStep::GiveUp { .. } => {
                self.give_up(own, operation);
                false
            }
            ReplacementStep::FindRemover(_) => {
                self.find_remover(own, &policy_use);
                false
            }
            ReplacementStep::Done(_) => {
                self.end(operation, "promoted", false);
                false
            }
            _ => false,
        };
        self.configuration += u64::from(changed);
        if changed && decision.is_after_end {
            let violation = format!("{operation} had ended, and {:?} was done", decision.step);
            self.violate(Invariant::NoStepAfterEnd, violation);
        }
    }

    /// Adds the newcomer as a learner. Returns whether that was done.
    fn add(&mut self, own: MemberId, operation: OperationId) -> bool {
        let newcomer = host_of(operation);
        let is_repeated =
            self.node == NodeKind::Muster && self.removed_newcomers.contains(&newcomer);
        if self.members.of_id(newcomer).is_some() || is_repeated {
            return false;
        }
        let voters = self.voters();
        if !voters.iter().all(|id| self.reaches(own, *id)) {
            self.hosts.get_mut(&own).expect("a host").is_addition_refused = true;
            return false;
        }
        self.members.list.push(member(newcomer, true));
        self.started.remove(&newcomer);
        self.learner_since.insert(newcomer, self.now);
        true
    }

    /// Makes the newcomer `id` a voter. Returns whether that was done.
    fn promote(
        &mut self,
        own: MemberId,
        id: MemberId,
        decided_at: u64,
        policy_use: &PolicyUse,
    ) -> bool {
        let is_ready = self.started.contains(&id) || self.is_off(Guard::Start);
        // A member that is removed and added again gets another id.
        let is_known = self.learner_since.get(&id).is_some_and(|since| *since <= decided_at);
        let is_learner = self.members.of_id(id).is_some_and(|found| found.is_learner);
        if !(is_ready && is_known && is_learner && self.reaches(own, id)) {
            return false;
        }
        self.check_still_dead(own, policy_use.member, "replaced");
        let dead = policy_use.member;
        let successor = Successor { voter: id, is_added_by_hand: false };
        let is_whole = self.voters().len() >= self.size;
        let earlier = self.successors.insert(dead, successor);
        if let Some(earlier) = earlier.filter(|earlier| is_whole || !earlier.is_added_by_hand) {
            let violation = format!("{} and {id} both take the place of {dead}", earlier.voter);
            self.violate(Invariant::OneNewcomerForOneDeath, violation);
        }
        let found = self.members.list.iter_mut().find(|each| each.id == id);
        let found = found.expect("just found");
        (found.is_learner, found.name) = (false, format!("db-{id}"));
        true
    }

    /// Removes the dead member `id`. Returns whether that was done.
    fn remove(&mut self, own: MemberId, id: MemberId, operation: OperationId) -> bool {
        if self.node == NodeKind::StockEtcd {
            self.announced.insert(id, operation);
        }
        let voters = self.voters();
        let stay: Vec<MemberId> = voters.into_iter().filter(|each| *each != id).collect();
        let connected = stay.iter().filter(|each| self.reaches(own, **each)).count();
        if connected <= stay.len() / 2 || self.members.of_id(id).is_none() {
            return false;
        }
        if self.members.of_id(host_of(operation)).is_none_or(|found| found.is_learner) {
            self.check_still_dead(own, id, "removed");
        }
        self.members.list.retain(|each| each.id != id);
        self.removed_by.insert(id, operation);
        true
    }
}
