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

    /// Returns the voters, this agent's own included, whose agents have observed for `after`
    /// seconds that `dead` is unreachable. The agent of `own` accepts these observations.
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
        let decision = match (self.uses.0.under_way().cloned(), self.ended_use()) {
            (_, Some(ended)) if self.random.one_in(4) => self.decide_step(own, &ended),
            (Some(policy_use), _) => self.decide_step(own, &policy_use),
            (None, _) => self.decide_beginning(own),
        };
        let Some(decision) = decision else { return };
        let delay = match self.agents_hang && self.random.one_in(30) {
            true => self.random.below(MAX_HANG),
            false => self.random.below(MAX_DELAY),
        };
        let (decided_at, configuration) = (self.now, self.configuration);
        let due = self.now + delay * TICK;
        let pending = PendingChange { decided_at, due, configuration, decision };
        self.hosts.get_mut(&own).expect("a host").pending = Some(pending);
        self.events += 1;
    }

    /// Returns a use that has ended, if discovery hands its newcomer out again.
    fn ended_use(&mut self) -> Option<PolicyUse> {
        let mut ended = self.uses.0.clone().into_uses();
        ended.retain(|each| each.ended.is_some());
        let count = u64::try_from(ended.len()).unwrap_or(0);
        let at = if count == 0 { return None } else { self.random.below(count) };
        Some(ended.swap_remove(usize::try_from(at).unwrap_or(0)))
    }

    fn decide_beginning(&mut self, own: MemberId) -> Option<Decision> {
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
        let facts =
            VoterFacts { unreachable, are_known, observers, unconfirming: Vec::new(), not_in_sync };
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
                Some(Decision::Begin { new, revision, ended })
            }
            _ => None,
        }
    }

    /// Returns the policy as agents see it, and why it is no longer in force by the true time;
    /// `None` if it is in force.
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

    /// Decides about the next step of a replacement. `policy_use` may have ended, because discovery
    /// hands out newcomers even of uses that have ended.
    fn decide_step(&mut self, own: MemberId, policy_use: &PolicyUse) -> Option<Decision> {
        let operation = policy_use.operation;
        let host = host_of(operation);
        let newcomer = self.members.of_id(host).cloned();
        let newcomer_votes = newcomer.as_ref().is_some_and(|found| !found.is_learner);
        if !newcomer_votes {
            match self.continuation_of(own, policy_use) {
                Continuation::Continue => {}
                Continuation::Pause(_) => return None,
                Continuation::GiveUp(_) => return Some(Decision::GiveUp { operation }),
            }
            let stalled = self.learner_since.get(&host);
            let is_stalled = stalled.is_some_and(|since| self.now - since > STALLED_AFTER);
            let is_gone = newcomer.is_none() && self.removed_newcomers.contains(&host);
            if is_stalled || is_gone {
                return Some(Decision::GiveUp { operation });
            }
        }
        let known = self.hosts[&own].removal_origin.filter(|(of, _)| *of == operation);
        let step = ReplacementFacts {
            observed: &self.observed_cluster(own, host),
            old: (!policy_use.fills_vacancy).then_some(policy_use.member),
            peer_urls: &[url_of(host)],
            removal_origin: known.map(|(_, origin)| origin).unwrap_or_default(),
            is_addition_refused: self.hosts[&own].is_addition_refused,
        }
        .next_step();
        if matches!(step, ReplacementStep::AwaitStart(_) | ReplacementStep::AwaitSync(..)) {
            return None;
        }
        let is_after_end = policy_use.ended.is_some();
        Some(Decision::Step(StepDecision { operation, step, newcomer_votes, is_after_end }))
    }

    /// Returns whether an agent goes on with a replacement whose newcomer doesn't vote.
    fn continuation_of(&mut self, own: MemberId, policy_use: &PolicyUse) -> Continuation {
        let (now, voters) = (self.instant(), self.voters());
        let old = self.members.of_id(policy_use.member).filter(|_| !policy_use.fills_vacancy);
        let old = old.map(|old| old.id);
        let reach = &self.hosts[&own].reach;
        let seen = old.map(|old| reach.state_of(old, own, now));
        let mut state = seen;
        if let (Some(old), Some(seen), false) = (old, seen, self.is_off(Guard::Agreement)) {
            let observers = self.agreeing(own, old, 0);
            state = Some(seen.with_observers(old, &observers, &voters));
        }
        if self.is_off(Guard::Continuation) {
            return Continuation::Continue;
        }
        let standing =
            if self.is_revoked { PolicyStanding::Revoked } else { PolicyStanding::InForce };
        let mut policy_use = policy_use.clone();
        if self.is_off(Guard::EndedUse) {
            policy_use.ended = None;
        }
        continuation(&policy_use, standing, state, voters.len())
    }

    /// Returns the members as an agent sees them, with the newcomer `host`.
    fn observed_cluster(&self, own: MemberId, host: MemberId) -> ObservedCluster {
        let refused = self.hosts[&own].is_addition_refused;
        let state = |each: &ClusterMember| match () {
            () if !self.started.contains(&each.id) && !self.is_off(Guard::Start) => {
                MemberState::NotStarted
            }
            () if refused && !self.reaches(own, each.id) => MemberState::Silent,
            () if each.id == host && !self.reaches(own, host) => MemberState::Silent,
            () => MemberState::Answers { behind: Some(0) },
        };
        let members = self.members.list.iter();
        let members =
            members.map(|each| ObservedMember { member: each.clone(), state: state(each) });
        ObservedCluster { members: members.collect(), leader: Some(own) }
    }
}
