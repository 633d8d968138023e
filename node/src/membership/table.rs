//! The table, and what can be done to it.

use std::collections::{BTreeMap, HashSet};

use node_consensus::{ConfChange, Guards, Members};

use super::change::{ChangeError, ChangeRequest, MemberChange};
use crate::identity::{Incarnation, MemberId, NodeKey, OperationId};

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
    /// The entry that added, promoted or updated it last; 0 if it is as the cluster began.
    pub changed: u64,
    /// A learner that was asked for as a voter: the leader promotes it once it is in sync.
    pub vote_when_ready: bool,
    /// The operations on it, in their order: none of them is carried out again.
    pub operations: Vec<Operation>,
}

/// A change that was carried out under an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// By which it was asked for.
    pub id: OperationId,
    /// The entry that carried it out.
    pub index: u64,
}

/// What a member says of itself at each start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Published {
    /// Its name.
    pub name: String,
    /// Where clients reach it.
    pub client_urls: Vec<String>,
    /// The incarnation of its data directory.
    pub incarnation: Option<Incarnation>,
    /// Its key towards peers, if it has one.
    pub node_key: Option<NodeKey>,
}

impl Member {
    /// Whether it has ever run: it says its name when it does.
    #[must_use]
    pub(crate) fn is_started(&self) -> bool {
        !self.name.is_empty()
    }

    /// What is left of it once the entry `index` has removed it.
    fn gone(&self, index: u64, operations: Vec<Operation>) -> RemovedMember {
        let Self { incarnation, node_key, .. } = *self;
        RemovedMember { incarnation, node_key, index, operations }
    }
}

/// What is left of a member that was removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedMember {
    /// Its incarnation, if one was bound.
    pub incarnation: Option<Incarnation>,
    /// Its key, if one was bound.
    pub node_key: Option<NodeKey>,
    /// The entry that removed it.
    pub index: u64,
    /// All operations on it, to the last.
    pub operations: Vec<Operation>,
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

    /// The table of another cluster, which begins at `index` with this table's data and `founder`
    /// as its one member: everybody else that this table knows was removed there.
    pub(crate) fn founded_by(&self, founder: Member, index: u64) -> Self {
        let gone =
            self.members().map(|member| (member.id, member.gone(index, member.operations.clone())));
        let removed = self.removed.iter().map(|(id, removed)| (*id, removed.clone())).chain(gone);
        Self::from_parts([Member { changed: index, ..founder }], removed.collect::<Vec<_>>())
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

    /// Whether the member of this id refuses what etcd's learners refuse. A voter that counts as a learner
    /// until it has caught up was added as a voter: whoever added it expects answers of it.
    #[must_use]
    pub fn serves_as_learner(&self, id: MemberId) -> bool {
        self.member(id).is_some_and(|member| member.is_learner && !member.vote_when_ready)
    }

    /// Whether the member of this id was removed.
    #[must_use]
    pub fn was_removed(&self, id: MemberId) -> bool {
        self.removed.contains_key(&id)
    }

    /// Keys of members that were removed, and of nobody who is one: whoever shows them is one of those.
    #[must_use]
    pub fn removed_keys(&self) -> HashSet<NodeKey> {
        let gone = self.removed.values().filter_map(|gone| gone.node_key);
        gone.filter(|key| !self.members().any(|member| member.node_key == Some(*key))).collect()
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

    /// Somebody who was asked for as a voter, had to begin as a learner, and has started.
    #[must_use]
    pub fn waits_for_vote(&self) -> Option<MemberId> {
        let waits = |member: &&Member| member.vote_when_ready && member.is_started();
        self.members().find(waits).map(|member| member.id)
    }

    /// The entry that made the members what they are; 0 if they are as the cluster began. What a
    /// member publishes of itself does not count.
    #[must_use]
    pub fn changed(&self) -> u64 {
        let removed = self.removed.values().map(|removed| removed.index);
        self.members().map(|member| member.changed).chain(removed).max().unwrap_or(0)
    }

    /// Whether `asked` was carried out before, or was planned on other members than these.
    ///
    /// # Errors
    /// If so; the first of the two wins, since its own change is what made a plan stale.
    pub fn admit(&self, asked: &ChangeRequest) -> Result<(), ChangeError> {
        let removed = self.removed.values().flat_map(|removed| &removed.operations);
        let mut operations = self.members().flat_map(|member| &member.operations).chain(removed);
        if let Some(id) = asked.operation
            && let Some(done) = operations.find(|operation| operation.id == id)
        {
            return Err(ChangeError::CarriedOut { at: done.index });
        }
        let now = self.changed();
        if asked.planned_at.is_some_and(|at| at != now) {
            return Err(ChangeError::Stale { now });
        }
        Ok(())
    }

    /// Carries out what entry `index` asks for, or refuses it and changes nothing. Gives what
    /// consensus has to do in turn.
    pub fn change(
        &mut self,
        asked: impl Into<ChangeRequest>,
        index: u64,
    ) -> Result<Option<ConfChange>, ChangeError> {
        self.change_under(Guards::ALL, asked, index)
    }

    /// The same; `guards` may leave a rule out in tests.
    pub(crate) fn change_under(
        &mut self,
        guards: Guards,
        asked: impl Into<ChangeRequest>,
        index: u64,
    ) -> Result<Option<ConfChange>, ChangeError> {
        let asked = asked.into();
        self.admit(&asked)?;
        let operation = asked.operation.map(|id| Operation { id, index });
        match asked.change {
            MemberChange::Add(member) => {
                if !guards.removed_for_ever() {
                    self.removed.remove(&member.id);
                }
                let operations = operation.into_iter().collect();
                self.add(Member { changed: index, operations, ..member }).map(Option::Some)
            }
            MemberChange::Promote(id) => {
                let member = self.members.get_mut(&id).ok_or(ChangeError::NotFound)?;
                if !member.is_learner {
                    return Err(ChangeError::NotALearner);
                }
                member.is_learner = false;
                member.vote_when_ready = false;
                member.changed = index;
                member.operations.extend(operation);
                Ok(Some(ConfChange::Voter(id.0)))
            }
            MemberChange::Update(id, peer_urls) => {
                let member = self.update(id, peer_urls)?;
                member.changed = index;
                member.operations.extend(operation);
                member.is_learner &= guards.update_keeps_learner();
                Ok(None)
            }
            MemberChange::Remove(id) => {
                let member = self.member(id).ok_or(ChangeError::NotFound)?;
                let voters = self.members().filter(|member| !member.is_learner).count();
                if !member.is_learner && voters == 1 {
                    return Err(ChangeError::LastVoter);
                }
                let operations = member.operations.iter().copied().chain(operation).collect();
                let removed = member.gone(index, operations);
                self.members.remove(&id);
                self.removed.insert(id, removed);
                Ok(Some(ConfChange::Remove(id.0)))
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
            || member.node_key.is_some_and(|key| self.removed_keys().contains(&key))
        {
            return Err(ChangeError::Removed);
        }
        if self.members.contains_key(&id)
            || self.members().any(|other| known(member.incarnation, other.incarnation))
        {
            return Err(ChangeError::IdExists);
        }
        if self.is_taken(&member.peer_urls, id) {
            return Err(ChangeError::PeerUrlExists);
        }
        let change =
            if member.is_learner { ConfChange::Learner(id.0) } else { ConfChange::Voter(id.0) };
        self.members.insert(id, member);
        Ok(change)
    }

    fn update(&mut self, id: MemberId, urls: Vec<String>) -> Result<&mut Member, ChangeError> {
        let taken = self.is_taken(&urls, id);
        let member = self.members.get_mut(&id).ok_or(ChangeError::NotFound)?;
        if urls.is_empty() {
            return Err(ChangeError::Malformed);
        }
        if taken {
            return Err(ChangeError::PeerUrlExists);
        }
        member.peer_urls = urls;
        Ok(member)
    }

    /// Whether one of these is a peer URL of another member than `id`.
    fn is_taken(&self, urls: &[String], id: MemberId) -> bool {
        let others = self.members().filter(|other| other.id != id);
        others.flat_map(|other| &other.peer_urls).any(|url| urls.contains(url))
    }

    /// A member says its name and where clients find it. Nothing else of it can change this way, but
    /// that its first start binds it to who it is, if nothing did when it was added and it is the
    /// custom of this cluster: all other members that have started are bound. (Who renews
    /// certificates with new keys, as etcd allows, binds nobody, and one member that was added with
    /// a key changes nothing for the others.)
    pub(crate) fn publish(&mut self, id: MemberId, said: Published) -> Result<(), ChangeError> {
        let Published { name, client_urls, incarnation, node_key } = said;
        let binds_incarnations = self.binds(id, |other| other.incarnation.is_some());
        let binds_keys = self.binds(id, |other| other.node_key.is_some());
        let was_here = self.removed.values().any(|gone| gone.incarnation == incarnation)
            || self.members().any(|other| other.id != id && other.incarnation == incarnation);
        let member = self.members.get_mut(&id).ok_or(ChangeError::NotFound)?;
        if incarnation.is_some() {
            let other = member.incarnation.is_some_and(|bound| Some(bound) != incarnation);
            if other || was_here {
                return Err(ChangeError::OtherIncarnation);
            }
        }
        if binds_incarnations && !member.is_started() {
            member.incarnation = member.incarnation.or(incarnation);
        }
        if binds_keys && !member.is_started() {
            member.node_key = member.node_key.or(node_key);
        }
        member.name = name;
        member.client_urls = client_urls;
        Ok(())
    }

    /// Whether all members but `newcomer` that have started are bound.
    fn binds(&self, newcomer: MemberId, is_bound: impl Fn(&Member) -> bool) -> bool {
        let started = |other: &&Member| other.id != newcomer && other.is_started();
        let mut others = self.members().filter(started).peekable();
        others.peek().is_some() && others.all(is_bound)
    }
}
