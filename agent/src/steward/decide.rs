//! Decides the next action for an intent, from the cluster's own state. Pure.
//!
//! The decision is made again at each pass over the intents, and depends on nothing that the
//! cluster doesn't show. So if an agent or a leader fails halfway, the next one can go on.

use discovery_types::api::{InitialMember, IntentState, Outcome};
use discovery_types::digest;
use discovery_types::intent::{IntentChange, IntentStep, IntentTimeError, VerifiedIntent};
use discovery_types::record::VerifiedRecord;
use discovery_types::url::NodeUrl;

use crate::cluster::{ClusterMember, ClusterMemberChange, MemberId, MemberList, NewMember};
use discovery_types::text::truncate_reason;

/// The facts about an intent on which the decision depends.
pub(super) struct IntentFacts<'a> {
    /// The signed intent, verified.
    pub intent: &'a VerifiedIntent,
    /// The intent's state according to discovery.
    pub state: IntentState,
    /// Member id of the newcomer according to discovery, if it has one.
    pub reported_member: Option<digest::MemberId>,
    /// The members, from a linearizable read.
    pub members: &'a MemberList,
    /// The member of this agent's own node.
    pub own: MemberId,
    /// The cluster's current leader.
    pub leader: MemberId,
    /// Why the intent must not be begun now, if so.
    pub untimely: Option<IntentTimeError>,
    /// Whether the newcomer has made no progress for too long.
    pub stalled: bool,
    /// Whether the cluster says that it has added the newcomer before.
    pub added_before: bool,
    /// Whether the cluster refuses another member because the one to be replaced is down.
    pub old_is_down: bool,
    /// The operation that removed the replaced member, if that is gone.
    pub removal_origin: RemovalOrigin,
}

/// The operation that removed the member which an intent replaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RemovalOrigin {
    /// The cluster has not been asked yet.
    #[default]
    Unknown,
    /// The intent itself removed it, so the newcomer takes the free place.
    Own,
    /// Another operation removed it, so the newcomer would be one member more than was signed.
    Foreign,
}

/// The next action for an intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StewardAction {
    /// Do nothing now, for this reason.
    Wait(String),
    /// Ask this agent's own node for this change.
    Change(ClusterMemberChange, IntentStep),
    /// Find out whether the intent itself removed this member, which is gone.
    FindRemover(MemberId),
    /// Move the leadership to another member, since this agent's own member is to be removed.
    HandOver,
    /// Report this outcome to discovery.
    Report(Outcome),
}

impl IntentFacts<'_> {
    /// Returns the next action for the intent.
    pub(super) fn decide(&self) -> StewardAction {
        let act = match self.intent.change() {
            IntentChange::Add { record, replaces } => self.decide_newcomer(record, *replaces),
            IntentChange::Remove { member } => self.decide_removal(*member),
            IntentChange::Update { member, peer_urls } => self.decide_update(*member, peer_urls),
        };
        let leads = self.own == self.leader;
        // Discovery doesn't accept a host's own report that it has joined.
        let newcomer_leads = self.reported_member.is_some_and(|told| told.get() == self.leader.0);
        match act {
            StewardAction::Report(_) if leads == newcomer_leads => {
                StewardAction::Wait("an agent of another member tells discovery".to_owned())
            }
            StewardAction::Report(_) => act,
            _ if !leads => StewardAction::Wait("the agent beside the leader does it".to_owned()),
            _ => act,
        }
    }

    fn decide_newcomer(
        &self,
        record: &VerifiedRecord,
        replaces: Option<digest::MemberId>,
    ) -> StewardAction {
        let urls = texts(&record.peer_urls);
        let old = replaces.and_then(|id| self.members.of_id(MemberId(id.get())));
        let found = self.members.of_peer_urls(&urls);
        let found = found.filter(|found| old.is_none_or(|old| old.id != found.id));
        let gone = replaces.filter(|_| old.is_none()).map(|id| MemberId(id.get()));
        match (self.state, found) {
            (IntentState::Added, Some(member)) if member.is_learner => {
                self.decide_learner(member, gone)
            }
            (IntentState::Added, Some(member)) => self.decide_voter(member, old),
            (IntentState::Added, None) => self.removed_newcomer_action(),
            (_, Some(member)) if self.is_newcomer(member, &urls) => {
                let member = digest::MemberId::new(member.id.0);
                StewardAction::Report(Outcome::Added {
                    member,
                    initial_cluster: self.initial_members(member, record),
                })
            }
            (_, None) if self.added_before => self.removed_newcomer_action(),
            (_, Some(member)) if !self.has_operation_ids() => refusal(format!(
                "member {} ({}) is at this host's peer URL already",
                member.id, member.name
            )),
            // The cluster itself decides, at the addition, whether a member at these URLs is the
            // newcomer.
            (_, found) => self.decide_addition(record, urls, old, gone.filter(|_| found.is_none())),
        }
    }

    /// Returns whether a member at the newcomer's URLs is the newcomer. `muster-node` tells whether
    /// this operation added it. Stock etcd doesn't; there, a learner with these URLs counts as the
    /// newcomer.
    fn is_newcomer(&self, member: &ClusterMember, urls: &[String]) -> bool {
        let same = member.peer_urls.len() == urls.len();
        same && if self.has_operation_ids() { self.added_before } else { member.is_learner }
    }

    fn has_operation_ids(&self) -> bool {
        self.members.configuration.is_some()
    }

    fn decide_addition(
        &self,
        record: &VerifiedRecord,
        urls: Vec<String>,
        old: Option<&ClusterMember>,
        gone: Option<MemberId>,
    ) -> StewardAction {
        if let Some(why) = self.untimely {
            return StewardAction::Wait(why.to_string());
        }
        if self.intent.planned_at > self.members.configuration && self.has_operation_ids() {
            return StewardAction::Wait(
                "discovery knows of a later list of members than this one".to_owned(),
            );
        }
        match (gone, self.removal_origin) {
            (Some(gone), RemovalOrigin::Unknown) => return StewardAction::FindRemover(gone),
            (Some(gone), RemovalOrigin::Foreign) => return refusal(foreign_removal_reason(gone)),
            _ => {}
        }
        // Two members can't have one URL, so the old member is removed first then. A member that is
        // down is also removed first, if the cluster refuses an addition beside it.
        let in_the_way = |old: &&ClusterMember| old.peer_urls.iter().any(|url| urls.contains(url));
        if let Some(old) = old.filter(|old| self.old_is_down || in_the_way(old)) {
            return self.removal_action(old.id);
        }
        // A name in a command or an order must identify one member.
        let name = record.name.to_string();
        let called =
            |member: &&ClusterMember| member.name == name && old.is_none_or(|o| o.id != member.id);
        if let Some(member) = self.members.list.iter().find(called) {
            return refusal(format!("member {} is called {name} already", member.id));
        }
        let new = NewMember {
            peer_urls: urls,
            is_learner: true,
            incarnation: Some(record.incarnation.to_string()),
            node_key: Some(record.node_key().to_string()),
        };
        StewardAction::Change(ClusterMemberChange::Add(new), IntentStep::Add)
    }

    /// Decides about a newcomer that is still a learner. `gone` is the replaced member if that is
    /// no longer listed; another operation may have removed it.
    fn decide_learner(&self, member: &ClusterMember, gone: Option<MemberId>) -> StewardAction {
        match (gone, self.removal_origin) {
            _ if self.stalled => StewardAction::Change(
                ClusterMemberChange::Remove(member.id),
                IntentStep::RemoveLearner,
            ),
            (Some(gone), RemovalOrigin::Unknown) => StewardAction::FindRemover(gone),
            (Some(_), RemovalOrigin::Foreign) => StewardAction::Change(
                ClusterMemberChange::Remove(member.id),
                IntentStep::RemoveLearner,
            ),
            _ => {
                StewardAction::Change(ClusterMemberChange::Promote(member.id), IntentStep::Promote)
            }
        }
    }

    /// Decides about a newcomer that votes: only the member that it replaces remains to be removed.
    fn decide_voter(&self, member: &ClusterMember, old: Option<&ClusterMember>) -> StewardAction {
        match old {
            Some(old) => self.removal_action(old.id),
            None => StewardAction::Report(Outcome::Promoted {
                member: digest::MemberId::new(member.id.0),
            }),
        }
    }

    fn decide_removal(&self, member: digest::MemberId) -> StewardAction {
        let id = MemberId(member.get());
        if self.members.of_id(id).is_none() {
            return StewardAction::Report(Outcome::Removed { member });
        }
        self.unless_expired(|| self.removal_action(id))
    }

    fn removal_action(&self, id: MemberId) -> StewardAction {
        let voters = self.members.list.iter().filter(|member| !member.is_learner).count();
        if id == self.own && voters > 1 {
            return StewardAction::HandOver;
        }
        StewardAction::Change(ClusterMemberChange::Remove(id), IntentStep::Remove)
    }

    fn decide_update(&self, member: digest::MemberId, peer_urls: &[NodeUrl]) -> StewardAction {
        let id = MemberId(member.get());
        let change = ClusterMemberChange::Update(id, texts(peer_urls));
        if self.members.of_id(id).is_none() {
            return refusal(format!("there is no member {id}"));
        }
        if change.is_visible_in(self.members) {
            return StewardAction::Report(Outcome::Updated { member });
        }
        self.unless_expired(|| StewardAction::Change(change, IntentStep::Update))
    }

    /// Returns `act`, unless the order has expired or was planned for another configuration.
    fn unless_expired(&self, act: impl FnOnce() -> StewardAction) -> StewardAction {
        match (self.untimely, self.intent.planned_at, self.members.configuration) {
            (Some(why), ..) => StewardAction::Wait(why.to_string()),
            (None, Some(planned), Some(now)) if planned != now => refusal(format!(
                "it was planned at configuration {planned}, and the members have changed since: \
                 they are at {now}. Look at them, and order again"
            )),
            _ => act(),
        }
    }

    fn removed_newcomer_action(&self) -> StewardAction {
        let reason = "the cluster had added this host, and it was removed again since".to_owned();
        match self.reported_member {
            Some(member) if self.state == IntentState::Added => {
                StewardAction::Report(Outcome::Stalled { member, reason })
            }
            _ => refusal(reason),
        }
    }

    /// Returns the initial list of members with which the newcomer starts.
    fn initial_members(
        &self,
        own: digest::MemberId,
        record: &VerifiedRecord,
    ) -> Vec<InitialMember> {
        let mut initial = Vec::new();
        for member in &self.members.list {
            let is_own = member.id.0 == own.get();
            let name = if is_own { record.name.to_string() } else { member.name.clone() };
            let urls = member.peer_urls.iter().filter_map(|url| url.parse().ok());
            initial.extend(urls.map(|peer_url| InitialMember { name: name.clone(), peer_url }));
        }
        initial
    }
}

/// Returns why a newcomer doesn't take the place of `gone`.
pub(super) fn foreign_removal_reason(gone: MemberId) -> String {
    format!(
        "member {gone}, which this ticket replaces, was removed by another operation, so this host \
         would be one member more. Ask for a ticket without --replace if one more is meant"
    )
}

pub(super) fn refusal(reason: String) -> StewardAction {
    StewardAction::Report(Outcome::Refused { reason: truncate_reason(reason) })
}

fn texts(urls: &[NodeUrl]) -> Vec<String> {
    urls.iter().map(NodeUrl::to_string).collect()
}

#[cfg(test)]
mod tests;
