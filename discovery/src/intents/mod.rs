//! Changes of a running cluster that are requested through discovery.
//!
//! A newcomer redeems a ticket, or an operator sends an order. Either becomes an *intent*. The
//! cluster's own agents fetch it, check its signatures, and carry it out with the cluster's own
//! API. They report the outcome, which is shown to the requester. This module never connects to a
//! cluster, and a cluster trusts nothing that this module says.
//!
//! Each change is one transaction on the cluster: lock its row → read the clock → verify the
//! request → store → COMMIT.

mod join;
mod judge;
mod leaves;
mod readmit;
mod recover;
mod service;
mod standby;
mod view;

use discovery_formation::service::Cluster;
use discovery_types::api::{
    DirectoryResponse, IntentList, IntentState, IntentView, Outcome, OutcomeRequest, ReportRequest,
};
use discovery_types::convert;
use discovery_types::digest::{MemberId, OperationId};
use discovery_types::grant::ISSUER_SKEW_SECONDS;
use discovery_types::intent::{Intent, Verb};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::PublicKey;
use discovery_types::order::{Order, OrderedChange, VerifiedOrder};
use discovery_types::problem::Code;
use discovery_types::role::Action;
use uuid::Uuid;

pub(crate) use view::{explain, ticket_command};

use self::judge::{LIVE_WINDOW_US, MAX_LIVE_INTENTS, OutcomeDecision, ReportPosition, judge};
use crate::app::App;
use crate::auth::{Caller, check_statement_allows};
use crate::error::ApiError;
use crate::gate::with_timeout;
use crate::members::directory;
use crate::members::roster::{Roster, check_running};
use crate::store::UnixMicros;
use crate::store::changes::{MembershipChanges, MembershipReport, StoredIntent, StoredPolicy};
use crate::store::cluster::{ClusterTransaction, RunningCluster};
use crate::store::intents::{self, IntentResult, NewIntent};

/// Time after its creation for which an ended intent stays in the list, in microseconds.
const LIST_RETENTION_US: UnixMicros = 86_400 * 1_000_000;
/// Maximum length in characters of an agent's text that is stored.
const MAX_TEXT_CHARS: usize = 300;

/// Reader of intents. It determines which intents are visible.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IntentReader {
    /// An admin, who may read every intent.
    Admin,
    /// An agent: a member's agent reads every intent, a newcomer's only its own.
    Agent(PublicKey),
}

impl App {
    /// Locks a running cluster and reads its changes. Returns an error if `agent` is the agent of a
    /// removed member. `grant` is the id of the ticket that the agent redeems.
    async fn begin_change(
        &self,
        cluster: Uuid,
        agent: Option<&PublicKey>,
        grant: Option<&str>,
    ) -> Result<(ClusterTransaction, MembershipChanges), ApiError> {
        let begun = self.store.begin_change(cluster, grant).await?;
        let (transaction, changes) = begun.ok_or_else(|| ApiError::not_found("such cluster"))?;
        let transaction = self.check_not_set_back(transaction).await?;
        refuse_removed(&changes, agent)?;
        check_running(&transaction.cluster)?;
        Ok((transaction, changes))
    }

    /// Commits the transaction, and returns the intent as stored.
    async fn end_change(
        &self,
        transaction: ClusterTransaction,
        changes: &MembershipChanges,
        stored: &StoredIntent,
    ) -> Result<IntentView, ApiError> {
        let (cluster, now) = (transaction.id(), transaction.now.0 as UnixMicros);
        let chain = transaction.chain.clone();
        let before = find_intent(changes, stored.intent.operation).ok();
        // Die at a crash point only if the state is new. A test couldn't tell when an unchanged
        // state is stored, because agents report reasons for waiting at any moment.
        let is_new_state = before.is_none_or(|known| known.state != stored.state);
        if is_new_state {
            crate::crash::point("before", stored.state.as_str());
        }
        transaction.commit().await?;
        if is_new_state {
            crate::crash::point("after", stored.state.as_str());
        }
        if is_new_state {
            self.metrics.count_intent(stored.intent.verb, stored.state);
            if stored.state == IntentState::Promoted && stored.seen_us.is_some() {
                self.metrics.policy_replacements.inc();
            }
        }
        if before.map(|known| known.rev) != Some(stored.rev) {
            self.metrics.count_change("intent");
        }
        self.notifier.wake(cluster);
        Ok(judge::view(stored, changes, chain.newest().name.as_str(), now))
    }

    /// Reads a cluster and its changes, without a lock. Returns an error if `reader` is the agent
    /// of a removed member.
    async fn read_running(
        &self,
        cluster: Uuid,
        reader: IntentReader,
    ) -> Result<RunningCluster, ApiError> {
        let found = self.store.read_running(cluster).await?;
        let running = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
        if let IntentReader::Agent(key) = &reader {
            refuse_removed(&running.changes, Some(key))?;
        }
        Ok(running)
    }

    /// Stores an operator's order. Repeating the same order changes nothing.
    pub(crate) async fn put_order(
        &self,
        caller: &Caller,
        jws: &Jws,
    ) -> Result<IntentView, ApiError> {
        with_timeout(self.put_order_untimed(caller, jws)).await
    }

    async fn put_order_untimed(&self, caller: &Caller, jws: &Jws) -> Result<IntentView, ApiError> {
        let claimed: Order = jws
            .claims_unverified(JwsType::Order)
            .map_err(discovery_types::order::OrderError::Jws)?;
        let (mut transaction, changes) = self.begin_change(claimed.cluster, None, None).await?;
        let chain = transaction.chain.clone();
        let signer = chain.newest().admin(jws.kid()).map_or(caller.key, |admin| admin.key);
        check_statement_allows(&chain, &signer, Action::PutOrder)?;
        let order = VerifiedOrder::verify(jws, &chain)?;
        let verb = match order.change {
            OrderedChange::Remove { .. } => Verb::Remove,
            OrderedChange::Update { .. } => Verb::Update,
        };
        let operation = OperationId::of(jws, verb);
        if let Ok(known) = find_intent(&changes, operation) {
            return self.end_change(transaction, &changes, known).await;
        }
        let seconds = transaction.now.0 / 1_000_000;
        if order.issued_at > seconds + ISSUER_SKEW_SECONDS || order.expires_at <= seconds {
            let detail = format!(
                "The order runs from {} to {}, and it is {seconds}.",
                order.issued_at, order.expires_at
            );
            return Err(ApiError::new(Code::OrderRefused, detail, "Sign another one."));
        }
        check_intent_limit(&changes, transaction.now.0 as UnixMicros)?;
        check_order_target(&order, &changes, &Roster::of(&transaction.cluster, &chain, &changes)?)?;
        let intent = Intent {
            cluster: order.cluster,
            verb,
            operation,
            authority: jws.clone(),
            redeem: None,
            planned_at: order.planned_at,
            expires_at: order.expires_at,
        };
        let made_by = admin_name(&transaction, jws);
        let subject = order.change.member().to_string();
        let new = NewIntent { intent, newcomer: None, subject, made_by, seen_us: None };
        let now = transaction.now;
        let stored = intents::insert(transaction.connection(), now, new).await?;
        tracing::info!(cluster.id = %order.cluster, %operation, %verb, by = stored.made_by,
            member.id = stored.subject, "ordered");
        self.end_change(transaction, &changes, &stored).await
    }

    /// Withdraws an intent that no agent has started.
    pub(crate) async fn withdraw(
        &self,
        caller: &Caller,
        cluster: Uuid,
        operation: OperationId,
    ) -> Result<IntentView, ApiError> {
        with_timeout(async {
            let (mut transaction, changes) = self.begin_change(cluster, None, None).await?;
            check_statement_allows(&transaction.chain, &caller.key, Action::WithdrawIntent)?;
            let known = find_intent(&changes, operation)?;
            let now = transaction.now;
            match known.state_at(now.0 as UnixMicros) {
                IntentState::Withdrawn => {
                    return self.end_change(transaction, &changes, known).await;
                }
                IntentState::Open => {}
                state => {
                    let detail = format!("It is {state}: there is nothing to take back.");
                    let next = "A member that was added is removed with `muster-discovery intent \
                                remove`, or by the cluster's own API.";
                    return Err(ApiError::new(Code::WrongState, detail, next));
                }
            }
            let (state, by) = (IntentState::Withdrawn, caller.name.as_str());
            let became = IntentResult { state, outcome: None, by, position: None, recovery: 0 };
            let stored =
                intents::store_result(transaction.connection(), now, known, &became).await?;
            tracing::info!(cluster.id = %cluster, %operation, by, "withdrawn");
            self.end_change(transaction, &changes, &stored).await
        })
        .await
    }

    /// Stores the outcome of an intent, as reported by a member's agent.
    pub(crate) async fn report_outcome(
        &self,
        cluster: Uuid,
        operation: OperationId,
        key: &PublicKey,
        request: &OutcomeRequest,
    ) -> Result<IntentView, ApiError> {
        with_timeout(self.report_outcome_untimed(cluster, operation, key, request)).await
    }

    async fn report_outcome_untimed(
        &self,
        cluster: Uuid,
        operation: OperationId,
        key: &PublicKey,
        request: &OutcomeRequest,
    ) -> Result<IntentView, ApiError> {
        let (mut transaction, changes) = self.begin_change(cluster, Some(key), None).await?;
        let roster = Roster::of(&transaction.cluster, &transaction.chain, &changes)?;
        let known = find_intent(&changes, operation)?;
        if known.agent == Some(*key) {
            let next = "An agent of another member says what became of it.";
            let detail = "No agent says of itself that it has joined.";
            return Err(ApiError::new(Code::Forbidden, detail, next));
        }
        let by = roster.member(key)?;
        let outcome = shorten_outcome(&request.outcome);
        if let (Outcome::Added { member, .. }, None) = (&outcome, known.member)
            && (roster.by_id(*member).is_some() || roster.is_removed(*member))
        {
            let detail = format!("Member {member} is or was another one.");
            return Err(ApiError::new(Code::Conflict, detail, "Read the cluster's own list."));
        }
        let position = (request.raft_term, request.raft_index);
        check_position(&[position.0, position.1])?;
        let electors = directory::electors(changes.confirmed.as_ref(), &roster.founders());
        let reached = directory::quorum_log_position(&electors, &changes.reports);
        let name = by.record.name.to_string();
        if judge(known, &outcome, ReportPosition { by: &name, position, reached })?
            == OutcomeDecision::Same
        {
            return self.end_change(transaction, &changes, known).await;
        }
        let became = IntentResult {
            state: outcome.state(),
            outcome: Some(&outcome),
            by: &name,
            position: Some(position),
            recovery: roster.lineage.count(),
        };
        let now = transaction.now;
        let stored = intents::store_result(transaction.connection(), now, known, &became).await?;
        tracing::info!(cluster.id = %cluster, %operation, state = %became.state, by = name,
            "an intent was carried on");
        self.end_change(transaction, &changes, &stored).await
    }

    /// Stores the reason why an intent waits, as reported by a member's agent.
    pub(crate) async fn report_wait(
        &self,
        cluster: Uuid,
        operation: OperationId,
        key: &PublicKey,
        reason: &str,
    ) -> Result<IntentView, ApiError> {
        with_timeout(async {
            let (mut transaction, changes) = self.begin_change(cluster, Some(key), None).await?;
            let roster = Roster::of(&transaction.cluster, &transaction.chain, &changes)?;
            let known = find_intent(&changes, operation)?;
            let by = roster.member(key)?.record.name.to_string();
            let now = transaction.now;
            if !known.state_at(now.0 as UnixMicros).is_live() {
                return self.end_change(transaction, &changes, known).await;
            }
            let reason = clean_text(reason);
            let stored =
                intents::note_wait(transaction.connection(), now, known, reason, by).await?;
            self.end_change(transaction, &changes, &stored).await
        })
        .await
    }

    /// Returns a cluster's intents that are open or under way. With `all`, also returns ended
    /// intents that were made within the last day.
    pub(crate) async fn intents(
        &self,
        cluster: Uuid,
        reader: IntentReader,
        all: bool,
    ) -> Result<IntentList, ApiError> {
        let RunningCluster { cluster, chain, now, changes } =
            self.read_running(cluster, reader).await?;
        let mut zones = None;
        if let IntentReader::Agent(key) = reader {
            check_running(&cluster)?;
            let roster = Roster::of(&cluster, &chain, &changes)?;
            roster.member(&key)?;
            zones = chain.newest().spreads_zones().then(|| roster.zones());
        }
        let now = now.0 as UnixMicros;
        let listed = |intent: &&StoredIntent| {
            intent.state_at(now).is_live() || (all && intent.made_us > now - LIST_RETENTION_US)
        };
        let shown = |intent: &StoredIntent| {
            judge::view(intent, &changes, chain.newest().name.as_str(), now)
        };
        Ok(IntentList {
            rev: cluster.rev,
            now_ms: now / 1_000,
            statement: chain.newest_hash(),
            service: changes.service.clone(),
            intents: changes.intents.iter().filter(listed).map(shown).collect(),
            policies: changes.policies.iter().map(StoredPolicy::view).collect(),
            zones,
        })
    }

    /// Returns one intent, if the reader may see it.
    pub(crate) async fn intent(
        &self,
        cluster: Uuid,
        reader: IntentReader,
        operation: OperationId,
    ) -> Result<IntentView, ApiError> {
        let RunningCluster { cluster, chain, now, changes } =
            self.read_running(cluster, reader).await?;
        let known = find_intent(&changes, operation);
        if let IntentReader::Agent(key) = reader {
            match known.as_ref().ok().filter(|known| known.agent == Some(key)) {
                Some(own) => self.keep_standby(own, now.0 as UnixMicros).await?,
                None => drop(Roster::of(&cluster, &chain, &changes)?.member(&key)?),
            }
        }
        Ok(judge::view(known?, &changes, chain.newest().name.as_str(), now.0 as UnixMicros))
    }

    /// Returns the list of members, confirmed or as most members report it.
    pub(crate) async fn directory(&self, cluster: Uuid) -> Result<DirectoryResponse, ApiError> {
        let found = self.store.read_running(cluster).await?;
        let running = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
        let changes = running.changes;
        let view = directory::view(changes.confirmed.as_ref(), &changes.reports);
        Ok(DirectoryResponse { state: convert::state(running.cluster.phase), view })
    }

    /// Stores a member's report of its cluster's membership. Returns the Raft cluster that
    /// discovery follows, or `None` if the report contains no member list.
    pub(crate) async fn note_membership(
        &self,
        cluster: Uuid,
        key: &PublicKey,
        raft_cluster: u64,
        report: &ReportRequest,
    ) -> Result<Option<u64>, ApiError> {
        let Some(membership) = &report.membership else { return Ok(None) };
        if let Some(objection) = directory::objection(membership) {
            let next = "Send what the node's own list says.";
            return Err(ApiError::new(Code::InvalidRequest, objection, next));
        }
        let configuration = membership.configuration.unwrap_or(0);
        check_position(&[configuration, report.raft_term, report.raft_index])?;
        let leader = report.leader_id.as_ref().and_then(|id| id.parse().ok());
        with_timeout(async {
            let (mut transaction, mut changes) =
                self.begin_change(cluster, Some(key), None).await?;
            check_same_document(&transaction.cluster, report)?;
            let roster = Roster::of(&transaction.cluster, &transaction.chain, &changes)?;
            let id = roster.member(key)?.id;
            let followed = roster.lineage.raft_cluster();
            // A recovery makes another Raft cluster, in which every member has a new id. A list of
            // the old cluster would therefore remove every member of the new one. The answer tells
            // the agent which cluster is followed, and the agent then sends the recovery
            // statements.
            if raft_cluster != followed {
                return Ok(Some(followed));
            }
            let said = MembershipReport {
                membership: membership.clone(),
                term: report.raft_term,
                index: report.raft_index,
                leader,
                at_us: transaction.now.0 as UnixMicros,
            };
            let electors = directory::electors(changes.confirmed.as_ref(), &roster.founders());
            let reached = directory::quorum_list_position(&electors, &changes.reports);
            let last = changes.reports.iter().position(|(member, _)| *member == id);
            match last {
                Some(last) if !said.replaces(&changes.reports[last].1, reached) => {
                    return Ok(Some(followed));
                }
                Some(last) => changes.reports[last].1 = said.clone(),
                None => changes.reports.push((id, said.clone())),
            }
            let now = transaction.now;
            intents::note_report(transaction.connection(), cluster, id, &said).await?;
            self.confirm(&mut transaction, &roster, &mut changes).await?;
            transaction.commit().await?;
            self.notifier.wake(cluster);
            self.clock.set(now.0 as i64);
            Ok(Some(followed))
        })
        .await
    }

    /// Confirms newer member lists, one after the other, as long as a quorum of the electors has
    /// reported a newer list. Each confirmed list can change the electors.
    async fn confirm(
        &self,
        transaction: &mut ClusterTransaction,
        roster: &Roster,
        changes: &mut MembershipChanges,
    ) -> Result<(), ApiError> {
        let (cluster, now) = (transaction.id(), transaction.now);
        let founders = roster.founders();
        while let Some(view) =
            directory::newly_confirmed(changes.confirmed.as_ref(), &founders, &changes.reports)
        {
            let ids = |said: &MembershipReport| -> Vec<MemberId> {
                said.membership.members.iter().map(|member| member.id).collect()
            };
            let before: Vec<MemberId> = match &changes.confirmed {
                Some(confirmed) => ids(confirmed),
                None => founders.iter().copied().collect(),
            };
            let after = ids(&view);
            let gone: Vec<_> = before
                .into_iter()
                .filter(|id| !after.contains(id))
                .map(|id| (roster.by_id(id).map(|member| member.key), id, remover(changes, id)))
                .collect();
            intents::confirm(transaction.connection(), cluster, now, &view, &gone).await?;
            for (_, member, by) in &gone {
                tracing::info!(cluster.id = %cluster, member.id = %member, by, "a member is gone");
            }
            changes.confirmed = Some(view);
        }
        Ok(())
    }

    /// Whether this agent has joined with a ticket and was added.
    pub(crate) async fn is_newcomer(
        &self,
        cluster: Uuid,
        key: &PublicKey,
    ) -> Result<bool, ApiError> {
        let changes = self.store.membership_changes(cluster).await?;
        let own = |intent: &&StoredIntent| intent.agent == Some(*key) && intent.member.is_some();
        Ok(changes.intents.iter().any(|intent| own(&intent)))
    }
}

/// Returns an error if the agent's member was removed from the cluster.
fn refuse_removed(changes: &MembershipChanges, agent: Option<&PublicKey>) -> Result<(), ApiError> {
    let removed = changes.removed.iter().find(|(key, _)| key.is_some() && key.as_ref() == agent);
    match removed {
        Some((_, removal)) => Err(ApiError::removed(removal.clone())),
        None => Ok(()),
    }
}

/// Returns an error if a number is too large for a cluster's log.
fn check_position(numbers: &[u64]) -> Result<(), ApiError> {
    match directory::objection_to_position(numbers) {
        None => Ok(()),
        Some(objection) => {
            let next = "Look at the node's own status: its numbers are damaged, or not its own.";
            Err(ApiError::new(Code::InvalidRequest, objection, next))
        }
    }
}

fn find_intent(
    changes: &MembershipChanges,
    operation: OperationId,
) -> Result<&StoredIntent, ApiError> {
    let found = changes.intents.iter().find(|known| known.intent.operation == operation);
    found.ok_or_else(|| ApiError::not_found("such intent"))
}

fn check_intent_limit(changes: &MembershipChanges, now: UnixMicros) -> Result<(), ApiError> {
    let counts = |known: &&StoredIntent| {
        known.state_at(now).is_live()
            && !known.is_standby()
            && now.saturating_sub(known.made_us) < LIVE_WINDOW_US
    };
    let live = changes.intents.iter().filter(counts).count();
    if live < MAX_LIVE_INTENTS {
        return Ok(());
    }
    let next =
        "Wait until some are done, or take some back with `muster-discovery intent withdraw`.";
    Err(ApiError::new(
        Code::Conflict,
        format!("{live} changes of this cluster wait already."),
        next,
    ))
}

/// Returns an error if the order's member doesn't exist, or if the order was planned with an older
/// list.
fn check_order_target(
    order: &Order,
    changes: &MembershipChanges,
    roster: &Roster,
) -> Result<(), ApiError> {
    let member = order.change.member();
    let next = "Look with `muster-discovery cluster show`, and order again.";
    if roster.is_removed(member) {
        let detail = format!("Member {member} was removed already.");
        return Err(ApiError::new(Code::OrderRefused, detail, next));
    }
    if roster.is_lost(member) {
        let detail = format!("Member {member} was lost with its cluster, which was recovered.");
        return Err(ApiError::new(Code::OrderRefused, detail, next));
    }
    let Some(confirmed) = &changes.confirmed else { return Ok(()) };
    if !confirmed.membership.members.iter().any(|listed| listed.id == member) {
        let detail = format!("The cluster has no member {member}.");
        return Err(ApiError::new(Code::OrderRefused, detail, next));
    }
    match (order.planned_at, confirmed.membership.configuration) {
        (Some(planned), Some(known)) if planned < known => {
            let detail = format!(
                "It was planned at configuration {planned}, and the cluster is at {known}."
            );
            Err(ApiError::new(Code::StalePlan, detail, next))
        }
        _ => Ok(()),
    }
}

fn check_same_document(cluster: &Cluster, report: &ReportRequest) -> Result<(), ApiError> {
    let h = cluster.frozen.as_ref().map(|frozen| convert::digest(frozen.proposal_hash));
    if h == Some(report.h) {
        return Ok(());
    }
    let detail = "The report is of another commit document.";
    Err(ApiError::new(Code::Conflict, detail, "Look which cluster the node runs in."))
}

fn admin_name(transaction: &ClusterTransaction, jws: &Jws) -> String {
    let admin = transaction.chain.newest().admin(jws.kid());
    admin.map_or_else(|| jws.kid().to_string(), |admin| admin.name.to_string())
}

/// Returns the name of the admin whose order or ticket removed a member. If there is no such admin,
/// the cluster's own API was used, and the result says so.
fn remover(changes: &MembershipChanges, member: MemberId) -> String {
    let removes = |known: &&StoredIntent| match &known.outcome {
        Some(Outcome::Removed { member: gone }) => *gone == member,
        Some(Outcome::Promoted { .. }) => {
            known.intent.verb == Verb::Replace && known.replaced_member() == Some(member)
        }
        _ => false,
    };
    let ordered = changes.intents.iter().rev().find(removes);
    ordered.map_or_else(|| "the cluster's own API".into(), |known| known.made_by.clone())
}

/// Returns the outcome with the agent's text limited to the stored length.
fn shorten_outcome(outcome: &Outcome) -> Outcome {
    match outcome.clone() {
        Outcome::Refused { reason } => Outcome::Refused { reason: clean_text(&reason) },
        Outcome::Stalled { member, reason } => {
            Outcome::Stalled { member, reason: clean_text(&reason) }
        }
        other => other,
    }
}

fn clean_text(reason: &str) -> String {
    reason.chars().filter(|c| !c.is_control()).take(MAX_TEXT_CHARS).collect()
}
