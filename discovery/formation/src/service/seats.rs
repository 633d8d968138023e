//! Seats of an open cluster: which agents have a seat, wait or are in backoff, and when the list of
//! members is frozen.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::fitness;
use crate::rules::Rule;
use crate::service::cluster::{FrozenList, Phase, Seating};
use crate::service::outcome::ClusterChange;
use crate::service::step::StepState;
use crate::values::{AgentKey, ProposedList, Seat};

impl StepState<'_> {
    /// Updates the seats at the end of a step. Seats change only in an open cluster.
    pub(super) fn update_seats(&mut self) {
        if self.cluster.phase != Phase::Open || self.cluster.split.is_some() {
            return;
        }
        self.put_behind_standbys();
        self.unseat_from_crowded_zones();
        self.seat_approved_first();
        self.fill_seats();
        self.freeze();
    }

    /// Counts a failed list against `key`, and starts a backoff, which grows with each failed list
    /// (`FormationSettings::backoff_after`).
    pub(super) fn count_failed_list(&mut self, key: AgentKey) {
        let (now, settings) = (self.now, self.context.settings);
        let agent = self.agent_mut(key);
        agent.failed_lists = agent.failed_lists.saturating_add(1);
        agent.backoff_until = now.after(settings.backoff_after(agent.failed_lists));
        let counts = agent.failed_lists;
        self.record_change(ClusterChange::Counted { key, counts });
    }

    /// Takes the seat away from each agent that is in backoff after two or more failed lists of
    /// members. The first standby that isn't in backoff gets the seat, and the agent moves behind
    /// all standbys. Without such a standby, the agent keeps its seat.
    fn put_behind_standbys(&mut self) {
        if !self.context.rules.is_on(Rule::CountedGoBehind) {
            return;
        }
        for (seat, key) in self.cluster.seats() {
            let agent = &self.cluster.agents[&key];
            if agent.failed_lists < 2 || agent.backoff_until <= self.now {
                continue;
            }
            let Some(next) = self.first_standby(Some(key)) else {
                continue;
            };
            let order = self.cluster.next_queue_number;
            self.cluster.next_queue_number += 1;
            self.agent_mut(key).seating = Seating::Standby(order);
            self.record_change(ClusterChange::Queued { key });
            self.give_seat(next, seat);
        }
    }

    /// Takes the seat away from each agent whose zone already has as many seats as a zone may have.
    /// That can happen after the record of a seated agent was replaced by a record with another
    /// zone.
    fn unseat_from_crowded_zones(&mut self) {
        if !self.cluster.statement.spreads_zones {
            return;
        }
        let size = usize::from(self.cluster.statement.size);
        let mut zones: Vec<Option<String>> = Vec::new();
        for (_, key) in self.cluster.seats() {
            let zone = self.cluster.agents[&key].record.zone.clone();
            let before = zones.iter().map(Option::as_deref);
            if fitness::check_zone(zone.as_deref(), before, size).is_err() {
                let order = self.cluster.next_queue_number;
                self.cluster.next_queue_number += 1;
                self.agent_mut(key).seating = Seating::Standby(order);
                self.record_change(ClusterChange::Queued { key });
            } else {
                zones.push(zone);
            }
        }
    }

    /// Replaces each seated agent that nobody has approved by an approved standby. Otherwise hosts
    /// with a stolen bundle could keep all seats.
    fn seat_approved_first(&mut self) {
        if !self.cluster.statement.needs_approval {
            return;
        }
        for (seat, key) in self.cluster.seats() {
            if self.cluster.is_approved(key) {
                continue;
            }
            let next = self.first_standby(Some(key)).filter(|&next| self.cluster.is_approved(next));
            let Some(next) = next else { continue };
            let order = self.cluster.next_queue_number;
            self.cluster.next_queue_number += 1;
            self.agent_mut(key).seating = Seating::Standby(order);
            self.record_change(ClusterChange::Queued { key });
            self.give_seat(next, seat);
        }
    }

    fn fill_seats(&mut self) {
        for seat in 1..=self.cluster.statement.size {
            if self.cluster.seats().contains_key(&seat) {
                continue;
            }
            match self.first_standby(None) {
                Some(key) => self.give_seat(key, seat),
                None => break,
            }
        }
    }

    fn give_seat(&mut self, key: AgentKey, seat: Seat) {
        assert!(!self.cluster.seats().contains_key(&seat), "seat {seat} is given to a second one");
        self.agent_mut(key).seating = Seating::Seat(seat);
        self.record_change(ClusterChange::Seated { key, seat });
    }

    /// Returns the standby that has waited longest and can share a list with the seated agents.
    /// Approved standbys come before others.
    ///
    /// `leaving` is a seated agent that the standby would replace. A standby in backoff can't
    /// replace a seated agent.
    fn first_standby(&self, leaving: Option<AgentKey>) -> Option<AgentKey> {
        let cluster = &*self.cluster;
        let mut seated: Vec<AgentKey> = cluster.seats().into_values().collect();
        seated.retain(|&key| Some(key) != leaving);
        let permissions = cluster.statement.permissions;
        let suits = |key: &AgentKey| {
            let agent = &cluster.agents[key];
            let grant = &agent.record.grant;
            let taken =
                seated.iter().filter(|key| cluster.agents[key].record.grant == *grant).count();
            let in_use = self.context.rules.is_on(Rule::UseIsASeat) && taken >= agent.uses as usize;
            let held = leaving.is_some() && agent.backoff_until > self.now;
            let clashes = seated.iter().any(|other| {
                fitness::check_pair(&agent.record, &cluster.agents[other].record, permissions)
                    .is_err()
            });
            let is_crowded = cluster.statement.spreads_zones && {
                let zones = seated.iter().map(|other| cluster.agents[other].record.zone.as_deref());
                let size = usize::from(cluster.statement.size);
                fitness::check_zone(agent.record.zone.as_deref(), zones, size).is_err()
            };
            !in_use && !held && !clashes && !is_crowded
        };
        let suitable: Vec<AgentKey> = cluster.standbys().into_values().filter(suits).collect();
        let approved = suitable.iter().find(|&&key| cluster.is_approved(key));
        approved.or(suitable.first()).copied()
    }

    /// Freezes the list of members if every seat is taken by an approved agent, and none of them is
    /// in backoff. The list's epoch is above every epoch that an agent has signed or released.
    fn freeze(&mut self) {
        let seats = self.cluster.seats();
        let held = |key: &AgentKey| self.cluster.agents[key].backoff_until > self.now;
        if self.cluster.is_unsettled
            || seats.len() != usize::from(self.cluster.statement.size)
            || seats.values().any(held)
            || !seats.values().all(|key| self.cluster.is_approved(*key))
        {
            return;
        }
        let mut epoch = self.cluster.epoch;
        if self.context.rules.is_on(Rule::FreezeAboveFloor) {
            epoch = epoch.max(self.cluster.floor.saturating_add(1));
            assert!(epoch > self.cluster.floor, "epoch {epoch} may have been signed before");
        }
        let records = seats.values().map(|key| Arc::clone(&self.cluster.agents[key].record));
        let proposal = ProposedList {
            cluster: self.cluster.id,
            statement: self.cluster.statement.hash,
            epoch,
            records: records.collect(),
        };
        let h = (self.context.hash)(&proposal);
        self.cluster.phase = Phase::Preparing;
        self.cluster.epoch = epoch;
        self.cluster.frozen = Some(FrozenList {
            proposal,
            proposal_hash: h,
            at: self.now,
            acks: BTreeMap::new(),
            probes: BTreeMap::new(),
        });
        self.record_change(ClusterChange::Frozen { epoch, h });
    }
}
