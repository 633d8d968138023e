//! Applies the requests of agents in clusters that form, many in one transaction.
//!
//! Most of a transaction's cost doesn't depend on the number of its rows: the round trips, the
//! start of each SQL statement, and the wait for the disk at the COMMIT. So while a transaction
//! runs, the requests that arrive wait for the next one. It locks and loads all their clusters,
//! applies their events one after the other, saves all changed rows, and commits. Only then is any
//! of them answered. If there is no other request, a request waits for nothing.
//!
//! The last signatures of several clusters share a transaction, too: their lists are committed
//! together, and their ledger entries are written in one append ([`commits`]).
//!
//! A request gets a transaction of its own in these cases:
//!
//! - Verifying the request takes an SQL statement.
//! - Another transaction has locked the request's cluster. The other requests of the batch mustn't
//!   wait for that cluster.
//! - The certificates of the request's cluster can't be issued.
//!
//! If the transaction of a batch fails before its COMMIT, or Postgres refuses the COMMIT, nothing
//! has changed. Each request of the batch then gets a transaction of its own, so one faulty cluster
//! fails no other one's requests.

mod commits;

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use discovery_formation as formation;
use discovery_formation::memory::{ClusterDecision, LedgerVerdict, contradicts};
use discovery_formation::service::{
    Alarm, Answer, Cluster, ClusterChange, Phase, Refusal, StepOutcome, next_deadline,
};
use discovery_types::jws::Jws;
use discovery_types::statement::StatementChain;
use tokio::sync::oneshot;
use uuid::Uuid;

use self::commits::CommitParts;
use super::{ClusterReply, ClusterRequest, Delivery, crash_points, decisions, frozen_list_grants};
use crate::app::App;
use crate::error::ApiError;
use crate::gate::with_timeout;
use crate::store::cluster::{BatchTransaction, LoadedCluster, RequestDetails};
use crate::store::{KeptConnection, StoreError};

/// Maximum number of requests in one transaction. It keeps a transaction short, because its
/// clusters are locked until its end.
const MAX_BATCH: usize = 64;
/// Maximum number of transactions at a time. A second one begins only if a whole batch waits. With
/// more transactions, each would serve fewer requests, but take nearly as much time.
const MAX_TRANSACTIONS: usize = 2;
/// Maximum number of transactions in a row on one connection. Then the connection goes back to the
/// pool, because other requests wait for connections, too.
const MAX_KEPT: usize = 16;
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

impl BatchQueue {
    /// Whether the waiting requests need one more task, while `others` tasks serve them already.
    fn needs_task(&self, others: usize) -> bool {
        others == 0 || others < MAX_TRANSACTIONS && self.waiting.len() >= MAX_BATCH
    }
}

/// Result of a request in a batch.
#[derive(Debug)]
pub(super) enum BatchAnswer {
    /// The request was applied.
    Applied(Box<ClusterReply>),
    /// The request needs a transaction of its own. Nothing of it was applied.
    Alone(ClusterRequest),
}

/// Result of trying to apply a request to a loaded cluster.
enum Attempt {
    Applied(Box<AppliedEvent>),
    /// The request needs a transaction of its own. The cluster is unchanged.
    Alone,
    /// The request decides something, but the ledger lacks decisions that the database has. The
    /// cluster is unchanged.
    CopyFirst,
}

/// An event that was applied to a loaded cluster, but is not saved yet.
struct AppliedEvent {
    cluster: Cluster,
    answer: Result<Answer, Refusal>,
    changes: Vec<ClusterChange>,
    alarms: Vec<Alarm>,
    /// Whether the COMMIT notifies other processes of the changes.
    has_notified: bool,
    /// Set if the event commits the cluster's list.
    commit: Option<CommitParts>,
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
        let starts = queue.needs_task(queue.tasks);
        queue.tasks += usize::from(starts);
        Ok(starts)
    }

    /// Takes the next batch, oldest requests first. Leaves requests whose clusters are in a running
    /// transaction: the task of that transaction takes them afterwards. `None` ends the calling
    /// task, because nothing is left, or because the other task suffices.
    fn next_batch(&self) -> Option<(BusyClusters<'_>, Vec<WaitingRequest>)> {
        let mut queue = self.lock();
        let others = queue.tasks.saturating_sub(1);
        if others > 0 && !queue.needs_task(others) {
            queue.tasks = others;
            return None;
        }
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

    /// Applies a request to a loaded cluster. `has_copied` is true after the batch has copied
    /// decisions: the ledger then has all that the transaction saw, although `loaded` says
    /// otherwise.
    fn apply_loaded(
        &self,
        loaded: &mut LoadedCluster,
        incoming: &ClusterRequest,
        has_copied: bool,
    ) -> Result<Attempt, ApiError> {
        let is_forming = matches!(loaded.cluster.phase, Phase::Open | Phase::Preparing);
        if !is_forming || loaded.settled == loaded.cluster.is_unsettled {
            return Ok(Attempt::Alone);
        }
        let Some(prepared) = self.prepare_loaded(loaded, incoming)? else {
            return Ok(Attempt::Alone);
        };
        let before = loaded.cluster.clone();
        let outcome = self.step_with_session(loaded, prepared.session_event, prepared.event);
        let StepOutcome { answer, changed, changes, committed, alarms } = outcome;
        let grants = match &answer {
            Ok(Answer { proposal: Some(_), .. }) => frozen_list_grants(loaded).ok(),
            _ => Some(Vec::new()),
        };
        let decisions = decisions(&changes, committed, false);
        let refused = match grants {
            None => Some(Attempt::Alone),
            Some(_) => self.why_not_decide(loaded, &decisions, has_copied),
        };
        if let Some(refused) = refused {
            loaded.cluster = before;
            return Ok(refused);
        }
        let requested = incoming.grant_id();
        let requested = requested.and_then(|id| loaded.requested_grant(&id));
        let reply = ReplyParts {
            chain: loaded.chain.clone(),
            now: loaded.now,
            grants: grants.unwrap_or_default(),
            redeemed_grant: requested.map(|grant| grant.jws.clone()),
        };
        let mut applied = AppliedEvent {
            cluster: loaded.cluster.clone(),
            answer,
            changes,
            alarms,
            has_notified: false,
            commit: None,
            reply,
        };
        match committed {
            // A commit of a list is noted later, once the certificates are issued. If they can't be
            // issued, the event is undone.
            Some(h) => applied.commit = Some(CommitParts::new(h, before)),
            None if changed || !applied.changes.is_empty() => {
                self.note_event(loaded, &before, &mut applied, incoming);
            }
            None => {}
        }
        Ok(Attempt::Applied(Box::new(applied)))
    }

    /// Notes that an event has changed a loaded cluster, which was `before` until then.
    fn note_event(
        &self,
        loaded: &mut LoadedCluster,
        before: &Cluster,
        applied: &mut AppliedEvent,
        incoming: &ClusterRequest,
    ) {
        let next = next_deadline(&loaded.cluster, &self.settings, loaded.now);
        let address = incoming.address();
        let request = RequestDetails {
            address: address.as_deref(),
            agent: incoming.agent_key(),
            ..RequestDetails::default()
        };
        applied.has_notified = loaded.note_step(before, &applied.changes, next, &request);
    }

    /// Returns why this process may not make `decisions` now; `None` if it may.
    fn why_not_decide(
        &self,
        loaded: &LoadedCluster,
        decisions: &[ClusterDecision],
        has_copied: bool,
    ) -> Option<Attempt> {
        if decisions.is_empty() {
            return None;
        }
        if !self.store.watch().is_complete(loaded.generation()) {
            return Some(Attempt::Alone);
        }
        match loaded.ledger_verdict() {
            LedgerVerdict::Allowed => {}
            LedgerVerdict::CopyFirst if has_copied => {}
            LedgerVerdict::CopyFirst => return Some(Attempt::CopyFirst),
            LedgerVerdict::CompareFirst | LedgerVerdict::OlderDatabase(_) => {
                return Some(Attempt::Alone);
            }
        }
        // If the ledger can't be read, give the request a transaction of its own, which reports the
        // error.
        let Ok(entry) = self.store.ledger().entry(loaded.id()) else { return Some(Attempt::Alone) };
        let is_contradicted = decisions.iter().any(|decision| contradicts(entry, *decision));
        is_contradicted.then_some(Attempt::Alone)
    }
}

impl AppliedEvent {
    /// Announces the changes, which are committed.
    fn announce(&self, app: &App) {
        app.announce(&self.cluster, &self.changes, &self.alarms, self.has_notified);
    }

    /// Returns the reply. If `document` is given, the ledger must hold the commit already.
    fn into_reply(self, app: &App, document: Option<Delivery>) -> Result<ClusterReply, ApiError> {
        let AppliedEvent { cluster, answer, reply, .. } = self;
        let answer = answer.map_err(|refusal| app.refusal_error(&refusal, &cluster))?;
        let ReplyParts { chain, now, grants, redeemed_grant } = reply;
        let document = document.filter(|_| answer.document.is_some());
        Ok(ClusterReply { cluster, chain, now, answer, document, grants, redeemed_grant })
    }
}

/// Applies the waiting requests, batch after batch, until none is left.
async fn serve_queue(app: App) {
    let mut kept = None;
    for number in 1.. {
        let Some((busy, batch)) = app.batches.next_batch() else { return };
        let clusters: Vec<Uuid> = busy.clusters.iter().copied().collect();
        if number % MAX_KEPT == 0 {
            kept = None;
        }
        // Only log the error. Each caller has its answer, or notices that the channel for the
        // answer was closed.
        let applied = with_timeout(apply_batch(&app, &clusters, batch, kept.take())).await;
        kept = applied.unwrap_or_else(|error| {
            tracing::debug!(%error, "can't commit requests together");
            None
        });
    }
}

/// Requests of a batch, sorted by their results so far.
#[derive(Default)]
struct SortedBatch {
    /// Requests that were applied to their clusters, with their events.
    applied: Vec<(WaitingRequest, Box<AppliedEvent>)>,
    /// Requests that need a transaction of their own.
    alone: Vec<WaitingRequest>,
}

impl SortedBatch {
    /// Gives each request a transaction of its own. The transaction of the batch must have changed
    /// nothing.
    fn send_all_alone(self) {
        let applied = self.applied.into_iter().map(|(request, _)| request);
        send_alone(applied.chain(self.alone).collect());
    }
}

/// Applies the requests of a batch in one transaction, and answers them. Uses the connection `kept`
/// if it is alive, and returns the connection of the transaction if another one can begin on it. On
/// an error, the fate of the requests is unknown.
async fn apply_batch(
    app: &App,
    clusters: &[Uuid],
    batch: Vec<WaitingRequest>,
    kept: Option<KeptConnection>,
) -> Result<Option<KeptConnection>, ApiError> {
    let grants: BTreeSet<String> =
        batch.iter().filter_map(|request| request.incoming.grant_id()).collect();
    let grants: Vec<String> = grants.into_iter().collect();
    let begun = app.store.begin_batch(clusters, &grants, kept).await;
    let Ok(mut transaction) = begun.inspect_err(log_failure) else {
        send_alone(batch);
        return Ok(None);
    };
    let verdicts = |loaded: &LoadedCluster| loaded.ledger_verdict();
    let is_older = |verdict| matches!(verdict, LedgerVerdict::OlderDatabase(_));
    if transaction.clusters.values().map(verdicts).any(is_older) {
        // The database was set back to an older state. Let each request report that in its own
        // transaction.
        send_alone(batch);
        return Ok(None);
    }
    if let Some(loaded) = transaction.clusters.values().next() {
        app.clock.set(loaded.now.0 as i64);
    }
    let mut sorted = SortedBatch::default();
    let saved = async {
        apply_all(app, &mut transaction, batch, &mut sorted).await?;
        let commits = app.build_commits(&mut transaction, &mut sorted).await?;
        let rows: Vec<_> = commits.iter().map(|(id, commit)| (*id, &commit.commit)).collect();
        transaction.save(&rows).await?;
        Ok::<_, StoreError>(commits)
    };
    let commits = match saved.await {
        Ok(commits) => commits,
        Err(error) => {
            log_failure(&error);
            drop(transaction);
            sorted.send_all_alone();
            return Ok(None);
        }
    };
    let crash_here = |when: &str| {
        for (_, event) in &sorted.applied {
            crash_points(when, &event.changes, event.commit.is_some());
        }
    };
    crash_here("before");
    let kept = match transaction.commit().await {
        // Postgres has answered the COMMIT with an error, so it has rolled the transaction back.
        Err(error @ (StoreError::Refused(_) | StoreError::UniqueViolation { .. })) => {
            log_failure(&error);
            sorted.send_all_alone();
            return Ok(None);
        }
        committed => committed?,
    };
    crash_here("after");
    let SortedBatch { applied, alone } = sorted;
    for (_, event) in &applied {
        event.announce(app);
    }
    let (decided, others): (Vec<_>, Vec<_>) =
        applied.into_iter().partition(|(_, event)| event.commit.is_some());
    for (request, event) in others {
        request.answer(event.into_reply(app, None));
    }
    // Only now tell the callers of these requests: their transactions need the locks that the
    // COMMIT has released.
    send_alone(alone);
    if !decided.is_empty() {
        // The clusters are no longer busy while the ledger's disk is written.
        tokio::spawn(commits::deliver(app.clone(), decided, commits));
    }
    Ok(kept)
}

/// Applies the requests of a batch to the loaded clusters, in their order. Copies decisions that
/// the ledger lacks when the first request decides something.
async fn apply_all(
    app: &App,
    transaction: &mut BatchTransaction,
    batch: Vec<WaitingRequest>,
    sorted: &mut SortedBatch,
) -> Result<(), StoreError> {
    let (mut batch, mut has_copied) = (batch.into_iter(), None);
    while let Some(request) = batch.next() {
        let attempt = |transaction: &mut BatchTransaction, has_copied: Option<bool>| {
            let loaded = transaction.clusters.get_mut(&request.cluster);
            let has_copied = has_copied.unwrap_or(false);
            let apply = |loaded| app.apply_loaded(loaded, &request.incoming, has_copied);
            loaded.map_or(Ok(Attempt::Alone), apply)
        };
        let mut attempted = attempt(transaction, has_copied);
        if let (Ok(Attempt::CopyFirst), None) = (&attempted, has_copied) {
            match transaction.copy_new_decisions(&app.store).await {
                Ok(copied) => has_copied = Some(copied),
                Err(error) => {
                    sorted.alone.extend(std::iter::once(request).chain(batch));
                    return Err(error);
                }
            }
            attempted = attempt(transaction, has_copied);
        }
        match attempted {
            Ok(Attempt::Applied(event)) => sorted.applied.push((request, event)),
            Ok(Attempt::Alone | Attempt::CopyFirst) => sorted.alone.push(request),
            Err(error) => drop(request.sender.send(Err(error))),
        }
    }
    Ok(())
}

impl WaitingRequest {
    /// Answers the caller, who may have stopped waiting. The event was applied all the same.
    fn answer(self, reply: Result<ClusterReply, ApiError>) {
        let _ = self.sender.send(reply.map(|reply| BatchAnswer::Applied(Box::new(reply))));
    }
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
        for number in 1..=MAX_BATCH {
            let starts = batches.add(request(1)).unwrap();
            assert_eq!(starts, number == MAX_BATCH, "a second task begins if a whole batch waits");
        }
        assert!(batches.add(request(2)).is_ok_and(|starts| !starts), "a third task isn't allowed");
        let (second, _) = batches.next_batch().unwrap();
        assert_eq!(clusters(&second), [2], "cluster 1 is busy");
        drop(first);
        assert_eq!(clusters(&batches.next_batch().unwrap().0), [1]);
        assert!(batches.next_batch().is_none() && batches.next_batch().is_none());
        assert!(batches.add(request(3)).is_ok_and(|starts| starts), "no task is left");
    }

    #[test]
    fn one_of_two_tasks_ends_if_less_than_a_batch_waits() {
        let batches = ClusterBatches::default();
        for cluster in 0..=MAX_BATCH {
            batches.add(request(cluster as u128)).unwrap();
        }
        assert_eq!(batches.lock().tasks, 2);
        let first = batches.next_batch().unwrap();
        assert!(batches.next_batch().is_none(), "the other task serves the rest");
        drop(first);
        assert_eq!(clusters(&batches.next_batch().unwrap().0), [MAX_BATCH as u128]);
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
