//! Who waits for which cluster, in this process. A wake-up is a hint: whoever is woken reads again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use uuid::Uuid;

type Waiting = Mutex<BTreeMap<Uuid, watch::Sender<u64>>>;

/// Parked polls by cluster. Its size is bounded by the places for parked polls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wakes {
    waiting: Arc<Waiting>,
}

/// A place in the queue for one cluster's news.
#[derive(Debug)]
pub(crate) struct Subscription {
    cluster: Uuid,
    news: Option<watch::Receiver<u64>>,
    waiting: Arc<Waiting>,
}

impl Wakes {
    /// From now on `cluster`'s news are noticed, also those that come before the first wait.
    pub(crate) fn subscribe(&self, cluster: Uuid) -> Subscription {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let news = waiting.entry(cluster).or_insert_with(|| watch::channel(0).0).subscribe();
        Subscription { cluster, news: Some(news), waiting: self.waiting.clone() }
    }

    /// Something about `cluster` may have changed.
    pub(crate) fn wake(&self, cluster: Uuid) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(news) = waiting.get(&cluster) {
            news.send_modify(|count| *count += 1);
        }
    }

    /// News may have been missed, of any cluster.
    pub(crate) fn wake_all(&self) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        for news in waiting.values() {
            news.send_modify(|count| *count += 1);
        }
    }
}

impl Subscription {
    /// Returns at the next news.
    pub(crate) async fn changed(&mut self) {
        let Some(news) = &mut self.news else { return };
        // The sender lives in the map as long as we are subscribed.
        let _ = news.changed().await;
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.news.take();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.get(&self.cluster).is_some_and(|news| news.receiver_count() == 0) {
            waiting.remove(&self.cluster);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn news_between_subscribing_and_waiting_are_not_lost() {
        let (wakes, cluster) = (Wakes::default(), Uuid::now_v7());
        let mut subscription = wakes.subscribe(cluster);
        wakes.wake(cluster);
        subscription.changed().await;
    }

    #[tokio::test]
    async fn another_clusters_news_wake_nobody() {
        let (wakes, cluster) = (Wakes::default(), Uuid::now_v7());
        let mut subscription = wakes.subscribe(cluster);
        wakes.wake(Uuid::now_v7());
        let woken = tokio::time::timeout(std::time::Duration::ZERO, subscription.changed()).await;
        assert!(woken.is_err());
    }

    #[test]
    fn nobody_waiting_costs_nothing() {
        let (wakes, cluster) = (Wakes::default(), Uuid::now_v7());
        drop((wakes.subscribe(cluster), wakes.subscribe(cluster)));
        assert!(wakes.waiting.lock().unwrap().is_empty());
    }
}
