//! Who the members have to be: one step for each change that is committed, in order.

use std::collections::{BTreeMap, BTreeSet};

use muster_node::identity::{Incarnation, MemberId};
use muster_node::membership::{ChangeRequest, Member, MemberChange};
use node_consensus::Members;
use node_proto::command;
use node_proto::musterpb::PublishMember;

/// The members after a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    /// Who votes and who only receives.
    pub members: Members,
    /// Who never comes back.
    pub removed: BTreeSet<u64>,
}

#[derive(Debug)]
struct One {
    is_learner: bool,
    urls: Vec<String>,
    incarnation: Option<Incarnation>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Membership {
    now: BTreeMap<u64, One>,
    removed: BTreeMap<u64, Option<Incarnation>>,
    /// Operations that were carried out, in order.
    operations: Vec<[u8; 16]>,
    /// The entry of the last change.
    changed: u64,
    /// By the entry that made them.
    configurations: BTreeMap<u64, Configuration>,
}

impl Membership {
    /// The cluster begins with these.
    pub fn begin(&mut self, members: &[Member]) {
        members.iter().for_each(|member| self.insert(member));
        self.note(0);
    }

    /// The members as they are once entry `index` is applied.
    pub fn at(&self, index: u64) -> Option<&Configuration> {
        self.configurations.range(..=index).next_back().map(|(_, found)| found)
    }

    /// The members as they are once entry `index` is applied, and as each later change left them.
    pub fn since(&self, index: u64) -> impl Iterator<Item = &Configuration> {
        let first = self.configurations.range(..=index).next_back().map_or(0, |(first, _)| *first);
        self.configurations.range(first..).map(|(_, found)| found)
    }

    /// Those of the last change, and of the one before.
    pub fn last_two(&self) -> Option<(&Configuration, &Configuration)> {
        let mut newest = self.configurations.values().rev();
        newest.next().zip(newest.next())
    }

    /// Whether entry `index` changed who votes or receives.
    pub fn counts(&self, index: u64) -> bool {
        let before = index.checked_sub(1).and_then(|before| self.at(before));
        self.at(index).map(|at| &at.members) != before.map(|before| &before.members)
    }

    /// When this one was removed.
    pub fn removal(&self, id: u64) -> Option<u64> {
        self.configurations.iter().find(|(_, at)| at.removed.contains(&id)).map(|(index, _)| *index)
    }

    /// A change is committed; whether it was made.
    pub fn change(&mut self, index: u64, change: command::MemberChange) -> bool {
        let Ok(asked) = ChangeRequest::try_from(change) else { return false };
        let ChangeRequest { change, operation, planned_at } = asked;
        let stale = planned_at.is_some_and(|at| at != self.changed);
        let again = operation.is_some_and(|operation| self.operations.contains(&operation.0));
        if stale || again || !self.carry_out(&change) {
            return false;
        }
        self.operations.extend(operation.map(|operation| operation.0));
        self.note(index);
        true
    }

    /// A member has said who it is.
    pub fn publish(&mut self, said: &PublishMember) {
        let bound = self.now.values().any(|one| one.incarnation.is_some());
        let incarnation = <[u8; 16]>::try_from(&said.incarnation[..]).ok().map(Incarnation);
        let known = |of: &Option<Incarnation>| incarnation.is_some() && *of == incarnation;
        let elsewhere = self.removed.values().any(known)
            || self.now.iter().any(|(id, one)| *id != said.member_id && known(&one.incarnation));
        if let Some(one) = self.now.get_mut(&said.member_id)
            && bound
            && !elsewhere
        {
            one.incarnation = one.incarnation.or(incarnation);
        }
    }

    fn carry_out(&mut self, change: &MemberChange) -> bool {
        match change {
            MemberChange::Add(member) => {
                let id = member.id.0;
                let known = |of: &Option<Incarnation>| {
                    member.incarnation.is_some() && *of == member.incarnation
                };
                let was_here = self.now.contains_key(&id) || self.removed.contains_key(&id);
                let incarnation_was = self.now.values().any(|one| known(&one.incarnation))
                    || self.removed.values().any(known);
                if was_here || incarnation_was || self.is_taken(&member.peer_urls, id) {
                    return false;
                }
                self.insert(member);
            }
            MemberChange::Promote(MemberId(id)) => match self.now.get_mut(id) {
                Some(one) if one.is_learner => one.is_learner = false,
                _ => return false,
            },
            MemberChange::Update(MemberId(id), urls) => {
                let taken = self.is_taken(urls, *id);
                match self.now.get_mut(id) {
                    Some(one) if !taken => one.urls.clone_from(urls),
                    _ => return false,
                }
            }
            MemberChange::Remove(MemberId(id)) => {
                let others = self.now.iter().any(|(other, one)| other != id && !one.is_learner);
                match self.now.get(id) {
                    Some(one) if one.is_learner || others => {}
                    _ => return false,
                }
                if let Some(gone) = self.now.remove(id) {
                    self.removed.insert(*id, gone.incarnation);
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
        self.now.insert(member.id.0, One { is_learner, urls: peer_urls, incarnation });
    }

    fn note(&mut self, index: u64) {
        let of = |learners: bool| {
            let of = self.now.iter().filter(move |(_, one)| one.is_learner == learners);
            of.map(|(id, _)| *id).collect()
        };
        let members = Members { voters: of(false), learners: of(true) };
        let removed = self.removed.keys().copied().collect();
        self.configurations.insert(index, Configuration { members, removed });
        self.changed = index;
    }
}
