//! Tells other processes of small changes of clusters, many in one SQL statement. A hint only lets
//! polls that wait at another process read their cluster earlier.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use uuid::Uuid;

use crate::app::App;

/// Maximum number of clusters in one SQL statement.
const MAX_BATCH: usize = 1_000;
/// Maximum number of clusters that wait for an SQL statement. Further hints are dropped. Agents
/// that poll another process then see these changes at their next poll.
const MAX_PENDING: usize = 65_536;

/// Clusters whose changes are still to be announced to the other processes.
#[derive(Debug, Default)]
pub(crate) struct PendingHints {
    queue: Mutex<HintQueue>,
}

#[derive(Debug, Default)]
struct HintQueue {
    clusters: BTreeSet<Uuid>,
    /// Whether a task takes batches from the queue.
    is_served: bool,
}

impl PendingHints {
    /// Adds a cluster to the queue, unless the queue is full. Returns whether the caller has to
    /// start the task that sends the hints.
    fn add(&self, cluster: Uuid) -> bool {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.clusters.len() < MAX_PENDING {
            queue.clusters.insert(cluster);
        }
        !std::mem::replace(&mut queue.is_served, true)
    }

    /// Takes the next batch of clusters from the queue. After an empty batch, the task that sends
    /// the hints must end.
    fn next_batch(&self) -> Vec<Uuid> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut batch = Vec::new();
        while batch.len() < MAX_BATCH
            && let Some(cluster) = queue.clusters.pop_first()
        {
            batch.push(cluster);
        }
        queue.is_served = !batch.is_empty();
        batch
    }
}

impl App {
    /// Tells the other processes of a change that is committed. Returns at once.
    pub(super) fn send_hint(&self, cluster: Uuid) {
        if self.hints.add(cluster) {
            tokio::spawn(send_pending(self.clone()));
        }
    }
}

/// Sends the notifications of changed clusters, batch after batch, until none is pending.
async fn send_pending(app: App) {
    loop {
        let batch = app.hints.next_batch();
        if batch.is_empty() {
            return;
        }
        if let Err(error) = app.store.notify_clusters(&batch).await {
            tracing::debug!(%error, "can't tell the other processes of changed clusters");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_sent_once_however_often_it_has_changed() {
        let hints = PendingHints::default();
        let (one, two) = (Uuid::from_u128(1), Uuid::from_u128(2));
        assert!(hints.add(one), "the first hint starts the task");
        assert!(!hints.add(two) && !hints.add(one));
        assert_eq!(hints.next_batch(), [one, two]);
        assert!(!hints.add(one), "the task still runs");
        assert_eq!(hints.next_batch(), [one]);
        assert!(hints.next_batch().is_empty());
        assert!(hints.add(two), "the task has ended");
    }
}
