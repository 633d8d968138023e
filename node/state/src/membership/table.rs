//! The member table, and the changes that can be made to it.

use std::collections::{BTreeMap, HashSet};

use node_consensus::{ConfChange, Guards, Members};

use super::change::{ChangeError, ChangeRequest, MemberChange};
use crate::identity::{Incarnation, MemberId, NodeKey, OperationId};

/// A member of the cluster, as the member table records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Member id, unique for ever.
    pub id: MemberId,
    /// Name of the member; empty until it has started.
    pub name: String,
    /// URLs under which peers reach the member.
    pub peer_urls: Vec<String>,
    /// URLs under which clients reach the member; empty until it publishes them.
    pub client_urls: Vec<String>,
    /// Whether the member is a learner: it receives entries and has no vote.
    pub is_learner: bool,
    /// The only incarnation that may act as this member; `None` until one is bound.
    pub incarnation: Option<Incarnation>,
    /// The only key that may authenticate as this member; `None` until one is bound.
    pub node_key: Option<NodeKey>,
    /// Index of the last entry that added, promoted or updated the member; 0 if no entry has done
    /// so since the cluster began.
    pub changed_at: u64,
    /// Whether the member is a learner that was requested as a voter. The leader promotes it once
    /// it is in sync.
    pub vote_when_ready: bool,
    /// Operations that changed the member, in order. None of them is carried out again.
    pub operations: Vec<CompletedOperation>,
}

/// An operation on the members that was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletedOperation {
    /// Id under which the operation was requested.
    pub id: OperationId,
    /// Index of the entry that carried out the operation.
    pub index: u64,
}

/// A member's own description of itself, which it publishes at each start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberAttributes {
    pub name: String,
    /// URLs under which clients reach the member.
    pub client_urls: Vec<String>,
    /// Incarnation of the member's data directory.
    pub incarnation: Option<Incarnation>,
    /// Key with which the member authenticates to peers, if it has one.
    pub node_key: Option<NodeKey>,
}

impl Member {
    /// Whether the member has ever started. A member publishes its name when it starts.
    #[must_use]
    pub(crate) fn is_started(&self) -> bool {
        !self.name.is_empty()
    }

    /// Returns the record of this member after the entry `index` has removed it.
    fn to_removed(&self, index: u64, operations: Vec<CompletedOperation>) -> RemovedMember {
        let Self { incarnation, node_key, .. } = *self;
        RemovedMember { incarnation, node_key, index, operations }
    }
}

/// The record of a removed member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedMember {
    /// Incarnation of the member, if one was bound.
    pub incarnation: Option<Incarnation>,
    /// Key of the member, if one was bound.
    pub node_key: Option<NodeKey>,
    /// Index of the entry that removed the member.
    pub index: u64,
    /// All operations on the member, including its removal.
    pub operations: Vec<CompletedOperation>,
}

/// The current members and the removed ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberTable {
    members: BTreeMap<MemberId, Member>,
    removed: BTreeMap<MemberId, RemovedMember>,
}

impl MemberTable {
    /// Creates the table of a cluster that begins with `members`.
    pub fn new(members: impl IntoIterator<Item = Member>) -> Self {
        Self::from_parts(members, [])
    }

    /// Creates a table from its members and the removed members, as [`Self::members`] and
    /// [`Self::removed`] return them.
    pub(crate) fn from_parts(
        members: impl IntoIterator<Item = Member>,
        removed: impl IntoIterator<Item = (MemberId, RemovedMember)>,
    ) -> Self {
        Self {
            members: members.into_iter().map(|member| (member.id, member)).collect(),
            removed: removed.into_iter().collect(),
        }
    }

    /// Returns the table of a new cluster that begins at `index` with this table's data. `founder`
    /// is its only member. All other members in this table count as removed.
    pub(crate) fn with_only_founder(&self, founder: Member, index: u64) -> Self {
        let gone = self
            .members()
            .map(|member| (member.id, member.to_removed(index, member.operations.clone())));
        let removed = self.removed.iter().map(|(id, removed)| (*id, removed.clone())).chain(gone);
        Self::from_parts([Member { changed_at: index, ..founder }], removed.collect::<Vec<_>>())
    }

    /// Returns the members, ordered by id.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// Returns the removed members, ordered by id.
    pub fn removed(&self) -> impl Iterator<Item = (MemberId, &RemovedMember)> {
        self.removed.iter().map(|(id, removed)| (*id, removed))
    }

    /// Returns the member with this id, if there is one.
    #[must_use]
    pub fn member(&self, id: MemberId) -> Option<&Member> {
        self.members.get(&id)
    }

    /// Whether the member with this id is a learner.
    #[must_use]
    pub fn is_learner(&self, id: MemberId) -> bool {
        self.member(id).is_some_and(|member| member.is_learner)
    }

    /// Whether the member with this id refuses those requests that a learner of etcd refuses. A
    /// learner that was requested as a voter doesn't refuse them, because the client that added the
    /// member expects a voter.
    #[must_use]
    pub fn serves_as_learner(&self, id: MemberId) -> bool {
        self.member(id).is_some_and(|member| member.is_learner && !member.vote_when_ready)
    }

    /// Whether the member with this id was removed.
    #[must_use]
    pub fn is_removed(&self, id: MemberId) -> bool {
        self.removed.contains_key(&id)
    }

    /// Returns the keys that only removed members have. A peer that presents one is a removed
    /// member.
    #[must_use]
    pub fn removed_keys(&self) -> HashSet<NodeKey> {
        let gone = self.removed.values().filter_map(|gone| gone.node_key);
        gone.filter(|key| !self.members().any(|member| member.node_key == Some(*key))).collect()
    }

    /// Returns the voters and learners. The configuration of consensus must be the same.
    #[must_use]
    pub fn voters_and_learners(&self) -> Members {
        let ids = |learners: bool| {
            let of = self.members().filter(move |member| member.is_learner == learners);
            of.map(|member| member.id.0).collect()
        };
        Members { voters: ids(false), learners: ids(true) }
    }

    /// Returns a learner to be promoted: it was requested as a voter, was added as a learner, and
    /// has started.
    #[must_use]
    pub fn learner_to_promote(&self) -> Option<MemberId> {
        let waits = |member: &&Member| member.vote_when_ready && member.is_started();
        self.members().find(waits).map(|member| member.id)
    }

    /// Returns the index of the entry that made the current configuration; 0 for the cluster's
    /// first one. Publishing a member's name and URLs does not count.
    #[must_use]
    pub fn configuration_index(&self) -> u64 {
        let removed = self.removed.values().map(|removed| removed.index);
        self.members().map(|member| member.changed_at).chain(removed).max().unwrap_or(0)
    }

    /// Checks that `asked` was not carried out before, and was planned on the current
    /// configuration.
    ///
    /// # Errors
    /// For a change that was carried out before, `CarriedOut` takes precedence over `Stale`,
    /// because the change itself has made its plan stale.
    pub fn check_fresh(&self, asked: &ChangeRequest) -> Result<(), ChangeError> {
        let removed = self.removed.values().flat_map(|removed| &removed.operations);
        let mut operations = self.members().flat_map(|member| &member.operations).chain(removed);
        if let Some(id) = asked.operation
            && let Some(done) = operations.find(|operation| operation.id == id)
        {
            return Err(ChangeError::CarriedOut { at: done.index });
        }
        let now = self.configuration_index();
        if asked.planned_at.is_some_and(|at| at != now) {
            return Err(ChangeError::Stale { now });
        }
        Ok(())
    }

    /// Carries out the change that the entry `index` asks for, or refuses it and changes nothing.
    /// Returns the change that consensus has to make, if any.
    pub fn apply_change(
        &mut self,
        asked: impl Into<ChangeRequest>,
        index: u64,
    ) -> Result<Option<ConfChange>, ChangeError> {
        self.apply_change_with_guards(Guards::ALL, asked, index)
    }

    /// Carries out a change like [`Self::apply_change`]. In tests, `guards` may switch off a rule.
    pub(crate) fn apply_change_with_guards(
        &mut self,
        guards: Guards,
        asked: impl Into<ChangeRequest>,
        index: u64,
    ) -> Result<Option<ConfChange>, ChangeError> {
        let asked = asked.into();
        self.check_fresh(&asked)?;
        let operation = asked.operation.map(|id| CompletedOperation { id, index });
        match asked.change {
            MemberChange::Add(member) => {
                if !guards.removed_for_ever() {
                    self.removed.remove(&member.id);
                }
                let operations = operation.into_iter().collect();
                self.add(Member { changed_at: index, operations, ..member }).map(Option::Some)
            }
            MemberChange::Promote(id) => {
                let member = self.members.get_mut(&id).ok_or(ChangeError::NotFound)?;
                if !member.is_learner {
                    return Err(ChangeError::NotALearner);
                }
                member.is_learner = false;
                member.vote_when_ready = false;
                member.changed_at = index;
                member.operations.extend(operation);
                Ok(Some(ConfChange::Voter(id.0)))
            }
            MemberChange::Update(id, peer_urls) => {
                let member = self.update(id, peer_urls)?;
                member.changed_at = index;
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
                let removed = member.to_removed(index, operations);
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
        if self.is_removed(id)
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

    /// Whether one of `urls` is a peer URL of a member other than `id`.
    fn is_taken(&self, urls: &[String], id: MemberId) -> bool {
        let others = self.members().filter(|other| other.id != id);
        others.flat_map(|other| &other.peer_urls).any(|url| urls.contains(url))
    }

    /// Records the name and client URLs that a member publishes about itself.
    ///
    /// A member's first start can also bind it to its incarnation and its key. This happens only if
    /// it was added without a binding and all other members that have started are bound. In a
    /// cluster where certificates are renewed with new keys, as etcd allows, members are added
    /// without a key. They stay unbound even after one member was added with a key. Publishing
    /// changes nothing else.
    pub(crate) fn publish(
        &mut self,
        id: MemberId,
        said: MemberAttributes,
    ) -> Result<(), ChangeError> {
        let MemberAttributes { name, client_urls, incarnation, node_key } = said;
        let binds_incarnations = self.others_are_bound(id, |other| other.incarnation.is_some());
        let binds_keys = self.others_are_bound(id, |other| other.node_key.is_some());
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

    /// Whether members other than `newcomer` have started, and all of these are bound to an
    /// incarnation or key.
    fn others_are_bound(&self, newcomer: MemberId, is_bound: impl Fn(&Member) -> bool) -> bool {
        let started = |other: &&Member| other.id != newcomer && other.is_started();
        let mut others = self.members().filter(started).peekable();
        others.peek().is_some() && others.all(is_bound)
    }
}
