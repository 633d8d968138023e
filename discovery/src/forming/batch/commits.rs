//! Commits of several clusters' lists in one transaction.
//!
//! A commit document leaves this process only after the ledger holds the commit. So the answers to
//! the last signatures wait for the ledger as well, whose entries are written and synced together.
//! A process that dies between the COMMIT and the ledger's sync has answered none of them. The next
//! process that is asked for a document finds the commit in the database, and writes the entry
//! first.

use discovery_formation as formation;
use discovery_formation::service::Cluster;
use uuid::Uuid;

use super::{AppliedEvent, SortedBatch, WaitingRequest};
use crate::app::App;
use crate::error::ApiError;
use crate::forming::Delivery;
use crate::forming::commit::parts_to_deliver;
use crate::ledger;
use crate::store::StoreError;
use crate::store::cluster::{BatchTransaction, NewCommit};

/// Parts of an event that commits a cluster's list.
pub(super) struct CommitParts {
    /// Hash of the list.
    h: formation::Hash,
    /// The cluster before the event.
    before: Cluster,
}

impl CommitParts {
    pub(super) fn new(h: formation::Hash, before: Cluster) -> Self {
        CommitParts { h, before }
    }
}

/// A commit of a batch.
pub(super) struct BatchCommit {
    /// Rows of the commit and of its certificates.
    pub(super) commit: NewCommit,
    entry: ledger::Commit,
    delivery: Delivery,
}

impl App {
    /// Signs the documents of the lists that the batch commits, and issues the certificates. A
    /// request whose document or certificates can't be made is undone, and gets a transaction of
    /// its own, which reports the error. The results have the order of the events in `sorted`.
    pub(super) async fn build_commits(
        &self,
        transaction: &mut BatchTransaction,
        sorted: &mut SortedBatch,
    ) -> Result<Vec<(Uuid, BatchCommit)>, StoreError> {
        let is_decided = |(_, event): &&(WaitingRequest, Box<AppliedEvent>)| event.commit.is_some();
        let clusters: Vec<Uuid> =
            sorted.applied.iter().filter(is_decided).map(|(request, _)| request.cluster).collect();
        if clusters.is_empty() {
            return Ok(Vec::new());
        }
        let authorities = transaction.authorities(&clusters).await?;
        let mut commits = Vec::with_capacity(clusters.len());
        for (request, mut event) in std::mem::take(&mut sorted.applied) {
            let loaded = transaction.clusters.get_mut(&request.cluster);
            let (Some(parts), Some(loaded)) = (&event.commit, loaded) else {
                sorted.applied.push((request, event));
                continue;
            };
            let (h, before) = (parts.h, parts.before.clone());
            let authorities = authorities.get(&request.cluster);
            let built = authorities.map(|pair| self.build_commit(loaded, h, None, pair));
            let (Some(Ok(commit)), Some(authorities)) = (built, authorities) else {
                loaded.cluster = before;
                sorted.alone.push(request);
                continue;
            };
            self.note_event(loaded, &before, &mut event, &request.incoming);
            let asker = request.incoming.agent_key();
            let (delivery, entry) = parts_to_deliver(&commit, loaded, authorities, asker);
            commits.push((request.cluster, BatchCommit { commit, entry, delivery }));
            sorted.applied.push((request, event));
            // Certificates are a computation. Let other tasks of this thread run in between.
            tokio::task::yield_now().await;
        }
        Ok(commits)
    }
}

/// Writes the ledger entries of committed lists, and answers the requests that committed them.
/// `commits` has the order of `decided`.
pub(super) async fn deliver(
    app: App,
    decided: Vec<(WaitingRequest, Box<AppliedEvent>)>,
    commits: Vec<(Uuid, BatchCommit)>,
) {
    let (entries, deliveries): (Vec<_>, Vec<_>) =
        commits.into_iter().map(|(_, commit)| (commit.entry, commit.delivery)).unzip();
    let recorded = match app.record_in_ledger(entries).await {
        Ok(recorded) => recorded,
        Err(error) => {
            // The process is about to stop. The callers notice that their channels were closed.
            tracing::debug!(%error, "can't write the commits to the ledger");
            return;
        }
    };
    for (((request, event), delivery), recorded) in
        decided.into_iter().zip(deliveries).zip(recorded)
    {
        let reply = recorded.map_err(ApiError::from);
        request.answer(reply.and_then(|()| event.into_reply(&app, Some(delivery))));
    }
}
