//! Acts for the cluster, if this host's node is a voter. Makes only changes that people have
//! signed. It carries out intents, and keeps the statement chain in the cluster's own store.
//!
//! Only the leader's agent, on the leader's host, acts: on its own node, through the Cluster API,
//! one change at a time. If a newcomer itself leads, another member's agent reports its outcome. If
//! the leader's agent is silent, another voter's agent moves the leadership to its own node
//! (`takeover`).
//!
//! Discovery hands out intents, which the agent examines in regular passes. Signatures alone decide
//! whether an intent may be carried out. Before each step, the agent asks the cluster which steps
//! were carried out. Nothing begins without a signed intent. A node serves even if its agent can
//! carry out no intents.

mod act;
mod adoption;
mod builds;
mod chain;
mod decide;
mod progress;
pub(crate) mod replacement;
mod takeover;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::api::{
    IntentList, IntentState, IntentView, Outcome, OutcomeRequest, WaitRequest,
};
use discovery_types::client::{ClientError, DiscoveryClient};
use discovery_types::digest::{self, Digest, OperationId};
use discovery_types::intent::{IntentChange, IntentError, IntentStep, VerifiedIntent};
use discovery_types::jws::{Jws, newer_version};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

pub(crate) use self::builds::{BuildKeeper, own_build};
pub(crate) use self::chain::{RECOVERIES, STATEMENTS, Statements};
use self::decide::{IntentFacts, StewardAction};
use self::progress::NewcomerProgress;
use self::replacement::STEP_LIFETIME;
use self::replacement::decide::Continuation;
pub(crate) use self::replacement::{ReplacementKeeper, VoterObserver};
use self::takeover::LeaderWatch;
use crate::cluster::{ClusterApiClient, MemberId, MemberList, NodeStatus, RemovalOrigin};
use crate::exit::error_chain as causes;
use crate::retry::Retry;
use discovery_types::text::truncate_reason;

/// How often intents are examined while there are any.
const INTENT_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How often newcomers under a policy are examined while a voter can't be reached.
const STANDBY_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// How often the agent asks an unreachable node for its status.
const NODE_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// How often the statements are fetched while the node can't be asked.
const STATEMENTS_FETCH_INTERVAL: Duration = Duration::from_secs(15);
/// Minimum time between two reports to discovery on why one intent waits.
const MIN_EXPLAIN_INTERVAL: Duration = Duration::from_secs(5);
/// Time after which a warning that is still true is logged again.
const WARNING_REPEAT_INTERVAL: Duration = Duration::from_secs(600);
/// Maximum number of warnings that are remembered as logged. Further ones are logged each time.
const MAX_REMEMBERED_WARNINGS: usize = 64;

/// The task that carries out intents while this host's node runs.
pub(crate) struct Steward {
    /// Client of the discovery service.
    pub client: Arc<DiscoveryClient>,
    /// The cluster's id at discovery.
    pub cluster: Uuid,
    /// API client of this host's own node.
    pub node: ClusterApiClient,
    /// The statement chain, which says who may sign what.
    pub statements: Statements,
    /// Hash of the signed list of members.
    list: Digest,
    /// The service statement (discovery's URLs and TLS keys) that discovery sent last. The task
    /// that finds discovery uses it.
    pub announced: watch::Sender<Option<Jws>>,
    /// Changes when the client of discovery gets other URLs.
    service_moves: watch::Receiver<u64>,
    /// Notified when the members have probably changed.
    pub hint: Arc<Notify>,
    /// State of each intent that discovery handed out last. If a state has changed or an intent is
    /// gone, the members have probably changed.
    intent_states: BTreeMap<OperationId, IntentState>,
    /// Observations of pending intents.
    observations: BTreeMap<OperationId, IntentObservations>,
    /// Observations of the leader's agent.
    leader_watch: LeaderWatch,
    /// Facts about replacement policies.
    replacement: ReplacementKeeper,
    /// Versions and features of the members' agents.
    builds: BuildKeeper,
    retry: Retry,
    /// Warnings that were logged, and when.
    warnings: BTreeMap<String, Instant>,
}

/// An agent's observations of one intent. The agent of the next leader doesn't need them.
#[derive(Default)]
struct IntentObservations {
    progress: NewcomerProgress,
    added_before: bool,
    /// Members that did not answer when the cluster refused the newcomer because too few voters are
    /// healthy.
    refused_addition: Option<Vec<MemberId>>,
    /// Origin of the removal of the replaced member, once that member is gone.
    removal_origin: RemovalOrigin,
    last_logged_wait: String,
    /// The last reason to wait that was reported to discovery, and when it was reported.
    last_explanation: Option<(String, Instant)>,
    /// Why the replacement by a policy is given up.
    given_up: Option<String>,
}

/// Parts of a steward that it shares with the agent's other tasks.
pub(crate) struct StewardParts {
    /// The statement chain, which says who may sign what.
    pub statements: Statements,
    /// Hash of the signed list of members.
    pub list: Digest,
    /// The service statement (discovery's URLs and TLS keys) that discovery sent last. The task
    /// that finds discovery uses it.
    pub announced: watch::Sender<Option<Jws>>,
    /// Notified when the members have probably changed.
    pub hint: Arc<Notify>,
    /// Facts about replacement policies.
    pub replacement: ReplacementKeeper,
    /// Versions and features of the members' agents.
    pub builds: BuildKeeper,
}

impl Steward {
    /// Makes the steward of a running node.
    pub(crate) fn new(
        client: Arc<DiscoveryClient>,
        cluster: Uuid,
        node: ClusterApiClient,
        parts: StewardParts,
    ) -> Self {
        let StewardParts { statements, list, announced, hint, replacement, builds } = parts;
        Self {
            service_moves: client.moves(),
            client,
            cluster,
            node,
            statements,
            list,
            announced,
            hint,
            intent_states: BTreeMap::new(),
            observations: BTreeMap::new(),
            leader_watch: LeaderWatch::default(),
            replacement,
            builds,
            retry: Retry::default(),
            warnings: BTreeMap::new(),
        }
    }

    /// Carries out intents until the future is dropped.
    pub(crate) async fn run(self) -> Infallible {
        let watcher = self.replacement.watch_voters(&self.node);
        let builds = self.builds.clone().run(self.node.clone());
        tokio::select! {
            never = watcher => never,
            never = builds => never,
            never = self.carry_out_intents() => never,
        }
    }

    /// Fetches the statement chain from time to time while the node doesn't answer. A newer
    /// statement may name the CAs of the certificates that this agent can get. The node may need
    /// such certificates.
    async fn fetch_statements_if_due(&mut self, fetched: &mut Instant) {
        if fetched.elapsed() < STATEMENTS_FETCH_INTERVAL {
            return;
        }
        *fetched = Instant::now();
        if let Err(error) = self.statements.fetch(&self.client, self.cluster).await {
            tracing::debug!(error, "the statements can't be fetched");
        }
    }

    async fn carry_out_intents(mut self) -> Infallible {
        let mut known = None;
        let mut fetched = Instant::now();
        loop {
            let status = match self.node.status().await {
                Ok(status) => status,
                Err(error) => {
                    tracing::debug!(error = causes(&error), "the node can't be asked");
                    self.fetch_statements_if_due(&mut fetched).await;
                    sleep(NODE_RETRY_PAUSE).await;
                    continue;
                }
            };
            let leads = status.leader == Some(status.member_id);
            if leads && let Err(error) = self.statements.sync_store(&self.node).await {
                self.warn_once(&format!(
                    "the statement chain can't be kept in the cluster: {error}"
                ));
            }
            self.service_moves.mark_unchanged();
            let asked = tokio::select! {
                asked = self.client.intents(self.cluster, known, false) => asked,
                // Another voter has become unreachable, or reachable. Ask discovery again at once,
                // since a newcomer may take the place of an unreachable voter.
                () = self.replacement.voters_changed(), if known.is_some() => {
                    known = None;
                    continue;
                }
            };
            let list = match asked {
                Ok(list) => list,
                Err(error) => {
                    self.wait_after_failure(&error, leads).await;
                    continue;
                }
            };
            self.retry.reset();
            self.pass_on_news(&list);
            // An owner may have removed an admin. So every agent fetches a newer chain at once, and
            // the leader's agent writes it to the store.
            let learnt =
                self.statements.fetch_newer(&self.client, self.cluster, &list.statement).await;
            if let Err(error) = &learnt {
                self.warn_once(&format!("the newest statement can't be taken: {error}"));
            }
            self.store_zones(list.zones.clone());
            self.store_policies(&list, leads).await;
            // With intents pending, ask again soon instead of waiting for a change: this node may
            // become the leader.
            let is_busy = self.is_busy(&list.intents, leads).await;
            known = (!is_busy).then_some(list.rev);
            let under_way = self.operation_under_way();
            self.observations
                .retain(|id, _| self.intent_states.contains_key(id) || Some(*id) == under_way);
            if !is_busy || !leads {
                self.show_no_replacement();
            }
            if !is_busy {
                self.leader_watch.reset();
                continue;
            }
            // Another node may lead by now: the agent may have waited long for discovery's answer,
            // or it has hung.
            if learnt.is_ok()
                && let Ok(status) = self.node.status().await
                && let Some(leader) = status.leader
            {
                self.process_intents(&list.intents, &status, leader).await;
            }
            sleep(match self.can_wait_longer(&list.intents) {
                true => STANDBY_CHECK_INTERVAL,
                false => INTENT_CHECK_INTERVAL,
            })
            .await;
        }
    }

    /// Tells the agent's other tasks what is new in discovery's answer.
    fn pass_on_news(&mut self, list: &IntentList) {
        self.announced.send_if_modified(|shown| {
            let is_news = list.service.is_some() && *shown != list.service;
            if is_news {
                shown.clone_from(&list.service);
            }
            is_news
        });
        let each = list.intents.iter().map(|view| (view.intent.operation, view.state));
        let before = std::mem::replace(&mut self.intent_states, each.collect());
        if before != self.intent_states {
            self.hint.notify_one();
        }
    }

    /// Examines the pending intents once. The leader's agent carries them out; other agents watch
    /// that agent's heartbeat.
    async fn process_intents(
        &mut self,
        intents: &[IntentView],
        status: &NodeStatus,
        leader: MemberId,
    ) {
        if leader != status.member_id {
            self.observe_voters(intents, status.member_id).await;
        }
        // A learner can't take the leadership over, and a learner of stock etcd refuses all reads.
        if leader != status.member_id
            && !status.is_learner
            && let Err(error) = self.watch_leader(intents, status, leader).await
        {
            self.warn_once(&format!("the leadership can't be taken over now: {error}"));
        }
        if let Err(error) = self.carry_out(intents, status, leader).await {
            let why = format!("intents can't be carried out now: {error}");
            self.warn_once(&why);
            for view in intents.iter().filter(|_| leader == status.member_id) {
                self.explain(view.intent.operation, &why).await;
            }
        }
    }

    /// Waits before the next request to discovery, or until the client gets other URLs.
    async fn wait_after_failure(&mut self, error: &ClientError, leads: bool) {
        tracing::debug!(error = causes(error), "discovery doesn't hand out intents now");
        // The cluster's store may have a newer chain, which discovery doesn't show now. An owner in
        // that chain may have signed discovery's new URLs.
        if !leads && let Err(error) = self.statements.sync_store(&self.node).await {
            tracing::debug!("the statement chain can't be read from the cluster: {error}");
        }
        let pause = self.retry.next_pause();
        tokio::select! {
            () = sleep(pause) => {}
            Ok(()) = self.service_moves.changed() => self.retry.reset(),
        }
    }

    /// Logs a warning, unless the same one was logged within [`WARNING_REPEAT_INTERVAL`].
    fn warn_once(&mut self, what: &str) {
        self.warnings.retain(|_, logged| logged.elapsed() < WARNING_REPEAT_INTERVAL);
        if self.warnings.contains_key(what) {
            return;
        }
        tracing::warn!("{what}");
        if self.warnings.len() < MAX_REMEMBERED_WARNINGS {
            self.warnings.insert(what.to_owned(), Instant::now());
        }
    }

    async fn carry_out(
        &mut self,
        intents: &[IntentView],
        status: &NodeStatus,
        leader: MemberId,
    ) -> Result<(), String> {
        let concern = |view: &&IntentView| {
            leader == status.member_id || newcomer_id(view).is_some_and(|id| id.get() == leader.0)
        };
        let intents: Vec<&IntentView> = intents.iter().filter(concern).collect();
        let leads = leader == status.member_id;
        if intents.is_empty() && !(leads && self.operation_under_way().is_some()) {
            return Ok(());
        }
        // The chain in the cluster's store may be newer than discovery's, so read it first.
        self.statements.sync_store(&self.node).await?;
        let (mut verified, mut reads_all) = (Vec::new(), true);
        for view in intents {
            match VerifiedIntent::verify(&view.intent, self.statements.chain()) {
                Ok(intent) => verified.push((intent, view)),
                Err(error) => {
                    reads_all &= newer_version(&error).is_none();
                    self.handle_unverified(view, &error, status, leads).await;
                }
            }
        }
        // An agent that can't read the chain or an intent writes no heartbeat, so that another
        // agent takes over.
        if leads && reads_all {
            self.write_heartbeat_if_due(leader).await;
        }
        let split = self.split_by_policy(verified).await?;
        let (mut verified, waiting) = (split.begun, split.waiting);
        let lost = match &split.lost {
            Some(policy_use) if leads => self.recover_intent(policy_use).await?,
            _ => None,
        };
        verified.extend(lost.as_ref().map(|(intent, view)| (intent.clone(), view)));
        for (intent, view) in &verified {
            if let Some(rival) = rival(intent, &verified) {
                let why = format!(
                    "{} comes in the place of the same member already: this one waits until that is \
                     over",
                    rival.subject
                );
                self.report_wait(intent, &why).await;
                continue;
            }
            // A step may take seconds if a member doesn't answer. Renew this agent's heartbeat
            // before each step, so that the other agents don't take over.
            if leads && reads_all {
                self.write_heartbeat_if_due(leader).await;
            }
            let members = self.node.list_members().await.map_err(|error| causes(&error))?;
            self.step(intent, view, &members, status, leader).await;
        }
        if leads && reads_all {
            self.consider_newcomers(&waiting, &verified, status).await?;
        }
        Ok(())
    }

    /// Ends an intent that can't be verified, if this host's node `leads`. An intent that a newer
    /// program has signed stays open: another member's agent may be able to read it.
    async fn handle_unverified(
        &mut self,
        view: &IntentView,
        error: &IntentError,
        status: &NodeStatus,
        leads: bool,
    ) {
        let (operation, why) = (view.intent.operation, causes(error));
        self.warn_once(&format!(
            "discovery hands out a change ({operation}) that is refused: {why}"
        ));
        match newer_version(error) {
            _ if !leads || view.state != IntentState::Open => {}
            Some(_) => self.explain(operation, &why).await,
            None => self.refuse(view, &why, status).await,
        }
    }

    /// Ends an intent whose signatures this cluster refuses, such as those of an operator who was
    /// removed since. No agent would ever carry it out.
    async fn refuse(&self, view: &IntentView, why: &str, status: &NodeStatus) {
        let reason = truncate_reason(format!(
            "{why}. Whoever signed it may not order this by the cluster's newest statement: order \
             it again"
        ));
        let request = OutcomeRequest {
            outcome: Outcome::Refused { reason },
            raft_term: status.raft_term,
            raft_index: status.raft_index,
        };
        let operation = view.intent.operation;
        if let Err(error) = self.client.report_outcome(self.cluster, operation, &request).await {
            tracing::debug!(error = causes(&error), "discovery doesn't hear of a refusal");
        }
    }

    /// Examines one intent once, and carries out the action that follows.
    async fn step(
        &mut self,
        intent: &VerifiedIntent,
        view: &IntentView,
        members: &MemberList,
        status: &NodeStatus,
        leader: MemberId,
    ) {
        let mut seen = self.observations.remove(&intent.operation).unwrap_or_default();
        if let IntentChange::Add { record, .. } = intent.change() {
            seen.progress.observe(&self.node, record, members, status).await;
        }
        let looked = Instant::now();
        let continuation = self.continuation(intent, members, status.member_id).await;
        let send_before = continuation.as_ref().map(|_| looked + STEP_LIFETIME);
        seen.given_up = match &continuation {
            Some(Continuation::GiveUp(why)) => Some(why.clone()),
            _ => None,
        };
        let act =
            self.collect_facts(intent, view, members, (status.member_id, leader), &seen).decide();
        self.observations.insert(intent.operation, seen);
        let leads = status.member_id == leader;
        let act = match (act, continuation) {
            // A pause of the replacement doesn't hold up the removal of a newcomer that is still a
            // learner, because that removal costs the cluster nothing.
            (StewardAction::Change(_, step), Some(Continuation::Pause(why)))
                if step != IntentStep::RemoveLearner =>
            {
                StewardAction::Wait(why)
            }
            (act, _) => act,
        };
        let act = match self.why_not_add(intent, &act, members).await {
            Some(why) => StewardAction::Wait(why),
            None => act,
        };
        match act {
            StewardAction::AwaitNewcomer(why) => self.report_wait(intent, why).await,
            StewardAction::Wait(why) if leads => self.report_wait(intent, &why).await,
            StewardAction::Wait(why) => self.log_wait(intent, &why),
            StewardAction::HandOver => self.hand_over(intent, members, status).await,
            StewardAction::Report(outcome) => self.report_outcome(intent, outcome).await,
            StewardAction::Change(change, step) => {
                self.change(intent, (&change, step), members, send_before).await
            }
            StewardAction::FindRemover(old) => self.find_remover(intent, old, members).await,
        }
    }

    /// Collects the facts for deciding about an intent. `own` is this agent's member, `leader` the
    /// current leader.
    fn collect_facts<'a>(
        &self,
        intent: &'a VerifiedIntent,
        view: &IntentView,
        members: &'a MemberList,
        (own, leader): (MemberId, MemberId),
        seen: &'a IntentObservations,
    ) -> IntentFacts<'a> {
        let (here, service) = self.clocks();
        IntentFacts {
            intent,
            state: view.state,
            reported_member: newcomer_id(view),
            members,
            own,
            leader,
            untimely: intent.time_error(service, here),
            is_under_way: self.operation_under_way() == Some(intent.operation),
            stalled: seen.progress.is_stalled(),
            added_before: seen.added_before,
            newcomer_state: seen.progress.state(),
            refused_addition: seen.refused_addition.as_deref(),
            removal_origin: seen.removal_origin,
            given_up: seen.given_up.as_deref(),
        }
    }

    /// Reports to discovery why an intent waits, for people who look at it there. Older services
    /// don't accept this report, and nothing depends on it.
    async fn explain(&mut self, operation: OperationId, why: &str) {
        let seen = self.observations.entry(operation).or_default();
        let recent =
            |(last, at): &(String, Instant)| last == why || at.elapsed() < MIN_EXPLAIN_INTERVAL;
        if seen.last_explanation.as_ref().is_some_and(recent) {
            return;
        }
        seen.last_explanation = Some((why.to_owned(), Instant::now()));
        let wait = WaitRequest { reason: truncate_reason(why.to_owned()) };
        let told = self.client.report_wait(self.cluster, operation, &wait).await;
        if let Err(error) = told {
            tracing::debug!(error = causes(&error), "discovery doesn't hear why an intent waits");
        }
    }

    /// Logs why an intent waits, and reports the reason to discovery.
    async fn report_wait(&mut self, intent: &VerifiedIntent, why: &str) {
        self.log_wait(intent, why);
        self.explain(intent.operation, why).await;
    }

    /// Logs why an intent waits, unless the reason is unchanged.
    fn log_wait(&mut self, intent: &VerifiedIntent, why: &str) {
        let seen = self.observations.entry(intent.operation).or_default();
        if seen.last_logged_wait != why {
            tracing::info!(operation = %intent.operation, "{} waits: {why}", intent.verb);
            why.clone_into(&mut seen.last_logged_wait);
        }
    }

    /// Notes in the store that the replacement of an intent has ended in `state`.
    async fn end_replacement(
        &mut self,
        intent: &VerifiedIntent,
        state: IntentState,
    ) -> Result<(), String> {
        let is_promoted = state == IntentState::Promoted;
        let is_vacant = self.leaves_vacancy(intent, is_promoted).await?;
        self.end_use(&intent.operation, state.as_str(), is_vacant).await
    }

    /// Returns the origin of the removal of an intent's dead member, as far as this agent knows it.
    fn removal_origin(&self, operation: &OperationId) -> RemovalOrigin {
        self.observations.get(operation).map(|seen| seen.removal_origin).unwrap_or_default()
    }

    /// Reports an outcome to discovery. If the report fails, the next pass decides the same and
    /// reports it again.
    async fn report_outcome(&mut self, intent: &VerifiedIntent, outcome: Outcome) {
        let Ok(status) = self.node.status().await else { return };
        let state = outcome.state();
        if intent.policy().is_some()
            && !state.is_live()
            && let Err(why) = self.end_replacement(intent, state).await
        {
            return self.log_wait(intent, &why);
        }
        let request =
            OutcomeRequest { outcome, raft_term: status.raft_term, raft_index: status.raft_index };
        match self.client.report_outcome(self.cluster, intent.operation, &request).await {
            Ok(_) => tracing::info!(operation = %intent.operation, "{} is {state}", intent.verb),
            Err(error) => {
                self.log_wait(intent, &format!("discovery doesn't hear of it: {}", causes(&error)))
            }
        }
    }
}

/// Returns another intent that replaces the same member and is carried out before `intent`.
/// Carrying out both intents would make the cluster grow.
fn rival<'a>(
    intent: &VerifiedIntent,
    all: &'a [(VerifiedIntent, &IntentView)],
) -> Option<&'a IntentView> {
    let replaced = |intent: &VerifiedIntent| match intent.change() {
        IntentChange::Add { replaces, .. } => *replaces,
        IntentChange::Remove { .. } | IntentChange::Update { .. } => None,
    };
    let old = replaced(intent)?;
    let mut same = all.iter().filter(|(other, _)| replaced(other) == Some(old));
    let first = same.clone().find(|(_, view)| view.state == IntentState::Added);
    let (first, view) = first.or_else(|| same.next())?;
    (first.operation != intent.operation).then_some(*view)
}

/// Returns the newcomer's member id according to discovery.
fn newcomer_id(view: &IntentView) -> Option<digest::MemberId> {
    view.outcome.as_ref().and_then(Outcome::member)
}
