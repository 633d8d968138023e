//! Applies one event to one cluster: the thin shell around the pure state machine.
//!
//! The steps: lock the row → read the clock → verify the request → step → save, sign and issue →
//! COMMIT → fsync the ledger if the response contains a document → respond. `discovery_formation`
//! makes every decision.

mod commit;
mod event;
pub(crate) mod show;
mod sweep;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use discovery_formation as formation;
use discovery_formation::Rules;
use discovery_formation::memory::{Decision, Gate, contradicts};
use discovery_formation::service::{
    Alarm, Answer, Change, Cluster, Context, Event, Outcome, Phase, Refusal, Settings,
    next_deadline, step,
};
use discovery_types::convert;
use discovery_types::jws::Jws;
use discovery_types::problem::Code;
use discovery_types::statement::StatementChain;
use uuid::Uuid;

use crate::app::App;
use crate::domain::describe;
use crate::error::ApiError;
use crate::ledger::{self, Occasion};
use crate::store::StoreError;
use crate::store::cluster::{ClusterTransaction, LeafPair, Trust};
use crate::store::intents;

pub(crate) use event::{Incoming, is_void, statement_allows};
pub(crate) use show::{explanations, poll_response, summary_of};

/// Time limit for applying an event or reading a cluster. It is longer than all its SQL statements
/// together: Postgres ends each of them after two seconds.
const LONGEST: Duration = Duration::from_secs(20);

/// Result of an applied event. A refusal by the machine is not an error of the transaction: what
/// time has changed in the cluster is saved anyway.
#[derive(Debug)]
pub(crate) struct Applied {
    /// The cluster after the event.
    pub cluster: Cluster,
    /// The cluster's statement chain.
    pub chain: Arc<StatementChain>,
    /// Database time of the transaction.
    pub now: formation::Micros,
    /// The machine's answer to the caller.
    pub answer: Answer,
    /// The decided document, if the caller is a member of the list.
    pub document: Option<Delivery>,
    /// Grants of the frozen list, if the caller is to sign it.
    pub grants: Vec<Jws>,
    /// JWS of the grant that was redeemed.
    pub asked: Option<String>,
}

/// A document on its way to a member. The ledger already holds its commit.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    /// The signed commit document.
    pub document: Jws,
    /// DER of the member's two certificates.
    pub leaves: Option<LeafPair>,
}

impl App {
    /// Applies one event. If the machine refuses, the error is its refusal as a problem document.
    pub(crate) async fn apply(
        &self,
        cluster: Uuid,
        incoming: Incoming,
        address: Option<IpAddr>,
    ) -> Result<Applied, ApiError> {
        in_time(self.apply_event(cluster, incoming, address)).await
    }

    async fn apply_event(
        &self,
        cluster: Uuid,
        incoming: Incoming,
        address: Option<IpAddr>,
    ) -> Result<Applied, ApiError> {
        let trust = match incoming {
            Incoming::Abandon { .. } | Incoming::DatabaseAccepted { .. } => Trust::Claims,
            _ => Trust::Verify,
        };
        let accepts = matches!(incoming, Incoming::DatabaseAccepted { .. });
        let asked = incoming.grant();
        let mut transaction = self.begin(cluster, trust, asked.as_deref()).await?;
        let asker = incoming.asker();
        self.turn_removed_away(&mut transaction, asker).await?;
        let prepared = self.prepare(&mut transaction, &incoming).await?;

        let mut changes = self.catch_up(&mut transaction);
        let outcome = self.step_spoken(&mut transaction, prepared.speaks, prepared.event);
        let Outcome { answer, changed, changes: own, committed, alarms } = outcome;
        let refused = answer.is_err();
        changes.extend(own);
        let shown = prepared.document.filter(|_| committed.is_some());
        let decisions = decisions(&changes, committed, shown.is_some());
        if let Some(doubt) = self.doubt(&mut transaction, &decisions, accepts).await? {
            drop(transaction);
            return Err(match doubt {
                Doubt::Behind => self.ledger_is_behind(),
                Doubt::SetBack(why) => self.found_another_database(cluster, why).await,
            });
        }
        let new_commit = match committed {
            Some(h) => Some(self.decide(&mut transaction, h, shown).await?),
            None => None,
        };
        if !refused {
            transaction.add(prepared.statement.as_ref(), prepared.revoke.as_ref()).await?;
        }
        // A tick is saved even without changes: that corrects the cluster's next deadline.
        if changed || !changes.is_empty() || matches!(incoming, Incoming::Tick) {
            let next = next_deadline(&transaction.cluster, &self.settings, transaction.now);
            let address = address.map(|address| address.to_string());
            transaction.save(&changes, new_commit.as_ref(), next, address.as_deref()).await?;
        }
        let (delivery, entry) = match &answer {
            Ok(answer) => self.delivery(&mut transaction, answer, asker).await?,
            Err(_) => (None, None),
        };
        let grants = match (&answer, &transaction.cluster.frozen) {
            (Ok(Answer { proposal: Some(_), .. }), Some(frozen)) => {
                let list = frozen.proposal.clone();
                transaction.grants_of(&list)?
            }
            _ => Vec::new(),
        };
        let (now, chain) = (transaction.now, transaction.chain.clone());
        let asked = transaction.asked().map(|grant| grant.jws.clone());
        crash_points("before", &changes, committed.is_some());
        let cluster = transaction.commit().await?;
        crash_points("after", &changes, committed.is_some());
        self.announce(&cluster, &changes, &alarms);
        // The commit must be durable in the ledger before its document leaves with the response.
        if let Some(entry) = entry {
            crate::crash::point("before", "ledger");
            self.store.let_out(entry).await?;
            self.metrics.ledger_entries.set(self.store.ledger().commits() as i64);
            crate::crash::point("after", "ledger");
        }
        let answer = answer.map_err(|refusal| self.refused(&refusal, &cluster))?;
        Ok(Applied { cluster, chain, now, answer, document: delivery, grants, asked })
    }

    /// Locks a cluster and loads it. Errors if the database was set back. `asked` is a grant's id.
    pub(crate) async fn begin(
        &self,
        cluster: Uuid,
        trust: Trust,
        asked: Option<&str>,
    ) -> Result<ClusterTransaction, ApiError> {
        let transaction = self.store.begin_cluster(cluster, trust, asked).await?;
        let transaction = transaction.ok_or_else(|| ApiError::not_found("such cluster"))?;
        if let Gate::Past(difference) = transaction.gate() {
            transaction.hang_up().await;
            return Err(self.found_another_database(cluster, &difference.to_string()).await);
        }
        self.clock.set(transaction.now.0 as i64);
        Ok(transaction)
    }

    /// Errors if the caller's member was removed from the cluster.
    async fn turn_removed_away(
        &self,
        transaction: &mut ClusterTransaction,
        asker: Option<formation::KeyId>,
    ) -> Result<(), ApiError> {
        let runs = matches!(transaction.cluster.phase, Phase::Committed | Phase::Formed);
        let Some(key) = asker.filter(|_| runs) else { return Ok(()) };
        let id = transaction.id();
        match intents::removal_of(transaction.connection(), id, &key.0).await? {
            Some(removal) => Err(ApiError::removed(removal)),
            None => Ok(()),
        }
    }

    /// Reads a cluster as `key` sees it, without a lock. The commit that a response contains is
    /// written to the ledger first.
    pub(crate) async fn look(
        &self,
        cluster: Uuid,
        key: Option<formation::KeyId>,
    ) -> Result<Applied, ApiError> {
        in_time(self.look_for(cluster, key)).await
    }

    async fn look_for(
        &self,
        cluster: Uuid,
        key: Option<formation::KeyId>,
    ) -> Result<Applied, ApiError> {
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
            self.store.let_out(entry).await?;
        }
        let asked = None;
        Ok(Applied { cluster, chain, now, answer, document: delivery, grants, asked })
    }

    /// Returns a decided cluster's document, the certificates of `key`, and the statements. Unlike
    /// a poll, this also serves admins and retired clusters.
    pub(crate) async fn document(
        &self,
        cluster: Uuid,
        key: Option<formation::KeyId>,
    ) -> Result<(Option<Delivery>, Vec<Jws>), ApiError> {
        let found = self.store.read_cluster(cluster).await?;
        let (cluster, chain, _) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
        let mut connection = self.store.acquire().await?;
        let (delivery, entry) = self.delivery_of(&mut connection, &cluster, &chain, key).await?;
        drop(connection);
        if let Some(entry) = entry {
            self.store.let_out(entry).await?;
        }
        Ok((delivery, chain.jws()))
    }

    /// Converts the machine's refusal to a problem. Adds the name of the agent that is in the way,
    /// because the machine knows only keys.
    fn refused(&self, refusal: &Refusal, cluster: &Cluster) -> ApiError {
        let error = ApiError::refused(refusal, self.settings.lease);
        match refusal {
            Refusal::Duplicate { other, .. } => match cluster.agents.get(other) {
                Some(agent) => error.naming(&other.to_string(), &agent.record.name),
                None => error,
            },
            _ => error,
        }
    }

    /// Tells the machine whether the database has become settled or unsettled since this cluster's
    /// last event.
    fn catch_up(&self, transaction: &mut ClusterTransaction) -> Vec<Change> {
        let event = match (transaction.settled, transaction.cluster.unsettled) {
            (false, false) => Event::DatabaseChanged,
            (true, true) => Event::DatabaseSettled,
            _ => return Vec::new(),
        };
        self.step(transaction, event).changes
    }

    /// Applies the session event first, then the event itself. Returns the second answer and all
    /// changes.
    fn step_spoken(
        &self,
        transaction: &mut ClusterTransaction,
        speaks: Option<Event>,
        event: Event,
    ) -> Outcome {
        let Some(speaks) = speaks else { return self.step(transaction, event) };
        let mut first = self.step(transaction, speaks);
        if first.answer.is_err() {
            return first;
        }
        let second = self.step(transaction, event);
        first.changes.extend(second.changes);
        first.alarms.extend(second.alarms);
        Outcome {
            answer: second.answer,
            changed: first.changed || second.changed,
            changes: first.changes,
            committed: second.committed,
            alarms: first.alarms,
        }
    }

    /// Returns why this process may not make the step's decisions, if so. A process that decides
    /// must have copied all decisions of the others. The database may also have been set back under
    /// an open connection.
    async fn doubt(
        &self,
        transaction: &mut ClusterTransaction,
        decisions: &[Decision],
        accepts: bool,
    ) -> Result<Option<Doubt>, ApiError> {
        if decisions.is_empty() {
            return Ok(None);
        }
        let is_complete = self.store.watch().is_complete(transaction.generation());
        let copied = match transaction.gate() {
            Gate::Open | Gate::Copy if !is_complete => return Ok(Some(Doubt::Behind)),
            Gate::Open => true,
            Gate::Copy => transaction.copy_news(&self.store).await?,
            Gate::Look | Gate::Past(_) => false,
        };
        if !copied {
            let why = "another process has found that it was set back";
            return Ok(Some(match transaction.gate() {
                Gate::Copy => Doubt::Behind,
                _ => Doubt::SetBack(why),
            }));
        }
        let entry = self.store.ledger().entry(transaction.id());
        let contradicted = |decision: &Decision| contradicts(entry, *decision);
        let found = !accepts && decisions.iter().any(contradicted);
        Ok(found.then_some(Doubt::SetBack("it lacks what was decided of this cluster")))
    }

    /// Error for a ledger that lacks too many decisions of others. Starts filling it.
    fn ledger_is_behind(&self) -> ApiError {
        self.store.watch().behind.notify_one();
        let (copied, newest) = self.store.watch().progress.now();
        let detail = format!(
            "This process's ledger is being filled: {copied} of {newest} decisions are copied, and \
             it decides nothing before it has all."
        );
        let next = "Wait, and try again; or ask another discovery process.";
        ApiError::new(Code::Overloaded, detail, next)
    }

    /// Compares the database again, as a new connection does. That also starts writing the ledger
    /// back.
    async fn found_another_database(&self, cluster: Uuid, why: &str) -> ApiError {
        tracing::error!(cluster.id = %cluster, why, "the database was set back");
        self.metrics.alarm("database_set_back");
        self.store.watch().compare_again();
        if let Err(error) = self.store.look_again(Occasion::Doubt).await {
            return error.into();
        }
        let next = "Wait: what the discovery processes know of it is put back from their ledgers.";
        let detail = format!("The database isn't the one that this process has seen: {why}.");
        ApiError::new(Code::DatabaseChanged, detail, next)
    }

    fn step(&self, transaction: &mut ClusterTransaction, event: Event) -> Outcome {
        let steady_after = Duration::from_millis(self.settings.steady_after().0);
        let context = Context {
            rules: &Rules::ALL,
            settings: &self.settings,
            steady: self.clock.even_for() >= steady_after,
            hash: &convert::proposal_hash,
        };
        step(&mut transaction.cluster, &context, transaction.now, event)
    }

    async fn delivery(
        &self,
        transaction: &mut ClusterTransaction,
        answer: &Answer,
        asker: Option<formation::KeyId>,
    ) -> Result<(Option<Delivery>, Option<ledger::Commit>), ApiError> {
        if answer.document.is_none() {
            return Ok((None, None));
        }
        let (cluster, chain) = (transaction.cluster.clone(), transaction.chain.clone());
        self.delivery_of(transaction.connection(), &cluster, &chain, asker).await
    }

    /// After COMMIT: wakes waiting requests, counts the changes, and logs changes and alarms.
    fn announce(&self, cluster: &Cluster, changes: &[Change], alarms: &[Alarm]) {
        let id = Uuid::from_u128(cluster.id.0);
        for change in changes {
            let (kind, body) = describe(change);
            self.metrics.change(kind);
            tracing::info!(cluster.id = %id, change = kind, %body, "cluster changed");
        }
        if !changes.is_empty() {
            self.wakes.wake(id);
        }
        for alarm in alarms {
            match alarm {
                Alarm::KeyElsewhere { key } => {
                    self.metrics.alarm("key_elsewhere");
                    tracing::error!(cluster.id = %id, agent = %key,
                        "two holders of one agent's key: a cloned host, or a stolen key");
                }
                Alarm::Split { decided, other } => {
                    self.metrics.alarm("split");
                    tracing::error!(cluster.id = %id, %decided, %other,
                        "two valid commit documents of one cluster; nothing is done for it any more");
                }
            }
        }
    }
}

/// Why this process may not freeze, decide or end anything.
enum Doubt {
    /// This process's ledger isn't complete yet.
    Behind,
    /// The database isn't the one that this process knows, with the reason.
    SetBack(&'static str),
}

/// Limits `work` to `LONGEST`. A caller gets an error if Postgres stops responding.
pub(crate) async fn in_time<T>(
    work: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let done = tokio::time::timeout(LONGEST, work).await;
    done.unwrap_or_else(|_| Err(StoreError::silent().into()))
}

/// Returns the step's decisions: the changes that must not be made in a database that was set back.
fn decisions(
    changes: &[Change],
    committed: Option<formation::Hash>,
    adopted: bool,
) -> Vec<Decision> {
    let decided = committed.map(|h| Decision::Commit { h, adopted });
    let other = changes.iter().filter_map(|change| match change {
        Change::Frozen { .. } => Some(Decision::Freeze),
        Change::Ended { phase } if *phase != Phase::Retired => Some(Decision::End),
        _ => None,
    });
    other.chain(decided).collect()
}

fn crash_points(when: &str, changes: &[Change], committed: bool) {
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
        ApiError::refused(&refusal, Settings::DEFAULT.lease)
    }
}
