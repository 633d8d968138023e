//! Applies the requests of agents in clusters that form, many in one transaction.
//!
//! Most of a transaction's cost doesn't depend on the number of its rows: the round trips, the
//! start of each SQL statement, and the wait for the disk at the COMMIT. So while a transaction
//! runs, the requests that arrive wait for the next one. It locks and loads all their clusters,
//! applies their events one after the other, saves all changed rows, and commits. Only then is any
//! of them answered. If there is no other request, a request waits for nothing.
//!
//! A request gets a transaction of its own if it commits a list, or if verifying it takes an SQL
//! statement. The same applies if another transaction has locked its cluster, so that no request
//! waits for a cluster that isn't its own. If the transaction of a batch fails before its COMMIT,
//! it has changed nothing. Each request of the batch then gets a transaction of its own.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use discovery_formation as formation;
use discovery_formation::memory::{LedgerVerdict, contradicts};
use discovery_formation::service::{
    Alarm, Answer, Cluster, ClusterChange, Phase, Refusal, StepOutcome, next_deadline,
};
use discovery_types::jws::Jws;
use discovery_types::statement::StatementChain;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{ClusterReply, ClusterRequest, crash_points, decisions, frozen_list_grants};
use crate::app::App;
use crate::error::ApiError;
use crate::gate::with_timeout;
use crate::store::StoreError;
use crate::store::cluster::{LoadedCluster, RequestDetails};

/// Maximum number of requests in one transaction. It keeps a transaction short, because its
/// clusters are locked until its end.
const MAX_BATCH: usize = 64;
/// Maximum number of transactions at a time. With more transactions, fewer requests would share the
/// cost of each.
const MAX_TRANSACTIONS: usize = 2;
/// Maximum number of requests that wait for a transaction. Each further one gets a transaction of
/// its own. The connection pool limits the number of these transactions.
const MAX_WAITING: usize = 4_096;

/// Requests that wait for the next transaction.
#[derive(Debug, Default)]
pub(crate) struct ClusterBatches {
    queue: Mutex<BatchQueue>,
}

#[derive(Debug, Default)]
struct BatchQueue {
    waiting: VecDeque<WaitingRequest>,
    /// Clusters that running transactions have locked.
    busy: BTreeSet<Uuid>,
    /// Number of tasks that take batches from the queue.
    tasks: usize,
}

#[derive(Debug)]
struct WaitingRequest {
    cluster: Uuid,
    incoming: ClusterRequest,
    sender: oneshot::Sender<Result<BatchAnswer, ApiError>>,
}

/// Result of a request in a batch.
#[derive(Debug)]
pub(super) enum BatchAnswer {
    /// The request was applied.
    Applied(Box<ClusterReply>),
    /// The request needs a transaction of its own. Nothing of it was applied.
    Alone(ClusterRequest),
}

/// An event that was applied to a loaded cluster, but is not saved yet.
struct AppliedEvent {
    cluster: Cluster,
    answer: Result<Answer, Refusal>,
    changes: Vec<ClusterChange>,
    alarms: Vec<Alarm>,
    /// Whether the COMMIT notifies other processes of the changes.
    has_notified: bool,
    reply: ReplyParts,
}

/// Parts of a reply that come from the loaded cluster.
struct ReplyParts {
    chain: Arc<StatementChain>,
    now: formation::UnixMicros,
    grants: Vec<Jws>,
    redeemed_grant: Option<String>,
}

impl ClusterBatches {
    fn lock(&self) -> MutexGuard<'_, BatchQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request. Returns the request if too many wait already, and otherwise whether the
    /// caller has to start a task that serves the queue.
    fn add(&self, request: WaitingRequest) -> Result<bool, Box<WaitingRequest>> {
        let mut queue = self.lock();
        if queue.waiting.len() >= MAX_WAITING {
            return Err(Box::new(request));
        }
        queue.waiting.push_back(request);
        let starts = queue.tasks < MAX_TRANSACTIONS;
        queue.tasks += usize::from(starts);
        Ok(starts)
    }

    /// Takes the next batch, oldest requests first. Leaves requests whose clusters are in a running
    /// transaction: the task of that transaction takes them afterwards. `None` ends the calling
    /// task.
    fn next_batch(&self) -> Option<(BusyClusters<'_>, Vec<WaitingRequest>)> {
        let mut queue = self.lock();
        let (mut batch, mut left) = (Vec::new(), VecDeque::new());
        while let Some(request) = queue.waiting.pop_front() {
            match batch.len() < MAX_BATCH && !queue.busy.contains(&request.cluster) {
                true => batch.push(request),
                false => left.push_back(request),
            }
        }
        queue.waiting = left;
        if batch.is_empty() {
            queue.tasks -= 1;
            return None;
        }
        let clusters: BTreeSet<Uuid> = batch.iter().map(|request| request.cluster).collect();
        queue.busy.extend(&clusters);
        Some((BusyClusters { batches: self, clusters }, batch))
    }
}

/// Clusters of a running transaction. No other transaction takes requests for them until this value
/// is dropped.
#[derive(Debug)]
struct BusyClusters<'a> {
    batches: &'a ClusterBatches,
    clusters: BTreeSet<Uuid>,
}

impl Drop for BusyClusters<'_> {
    fn drop(&mut self) {
        let mut queue = self.batches.lock();
        for cluster in &self.clusters {
            queue.busy.remove(cluster);
        }
        // A task that panics takes no further batch, so don't count it any more.
        queue.tasks -= usize::from(std::thread::panicking());
    }
}

impl App {
    /// Applies a request together with others, unless it needs a transaction of its own.
    pub(super) async fn apply_in_batch(
        &self,
        cluster: Uuid,
        incoming: ClusterRequest,
    ) -> Result<BatchAnswer, ApiError> {
        if !incoming.may_share_transaction() {
            return Ok(BatchAnswer::Alone(incoming));
        }
        let (sender, receiver) = oneshot::channel();
        match self.batches.add(WaitingRequest { cluster, incoming, sender }) {
            Err(request) => return Ok(BatchAnswer::Alone(request.incoming)),
            // Spawn a task, because this caller may stop waiting at any time.
            Ok(true) => drop(tokio::spawn(serve_queue(self.clone()))),
            Ok(false) => {}
        }
        // If the task ends without an answer, it is unknown whether the request was applied.
        receiver.await.unwrap_or_else(|_| Err(StoreError::no_answer().into()))
    }

    /// Applies a request to a loaded cluster. Returns `None`, and leaves the cluster unchanged, if
    /// the request needs a transaction of its own.
    fn apply_loaded(
        &self,
        loaded: &mut LoadedCluster,
        incoming: &ClusterRequest,
    ) -> Result<Option<AppliedEvent>, ApiError> {
        let is_forming = matches!(loaded.cluster.phase, Phase::Open | Phase::Preparing);
        if !is_forming || loaded.settled == loaded.cluster.is_unsettled {
            return Ok(None);
        }
        let Some(prepared) = self.prepare_loaded(loaded, incoming)? else { return Ok(None) };
        let before = loaded.cluster.clone();
        let outcome = self.step_with_session(loaded, prepared.session_event, prepared.event);
        let StepOutcome { answer, changed, changes, committed, alarms } = outcome;
        let grants = match &answer {
            Ok(Answer { proposal: Some(_), .. }) => frozen_list_grants(loaded).ok(),
            _ => Some(Vec::new()),
        };
        let may_share = committed.is_none() && self.may_decide(loaded, &changes);
        let Some(grants) = grants.filter(|_| may_share) else {
            loaded.cluster = before;
            return Ok(None);
        };
        let mut has_notified = false;
        if changed || !changes.is_empty() {
            let next = next_deadline(&loaded.cluster, &self.settings, loaded.now);
            let address = incoming.address();
            let request = RequestDetails {
                address: address.as_deref(),
                agent: incoming.agent_key(),
                ..RequestDetails::default()
            };
            has_notified = loaded.note_step(&before, &changes, next, &request);
        }
        let requested = incoming.grant_id();
        let requested = requested.and_then(|id| loaded.requested_grant(&id));
        let reply = ReplyParts {
            chain: loaded.chain.clone(),
            now: loaded.now,
            grants,
            redeemed_grant: requested.map(|grant| grant.jws.clone()),
        };
        let cluster = loaded.cluster.clone();
        Ok(Some(AppliedEvent { cluster, answer, changes, alarms, has_notified, reply }))
    }

    /// Whether this process may make the decisions among `changes` without reading more from the
    /// database.
    fn may_decide(&self, loaded: &LoadedCluster, changes: &[ClusterChange]) -> bool {
        let decisions = decisions(changes, None, false);
        if decisions.is_empty() {
            return true;
        }
        // If the ledger can't be read, give the request a transaction of its own, which reports the
        // error.
        let Ok(entry) = self.store.ledger().entry(loaded.id()) else { return false };
        loaded.ledger_verdict() == LedgerVerdict::Allowed
            && self.store.watch().is_complete(loaded.generation())
            && !decisions.iter().any(|decision| contradicts(entry, *decision))
    }
}

impl AppliedEvent {
    /// Announces the changes, which are committed, and returns the reply.
    fn finish(self, app: &App) -> Result<ClusterReply, ApiError> {
        let AppliedEvent { cluster, answer, changes, alarms, has_notified, reply } = self;
        app.announce(&cluster, &changes, &alarms, has_notified);
        let answer = answer.map_err(|refusal| app.refusal_error(&refusal, &cluster))?;
        let ReplyParts { chain, now, grants, redeemed_grant } = reply;
        Ok(ClusterReply { cluster, chain, now, answer, document: None, grants, redeemed_grant })
    }
}

/// Applies the waiting requests, batch after batch, until none is left.
async fn serve_queue(app: App) {
    while let Some((busy, batch)) = app.batches.next_batch() {
        let clusters: Vec<Uuid> = busy.clusters.iter().copied().collect();
        // Only log the error. Each caller has its answer, or notices that the channel for the
        // answer was closed.
        if let Err(error) = with_timeout(apply_batch(&app, &clusters, batch)).await {
            tracing::debug!(%error, "can't commit requests together");
        }
    }
}

/// Applies the requests of a batch in one transaction, and answers them. On an error, the fate of
/// the requests is unknown.
async fn apply_batch(
    app: &App,
    clusters: &[Uuid],
    batch: Vec<WaitingRequest>,
) -> Result<(), ApiError> {
    let grants: BTreeSet<String> =
        batch.iter().filter_map(|request| request.incoming.grant_id()).collect();
    let grants: Vec<String> = grants.into_iter().collect();
    let begun = app.store.begin_batch(clusters, &grants).await;
    let Ok(mut transaction) = begun.inspect_err(log_failure) else {
        send_alone(batch);
        return Ok(());
    };
    let verdicts = |loaded: &LoadedCluster| loaded.ledger_verdict();
    let is_older = |verdict| matches!(verdict, LedgerVerdict::OlderDatabase(_));
    if transaction.clusters.values().map(verdicts).any(is_older) {
        // The database was set back to an older state. Let each request report that in its own
        // transaction.
        send_alone(batch);
        return Ok(());
    }
    if let Some(loaded) = transaction.clusters.values().next() {
        app.clock.set(loaded.now.0 as i64);
    }
    let (mut applied, mut alone) = (Vec::new(), Vec::new());
    for request in batch {
        let loaded = transaction.clusters.get_mut(&request.cluster);
        match loaded.map(|loaded| app.apply_loaded(loaded, &request.incoming)) {
            Some(Ok(Some(event))) => applied.push((request, event)),
            Some(Ok(None)) | None => alone.push(request),
            Some(Err(error)) => drop(request.sender.send(Err(error))),
        }
    }
    if let Err(error) = transaction.save().await {
        log_failure(&error);
        alone.extend(applied.into_iter().map(|(request, _)| request));
        send_alone(alone);
        return Ok(());
    }
    for (_, event) in &applied {
        crash_points("before", &event.changes, false);
    }
    transaction.commit().await?;
    for (_, event) in &applied {
        crash_points("after", &event.changes, false);
    }
    for (request, event) in applied {
        // The caller may no longer wait for the answer. Its event was applied all the same.
        let reply = event.finish(app).map(|reply| BatchAnswer::Applied(Box::new(reply)));
        let _ = request.sender.send(reply);
    }
    // Only now tell the callers of these requests: their transactions need the locks that the
    // COMMIT has released.
    send_alone(alone);
    Ok(())
}

fn log_failure(error: &StoreError) {
    tracing::debug!(%error, "can't apply requests together");
}

/// Tells the callers that each of these requests needs a transaction of its own.
fn send_alone(requests: Vec<WaitingRequest>) {
    for WaitingRequest { incoming, sender, .. } in requests {
        let _ = sender.send(Ok(BatchAnswer::Alone(incoming)));
    }
}

#[cfg(test)]
impl App {
    /// Makes requests wait until [`App::resume_batches`]. Returns `false` if a transaction still
    /// runs.
    pub(crate) fn pause_batches(&self) -> bool {
        let mut queue = self.batches.lock();
        let is_idle = queue.tasks == 0;
        if is_idle {
            queue.tasks = MAX_TRANSACTIONS;
        }
        is_idle
    }

    /// Returns the number of requests that wait for a transaction.
    pub(crate) fn waiting_requests(&self) -> usize {
        self.batches.lock().waiting.len()
    }

    pub(crate) fn resume_batches(&self) {
        for _ in 0..MAX_TRANSACTIONS {
            tokio::spawn(serve_queue(self.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(cluster: u128) -> WaitingRequest {
        let (sender, _) = oneshot::channel();
        let cluster = Uuid::from_u128(cluster);
        WaitingRequest { cluster, incoming: ClusterRequest::Tick, sender }
    }

    fn clusters(busy: &BusyClusters<'_>) -> Vec<u128> {
        busy.clusters.iter().map(Uuid::as_u128).collect()
    }

    #[test]
    fn a_cluster_is_in_one_transaction_at_a_time() {
        let batches = ClusterBatches::default();
        assert!(batches.add(request(1)).is_ok_and(|starts| starts));
        let (first, _) = batches.next_batch().unwrap();
        assert_eq!(clusters(&first), [1]);
        assert!(batches.add(request(1)).is_ok_and(|starts| starts), "a second task is allowed");
        assert!(batches.add(request(2)).is_ok_and(|starts| !starts), "a third one isn't");
        let (second, _) = batches.next_batch().unwrap();
        assert_eq!(clusters(&second), [2], "cluster 1 is busy");
        drop(first);
        assert_eq!(clusters(&batches.next_batch().unwrap().0), [1]);
        assert!(batches.next_batch().is_none() && batches.next_batch().is_none());
        assert!(batches.add(request(3)).is_ok_and(|starts| starts), "no task is left");
    }

    #[test]
    fn a_batch_and_the_queue_are_bounded() {
        let batches = ClusterBatches::default();
        for _ in 0..MAX_WAITING {
            assert!(batches.add(request(1)).is_ok());
        }
        assert!(batches.add(request(1)).is_err());
        assert_eq!(batches.next_batch().unwrap().1.len(), MAX_BATCH);
        assert!(batches.add(request(1)).is_ok());
    }
}
