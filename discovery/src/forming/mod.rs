//! Applies one event to one cluster: the thin shell around the pure state machine.
//!
//! The steps: lock the row → read the clock → verify the request → step → save, sign and issue →
//! COMMIT → fsync the ledger if the response contains a document → respond. `discovery_formation`
//! makes every decision.

mod batch;
mod commit;
mod event;
mod hints;
mod renewals;
pub(crate) mod show;
mod sweep;

use std::sync::Arc;
use std::time::Duration;

use data_encoding::HEXLOWER;
use discovery_formation as formation;
use discovery_formation::Rules;
use discovery_formation::memory::{ClusterDecision, LedgerVerdict, contradicts};
use discovery_formation::service::{
    Alarm, Answer, Cluster, ClusterChange, ClusterEvent, FormationSettings, Phase, Refusal,
    StepContext, StepOutcome, next_deadline, step,
};
use discovery_types::convert;
use discovery_types::jws::Jws;
use discovery_types::problem::{Code, Problem};
use discovery_types::statement::StatementChain;
use serde_json::Value;
use uuid::Uuid;

use crate::app::App;
use crate::domain::describe;
use crate::error::ApiError;
use crate::gate::with_timeout;
use crate::ledger::{self, LedgerError};
use crate::store::changes::removal_of;
use crate::store::cluster::{
    Authorities, ClusterTransaction, LeafPair, LoadedCluster, NewCommit, RequestDetails, Trust,
};

use batch::BatchAnswer;
pub(crate) use batch::ClusterBatches;
use commit::parts_to_deliver;
pub(crate) use event::ClusterRequest;
pub(crate) use hints::PendingHints;
pub(crate) use renewals::LeaseRenewals;
pub(crate) use show::{explanations, poll_response, summary_of};

/// Result of an applied event. Even if the state machine refuses the event, the transaction
/// commits: it saves the changes that are due because time has passed.
#[derive(Debug)]
pub(crate) struct ClusterReply {
    /// The cluster after the event.
    pub cluster: Cluster,
    /// The cluster's statement chain.
    pub chain: Arc<StatementChain>,
    /// Database time of the transaction.
    pub now: formation::UnixMicros,
    /// The state machine's answer to the caller.
    pub answer: Answer,
    /// The commit document, if the caller is a member of the list that the cluster has decided.
    pub document: Option<Delivery>,
    /// Grants of the frozen list, if the caller is asked to sign the list. Otherwise empty.
    pub grants: Vec<Jws>,
    /// JWS of the grant that was redeemed.
    pub redeemed_grant: Option<String>,
}

/// A commit document on its way to a member. The ledger must hold the commit before the document
/// leaves this process.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    /// The signed commit document.
    pub document: Jws,
    /// DER of the member's two certificates. `None` if the document is not for a member.
    pub leaves: Option<LeafPair>,
}

impl App {
    /// Applies one event, together with other requests' events if possible. If the state machine
    /// refuses the event, the error is its refusal as a problem document.
    pub(crate) async fn apply(
        &self,
        cluster: Uuid,
        incoming: ClusterRequest,
    ) -> Result<ClusterReply, ApiError> {
        let applied = with_timeout(async {
            match self.apply_in_batch(cluster, incoming).await? {
                BatchAnswer::Applied(reply) => Ok(*reply),
                BatchAnswer::Alone(incoming) => self.apply_event(cluster, incoming).await,
            }
        })
        .await;
        if applied.as_ref().is_err_and(ApiError::is_without_writes) {
            self.store.watch().note_write(true);
        }
        applied
    }

    async fn apply_event(
        &self,
        cluster: Uuid,
        incoming: ClusterRequest,
    ) -> Result<ClusterReply, ApiError> {
        let trust = trust_for(&incoming);
        let accepts = matches!(incoming, ClusterRequest::DatabaseAccepted { .. });
        let requested_grant = incoming.grant_id();
        let mut transaction = self.begin(cluster, trust, requested_grant.as_deref()).await?;
        let asker = incoming.agent_key();
        self.refuse_removed(&mut transaction, asker).await?;
        let prepared = self.prepare(&mut transaction, &incoming).await?;

        let mut changes = self.sync_settled_state(&mut transaction);
        let outcome =
            self.step_with_session(&mut transaction, prepared.session_event, prepared.event);
        let StepOutcome { answer, changed, changes: own, committed, alarms } = outcome;
        let refused = answer.is_err();
        changes.extend(own);
        let shown = prepared.document.filter(|_| committed.is_some());
        let decisions = decisions(&changes, committed, shown.is_some());
        let blocker = self.find_decision_blocker(&mut transaction, &decisions, accepts).await?;
        if let Some(blocker) = blocker {
            drop(transaction);
            return Err(self.report_blocker(cluster, blocker).await);
        }
        let (mut transaction, new_commit) =
            self.build_new_commit(transaction, committed, shown).await?;
        let statement = prepared.statement.as_ref().filter(|_| !refused);
        let revocation = prepared.revocation.as_ref().filter(|_| !refused);
        transaction.add_statement_and_revocation(statement, revocation).await?;
        // A tick (the event that time has passed) is saved even without changes: that corrects the
        // cluster's next deadline.
        if changed || !changes.is_empty() || matches!(incoming, ClusterRequest::Tick) {
            let next = next_deadline(&transaction.cluster, &self.settings, transaction.now);
            let address = incoming.address();
            let request = RequestDetails {
                address: address.as_deref(),
                agent: asker,
                instance: prepared.instance.as_deref(),
                revocation,
            };
            let commit = new_commit.as_ref().map(|(commit, _)| commit);
            transaction.save(&changes, commit, next, &request).await?;
        }
        let has_document = answer.as_ref().is_ok_and(|answer| answer.document.is_some());
        let (delivery, entry) = match has_document {
            true => self.delivery(&mut transaction, asker, new_commit).await?,
            false => (None, None),
        };
        let grants = match &answer {
            Ok(Answer { proposal: Some(_), .. }) => frozen_list_grants(&transaction)?,
            _ => Vec::new(),
        };
        let (now, chain) = (transaction.now, transaction.chain.clone());
        let redeemed_grant = requested_grant
            .and_then(|id| transaction.requested_grant(&id).map(|grant| grant.jws.clone()));
        crash_points("before", &changes, committed.is_some());
        let has_notified = transaction.has_notified();
        let cluster = transaction.commit().await?;
        crash_points("after", &changes, committed.is_some());
        self.announce(&cluster, &changes, &alarms, has_notified);
        // The commit must be durable in the ledger before its document leaves with the response.
        if let Some(entry) = entry {
            self.record_in_ledger(vec![entry]).await?.into_iter().collect::<Result<(), _>>()?;
        }
        let answer = answer.map_err(|refusal| self.refusal_error(&refusal, &cluster))?;
        Ok(ClusterReply { cluster, chain, now, answer, document: delivery, grants, redeemed_grant })
    }

    /// Makes the commit of the list with the hash `committed`, if there is one. Takes the transaction,
    /// because after an error nobody may commit it: it ends, and the error is stored.
    async fn build_new_commit(
        &self,
        mut transaction: ClusterTransaction,
        committed: Option<formation::Hash>,
        shown: Option<Jws>,
    ) -> Result<(ClusterTransaction, Option<(NewCommit, Authorities)>), ApiError> {
        let Some(h) = committed else { return Ok((transaction, None)) };
        let cluster = transaction.id();
        let authorities = transaction.authorities().await.map_err(ApiError::from);
        let built = authorities.and_then(|authorities| {
            let commit = self.build_commit(&transaction, h, shown, &authorities)?;
            Ok((commit, authorities))
        });
        match built {
            Ok(built) => Ok((transaction, Some(built))),
            Err(error) => {
                drop(transaction);
                self.note_failed_commit(cluster, &error).await;
                Err(error)
            }
        }
    }

    /// Stores why a list that all its agents have signed can't be committed, for `cluster explain`.
    async fn note_failed_commit(&self, cluster: Uuid, error: &ApiError) {
        let Problem { code, detail, next, .. } = error.problem();
        if *code != Code::Internal {
            return;
        }
        let text =
            format!("all have signed, but the service can't commit the list: {detail} {next}");
        if let Err(error) = self.store.note_error(cluster, &text).await {
            tracing::debug!(cluster.id = %cluster, %error, "can't store why a list isn't committed");
        }
    }

    /// Locks a cluster and loads it. Returns an error if the database was set back to an older
    /// state. `requested_grant` is the id of the grant that the request redeems.
    async fn begin(
        &self,
        cluster: Uuid,
        trust: Trust,
        requested_grant: Option<&str>,
    ) -> Result<ClusterTransaction, ApiError> {
        let transaction = self.store.begin_cluster(cluster, trust, requested_grant).await?;
        self.check_not_set_back(transaction.ok_or_else(|| ApiError::not_found("such cluster"))?)
            .await
    }

    /// Returns an error if the caller's member was removed from the cluster.
    async fn refuse_removed(
        &self,
        transaction: &mut ClusterTransaction,
        asker: Option<formation::AgentKey>,
    ) -> Result<(), ApiError> {
        let runs = matches!(transaction.cluster.phase, Phase::Committed | Phase::Formed);
        let Some(key) = asker.filter(|_| runs) else { return Ok(()) };
        let id = transaction.id();
        match removal_of(transaction.connection(), id, &key.0).await? {
            Some(removal) => Err(ApiError::removed(removal)),
            None => Ok(()),
        }
    }

    /// Reads a cluster as `key` sees it, without a lock. If the reply contains a commit document,
    /// the commit is written to the ledger first.
    pub(crate) async fn view_cluster(
        &self,
        cluster: Uuid,
        key: Option<formation::AgentKey>,
    ) -> Result<ClusterReply, ApiError> {
        with_timeout(self.view_cluster_without_timeout(cluster, key)).await
    }

    async fn view_cluster_without_timeout(
        &self,
        cluster: Uuid,
        key: Option<formation::AgentKey>,
    ) -> Result<ClusterReply, ApiError> {
        let found = self.store.read_cluster(cluster).await?;
        let (cluster, chain, now) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
        let answer = formation::service::view(&cluster, key);
        let id = Uuid::from_u128(cluster.id.0);
        let mut connection = self.store.acquire().await?;
        let (delivery, entry) = match answer.document {
            Some(_) => self.delivery_of(&mut connection, &cluster, &chain, key).await?,
            None => (None, None),
        };
        let grants = match (&answer.proposal, &cluster.frozen) {
            (Some(_), Some(frozen)) => {
                crate::store::cluster::grants_of(&mut connection, id, &frozen.proposal).await?
            }
            _ => Vec::new(),
        };
        drop(connection);
        if let Some(entry) = entry {
            self.store.record_commit(entry).await?;
        }
        Ok(ClusterReply {
            cluster,
            chain,
            now,
            answer,
            document: delivery,
            grants,
            redeemed_grant: None,
        })
    }

    /// Returns a decided cluster's commit document, the certificates of `key`, and the statements.
    /// Unlike a poll, this also serves admins and retired clusters.
    pub(crate) async fn document(
        &self,
        cluster: Uuid,
        key: Option<formation::AgentKey>,
    ) -> Result<(Option<Delivery>, Vec<Jws>), ApiError> {
        let found = self.store.read_cluster(cluster).await?;
        let (cluster, chain, _) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
        let mut connection = self.store.acquire().await?;
        let (delivery, entry) = self.delivery_of(&mut connection, &cluster, &chain, key).await?;
        drop(connection);
        if let Some(entry) = entry {
            self.store.record_commit(entry).await?;
        }
        Ok((delivery, chain.jws()))
    }

    /// Converts the state machine's refusal to a problem. Adds the name of the agent whose record
    /// conflicts with the request, because the refusal's text contains only that agent's key.
    fn refusal_error(&self, refusal: &Refusal, cluster: &Cluster) -> ApiError {
        let error = ApiError::from_refusal(refusal, self.settings.lease);
        match refusal {
            Refusal::Duplicate { other, .. } => match cluster.agents.get(other) {
                Some(agent) => error.with_key_name(&other.to_string(), &agent.record.name),
                None => error,
            },
            _ => error,
        }
    }

    /// Tells the state machine whether the database has become settled or unsettled since this
    /// cluster's last event.
    fn sync_settled_state(&self, loaded: &mut LoadedCluster) -> Vec<ClusterChange> {
        let event = match (loaded.settled, loaded.cluster.is_unsettled) {
            (false, false) => ClusterEvent::DatabaseChanged,
            (true, true) => ClusterEvent::DatabaseSettled,
            _ => return Vec::new(),
        };
        self.step(loaded, event).changes
    }

    /// Applies the session event first, if there is one, then the event itself. Returns the answer
    /// to the event itself, with the changes and alarms of both. If the session event is refused,
    /// returns its outcome and leaves the event out.
    fn step_with_session(
        &self,
        loaded: &mut LoadedCluster,
        speaks: Option<ClusterEvent>,
        event: ClusterEvent,
    ) -> StepOutcome {
        let Some(speaks) = speaks else { return self.step(loaded, event) };
        let mut first = self.step(loaded, speaks);
        if first.answer.is_err() {
            return first;
        }
        let second = self.step(loaded, event);
        first.changes.extend(second.changes);
        first.alarms.extend(second.alarms);
        StepOutcome {
            answer: second.answer,
            changed: first.changed || second.changed,
            changes: first.changes,
            committed: second.committed,
            alarms: first.alarms,
        }
    }

    /// Returns the reason why this process may not make `decisions`, if there is one. A process
    /// must have copied all decisions of other processes first. The database can also have been set
    /// back to an older state while this connection was open.
    async fn find_decision_blocker(
        &self,
        transaction: &mut ClusterTransaction,
        decisions: &[ClusterDecision],
        accepts: bool,
    ) -> Result<Option<DecisionBlocker>, ApiError> {
        if decisions.is_empty() {
            return Ok(None);
        }
        let is_complete = self.store.watch().is_complete(transaction.generation());
        let copied = match transaction.ledger_verdict() {
            LedgerVerdict::Allowed | LedgerVerdict::CopyFirst if !is_complete => {
                return Ok(Some(DecisionBlocker::LedgerBehind));
            }
            LedgerVerdict::Allowed => true,
            LedgerVerdict::CopyFirst => transaction.copy_new_decisions(&self.store).await?,
            LedgerVerdict::CompareFirst | LedgerVerdict::OlderDatabase(_) => false,
        };
        if !copied {
            let why = "another process has found that it was set back";
            return Ok(Some(match transaction.ledger_verdict() {
                LedgerVerdict::CopyFirst => DecisionBlocker::LedgerBehind,
                _ => DecisionBlocker::DatabaseSetBack(why),
            }));
        }
        let entry = self.store.ledger().entry(transaction.id())?;
        let contradicted = |decision: &ClusterDecision| contradicts(entry, *decision);
        let found = !accepts && decisions.iter().any(contradicted);
        Ok(found.then_some(DecisionBlocker::DatabaseSetBack(
            "it lacks what was decided of this cluster",
        )))
    }

    /// Returns the error for a decision that this process may not make, after reporting the reason.
    async fn report_blocker(&self, cluster: Uuid, blocker: DecisionBlocker) -> ApiError {
        match blocker {
            DecisionBlocker::LedgerBehind => self.ledger_behind_error(),
            DecisionBlocker::DatabaseSetBack(why) => {
                self.report_database_change(cluster, why).await
            }
        }
    }

    /// Returns the error for a ledger that lacks too many decisions of other processes. Starts
    /// filling the ledger.
    fn ledger_behind_error(&self) -> ApiError {
        self.store.watch().fill_needed.notify_one();
        let (copied, newest) = self.store.watch().progress.copied_and_newest();
        let detail = format!(
            "This process's ledger is being filled: {copied} of {newest} decisions are copied, and \
             it decides nothing before it has all."
        );
        let next = "Wait, and try again; or ask another discovery process.";
        ApiError::new(Code::Overloaded, detail, next)
    }

    fn step(&self, loaded: &mut LoadedCluster, event: ClusterEvent) -> StepOutcome {
        let steady_after = Duration::from_millis(self.settings.steady_after().0);
        let context = StepContext {
            rules: &Rules::ALL,
            settings: &self.settings,
            is_clock_steady: self.clock.steady_for() >= steady_after,
            hash: &convert::proposal_hash,
        };
        step(&mut loaded.cluster, &context, loaded.now, event)
    }

    /// Makes commits of different clusters durable in the ledger. Only afterwards may their
    /// documents leave this process. The results have the order of `commits`.
    async fn record_in_ledger(
        &self,
        commits: Vec<ledger::Commit>,
    ) -> Result<Vec<Result<(), LedgerError>>, LedgerError> {
        crate::crash::point("before", "ledger");
        let results = self.store.record_commits(commits).await?;
        self.metrics.ledger_entries.set(self.store.ledger().commits() as i64);
        crate::crash::point("after", "ledger");
        Ok(results)
    }

    /// Returns what `asker` gets of the cluster's commit, and the ledger entry of the commit if the
    /// ledger lacks it. `new_commit` is given if this transaction commits the list.
    async fn delivery(
        &self,
        transaction: &mut ClusterTransaction,
        asker: Option<formation::AgentKey>,
        new_commit: Option<(NewCommit, Authorities)>,
    ) -> Result<(Option<Delivery>, Option<ledger::Commit>), ApiError> {
        if let Some((commit, authorities)) = new_commit {
            let (delivery, entry) = parts_to_deliver(&commit, transaction, &authorities, asker);
            return Ok((Some(delivery), Some(entry)));
        }
        let (cluster, chain) = (transaction.cluster.clone(), transaction.chain.clone());
        self.delivery_of(transaction.connection(), &cluster, &chain, asker).await
    }

    /// After COMMIT: wakes waiting requests, counts the changes, and logs changes and alarms. Tells
    /// the other processes, unless the COMMIT has notified them (`has_notified`).
    fn announce(
        &self,
        cluster: &Cluster,
        changes: &[ClusterChange],
        alarms: &[Alarm],
        has_notified: bool,
    ) {
        let id = Uuid::from_u128(cluster.id.0);
        for change in changes {
            let (kind, body) = describe(change);
            self.metrics.count_change(kind);
            let (host, facts) = log_facts(cluster, &body);
            tracing::info!(cluster.id = %id, change = kind, host, facts, "cluster changed");
        }
        if !changes.is_empty() {
            self.notifier.wake(id);
            if !has_notified {
                self.send_hint(id);
            }
        }
        for alarm in alarms {
            match alarm {
                Alarm::KeyElsewhere { key } => {
                    self.metrics.count_alarm("key_elsewhere");
                    tracing::error!(cluster.id = %id, agent = %key,
                        "two holders of one agent's key: a cloned host, or a stolen key");
                }
                Alarm::Split { decided, other } => {
                    self.metrics.count_alarm("split");
                    tracing::error!(cluster.id = %id, %decided, %other,
                        "two valid commit documents of one cluster; nothing is done for it any more");
                }
            }
        }
    }
}

/// Why this process may not freeze, decide or end anything.
enum DecisionBlocker {
    /// This process's ledger isn't complete yet.
    LedgerBehind,
    /// The database isn't the one that this process knows, with the reason.
    DatabaseSetBack(&'static str),
}

/// Returns the decisions among the step's changes. A database that was set back to an earlier
/// state must not receive decisions.
fn decisions(
    changes: &[ClusterChange],
    committed: Option<formation::Hash>,
    adopted: bool,
) -> Vec<ClusterDecision> {
    let decided = committed.map(|h| ClusterDecision::Commit { h, adopted });
    let other = changes.iter().filter_map(|change| match change {
        ClusterChange::Frozen { .. } => Some(ClusterDecision::Freeze),
        ClusterChange::Ended { phase } if *phase != Phase::Retired => Some(ClusterDecision::End),
        _ => None,
    });
    other.chain(decided).collect()
}

fn crash_points(when: &str, changes: &[ClusterChange], committed: bool) {
    if !cfg!(debug_assertions) {
        return;
    }
    for change in changes {
        crate::crash::point(when, describe(change).0);
    }
    if committed {
        crate::crash::point(when, "commit");
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        ApiError::from_refusal(&refusal, FormationSettings::DEFAULT.lease)
    }
}

/// Returns how to load a cluster for a request. Requests that can end a damaged cluster must not
/// verify its rows, since that would fail.
fn trust_for(incoming: &ClusterRequest) -> Trust {
    match incoming {
        ClusterRequest::Abandon { .. } | ClusterRequest::DatabaseAccepted { .. } => {
            Trust::Unverified
        }
        _ => Trust::Verify,
    }
}

/// Returns the grants of all members of the frozen list.
fn frozen_list_grants(loaded: &LoadedCluster) -> Result<Vec<Jws>, ApiError> {
    match &loaded.cluster.frozen {
        Some(frozen) => Ok(loaded.grants_of(&frozen.proposal)?),
        None => Ok(Vec::new()),
    }
}

/// Returns the facts of a change for a line of the log: the host's name, and all facts as
/// `name=value`. In JSON, an object inside a string couldn't be searched.
fn log_facts<'c>(cluster: &'c Cluster, body: &Value) -> (Option<&'c str>, String) {
    let mut host = None;
    let mut facts = Vec::new();
    for (name, value) in body.as_object().into_iter().flatten() {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let agents = || cluster.agents.iter().filter(|_| name == "key");
        match agents().find(|(key, _)| HEXLOWER.encode(&key.0) == text) {
            Some((key, agent)) => {
                host = Some(agent.record.name.as_str());
                facts.push(format!("{name}={key}"));
            }
            None => facts.push(format!("{name}={text}")),
        }
    }
    (host, facts.join(" "))
}
