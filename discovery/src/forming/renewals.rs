//! Renews the leases of polls that find nothing new. While one SQL statement runs, the polls that
//! arrive wait for the next one, so that many share a round trip and a COMMIT.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::app::App;
use crate::store::UnixMicros;
use crate::store::leases::LeaseRenewal;

/// Maximum number of leases that one SQL statement renews.
const MAX_BATCH: usize = 256;
/// Maximum number of renewals that wait for an SQL statement. Each further poll takes a transaction
/// of its own. The connection pool limits the number of these transactions.
const MAX_WAITING: usize = 16_384;

/// Renewals that wait for the next SQL statement.
#[derive(Debug, Default)]
pub(crate) struct LeaseRenewals {
    queue: Mutex<RenewalQueue>,
}

#[derive(Debug, Default)]
struct RenewalQueue {
    waiting: VecDeque<(LeaseRenewal, oneshot::Sender<Option<UnixMicros>>)>,
    /// Whether a task takes batches from the queue.
    is_served: bool,
}

impl LeaseRenewals {
    fn lock(&self) -> MutexGuard<'_, RenewalQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next batch of renewals. Returns `None` if the queue is empty; the calling task
    /// must then end.
    fn next_batch(&self) -> Option<Vec<(LeaseRenewal, oneshot::Sender<Option<UnixMicros>>)>> {
        let mut queue = self.lock();
        let size = queue.waiting.len().min(MAX_BATCH);
        queue.is_served = size > 0;
        (size > 0).then(|| queue.waiting.drain(..size).collect())
    }
}

impl App {
    /// Renews an agent's lease. Returns the cluster's next deadline, or `None` if the poll needs a
    /// transaction of its own. That is so if something has changed or is due, too many renewals
    /// wait, the database is unsettled, or it gave no answer.
    pub(crate) async fn renew_lease(&self, renewal: LeaseRenewal) -> Option<UnixMicros> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut queue = self.renewals.lock();
            if queue.waiting.len() >= MAX_WAITING {
                return None;
            }
            queue.waiting.push_back((renewal, sender));
            if !std::mem::replace(&mut queue.is_served, true) {
                // Spawn a task, because this caller may stop waiting at any time.
                tokio::spawn(serve_queue(self.clone()));
            }
        }
        receiver.await.ok().flatten()
    }

    /// Whether the database is settled and has this generation.
    pub(crate) fn is_settled_in(&self, generation: i64) -> bool {
        self.settled_generation() == Some(generation)
    }

    /// Generation of the database, if this process knows it. `None` also while the database is
    /// unsettled, which means that no list may be frozen or committed in it.
    pub(crate) fn settled_generation(&self) -> Option<i64> {
        let known = self.store.watch().generation.borrow();
        known.as_ref().filter(|known| known.settled).map(|known| known.number)
    }
}

/// Renews the queued leases, batch after batch, until the queue is empty.
async fn serve_queue(app: App) {
    while let Some(batch) = app.renewals.next_batch() {
        let (renewals, senders): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        let results = renew(&app, &renewals).await;
        for (sender, result) in senders.into_iter().zip(results) {
            // The poll may have ended meanwhile. Its lease is renewed all the same.
            let _ = sender.send(result);
        }
    }
}

async fn renew(app: &App, renewals: &[LeaseRenewal]) -> Vec<Option<UnixMicros>> {
    let none = vec![None; renewals.len()];
    let Some(generation) = app.settled_generation() else { return none };
    let lease = app.settings.lease;
    match app.store.renew_leases(renewals, lease, generation).await {
        Ok(renewed) => renewed,
        Err(error) => {
            tracing::debug!(%error, "can't renew leases together");
            none
        }
    }
}
