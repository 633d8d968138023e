//! Decides whether a newcomer takes the place of a dead member by a replacement policy. Pure.
//!
//! A replacement begins only if an operator has signed a policy, and all of these conditions hold:
//! - the policy is in the cluster's own store, and its limits are kept;
//! - exactly one voter is unreachable, for this host's node and for a quorum of the voters' agents;
//! - all other voters are in sync;
//! - no other change is under way;
//! - if this replacement is the last one that the policy allows now, a quorum of the voters' agents
//!   can still confirm the death afterwards. Agents of older versions stop confirming it then.
//!
//! A place that an earlier replacement has left vacant is filled while all voters are reachable.
//!
//! While the dead member is in the cluster and the newcomer doesn't vote, a replacement goes on
//! only if both of these conditions hold:
//! - the policy isn't revoked;
//! - the member is unreachable, for this host and for a quorum of the voters' agents.
//!
//! Once the dead member is removed, the cluster lacks a voter. Then the replacement ends only if
//! somebody else fills the place.

use std::collections::BTreeMap;
use std::time::Duration;

use discovery_formation::fitness;
use discovery_types::digest::OperationId;
use discovery_types::grant::{GrantId, ReplacementLimits};

use super::store::no_room_text;
use super::uses::{PolicyUse, UseLog, raft_cluster_text};
use crate::cluster::{ClusterMember, MemberId, MemberList, RemovalOrigin};

/// State of a policy in the cluster's own store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PolicyStanding {
    /// The store doesn't have the policy yet.
    Missing,
    /// The store doesn't have the policy, and is full.
    NoRoom,
    /// The store has the policy.
    InForce,
    /// The policy was revoked. That is never undone.
    Revoked,
}

/// A policy with its state in the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PolicyFacts {
    /// Id of the policy.
    pub id: GrantId,
    /// Limits that the operator signed.
    pub limits: ReplacementLimits,
    /// End of the policy, in seconds since 1970.
    pub expires_at: u64,
    /// State of the policy in the cluster's own store.
    pub standing: PolicyStanding,
}

/// A host that waits for a place.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    /// Operation by which the host becomes a member.
    pub operation: OperationId,
    /// Name of the host.
    pub name: String,
    /// Peer URLs of the host.
    pub peer_urls: Vec<String>,
    /// Zone of the host, according to its agent.
    pub zone: Option<String>,
}

/// Facts about the voters.
#[derive(Clone, Debug, Default)]
pub(crate) struct VoterFacts {
    /// Voters that this host's agent and node can't reach, and for how long.
    pub unreachable: Vec<(MemberId, Duration)>,
    /// Whether this host has looked at every other voter lately.
    pub are_known: bool,
    /// Voters, this host's included, whose agents have observed for `after_seconds` of the policy's
    /// limits that the unreachable voter is unreachable.
    pub observers: Vec<MemberId>,
    /// Observers of older versions, which stop observing the dead member once the policy has
    /// reached its limit.
    pub unconfirming: Vec<MemberId>,
    /// Voters that don't answer, have not started, or lack entries of the log. The list may omit
    /// the unreachable voter.
    pub not_in_sync: Vec<MemberId>,
}

/// Facts on which the beginning of a replacement depends.
#[derive(Clone, Debug)]
pub(crate) struct PolicyReplacementFacts<'a> {
    pub policy: PolicyFacts,
    pub candidate: &'a Candidate,
    pub uses: &'a UseLog,
    /// Members of the cluster, by a linearizable read.
    pub members: &'a MemberList,
    /// Member of this host, which leads.
    pub own: MemberId,
    pub voters: &'a VoterFacts,
    /// Zones of the members, if the members are spread over zones. The zones come from discovery,
    /// so they only decide which host comes first.
    pub zones: Option<&'a BTreeMap<MemberId, String>>,
    /// Another change of members that is under way, if any.
    pub other_change: Option<&'a str>,
    /// Time by this host's clock, in seconds since 1970.
    pub own_now: u64,
    /// Time by the service's clock, in seconds since 1970. Limits and expiry are judged by both
    /// clocks, so that neither alone can widen them.
    pub service_now: u64,
}

/// Decision about a newcomer that waits under a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PolicyDecision {
    /// All voters are reachable: the newcomer is a standby.
    StandBy,
    /// Something else is missing, for this reason.
    Wait(String),
    /// The policy allows no more replacements now. A person may have to act.
    Exhausted(String),
    /// The newcomer can never take a place by this policy.
    Refuse(String),
    /// The newcomer takes the member's place, once this use is counted in the store.
    Begin(PolicyUse),
}

impl PolicyReplacementFacts<'_> {
    /// Decides whether the newcomer takes a member's place now.
    pub(crate) fn decide(&self) -> PolicyDecision {
        let id = self.policy.id;
        if self.policy.standing == PolicyStanding::Revoked {
            return PolicyDecision::Refuse(format!("the policy {id} was revoked"));
        }
        if self.own_now.max(self.service_now) >= self.policy.expires_at {
            return PolicyDecision::Refuse(format!("the policy {id} has expired"));
        }
        if let Some(earlier) = self.uses.of(&self.candidate.operation) {
            let how = earlier.ended.as_deref().unwrap_or("it is under way");
            return PolicyDecision::Refuse(format!("this host was in a replacement before: {how}"));
        }
        if self.policy.standing == PolicyStanding::Missing {
            return wait(format!("the policy {id} is not in the cluster's own store yet"));
        }
        if self.policy.standing == PolicyStanding::NoRoom {
            return wait(no_room_text(id));
        }
        if !self.voters.are_known {
            return wait("this host has yet to see which voters can be reached".to_owned());
        }
        let (dead, time) = match self.voters.unreachable[..] {
            [] => return self.decide_vacancy(),
            [one] => one,
            _ => return wait(self.several_unreachable()),
        };
        match self.members.of_id(dead).filter(|member| !member.is_learner && dead != self.own) {
            Some(dead) => self.decide_for(dead, time),
            None => wait("the members have just changed".to_owned()),
        }
    }

    /// Decides about the place that an earlier replacement has freed and not filled. All voters are
    /// reachable.
    fn decide_vacancy(&self) -> PolicyDecision {
        let Some(vacancy) = self.uses.vacancy(self.voter_ids().len(), self.members.cluster_id)
        else {
            return PolicyDecision::StandBy;
        };
        if let Some(why) = self.limit_objection() {
            let name = &vacancy.member_name;
            return PolicyDecision::Exhausted(format!("the place of {name} is free, and {why}"));
        }
        if let Some(decision) = self.obstacle(None) {
            return decision;
        }
        PolicyDecision::Begin(PolicyUse {
            fills_vacancy: true,
            voters: vacancy.voters,
            ..self.new_use(vacancy.member, vacancy.member_name.clone())
        })
    }

    /// Decides about the replacement of `dead`, the only voter that this host can't reach.
    fn decide_for(&self, dead: &ClusterMember, time: Duration) -> PolicyDecision {
        let (name, limits) = (label(dead), &self.policy.limits);
        if let Some(why) = self.limit_objection() {
            return PolicyDecision::Exhausted(format!("{name} is unreachable, and {why}"));
        }
        if time.as_secs() < limits.after_seconds {
            return wait(format!(
                "{name} has been unreachable for {} s; it is replaced after {} s",
                time.as_secs() / 10 * 10,
                limits.after_seconds
            ));
        }
        let ids = self.voter_ids();
        let (observers, quorum) = count_observers(dead.id, &self.voters.observers, &ids);
        if observers < quorum {
            return wait(format!(
                "{observers} of {} voters' agents have observed for {} s that {name} is unreachable: \
                 {quorum} are needed",
                ids.len(),
                limits.after_seconds
            ));
        }
        if let Some(why) = self.confirmation_objection(dead, &ids) {
            return wait(why);
        }
        if let Some(decision) = self.obstacle(Some(dead.id)) {
            return decision;
        }
        PolicyDecision::Begin(self.new_use(dead.id, dead.name.clone()))
    }

    /// Returns why a replacement of `dead` would pause once it has begun. Each step needs new
    /// observations of a quorum, and agents of older versions write none once the policy has
    /// reached its limit. No other replacement could begin meanwhile.
    fn confirmation_objection(&self, dead: &ClusterMember, voters: &[MemberId]) -> Option<String> {
        if self.uses_that_count() + 1 < usize::from(self.policy.limits.at_most) {
            return None;
        }
        let VoterFacts { observers, unconfirming, .. } = self.voters;
        let stays = |id: &MemberId| !unconfirming.contains(id);
        let confirming: Vec<MemberId> = observers.iter().copied().filter(stays).collect();
        let (confirming, quorum) = count_observers(dead.id, &confirming, voters);
        if confirming >= quorum {
            return None;
        }
        let old = unconfirming.iter().filter_map(|id| self.members.of_id(*id)).map(label);
        Some(format!(
            "{} is replaced once these members' agents are upgraded: {}. By the policy {}, this is \
             the last replacement for now, and older agents don't confirm it",
            label(dead),
            old.collect::<Vec<_>>().join(", "),
            self.policy.id
        ))
    }

    /// Returns the number of the policy's uses that count now.
    fn uses_that_count(&self) -> usize {
        // Use the earlier of the two clocks: by that clock, uses count for longer.
        let now = self.own_now.min(self.service_now);
        self.uses.count(&self.policy.id, &self.policy.limits, now)
    }

    fn voter_ids(&self) -> Vec<MemberId> {
        let voters = self.members.list.iter().filter(|member| !member.is_learner);
        voters.map(|member| member.id).collect()
    }

    fn new_use(&self, member: MemberId, member_name: String) -> PolicyUse {
        PolicyUse {
            policy: self.policy.id,
            operation: self.candidate.operation,
            member,
            member_name,
            newcomer: self.candidate.name.clone(),
            voters: self.voter_ids().len(),
            raft_cluster: raft_cluster_text(self.members.cluster_id),
            fills_vacancy: false,
            began_at: self.own_now,
            intent: None,
            ended: None,
            left_vacancy: false,
        }
    }

    /// Returns the decision if something now prevents all changes of members, or prevents the
    /// admission of this newcomer. `dead` is the member that the newcomer replaces.
    fn obstacle(&self, dead: Option<MemberId>) -> Option<PolicyDecision> {
        if let Some(running) = self.uses.under_way() {
            let (newcomer, old) = (&running.newcomer, &running.member_name);
            return Some(wait(format!("{newcomer} takes the place of {old} now")));
        }
        if let Some(change) = self.other_change {
            return Some(wait(format!("another change is under way: {change}")));
        }
        if let Some(learner) = self.members.list.iter().find(|member| member.is_learner) {
            return Some(wait(format!("{} is a learner already", label(learner))));
        }
        let ids = self.voter_ids();
        let is_late = |id: &&MemberId| Some(**id) != dead && ids.contains(id);
        if let Some(late) = self.voters.not_in_sync.iter().find(is_late) {
            let late = self.members.of_id(*late).map(label).unwrap_or_default();
            return Some(wait(format!("{late}, which has to stay, is not in sync")));
        }
        if let Some(why) = self.zone_conflict(dead) {
            return Some(wait(why));
        }
        self.membership_conflict(dead).map(PolicyDecision::Refuse)
    }

    /// Returns why the candidate may not join the remaining voters because of its zone. `None` if
    /// it may.
    fn zone_conflict(&self, dead: Option<MemberId>) -> Option<String> {
        let zones = self.zones?;
        let others: Vec<Option<&str>> = self
            .voter_ids()
            .into_iter()
            .filter(|id| Some(*id) != dead)
            .map(|id| zones.get(&id).map(String::as_str))
            .collect();
        let size = others.len() + 1;
        let fault = fitness::check_zone(self.candidate.zone.as_deref(), others, size).err()?;
        Some(format!("this host {fault}; a host in another zone takes the place"))
    }

    /// Returns why the policy allows no more replacements now.
    fn limit_objection(&self) -> Option<String> {
        let PolicyFacts { id, limits, .. } = &self.policy;
        let now = self.own_now.min(self.service_now);
        let used = self.uses_that_count();
        if used < usize::from(limits.at_most) {
            return None;
        }
        let free = self.uses.next_free(id, limits, now).unwrap_or(now);
        Some(format!(
            "the policy {id} has reached its limit: {used} replacements in {} h. The next is allowed \
             in {} min; an operator can replace the member sooner, with a join ticket",
            limits.per_seconds / 3_600,
            free.saturating_sub(now).div_ceil(60)
        ))
    }

    fn several_unreachable(&self) -> String {
        let name = |(id, _): &(MemberId, Duration)| {
            self.members.of_id(*id).map_or_else(|| id.to_string(), label)
        };
        let names: Vec<String> = self.voters.unreachable.iter().map(name).collect();
        format!(
            "{} are unreachable, and a policy replaces one member at a time: look for what they have \
             in common",
            names.join(" and ")
        )
    }

    /// Returns why the candidate can't join the remaining members: one of them has its name or one
    /// of its URLs. `None` if it can.
    fn membership_conflict(&self, dead: Option<MemberId>) -> Option<String> {
        let Candidate { name, peer_urls, .. } = self.candidate;
        let others = || self.members.list.iter().filter(|member| Some(member.id) != dead);
        if let Some(other) = others().find(|other| other.name == *name) {
            return Some(format!("member {} is called {name} already", other.id));
        }
        let shares =
            |other: &&ClusterMember| other.peer_urls.iter().any(|url| peer_urls.contains(url));
        let other = others().find(shares)?;
        Some(format!("member {} has this host's peer URL already", label(other)))
    }
}

fn wait(why: String) -> PolicyDecision {
    PolicyDecision::Wait(why)
}

fn label(member: &ClusterMember) -> String {
    if member.is_started() {
        format!("{} ({})", member.name, member.id)
    } else {
        format!("member {}", member.id)
    }
}

/// Returns how many voters' agents observe that `dead` is unreachable, and how many have to.
fn count_observers(dead: MemberId, observers: &[MemberId], voters: &[MemberId]) -> (usize, usize) {
    let counts = |id: &&MemberId| **id != dead && voters.contains(id);
    (observers.iter().filter(counts).count(), voters.len() / 2 + 1)
}

/// Whether the dead member is reachable again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeadMemberState {
    /// This host has not looked lately.
    Unknown,
    /// This host still can't reach the member, but too few voters' agents agree now.
    Disputed,
    /// The member is still unreachable.
    Unreachable,
    /// The member is reachable again for this host.
    Back,
}

impl DeadMemberState {
    /// Returns the state of `dead` according to this host and the other voters' agents. `self` is
    /// the state that this host alone sees. `observers` are the voters, this host's included, whose
    /// agents observe now that the member is unreachable.
    pub(crate) fn with_observers(
        self,
        dead: MemberId,
        observers: &[MemberId],
        voters: &[MemberId],
    ) -> Self {
        let (agreeing, quorum) = count_observers(dead, observers, voters);
        match self {
            Self::Unreachable if agreeing < quorum => Self::Disputed,
            state => state,
        }
    }
}

/// Decision about a replacement that has begun, and whose newcomer doesn't vote yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Continuation {
    /// The next step may be taken.
    Continue,
    /// No step is taken now, for this reason.
    Pause(String),
    /// The replacement ends, for this reason. A newcomer that is a learner is removed again.
    GiveUp(String),
}

/// Decides whether a replacement goes on whose newcomer doesn't vote yet. `old` is the state of the
/// dead member, or `None` if its place is free already. `voters` is the number of voters.
pub(crate) fn continuation(
    of: &PolicyUse,
    standing: PolicyStanding,
    old: Option<DeadMemberState>,
    voters: usize,
) -> Continuation {
    let name = &of.member_name;
    // Discovery may still hand out the newcomer of a replacement that has ended.
    if let Some(how) = &of.ended {
        return Continuation::GiveUp(format!("this replacement of {name} has ended: {how}"));
    }
    match (old, standing) {
        (None, _) if voters >= of.voters => {
            Continuation::GiveUp(format!("somebody else has taken the place of {name}"))
        }
        // The member's place is free: without the newcomer, the cluster would lack a voter.
        (None, _) => Continuation::Continue,
        (Some(_), PolicyStanding::Revoked) => {
            Continuation::GiveUp(format!("the policy {} was revoked", of.policy))
        }
        (Some(DeadMemberState::Back), _) => {
            Continuation::GiveUp(format!("{name}, which was to be replaced, is reachable again"))
        }
        (Some(DeadMemberState::Unknown), _) => {
            Continuation::Pause(format!("this host has yet to see whether {name} can be reached"))
        }
        (Some(DeadMemberState::Disputed), _) => Continuation::Pause(format!(
            "too few voters' agents have observed lately that {name} is still unreachable"
        )),
        (
            Some(DeadMemberState::Unreachable),
            PolicyStanding::InForce | PolicyStanding::Missing | PolicyStanding::NoRoom,
        ) => Continuation::Continue,
    }
}

/// Returns whether a use that ends leaves its dead member's place free for another newcomer.
/// `origin` says which operation removed the dead member. Returns `None` if the agent has to find
/// that out first.
pub(crate) fn leaves_vacancy(
    of: &PolicyUse,
    is_promoted: bool,
    members: &MemberList,
    origin: RemovalOrigin,
) -> Option<bool> {
    let voters = members.list.iter().filter(|member| !member.is_learner).count();
    match origin {
        _ if is_promoted || members.of_id(of.member).is_some() || voters >= of.voters => {
            Some(false)
        }
        // An earlier use has removed the member, and this use has not filled the place.
        _ if of.fills_vacancy => Some(true),
        RemovalOrigin::Own => Some(true),
        RemovalOrigin::Foreign => Some(false),
        RemovalOrigin::Unknown => None,
    }
}

#[cfg(test)]
mod tests;
