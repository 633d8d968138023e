//! Observations and decisions of the simulated agents.

use super::*;

impl Simulation {
    pub(super) fn look(&mut self, host: MemberId) {
        if self.random.one_in(10) {
            return;
        }
        let voters = self.voters();
        let others = voters.iter().filter(|to| **to != host);
        let reached: BTreeMap<MemberId, bool> =
            others.map(|to| (*to, self.reaches(host, *to))).collect();
        let now = self.instant();
        self.hosts.get_mut(&host).expect("a host").reach.record(&reached, now);
    }

    pub(super) fn observe(&mut self, host: MemberId) {
        let unreachable = self.hosts[&host].reach.unreachable(self.instant());
        let [(member, time)] = unreachable[..] else { return };
        let is_replaced = self.uses.0.under_way().is_some_and(|each| each.member == member);
        let is_early = time.as_secs() < LIMITS.after_seconds;
        if is_early && !is_replaced && !self.is_off(Guard::Patience) {
            return;
        }
        if self.has_quorum(host) && self.random.one_in(2) {
            self.writes += 1;
            let (number, revision) =
                (self.stored.get(&host).map_or(0, |last| last.revision), self.writes);
            self.stored.insert(host, StoredObservation { number, revision, unreachable });
        }
    }

    /// Returns the voters, this agent's own included, whose observations this agent accepts: the
    /// member has been unreachable for `after` seconds.
    fn agreeing(&mut self, own: MemberId, dead: MemberId, after: u64) -> Vec<MemberId> {
        let (now, voters) = (self.instant(), self.voters());
        if self.is_off(Guard::Quorum) {
            return voters;
        }
        let is_any_age = self.is_off(Guard::Freshness);
        let host = self.hosts.get_mut(&own).expect("a host");
        let mut agreeing = vec![own];
        for (observer, stored) in &self.stored {
            let written = (stored.number, stored.revision);
            let is_fresh = host.observations.is_fresh(*observer, written, now);
            let agrees = stored
                .unreachable
                .iter()
                .any(|(member, time)| *member == dead && time.as_secs() >= after);
            let is_other = *observer != own && *observer != dead && voters.contains(observer);
            if is_other && agrees && (is_fresh || is_any_age) {
                agreeing.push(*observer);
            }
        }
        agreeing
    }

    /// Lets the leader's agent read the store and decide on one change.
    pub(super) fn decide(&mut self, own: MemberId) {
        if self.hosts[&own].pending.is_some() || !self.has_quorum(own) {
            return;
        }
        let decision = match self.uses.0.under_way().cloned() {
            Some(policy_use) => self.decide_step(own, &policy_use),
            None => self.decide_beginning(own),
        };
        let delay = self.random.below(MAX_DELAY);
        let host = self.hosts.get_mut(&own).expect("a host");
        host.pending = decision.map(|decision| (self.now + delay * TICK, decision));
    }

    fn decide_beginning(&mut self, own: MemberId) -> Option<Pending> {
        let now = self.instant();
        let mut unreachable = self.hosts[&own].reach.unreachable(now);
        if self.is_off(Guard::OneDead) {
            unreachable.truncate(1);
        }
        if self.is_off(Guard::Patience) {
            for (_, time) in &mut unreachable {
                *time = Duration::from_secs(LIMITS.after_seconds);
            }
        }
        let voters = self.voters();
        let others: Vec<MemberId> = voters.iter().copied().filter(|id| *id != own).collect();
        let are_known = others.iter().all(|id| self.hosts[&own].reach.is_known(*id, now));
        let observers = match unreachable[..] {
            [(dead, _)] if self.is_off(Guard::Patience) => {
                let mut all = voters.clone();
                all.retain(|id| *id != dead);
                all
            }
            [(dead, _)] => self.agreeing(own, dead, LIMITS.after_seconds),
            _ => Vec::new(),
        };
        let mut not_in_sync: Vec<MemberId> =
            others.iter().copied().filter(|id| !self.reaches(own, *id)).collect();
        if self.is_off(Guard::InSync) {
            not_in_sync.clear();
        }
        let facts = VoterFacts { unreachable, are_known, observers, not_in_sync };
        // Discovery may hand out the hosts in any order, and may report any time.
        let (operation, host) = self.random.pick(&self.waiting.clone())?;
        let lie = self.random.below(3) * 10_000;
        let (name, peer_urls) = (format!("db-{host}"), vec![url_of(host)]);
        let candidate = Candidate { operation, name, peer_urls, zone: None };
        let own_now = self.now.saturating_add_signed(self.hosts[&own].skew);
        let mut uses = self.uses.0.clone();
        if self.is_off(Guard::Vacancy) {
            uses = uses.with_vacancies_for_ever();
        }
        let (policy, ended) = self.policy_facts();
        let decision = PolicyReplacementFacts {
            policy,
            candidate: &candidate,
            uses: &uses,
            members: &self.members,
            own,
            voters: &facts,
            zones: None,
            other_change: None,
            own_now,
            service_now: self.now.saturating_sub(10_000).saturating_add(lie),
        }
        .decide();
        match decision {
            PolicyDecision::Begin(new) => {
                let revision = self.uses.1;
                Some(Pending::Begin { new, revision, ended })
            }
            _ => None,
        }
    }

    /// Returns the policy as agents judge it, and how it has ended by the true time, if it has.
    fn policy_facts(&self) -> (PolicyFacts, Option<&'static str>) {
        let mut limits = LIMITS;
        if self.is_off(Guard::Limit) {
            limits.at_most = u8::MAX;
        }
        let standing = match self.is_revoked && !self.is_off(Guard::Revocation) {
            true => PolicyStanding::Revoked,
            false => PolicyStanding::InForce,
        };
        let expires_at = if self.is_off(Guard::Expiry) { u64::MAX } else { self.expires_at };
        // An agent's clock may be behind.
        let is_expired = self.now >= self.expires_at.saturating_add(MAX_SKEW);
        let ended = match (self.is_revoked, is_expired) {
            (true, _) => Some("was revoked"),
            (false, true) => Some("had expired"),
            (false, false) => None,
        };
        (PolicyFacts { id: self.policy, limits, expires_at, standing }, ended)
    }

    fn decide_step(&mut self, own: MemberId, policy_use: &PolicyUse) -> Option<Pending> {
        let operation = policy_use.operation;
        let host = MemberId(u64::from_be_bytes(operation.0[..8].try_into().expect("8 bytes")));
        let newcomer = self.members.of_id(host).cloned();
        let is_voter = newcomer.as_ref().is_some_and(|found| !found.is_learner);
        let now = self.instant();
        let old = self.members.of_id(policy_use.member).filter(|_| !policy_use.fills_vacancy);
        let old = old.map(|old| old.id);
        if !is_voter {
            let reach = &self.hosts[&own].reach;
            let seen =
                old.map(|old| match (reach.is_known(old, now), reach.unreachable_for(old, now)) {
                    (false, _) => DeadMemberState::Unknown,
                    (true, Some(_)) => DeadMemberState::Unreachable,
                    (true, None) => DeadMemberState::Back,
                });
            let mut state = seen;
            if let (Some(old), Some(seen), false) = (old, seen, self.is_off(Guard::Agreement)) {
                let observers = self.agreeing(own, old, 0);
                state = Some(seen.with_observers(old, &observers, &self.voters()));
            }
            let standing =
                if self.is_revoked { PolicyStanding::Revoked } else { PolicyStanding::InForce };
            let goes_on = match self.is_off(Guard::Continuation) {
                true => Continuation::Continue,
                false => continuation(policy_use, standing, state, self.voters().len()),
            };
            match goes_on {
                Continuation::Continue => {}
                Continuation::Pause(_) => return None,
                Continuation::GiveUp(_) => return Some(Pending::GiveUp { operation }),
            }
            let stalled = self.learner_since.get(&host);
            if stalled.is_some_and(|since| self.now - since > STALLED_AFTER) {
                return Some(Pending::GiveUp { operation });
            }
        }
        let old = (!policy_use.fills_vacancy).then_some(policy_use.member);
        let refused = self.hosts[&own].is_addition_refused;
        let state = |each: &ClusterMember| match () {
            () if !self.started.contains(&each.id) => MemberState::NotStarted,
            () if refused && !self.reaches(own, each.id) => MemberState::Silent,
            () if each.id == host && !self.reaches(own, host) => MemberState::Silent,
            () => MemberState::Answers { behind: Some(0) },
        };
        let members = self.members.list.iter();
        let members =
            members.map(|each| ObservedMember { member: each.clone(), state: state(each) });
        let observed = ObservedCluster { members: members.collect(), leader: Some(own) };
        let origin = match self.removed_by.get(&policy_use.member) {
            Some(by) if *by == operation => RemovalOrigin::Own,
            _ => RemovalOrigin::Foreign,
        };
        let step = ReplacementFacts {
            observed: &observed,
            old,
            peer_urls: &[url_of(host)],
            removal_origin: origin,
            is_addition_refused: refused,
        }
        .next_step();
        Some(Pending::Step { operation, step, configuration: self.configuration })
    }
}
