//! The table, and what can be done to it.

use std::collections::BTreeMap;

use node_consensus::{ConfChange, Members};

use super::change::{ChangeError, MemberChange};
use crate::identity::{Incarnation, MemberId, NodeKey};

/// What the cluster knows of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its id.
    pub id: MemberId,
    /// Its name; empty until it has started.
    pub name: String,
    /// Where its peers reach it.
    pub peer_urls: Vec<String>,
    /// Where clients reach it; empty until it publishes them.
    pub client_urls: Vec<String>,
    /// It receives, and has no vote.
    pub is_learner: bool,
    /// The only incarnation that may act as it; none until one is bound.
    pub incarnation: Option<Incarnation>,
    /// The only key that may speak for it; none until one is bound.
    pub node_key: Option<NodeKey>,
}

/// What is left of a member that was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemovedMember {
    /// Its incarnation, if one was bound.
    pub incarnation: Option<Incarnation>,
    /// The entry that removed it.
    pub index: u64,
}

/// All members, and all that were.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberTable {
    members: BTreeMap<MemberId, Member>,
    removed: BTreeMap<MemberId, RemovedMember>,
}

impl MemberTable {
    /// The table of a cluster that begins with `members`.
    pub fn new(members: impl IntoIterator<Item = Member>) -> Self {
        Self::from_parts(members, [])
    }

    /// The table that [`Self::members`] and [`Self::removed`] gave.
    pub(crate) fn from_parts(
        members: impl IntoIterator<Item = Member>,
        removed: impl IntoIterator<Item = (MemberId, RemovedMember)>,
    ) -> Self {
        Self {
            members: members.into_iter().map(|member| (member.id, member)).collect(),
            removed: removed.into_iter().collect(),
        }
    }

    /// The members, by id.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// The members that were removed, by id.
    pub fn removed(&self) -> impl Iterator<Item = (MemberId, &RemovedMember)> {
        self.removed.iter().map(|(id, removed)| (*id, removed))
    }

    /// The member of this id.
    #[must_use]
    pub fn member(&self, id: MemberId) -> Option<&Member> {
        self.members.get(&id)
    }

    /// Whether this one is a learner.
    #[must_use]
    pub fn is_learner(&self, id: MemberId) -> bool {
        self.member(id).is_some_and(|member| member.is_learner)
    }

    /// Whether the member of this id was removed.
    #[must_use]
    pub fn was_removed(&self, id: MemberId) -> bool {
        self.removed.contains_key(&id)
    }

    /// Who votes and who only receives: what consensus must have as well.
    #[must_use]
    pub fn voters_and_learners(&self) -> Members {
        let ids = |learners: bool| {
            let of = self.members().filter(move |member| member.is_learner == learners);
            of.map(|member| member.id.0).collect()
        };
        Members { voters: ids(false), learners: ids(true) }
    }

    /// Carries out `change`, which entry `index` asks for, or refuses it and changes nothing. Gives
    /// what consensus has to do in turn.
    pub fn change(&mut self, change: MemberChange, index: u64) -> Result<ConfChange, ChangeError> {
        match change {
            MemberChange::Add(member) => self.add(member),
            MemberChange::Promote(id) => {
                let member = self.members.get_mut(&id).ok_or(ChangeError::NotFound)?;
                if !member.is_learner {
                    return Err(ChangeError::NotALearner);
                }
                member.is_learner = false;
                Ok(ConfChange::Voter(id.0))
            }
            MemberChange::Remove(id) => {
                let member = self.member(id).ok_or(ChangeError::NotFound)?;
                let voters = self.members().filter(|member| !member.is_learner).count();
                if !member.is_learner && voters == 1 {
                    return Err(ChangeError::LastVoter);
                }
                let removed = RemovedMember { incarnation: member.incarnation, index };
                self.members.remove(&id);
                self.removed.insert(id, removed);
                Ok(ConfChange::Remove(id.0))
            }
        }
    }

    fn add(&mut self, member: Member) -> Result<ConfChange, ChangeError> {
        let id = member.id;
        let known = |incarnation: Option<Incarnation>, of: Option<Incarnation>| {
            incarnation.is_some() && incarnation == of
        };
        if id.0 == 0 || member.peer_urls.is_empty() {
            return Err(ChangeError::Malformed);
        }
        if self.was_removed(id)
            || self.removed.values().any(|gone| known(member.incarnation, gone.incarnation))
        {
            return Err(ChangeError::Removed);
        }
        if self.members.contains_key(&id)
            || self.members().any(|other| known(member.incarnation, other.incarnation))
        {
            return Err(ChangeError::IdExists);
        }
        if self.members().any(|other| other.peer_urls.iter().any(|u| member.peer_urls.contains(u)))
        {
            return Err(ChangeError::PeerUrlExists);
        }
        let change =
            if member.is_learner { ConfChange::Learner(id.0) } else { ConfChange::Voter(id.0) };
        self.members.insert(id, member);
        Ok(change)
    }

    /// A member says its name and where clients find it. Nothing else of it can change this way.
    pub fn publish(
        &mut self,
        id: MemberId,
        name: String,
        client_urls: Vec<String>,
    ) -> Result<(), ChangeError> {
        let member = self.members.get_mut(&id).ok_or(ChangeError::NotFound)?;
        member.name = name;
        member.client_urls = client_urls;
        Ok(())
    }
}
