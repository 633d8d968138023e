//! Decides the next action for an intent, from the cluster's own state. Pure. A newcomer is added
//! in the steps of [`ReplacementFacts`], perhaps in the place of another member.
//!
//! The decision is made again at each pass over the intents, and needs nothing that only an earlier
//! agent knows. So if an agent or a leader fails halfway, the next one can go on.

use discovery_types::api::{InitialMember, IntentState, Outcome};
use discovery_types::digest;
use discovery_types::intent::{IntentChange, IntentStep, IntentTimeError, VerifiedIntent};
use discovery_types::record::VerifiedRecord;
use discovery_types::url::NodeUrl;

use crate::cluster::{
    ClusterMember, ClusterMemberChange, MemberId, MemberList, NewMember, RemovalOrigin,
};
use crate::plan::{
    MemberState, ObservedCluster, ObservedMember, ReplacementFacts, ReplacementStep,
};
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
    /// Why the intent must not begin now; `None` if it may begin.
    pub untimely: Option<IntentTimeError>,
    /// Whether the intent is a replacement by a policy, and is under way. Such an intent is
    /// completed even after it has expired.
    pub is_under_way: bool,
    /// Whether the newcomer has made no progress for too long.
    pub stalled: bool,
    /// Whether the cluster has answered that this intent's addition was carried out.
    pub added_before: bool,
    /// State of the newcomer, if it has been added.
    pub newcomer_state: MemberState,
    /// Members that did not answer when the cluster refused the newcomer because too few voters are
    /// healthy; `None` if the cluster has not refused.
    pub refused_addition: Option<&'a [MemberId]>,
    /// Origin of the removal of the replaced member, once that member is gone.
    pub removal_origin: RemovalOrigin,
    /// Why a replacement by a policy has to be given up; `None` if it goes on.
    pub given_up: Option<&'a str>,
}

/// The next action for an intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StewardAction {
    /// Do nothing now, for this reason.
    Wait(String),
    /// Wait for the newcomer that has been added, for this reason.
    AwaitNewcomer(&'static str),
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
        // Discovery accepts no report from the newcomer's own agent. So if the newcomer leads, the
        // agent of another member reports.
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
        let old = replaces.map(|id| MemberId(id.get()));
        let found = self.members.of_peer_urls(&urls).filter(|found| Some(found.id) != old);
        match (self.state, found) {
            (IntentState::Open, None) if let Some(why) = self.given_up => refusal(why.to_owned()),
            (IntentState::Added, Some(member)) if member.is_learner && self.given_up.is_some() => {
                removal_of_learner(member.id)
            }
            (IntentState::Added, Some(member)) if member.is_learner && self.stalled => {
                removal_of_learner(member.id)
            }
            (IntentState::Added, Some(_)) => self.take_next_step(record, urls, old),
            (IntentState::Added, None) => self.removed_newcomer_action(),
            (_, Some(member)) if self.is_newcomer(member, &urls) => {
                let member = digest::MemberId::new(member.id.0);
                StewardAction::Report(Outcome::Added {
                    member,
                    initial_cluster: self.initial_members(member, record),
                    replaces: self.intent.policy().and(replaces),
                })
            }
            (_, None) if self.added_before => self.removed_newcomer_action(),
            (_, Some(member)) if !self.has_operation_ids() => refusal(format!(
                "member {} ({}) is at this host's peer URL already",
                member.id, member.name
            )),
            (_, found) => match (self.why_not_begin(), found) {
                (Some(why), _) => StewardAction::Wait(why),
                // A member has the newcomer's URLs. The cluster's answer to the addition shows
                // whether it is the newcomer.
                (None, Some(_)) => self.decide_addition(record, urls, old),
                (None, None) => self.take_next_step(record, urls, old),
            },
        }
    }

    /// Returns why the agent has to wait before it adds the newcomer or removes the replaced
    /// member. `None` if it may begin now.
    fn why_not_begin(&self) -> Option<String> {
        if let Some(why) = self.untimely.filter(|_| !self.is_under_way) {
            return Some(why.to_string());
        }
        let is_behind =
            self.intent.planned_at > self.members.configuration && self.has_operation_ids();
        is_behind.then(|| "discovery knows of a later list of members than this one".to_owned())
    }

    /// Returns the action for the next step of adding the newcomer, perhaps in the place of `old`.
    fn take_next_step(
        &self,
        record: &VerifiedRecord,
        urls: Vec<String>,
        old: Option<MemberId>,
    ) -> StewardAction {
        let facts = ReplacementFacts {
            observed: &self.observed_cluster(&urls),
            old,
            peer_urls: &urls,
            removal_origin: self.removal_origin,
            is_addition_refused: self.refused_addition.is_some(),
        };
        match facts.next_step() {
            ReplacementStep::FindRemover(old) => StewardAction::FindRemover(old),
            ReplacementStep::GiveUp { learner: Some(id), .. } => removal_of_learner(id),
            ReplacementStep::GiveUp { old, learner: None } => refusal(foreign_removal_reason(old)),
            ReplacementStep::Add => self.decide_addition(record, urls, old),
            ReplacementStep::AwaitStart(_) => {
                StewardAction::AwaitNewcomer("the newcomer's node has not started yet")
            }
            ReplacementStep::AwaitSync(_, MemberState::Silent) => {
                StewardAction::AwaitNewcomer("the newcomer's node doesn't answer")
            }
            ReplacementStep::AwaitSync(..) => {
                StewardAction::AwaitNewcomer("the newcomer's node has not caught up yet")
            }
            ReplacementStep::Promote(id) => {
                StewardAction::Change(ClusterMemberChange::Promote(id), IntentStep::Promote)
            }
            ReplacementStep::HandOver(_) => StewardAction::HandOver,
            ReplacementStep::Remove(id) => removal(id),
            ReplacementStep::Done(id) => {
                StewardAction::Report(Outcome::Promoted { member: digest::MemberId::new(id.0) })
            }
        }
    }

    /// Returns the members with their states. Each pass asks the newcomer, at `urls`, for its
    /// state. It asks the other members only if the cluster has refused the newcomer.
    fn observed_cluster(&self, urls: &[String]) -> ObservedCluster {
        let silent = self.refused_addition.unwrap_or_default();
        let newcomer = self.members.of_peer_urls(urls).map(|member| member.id);
        let state = |member: &ClusterMember| match member.id {
            _ if !member.is_started() => MemberState::NotStarted,
            id if silent.contains(&id) => MemberState::Silent,
            id if Some(id) == newcomer => self.newcomer_state,
            _ => MemberState::Answers { behind: None },
        };
        let observed = |member: &ClusterMember| ObservedMember {
            member: member.clone(),
            state: state(member),
        };
        ObservedCluster {
            members: self.members.list.iter().map(observed).collect(),
            leader: Some(self.leader),
        }
    }

    /// Returns whether a member at the newcomer's URLs is the newcomer. `muster-node` answers
    /// whether this operation added the member. With stock etcd, any learner with these URLs is
    /// taken for the newcomer. If the replacement is under way, a voter with these URLs is, too,
    /// because discovery's answer may be older than its promotion.
    fn is_newcomer(&self, member: &ClusterMember, urls: &[String]) -> bool {
        let same = member.peer_urls.len() == urls.len();
        same && match self.has_operation_ids() {
            true => self.added_before,
            false => member.is_learner || self.is_under_way,
        }
    }

    fn has_operation_ids(&self) -> bool {
        self.members.configuration.is_some()
    }

    fn decide_addition(
        &self,
        record: &VerifiedRecord,
        urls: Vec<String>,
        old: Option<MemberId>,
    ) -> StewardAction {
        // Refuse the newcomer if another member has its name, since commands and orders name
        // members.
        let name = record.name.to_string();
        // A member at the newcomer's URLs may be the newcomer itself, if discovery's answer is old.
        let newcomer = self.members.of_peer_urls(&urls).map(|member| member.id);
        let called = |member: &&ClusterMember| {
            member.name == name && Some(member.id) != old && Some(member.id) != newcomer
        };
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

    fn decide_removal(&self, member: digest::MemberId) -> StewardAction {
        let id = MemberId(member.get());
        if self.members.of_id(id).is_none() {
            return StewardAction::Report(Outcome::Removed { member });
        }
        let must_hand_over = self.observed_cluster(&[]).must_hand_over(id);
        self.unless_expired(|| if must_hand_over { StewardAction::HandOver } else { removal(id) })
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

    /// Returns the action that `act` returns. If the intent must not begin now, returns a wait
    /// instead. If the intent was planned for another configuration, returns its refusal instead.
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

/// Explains why a newcomer doesn't take the place of `gone`.
pub(super) fn foreign_removal_reason(gone: MemberId) -> String {
    format!(
        "member {gone}, which this ticket replaces, was removed by another operation, so this host \
         would be one member more. Ask for a ticket without --replace if one more is meant"
    )
}

fn removal(id: MemberId) -> StewardAction {
    StewardAction::Change(ClusterMemberChange::Remove(id), IntentStep::Remove)
}

/// Returns the action that removes a newcomer that is still a learner.
fn removal_of_learner(id: MemberId) -> StewardAction {
    StewardAction::Change(ClusterMemberChange::Remove(id), IntentStep::RemoveLearner)
}

pub(super) fn refusal(reason: String) -> StewardAction {
    StewardAction::Report(Outcome::Refused { reason: truncate_reason(reason) })
}

fn texts(urls: &[NodeUrl]) -> Vec<String> {
    urls.iter().map(NodeUrl::to_string).collect()
}

#[cfg(test)]
mod tests;
