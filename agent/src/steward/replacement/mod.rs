//! Replaces dead members by the policies that operators signed beforehand.
//!
//! Newcomers under a policy come through discovery, like newcomers with a ticket. But discovery
//! alone can't begin a replacement. [`decide`] needs the policy in the cluster's own store, and a
//! member that neither this host nor a quorum of the voters' agents can reach. Before the first
//! step, a use of the policy is counted in the store ([`uses`]), by compare-and-swap. From then on
//! the newcomer's intent is carried out like a ticket that replaces the dead member.
//!
//! | key in the store | holds |
//! |---|---|
//! | `muster/v1/policies` | the policies, and which were revoked ([`store`]) |
//! | `muster/v1/replacements` | the uses ([`uses`]) |
//! | `muster/v1/observations/ID` | what a voter's agent can't reach ([`observations`]) |
//!
//! While all voters live, nothing is written: hosts that wait are standbys, and no agent asks
//! discovery more often because of them.

pub(crate) mod decide;
mod observations;
mod progress;
#[cfg(test)]
mod simulation;
pub(crate) mod store;
pub(crate) mod uses;
mod voters;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use discovery_types::api::{IntentList, IntentState, IntentView, Outcome};
use discovery_types::digest::OperationId;
use discovery_types::features::Feature;
use discovery_types::grant::{ReplacementLimits, VerifiedGrant};
use discovery_types::intent::{IntentChange, VerifiedIntent};
use discovery_types::jws::newer_version;
use discovery_types::name::Name;
use discovery_types::record::VerifiedRecord;
use discovery_types::url::NodeUrl;
use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::Instant;

use self::decide::{
    Candidate, PolicyDecision, PolicyFacts, PolicyReplacementFacts, PolicyStanding, VoterFacts,
};
use self::observations::Observations;
pub(crate) use self::observations::VoterObserver;
use self::store::StoredPolicies;
use self::uses::{PolicyUse, UseLog};
use self::voters::Reachability;
use super::Steward;
use crate::cluster::{
    ClusterApiClient, ClusterMember, MemberId, MemberList, NodeStatus, StoredValue,
};
use crate::endpoint::ClientEndpoint;
use crate::exit::error_chain as causes;
use crate::observe::status::StatusHandle;
use crate::plan::MemberState;

/// Key in the cluster's store whose value is the log of uses. Keys that begin with `muster/` are
/// Muster's own.
const USES: &str = "muster/v1/replacements";
/// Why a newcomer under a policy waits while nobody is dead.
const STANDBY: &str = "all voters can be reached: this host is a standby";
/// Maximum time between an agent's look at the members and the step of a replacement that it
/// decides from that look. In a longer time, the dead member may have come back. The limit applies
/// until the newcomer votes.
pub(super) const STEP_LIFETIME: Duration = Duration::from_secs(15);

/// Returns the uses in a cluster's own store, oldest first.
pub(crate) async fn read_uses(node: &ClusterApiClient) -> Result<Vec<PolicyUse>, String> {
    let stored = node.read_key(USES).await.map_err(|error| causes(&error))?;
    let log = UseLog::parse(stored.value.as_deref()).map_err(|error| error.to_string())?;
    Ok(log.into_uses())
}

/// The steward's knowledge of policies, and of the voters that it watches for them.
pub(crate) struct ReplacementKeeper {
    /// Signs this host's observations. `None` if its agent has no proof of its member.
    observer: Option<VoterObserver>,
    /// Client port of this host's node.
    endpoint: ClientEndpoint,
    board: StatusHandle,
    /// Whether there is a policy, so that voters have to be watched.
    wanted: watch::Sender<bool>,
    voters: watch::Sender<Reachability>,
    /// Receives a value when the set of unreachable voters has changed.
    changes: watch::Receiver<Reachability>,
    observations: Observations,
    /// Policies that discovery handed out last, verified, each with whether it was revoked.
    known: Vec<(VerifiedGrant, bool)>,
    /// Policies in the cluster's own store, when they were last read.
    stored: StoredPolicies,
    /// Zones of the members, as discovery said last, if the members are spread over zones.
    zones: Option<BTreeMap<MemberId, String>>,
    /// Uses in the cluster's own store, when they were last read.
    uses: UseLog,
}

impl ReplacementKeeper {
    /// Makes the state of a running node's steward.
    pub(crate) fn new(
        observer: Option<VoterObserver>,
        endpoint: ClientEndpoint,
        board: StatusHandle,
    ) -> Self {
        let voters = watch::Sender::new(Reachability::default());
        Self {
            observer,
            endpoint,
            board,
            wanted: watch::Sender::new(false),
            changes: voters.subscribe(),
            voters,
            observations: Observations::default(),
            known: Vec::new(),
            stored: StoredPolicies::default(),
            zones: None,
            uses: UseLog::default(),
        }
    }

    /// Returns the task that watches the voters while there is a policy.
    pub(super) fn watch_voters(
        &self,
        node: &ClusterApiClient,
    ) -> impl Future<Output = Infallible> + use<> {
        let (wanted, found) = (self.wanted.subscribe(), self.voters.clone());
        voters::watch(node.clone(), self.endpoint.clone(), wanted, found)
    }

    /// Waits until the set of unreachable voters has changed.
    pub(super) async fn voters_changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns the voters that this host can't reach now, and for how long.
    fn unreachable(&self) -> Vec<(MemberId, Duration)> {
        self.voters.borrow().unreachable(Instant::now())
    }

    /// Shows in the agent's status why newcomers under policies wait.
    fn show(&self, why: Option<&str>, is_exhausted: bool) {
        let unreachable = u32::try_from(self.unreachable().len()).unwrap_or(u32::MAX);
        self.board.update(|status| {
            status.replacement = why.map(ToOwned::to_owned);
            status.replacement_limit_reached = is_exhausted;
            status.unreachable_voters = unreachable;
        });
    }
}

/// The members and the time, for one pass over the newcomers that wait.
struct Pass<'a> {
    members: &'a MemberList,
    status: &'a NodeStatus,
    other_change: Option<String>,
    own_now: u64,
    service_now: u64,
}

/// Whether the intent adds a newcomer under a policy, and the newcomer has not been added yet.
fn is_waiting(view: &IntentView) -> bool {
    view.policy.is_some() && view.state == IntentState::Open
}

impl Steward {
    /// Stores the members' zones from discovery's answer.
    pub(super) fn store_zones(
        &mut self,
        zones: Option<BTreeMap<discovery_types::digest::MemberId, Name>>,
    ) {
        let text = |(id, zone): (discovery_types::digest::MemberId, Name)| {
            (MemberId(id.get()), zone.to_string())
        };
        self.replacement.zones = zones.map(|zones| zones.into_iter().map(text).collect());
    }

    /// Verifies and stores the policies from discovery's answer. The leader's agent also writes
    /// them to the cluster's own store.
    pub(super) async fn store_policies(&mut self, list: &IntentList, leads: bool) {
        let verified = store::verified(&list.policies, self.statements.chain());
        // Discovery doesn't hand out expired policies. But a replacement that has begun goes on,
        // and needs the voters to be watched.
        let is_wanted = !verified.is_empty()
            || list.intents.iter().any(|view| view.policy.is_some())
            || self.operation_under_way().is_some();
        self.replacement
            .wanted
            .send_if_modified(|wanted| std::mem::replace(wanted, is_wanted) != is_wanted);
        let is_news = self.replacement.known != verified;
        self.replacement.known = verified;
        if is_news && self.replacement.known.is_empty() {
            self.replacement.show(None, false);
        }
        let lacks = |(policy, is_revoked): &(VerifiedGrant, bool)| {
            let standing = self.replacement.stored.standing(policy);
            matches!(standing, PolicyStanding::Missing | PolicyStanding::NoRoom)
                || (*is_revoked && standing == PolicyStanding::InForce)
        };
        if leads && self.replacement.known.iter().any(lacks) {
            let clocks = self.clocks();
            let chain = self.statements.chain();
            match store::sync(&self.node, &self.replacement.known, chain, clocks).await {
                Ok(stored) => self.replacement.stored = stored,
                Err(why) => self.warn_once(&format!(
                    "the replacement policies can't be kept in the cluster: {why}"
                )),
            }
            let replacement = &self.replacement;
            if let Some(id) = replacement.stored.first_without_room(&replacement.known) {
                self.warn_once(&store::no_room_text(id));
            }
        }
    }

    /// Whether the agent must do more than wait for discovery's next answer. While all voters are
    /// reachable, newcomers that wait under a policy give it no work, with two exceptions: a place
    /// is vacant, or discovery shows an outdated reason why a newcomer waits. A replacement under
    /// way does give it work, even if discovery has forgotten the replacement.
    pub(super) async fn is_busy(&mut self, intents: &[IntentView], leads: bool) -> bool {
        if intents.iter().any(|view| !is_waiting(view)) {
            return true;
        }
        // If discovery has forgotten a replacement under way, the other agents still have to
        // observe its dead member. That member is the only one that can't be reached.
        if intents.is_empty() && !leads && self.replacement.unreachable().len() != 1 {
            return false;
        }
        if let Err(why) = self.read_uses().await {
            self.warn_once(&why);
            return !intents.is_empty();
        }
        if intents.is_empty() {
            return self.operation_under_way().is_some();
        }
        let is_vacant = match self.replacement.uses.has_left_vacancy() {
            false => false,
            true => {
                let members = self.node.list_members_serializable().await.unwrap_or_default();
                let voters = members.list.iter().filter(|member| !member.is_learner).count();
                self.replacement.uses.vacancy(voters, members.cluster_id).is_some()
            }
        };
        let replacement = &self.replacement;
        let is_stale =
            |view: &IntentView| view.waits.as_ref().is_some_and(|waits| waits.reason != STANDBY);
        !replacement.unreachable().is_empty()
            || replacement.uses.under_way().is_some()
            || is_vacant
            || intents.iter().any(is_stale)
    }

    /// Returns the operation of the replacement under way, according to the uses that were read
    /// last.
    pub(super) fn operation_under_way(&self) -> Option<OperationId> {
        self.replacement.uses.under_way().map(|each| each.operation)
    }

    /// Clears the replacement in the status, because another agent decides, or because no newcomer
    /// waits.
    pub(super) fn show_no_replacement(&self) {
        self.replacement.show(None, false);
    }

    /// Whether the next pass over the intents may come later than usual, although there are
    /// intents.
    pub(super) fn can_wait_longer(&self, intents: &[IntentView]) -> bool {
        intents.iter().all(is_waiting) && self.replacement.uses.under_way().is_none()
    }

    /// Reads the uses from the cluster's own store.
    async fn read_uses(&mut self) -> Result<StoredValue, String> {
        let stored = self.node.read_key(USES).await.map_err(|error| causes(&error))?;
        self.replacement.uses =
            UseLog::parse(stored.value.as_deref()).map_err(|error| error.to_string())?;
        Ok(stored)
    }

    /// Writes this host's observation to the store, if a newcomer could need it or a replacement
    /// under way depends on it.
    pub(super) async fn observe_voters(&mut self, intents: &[IntentView], own: MemberId) {
        let unreachable = self.replacement.unreachable();
        let [(member, time)] = unreachable[..] else { return };
        if self.replacement.observer.is_none() || !self.replacement.observations.is_due() {
            return;
        }
        if let Err(why) = self.read_uses().await {
            return self.warn_once(&why);
        }
        let (own_now, service_now) = self.clocks();
        let counts = |(policy, is_revoked): &(VerifiedGrant, bool)| {
            let limits = limits_of(policy);
            let used = self.replacement.uses.count(&policy.id, &limits, own_now.min(service_now));
            let is_awaited = intents.iter().any(|view| view.policy == Some(policy.id));
            !is_revoked
                && is_awaited
                && time.as_secs() >= limits.after_seconds
                && used < usize::from(limits.at_most)
        };
        let is_replaced = |each: &PolicyUse| each.member == member;
        if !self.replacement.uses.under_way().is_some_and(is_replaced)
            && !self.replacement.known.iter().any(counts)
        {
            return;
        }
        let Some(observer) = &self.replacement.observer else { return };
        let observations = &mut self.replacement.observations;
        if let Err(why) = observations.write_if_due(observer, &self.node, own, &unreachable).await {
            self.warn_once(&format!("this host's observation can't be left in the cluster: {why}"));
        }
    }

    /// Returns the time by this host's clock and by the service's, in seconds since 1970.
    pub(super) fn clocks(&self) -> (u64, u64) {
        let clock = |seconds: i64| u64::try_from(seconds).unwrap_or(0);
        let own = clock(jiff::Timestamp::now().as_second());
        (own, clock(self.client.service_now_ms().div_euclid(1000)))
    }

    /// Splits the intents into those that are carried out, and the newcomers under policies that
    /// wait for a decision. An intent by a policy counts as begun if its use is in the store. Also
    /// returns the use under way if discovery has lost its intent.
    pub(super) async fn split_by_policy<'v>(
        &mut self,
        verified: Vec<(VerifiedIntent, &'v IntentView)>,
    ) -> Result<SplitIntents<'v>, String> {
        let (by_policy, mut begun): (Vec<_>, Vec<_>) =
            verified.into_iter().partition(|(intent, _)| intent.policy().is_some());
        let is_idle = self.operation_under_way().is_none();
        if by_policy.is_empty() && self.replacement.known.is_empty() && is_idle {
            return Ok(SplitIntents { begun, waiting: Vec::new(), lost: None });
        }
        self.read_uses().await?;
        let mut waiting = Vec::new();
        for (intent, view) in by_policy {
            match self.replacement.uses.of(&intent.operation) {
                Some(policy_use) => begun.push((resolve(intent, policy_use), view)),
                None if view.state == IntentState::Open => waiting.push((intent, view)),
                // The newcomer is a member already, and the store no longer keeps its use of the
                // policy.
                None => begun.push((intent, view)),
            }
        }
        let under_way = self.replacement.uses.under_way();
        let is_shown =
            |each: &PolicyUse| begun.iter().any(|(it, _)| it.operation == each.operation);
        let lost = under_way.filter(|each| !is_shown(each)).cloned();
        Ok(SplitIntents { begun, waiting, lost })
    }

    /// Returns the intent of a use that discovery doesn't show. Ends the use if the intent can't be
    /// verified any more, because the operator who signed the policy was removed.
    pub(super) async fn recover_intent(
        &mut self,
        policy_use: &PolicyUse,
    ) -> Result<Option<(VerifiedIntent, IntentView)>, String> {
        let members = self.node.list_members().await.map_err(|error| causes(&error))?;
        if !policy_use.is_of(members.cluster_id) {
            // A recovery copied the store from a lost cluster. The dead member was one of that
            // cluster's members, which this cluster doesn't have.
            self.end_use(&policy_use.operation, "the cluster was recovered", false).await?;
            return Ok(None);
        }
        let verified = policy_use
            .intent
            .as_deref()
            .map(|intent| VerifiedIntent::verify(intent, self.statements.chain()));
        if let Some(Err(error)) = &verified
            && newer_version(error).is_some()
        {
            // A newer program has signed the intent. Keep the use: an agent of that version can
            // continue the replacement.
            return Err(causes(error));
        }
        let verified = verified.and_then(Result::ok);
        let found = verified.and_then(|verified| lost_intent(verified, policy_use, &members));
        if found.is_none() {
            let how = "its policy's signer may not sign it any more";
            let is_removed = members.of_id(policy_use.member).is_none();
            self.end_use(&policy_use.operation, how, is_removed).await?;
            tracing::warn!(operation = %policy_use.operation, "a replacement has ended: {how}");
        }
        Ok(found)
    }

    /// Decides about the newcomers that wait, the longest-waiting first. Begins at most one
    /// replacement.
    pub(super) async fn consider_newcomers(
        &mut self,
        waiting: &[(VerifiedIntent, &IntentView)],
        begun: &[(VerifiedIntent, &IntentView)],
        status: &NodeStatus,
    ) -> Result<(), String> {
        if waiting.is_empty() {
            if begun.is_empty() {
                self.replacement.show(None, false);
            }
            return Ok(());
        }
        // Read the uses first. If another agent begins or ends a use after this, the write of this
        // pass fails. So no decision rests on an outdated count.
        let uses = self.read_uses().await?;
        self.replacement.stored = store::read(&self.node).await?;
        let members = self.node.list_members().await.map_err(|error| causes(&error))?;
        let (own_now, service_now) = self.clocks();
        let other_change = match begun.first() {
            Some((intent, view)) => Some(format!("{} {}", intent.verb, view.subject)),
            None => self.unfinished_adoption(&members, None).await?,
        };
        let pass = Pass { members: &members, status, other_change, own_now, service_now };
        let mut shown = (None, false);
        for (intent, _) in waiting {
            let looked = Instant::now();
            let decision = self.decide_newcomer(intent, &pass).await?;
            match decision {
                PolicyDecision::StandBy => self.report_wait(intent, STANDBY).await,
                PolicyDecision::Wait(why) => {
                    self.report_wait(intent, &why).await;
                    shown.0.get_or_insert(why);
                }
                PolicyDecision::Exhausted(why) => {
                    self.warn_once(&why);
                    self.report_wait(intent, &why).await;
                    shown = (Some(why), true);
                }
                PolicyDecision::Refuse(why) => {
                    let reason = discovery_types::text::truncate_reason(why);
                    self.report_outcome(intent, Outcome::Refused { reason }).await;
                }
                PolicyDecision::Begin(_) if looked.elapsed() > STEP_LIFETIME => {
                    return Err(decided_too_slowly());
                }
                PolicyDecision::Begin(new) => {
                    self.begin_use(intent, new, &uses).await?;
                    // The next pass takes the first step, and tells the other newcomers why they
                    // wait.
                    return Ok(());
                }
            }
        }
        self.replacement.show(shown.0.as_deref(), shown.1);
        Ok(())
    }

    async fn decide_newcomer(
        &mut self,
        intent: &VerifiedIntent,
        pass: &Pass<'_>,
    ) -> Result<PolicyDecision, String> {
        let (Some(policy), IntentChange::Add { record, .. }) = (intent.policy(), intent.change())
        else {
            return Ok(PolicyDecision::StandBy);
        };
        let limits = limits_of(policy);
        let facts = PolicyFacts {
            id: policy.id,
            limits,
            expires_at: policy.expires_at,
            standing: self.replacement.stored.standing(policy),
        };
        let candidate = candidate(intent, record);
        let voters = self.voter_facts(&limits, pass).await?;
        let facts = PolicyReplacementFacts {
            policy: facts,
            candidate: &candidate,
            uses: &self.replacement.uses,
            members: pass.members,
            own: pass.status.member_id,
            voters: &voters,
            zones: self.replacement.zones.as_ref(),
            other_change: pass.other_change.as_deref(),
            own_now: pass.own_now,
            service_now: pass.service_now,
        };
        Ok(facts.decide())
    }

    /// Collects facts about the voters. Asks the other voters' nodes only if one voter is dead or a
    /// place is vacant. Reads the other agents' observations only if one voter is dead.
    async fn voter_facts(
        &mut self,
        limits: &ReplacementLimits,
        pass: &Pass<'_>,
    ) -> Result<VoterFacts, String> {
        let own = pass.status.member_id;
        let voters = || pass.members.list.iter().filter(|member| !member.is_learner);
        let now = Instant::now();
        let (unreachable, are_known) = {
            let seen = self.replacement.voters.borrow();
            let known = voters().all(|member| member.id == own || seen.is_known(member.id, now));
            (seen.unreachable(now), known)
        };
        let mut facts = VoterFacts { unreachable, are_known, ..VoterFacts::default() };
        let dead = match facts.unreachable[..] {
            [] if self
                .replacement
                .uses
                .vacancy(voters().count(), pass.members.cluster_id)
                .is_some() =>
            {
                None
            }
            [(dead, time)] if time.as_secs() >= limits.after_seconds => Some(dead),
            _ => return Ok(facts),
        };
        let others: Vec<&ClusterMember> =
            voters().filter(|member| member.id != own && Some(member.id) != dead).collect();
        let leader = pass.status.raft_index;
        let states = join_all(others.iter().map(|member| async {
            let state = match self.node.status_of(member).await {
                Ok(said) => {
                    let behind = leader.saturating_sub(said.applied_index);
                    MemberState::Answers { behind: Some(behind) }
                }
                Err(_) => MemberState::Silent,
            };
            (!member.is_started() || !state.is_in_sync()).then_some(member.id)
        }));
        facts.not_in_sync = states.await.into_iter().flatten().collect();
        if let Some(dead) = dead {
            let after = Duration::from_secs(limits.after_seconds);
            facts.observers = self.observers_of((own, dead), pass.members, after).await?;
            let feature = Feature::ConfirmedReplacements;
            facts.unconfirming = self.without_feature(feature, &facts.observers).await?;
        }
        Ok(facts)
    }

    /// Counts a use in the store, if nobody has written there since `read`. Otherwise the next pass
    /// decides anew.
    async fn begin_use(
        &mut self,
        intent: &VerifiedIntent,
        new: PolicyUse,
        read: &StoredValue,
    ) -> Result<(), String> {
        let text = format!(
            "by the policy {}, {} takes the place of {} ({})",
            new.policy, new.newcomer, new.member_name, new.member
        );
        let new = PolicyUse { intent: Some(Box::new((**intent).clone())), ..new };
        let now = new.began_at;
        self.replacement.uses.begin(new, now).map_err(|error| error.to_string())?;
        let value = self.replacement.uses.encode();
        let written = self.node.replace_key_if_unchanged(USES, read, &value).await;
        if !written.map_err(|error| causes(&error))? {
            return Err("another agent has just counted a replacement".to_owned());
        }
        crate::crash::at(crate::crash::Failpoint::PolicyUsed);
        tracing::warn!(operation = %intent.operation, "{text}");
        self.replacement.show(Some(&text), false);
        self.report_wait(intent, &text).await;
        Ok(())
    }

    /// Notes in the store how the use of an intent has ended. `leaves_vacancy` tells whether the
    /// dead member was removed without a newcomer in its place.
    pub(super) async fn end_use(
        &mut self,
        operation: &OperationId,
        how: &str,
        leaves_vacancy: bool,
    ) -> Result<(), String> {
        let stored = self.read_uses().await?;
        if !self.replacement.uses.end(operation, how, leaves_vacancy) {
            return Ok(());
        }
        let value = self.replacement.uses.encode();
        let written = self.node.replace_key_if_unchanged(USES, &stored, &value).await;
        match written.map_err(|error| causes(&error))? {
            true => Ok(()),
            false => Err("another agent has just counted a replacement".to_owned()),
        }
    }

    /// Whether this agent could begin a replacement for a newcomer that waits, as far as it alone
    /// can tell.
    pub(super) fn could_begin(&self, intent: &VerifiedIntent) -> bool {
        let Some(policy) = intent.policy() else { return false };
        let (limits, (own_now, service_now)) = (limits_of(policy), self.clocks());
        let used = self.replacement.uses.count(&policy.id, &limits, own_now.min(service_now));
        let unreachable = self.replacement.unreachable();
        let is_due =
            matches!(unreachable[..], [(_, time)] if time.as_secs() >= limits.after_seconds);
        is_due
            && used < usize::from(limits.at_most)
            && self.replacement.uses.under_way().is_none()
            && self.replacement.uses.of(&intent.operation).is_none()
    }

    /// Returns an intent with the member that it replaces by its use. `None` for a newcomer under a
    /// policy that has no use yet.
    pub(super) fn with_replaced_member(&self, intent: VerifiedIntent) -> Option<VerifiedIntent> {
        match self.replacement.uses.of(&intent.operation) {
            Some(policy_use) => Some(resolve(intent, policy_use)),
            None if intent.policy().is_some() => None,
            None => Some(intent),
        }
    }
}

/// Intents of one pass.
pub(super) struct SplitIntents<'v> {
    /// Intents that are carried out.
    pub begun: Vec<(VerifiedIntent, &'v IntentView)>,
    /// Newcomers under policies that wait for a decision.
    pub waiting: Vec<(VerifiedIntent, &'v IntentView)>,
    /// A replacement under way whose intent discovery doesn't show.
    pub lost: Option<PolicyUse>,
}

/// Returns the intent of a use that discovery doesn't show, with a view made of the cluster's own
/// list of members.
fn lost_intent(
    verified: VerifiedIntent,
    policy_use: &PolicyUse,
    members: &MemberList,
) -> Option<(VerifiedIntent, IntentView)> {
    let IntentChange::Add { record, .. } = verified.change() else { return None };
    let found = members.of_peer_urls(&texts(&record.peer_urls));
    let found = found.filter(|member| member.id != policy_use.member);
    let outcome = found.map(|member| Outcome::Added {
        member: discovery_types::digest::MemberId::new(member.id.0),
        initial_cluster: Vec::new(),
        replaces: None,
    });
    let view = IntentView {
        intent: (*verified).clone(),
        state: outcome.as_ref().map_or(IntentState::Open, Outcome::state),
        rev: 0,
        subject: policy_use.newcomer.clone(),
        by: String::new(),
        made_at_ms: 0,
        outcome,
        reported_by: None,
        explain: Vec::new(),
        about: None,
        about_name: None,
        waits: None,
        policy: Some(policy_use.policy),
    };
    Some((resolve(verified, policy_use), view))
}

/// Returns the message that too much time has passed between an agent's look at the members and its
/// step.
pub(super) fn decided_too_slowly() -> String {
    format!(
        "deciding took more than {} s, and the members may have changed: the agent looks again",
        STEP_LIFETIME.as_secs()
    )
}

fn resolve(intent: VerifiedIntent, policy_use: &PolicyUse) -> VerifiedIntent {
    match policy_use.fills_vacancy {
        true => intent,
        false => {
            intent.with_replaced_member(discovery_types::digest::MemberId::new(policy_use.member.0))
        }
    }
}

fn candidate(intent: &VerifiedIntent, record: &VerifiedRecord) -> Candidate {
    Candidate {
        operation: intent.operation,
        name: record.name.to_string(),
        peer_urls: texts(&record.peer_urls),
        zone: record.zone.as_ref().map(ToString::to_string),
    }
}

fn texts(urls: &[NodeUrl]) -> Vec<String> {
    urls.iter().map(NodeUrl::to_string).collect()
}

/// Returns the limits that an operator signed. Tests shorten the time of unreachability with the
/// variable `MUSTER_UNREACHABLE_AFTER`, in seconds, which a release build doesn't read.
fn limits_of(policy: &VerifiedGrant) -> ReplacementLimits {
    let none = ReplacementLimits { after_seconds: u64::MAX, at_most: 0, per_seconds: u64::MAX };
    let limits = policy.replacement.unwrap_or(none);
    #[cfg(debug_assertions)]
    if let Some(seconds) =
        std::env::var("MUSTER_UNREACHABLE_AFTER").ok().and_then(|text| text.parse().ok())
    {
        return ReplacementLimits { after_seconds: seconds, ..limits };
    }
    limits
}
