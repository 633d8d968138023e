//! The member table that the cluster must have: the model applies each committed member change in
//! order.

use std::collections::{BTreeMap, BTreeSet};

use node_consensus::Members;
use node_proto::command;
use node_proto::musterpb::PublishMember;
use node_state::identity::{Incarnation, MemberId};
use node_state::membership::{ChangeRequest, Member, MemberChange};

/// The members after one change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    /// Current voters and learners.
    pub members: Members,
    /// Ids of removed members; a removed id is never used again.
    pub removed: BTreeSet<u64>,
}

#[derive(Debug)]
struct ModelMember {
    is_learner: bool,
    urls: Vec<String>,
    incarnation: Option<Incarnation>,
}

/// The members, and their history since the cluster began.
#[derive(Debug, Default)]
pub struct MembershipModel {
    now: BTreeMap<u64, ModelMember>,
    removed: BTreeMap<u64, Option<Incarnation>>,
    /// Ids of the operations that were carried out, in order.
    operations: Vec<[u8; 16]>,
    /// Index of the entry that made the last change.
    changed: u64,
    /// Each configuration, by the index of the entry that made it.
    configurations: BTreeMap<u64, Configuration>,
}

impl MembershipModel {
    /// Sets the cluster's initial members.
    pub fn begin(&mut self, members: &[Member]) {
        members.iter().for_each(|member| self.insert(member));
        self.record_configuration(0);
    }

    /// Returns the members once entry `index` is applied.
    pub fn configuration_at(&self, index: u64) -> Option<&Configuration> {
        self.configurations.range(..=index).next_back().map(|(_, found)| found)
    }

    /// Returns the members once entry `index` is applied, then the members after each later change.
    pub fn configurations_since(&self, index: u64) -> impl Iterator<Item = &Configuration> {
        let first = self.configurations.range(..=index).next_back().map_or(0, |(first, _)| *first);
        self.configurations.range(first..).map(|(_, found)| found)
    }

    /// Returns the configuration after the last change, and the one before it.
    pub fn last_two(&self) -> Option<(&Configuration, &Configuration)> {
        let mut newest = self.configurations.values().rev();
        newest.next().zip(newest.next())
    }

    /// Returns whether entry `index` changed the voters or the learners.
    pub fn has_changed_members(&self, index: u64) -> bool {
        let before = index.checked_sub(1).and_then(|before| self.configuration_at(before));
        self.configuration_at(index).map(|at| &at.members) != before.map(|before| &before.members)
    }

    /// Returns the index of the entry that removed member `id`.
    pub fn removal(&self, id: u64) -> Option<u64> {
        self.configurations.iter().find(|(_, at)| at.removed.contains(&id)).map(|(index, _)| *index)
    }

    /// Applies a committed change. Returns false if the change is refused, or if it was already
    /// carried out.
    pub fn change(&mut self, index: u64, change: command::MemberChange) -> bool {
        let Ok(request) = ChangeRequest::try_from(change) else { return false };
        let ChangeRequest { change, operation, planned_at } = request;
        let is_stale = planned_at.is_some_and(|at| at != self.changed);
        let is_repeated = operation.is_some_and(|operation| self.operations.contains(&operation.0));
        if is_stale || is_repeated || !self.apply_member_change(&change) {
            return false;
        }
        self.operations.extend(operation.map(|operation| operation.0));
        self.record_configuration(index);
        true
    }

    /// Applies a published member record: binds its incarnation to the member if the member has
    /// none. An incarnation that another member has or had is not bound. A cluster whose members
    /// have no incarnations stays without them.
    pub fn publish(&mut self, record: &PublishMember) {
        let are_bound = self.now.values().any(|one| one.incarnation.is_some());
        let incarnation = <[u8; 16]>::try_from(&record.incarnation[..]).ok().map(Incarnation);
        let is_same = |other: &Option<Incarnation>| incarnation.is_some() && *other == incarnation;
        let is_used_elsewhere = self.removed.values().any(is_same)
            || self
                .now
                .iter()
                .any(|(id, one)| *id != record.member_id && is_same(&one.incarnation));
        if let Some(one) = self.now.get_mut(&record.member_id)
            && are_bound
            && !is_used_elsewhere
        {
            one.incarnation = one.incarnation.or(incarnation);
        }
    }

    fn apply_member_change(&mut self, change: &MemberChange) -> bool {
        match change {
            MemberChange::Add(member) => {
                let id = member.id.0;
                let is_same = |other: &Option<Incarnation>| {
                    member.incarnation.is_some() && *other == member.incarnation
                };
                let is_used_id = self.now.contains_key(&id) || self.removed.contains_key(&id);
                let is_used_incarnation = self.now.values().any(|one| is_same(&one.incarnation))
                    || self.removed.values().any(is_same);
                if is_used_id || is_used_incarnation || self.is_taken(&member.peer_urls, id) {
                    return false;
                }
                self.insert(member);
            }
            MemberChange::Promote(MemberId(id)) => match self.now.get_mut(id) {
                Some(one) if one.is_learner => one.is_learner = false,
                _ => return false,
            },
            MemberChange::Update(MemberId(id), urls) => {
                let is_taken = self.is_taken(urls, *id);
                match self.now.get_mut(id) {
                    Some(one) if !is_taken => one.urls.clone_from(urls),
                    _ => return false,
                }
            }
            MemberChange::Remove(MemberId(id)) => {
                let others = self.now.iter().any(|(other, one)| other != id && !one.is_learner);
                match self.now.get(id) {
                    Some(one) if one.is_learner || others => {}
                    _ => return false,
                }
                if let Some(member) = self.now.remove(id) {
                    self.removed.insert(*id, member.incarnation);
                }
            }
        }
        true
    }

    fn is_taken(&self, urls: &[String], by: u64) -> bool {
        let mut others = self.now.iter().filter(|(id, _)| **id != by);
        others.any(|(_, one)| one.urls.iter().any(|url| urls.contains(url)))
    }

    fn insert(&mut self, member: &Member) {
        let Member { is_learner, peer_urls, incarnation, .. } = member.clone();
        self.now.insert(member.id.0, ModelMember { is_learner, urls: peer_urls, incarnation });
    }

    fn record_configuration(&mut self, index: u64) {
        let ids_where = |learners: bool| {
            let members = self.now.iter().filter(move |(_, one)| one.is_learner == learners);
            members.map(|(id, _)| *id).collect()
        };
        let members = Members { voters: ids_where(false), learners: ids_where(true) };
        let removed = self.removed.keys().copied().collect();
        self.configurations.insert(index, Configuration { members, removed });
        self.changed = index;
    }
}
