//! Admits agents and keeps their seats: redeems, polls and leases.

use std::sync::Arc;

use crate::fitness::{self, ZoneFault};
use crate::rules::Rule;
use crate::service::cluster::{Applicant, Phase, Seating};
use crate::service::event::{Grant, Poll, Redeem};
use crate::service::outcome::{Alarm, ClusterChange, ReopenReason};
use crate::service::refusal::Refusal;
use crate::service::settings::{MAX_EPOCH, MAX_EPOCH_DISTANCE};
use crate::service::step::{EventResult, StepState};
use crate::values::{AgentKey, AgentRecord, AgentSession, Epoch, GrantId, UnixMicros};

impl StepState<'_> {
    pub(super) fn redeem(&mut self, redeem: &Redeem) -> EventResult {
        self.refuse_if_ended()?;
        let record = &redeem.record;
        if record.cluster != self.cluster.id || record.grant != redeem.grant.id {
            return Err(Refusal::ForeignRecord);
        }
        let key = record.key;
        if self.is_forming() {
            self.refuse_freed(&record.grant)?;
            self.check_epoch(redeem.highest_epoch)?;
        }
        if self.cluster.agents.contains_key(&key) {
            self.redeem_again(redeem)?;
        } else {
            if !self.is_forming() {
                return Err(Refusal::BootClosed { key });
            }
            self.admit(redeem)?;
        }
        Ok(Some(key))
    }

    /// Checks a grant when a key redeems it for the first time. Later redeems of the grant by this
    /// key skip the check.
    fn check_grant(&self, grant: &Grant) -> Result<(), Refusal> {
        if grant.revoked || self.cluster.revoked.contains(&grant.id) {
            return Err(Refusal::GrantRevoked);
        }
        if grant.expires <= self.now {
            return Err(Refusal::GrantExpired { expired: grant.expires });
        }
        let of_grant = |agent: &&Applicant| agent.record.grant == grant.id;
        let admitted = self.cluster.agents.values().filter(of_grant).count();
        let limit =
            usize::from(self.cluster.statement.size) * self.context.settings.keys_per_seat as usize;
        if admitted >= limit {
            return Err(Refusal::TooManyKeys { admitted, limit });
        }
        if !self.context.rules.is_on(Rule::UseIsASeat) && admitted >= grant.uses as usize {
            return Err(Refusal::GrantUsed);
        }
        Ok(())
    }

    /// Admits an agent whose key has not redeemed a token of this cluster before.
    fn admit(&mut self, redeem: &Redeem) -> Result<(), Refusal> {
        let grant = &redeem.grant;
        self.check_grant(grant)?;
        self.check_record(&redeem.record)?;
        let key = redeem.record.key;
        let agent = Applicant {
            record: Arc::clone(&redeem.record),
            uses: grant.uses,
            seating: Seating::Absent,
            lease_until: self.now,
            session: Some(redeem.session),
            highest_epoch: 0,
            failed_lists: 0,
            backoff_until: UnixMicros(0),
            release: None,
            approval: None,
        };
        self.cluster.agents.insert(key, agent);
        self.record_change(ClusterChange::Joined { key });
        self.renew(key, redeem.highest_epoch);
        Ok(())
    }

    fn check_record(&self, record: &AgentRecord) -> Result<(), Refusal> {
        let permissions = self.cluster.statement.permissions;
        fitness::check_record(record, permissions).map_err(Refusal::Unfit)?;
        if self.cluster.statement.spreads_zones && record.zone.is_none() {
            return Err(Refusal::NoZone(ZoneFault::Missing));
        }
        for (&other, agent) in &self.cluster.agents {
            if other != record.key && agent.seating != Seating::Absent {
                fitness::check_pair(record, &agent.record, permissions)
                    .map_err(|clash| Refusal::Duplicate { other, clash })?;
            }
        }
        Ok(())
    }

    fn redeem_again(&mut self, redeem: &Redeem) -> Result<(), Refusal> {
        let key = redeem.record.key;
        let known = &self.cluster.agents[&key];
        let same_record = known.record.hash == redeem.record.hash;
        let newer = known.session.is_none_or(|session| redeem.session.boot > session.boot);
        if self.is_forming() && known.record.grant != redeem.grant.id {
            // Without this check, a key that one token has admitted could continue with a revoked
            // token.
            self.check_grant(&redeem.grant)?;
        }
        if !same_record && self.is_forming() && newer {
            self.check_record(&redeem.record)?;
        }
        self.take_over(key, redeem.session)?;
        if !self.is_forming() {
            if !self.cluster.is_listed(key) {
                return Err(Refusal::BootClosed { key });
            }
            return if same_record { Ok(()) } else { Err(Refusal::RecordChanged { key }) };
        }
        if !same_record {
            if !newer {
                return Err(Refusal::RecordChanged { key });
            }
            self.replace_record(key, redeem);
        }
        self.renew(key, redeem.highest_epoch);
        Ok(())
    }

    fn replace_record(&mut self, key: AgentKey, redeem: &Redeem) {
        let agent = self.agent_mut(key);
        agent.record = Arc::clone(&redeem.record);
        agent.uses = redeem.grant.uses;
        self.record_change(ClusterChange::RecordReplaced { key });
        if self.cluster.phase == Phase::Preparing && self.cluster.is_listed(key) {
            self.reopen(ReopenReason::RecordReplaced(key));
        }
    }

    /// Records that an issuer has approved an agent. After the list is decided, an approval has no
    /// effect.
    pub(super) fn approve(&mut self, key: AgentKey, jws: Arc<str>) -> EventResult {
        self.refuse_if_ended()?;
        if !self.cluster.agents.contains_key(&key) {
            return Err(Refusal::UnknownKey { key });
        }
        if self.is_forming() && self.cluster.agents[&key].approval.is_none() {
            self.agent_mut(key).approval = Some(jws);
            self.record_change(ClusterChange::Approved { key });
        }
        Ok(None)
    }

    pub(super) fn poll(&mut self, poll: &Poll) -> EventResult {
        self.refuse_if_ended()?;
        let key = poll.key;
        if !self.cluster.agents.contains_key(&key) {
            return Err(Refusal::UnknownKey { key });
        }
        if self.is_forming() {
            let grant = self.cluster.agents[&key].record.grant.clone();
            self.refuse_freed(&grant)?;
            self.check_epoch(poll.highest_epoch)?;
        }
        self.take_over(key, poll.session)?;
        if self.is_forming() {
            self.renew(key, poll.highest_epoch);
        } else if !self.cluster.is_listed(key) {
            return Err(Refusal::BootClosed { key });
        }
        Ok(Some(key))
    }

    pub(super) fn record_session(&mut self, key: AgentKey, session: AgentSession) -> EventResult {
        self.refuse_if_ended()?;
        if !self.cluster.agents.contains_key(&key) {
            return Err(Refusal::UnknownKey { key });
        }
        self.take_over(key, session)?;
        Ok(Some(key))
    }

    /// Refuses an agent that came with a grant whose seats were freed.
    fn refuse_freed(&self, grant: &GrantId) -> Result<(), Refusal> {
        match self.cluster.freed.contains(grant) {
            true => Err(Refusal::GrantRevoked),
            false => Ok(()),
        }
    }

    /// Takes the seats and places in the queue from all agents that came with a grant, if the
    /// cluster is still forming. A freed seat can't split a cluster: the service may take a seat
    /// away at any time, as it does when a lease lapses.
    pub(super) fn free_seats(&mut self, grant: GrantId) {
        if !self.is_forming() {
            return;
        }
        let of_grant =
            |agent: &Applicant| agent.record.grant == grant && agent.seating != Seating::Absent;
        let agents = self.cluster.agents.iter();
        let freed: Vec<AgentKey> =
            agents.filter(|(_, agent)| of_grant(agent)).map(|(&key, _)| key).collect();
        let listed = freed.iter().find(|&&key| self.cluster.is_listed(key)).copied();
        for key in freed {
            self.agent_mut(key).seating = Seating::Absent;
            self.record_change(ClusterChange::SeatFreed { key });
        }
        self.changed |= self.cluster.freed.insert(grant);
        if let Some(key) = listed.filter(|_| self.cluster.phase == Phase::Preparing) {
            self.reopen(ReopenReason::SeatFreed(key));
        }
    }

    /// Refuses an epoch that no service can have proposed to an agent of this cluster.
    pub(super) fn check_epoch(&self, epoch: Epoch) -> Result<(), Refusal> {
        let seen = self.cluster.epoch.max(self.cluster.floor);
        let limit = seen.saturating_add(MAX_EPOCH_DISTANCE).min(MAX_EPOCH);
        if epoch > limit {
            return Err(Refusal::EpochTooFar { sent: epoch, limit });
        }
        Ok(())
    }

    /// Makes `session` the session of `key`. Refuses it if another session has the key and
    /// `session` has no higher boot counter.
    fn take_over(&mut self, key: AgentKey, session: AgentSession) -> Result<(), Refusal> {
        let one_session = self.context.rules.is_on(Rule::OneSession);
        let agent = self.agent_mut(key);
        match agent.session {
            Some(last) if last == session => Ok(()),
            Some(last) if session.boot <= last.boot && one_session => {
                self.alarms.push(Alarm::KeyElsewhere { key });
                self.note_error(key, "two holders of this agent's key have spoken".to_owned());
                Err(Refusal::KeyElsewhere { key, last: last.boot, sent: session.boot })
            }
            _ => {
                agent.session = Some(session);
                self.changed = true;
                Ok(())
            }
        }
    }

    /// Renews the lease of an agent in a forming cluster, and queues the agent if it was absent.
    /// Raises the cluster's `floor` to the agent's highest epoch.
    fn renew(&mut self, key: AgentKey, highest_epoch: Epoch) {
        let until = self.now.after(self.context.settings.lease);
        let place = self.cluster.next_queue_number;
        let agent = self.agent_mut(key);
        agent.lease_until = until;
        agent.highest_epoch = agent.highest_epoch.max(highest_epoch);
        let returned = agent.seating == Seating::Absent;
        if returned {
            agent.seating = Seating::Standby(place);
        }
        self.changed = true;
        self.cluster.floor = self.cluster.floor.max(highest_epoch);
        if returned {
            self.cluster.next_queue_number += 1;
            self.record_change(ClusterChange::Queued { key });
        }
    }
}
