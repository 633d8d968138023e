//! Requests of this process that wait for a change of a cluster. A wake-up is only a hint: the
//! request reads the database again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use uuid::Uuid;

type ClusterChannels = Mutex<BTreeMap<Uuid, watch::Sender<u64>>>;

/// Wake-up channels of long polls and of the console's streams, by cluster. The slots for polls and
/// streams bound the number of channels.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterNotifier {
    channels: Arc<ClusterChannels>,
    /// Number of wake-ups of any cluster in this process.
    all: watch::Sender<u64>,
}

/// A subscription to one cluster's changes. Dropping a cluster's last subscription removes the
/// cluster's channel.
#[derive(Debug)]
pub(crate) struct Subscription {
    cluster: Uuid,
    receiver: Option<watch::Receiver<u64>>,
    channels: Arc<ClusterChannels>,
}

impl ClusterNotifier {
    /// Subscribes to changes of `cluster`. The first call of [`Subscription::changed`] also reports
    /// a change between the subscription and that call.
    pub(crate) fn subscribe(&self, cluster: Uuid) -> Subscription {
        let mut waiting = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let news = waiting.entry(cluster).or_insert_with(|| watch::channel(0).0).subscribe();
        Subscription { cluster, receiver: Some(news), channels: self.channels.clone() }
    }

    /// Subscribes to changes of all clusters. The channel's value counts the wake-ups of this
    /// process.
    pub(crate) fn subscribe_all(&self) -> watch::Receiver<u64> {
        self.all.subscribe()
    }

    /// Wakes every long poll and stream that waits for `cluster`, or for all clusters.
    pub(crate) fn wake(&self, cluster: Uuid) {
        self.all.send_modify(|count| *count += 1);
        let waiting = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(news) = waiting.get(&cluster) {
            news.send_modify(|count| *count += 1);
        }
    }

    /// Wakes every waiting request, for when notifications of any cluster may have been lost.
    pub(crate) fn wake_all(&self) {
        self.all.send_modify(|count| *count += 1);
        let waiting = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        for news in waiting.values() {
            news.send_modify(|count| *count += 1);
        }
    }
}

impl Subscription {
    /// Waits for the next change.
    pub(crate) async fn changed(&mut self) {
        let Some(news) = &mut self.receiver else { return };
        // Waiting can't fail: the sender stays in the map while a subscription exists.
        let _ = news.changed().await;
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.receiver.take();
        let mut waiting = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.get(&self.cluster).is_some_and(|news| news.receiver_count() == 0) {
            waiting.remove(&self.cluster);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_subscription_to_all_clusters_counts_each_wake_up() {
        let wakes = ClusterNotifier::default();
        let before = *wakes.subscribe_all().borrow();
        wakes.wake(Uuid::now_v7());
        wakes.wake_all();
        assert_eq!(*wakes.subscribe_all().borrow(), before + 2, "also without a subscriber");
    }

    #[tokio::test]
    async fn a_change_between_subscribing_and_waiting_is_not_lost() {
        let (wakes, cluster) = (ClusterNotifier::default(), Uuid::now_v7());
        let mut subscription = wakes.subscribe(cluster);
        wakes.wake(cluster);
        subscription.changed().await;
    }

    #[tokio::test]
    async fn a_change_of_another_cluster_wakes_no_subscription() {
        let (wakes, cluster) = (ClusterNotifier::default(), Uuid::now_v7());
        let mut subscription = wakes.subscribe(cluster);
        wakes.wake(Uuid::now_v7());
        let woken = tokio::time::timeout(std::time::Duration::ZERO, subscription.changed()).await;
        assert!(woken.is_err());
    }

    #[test]
    fn a_channel_is_removed_with_its_last_subscription() {
        let (wakes, cluster) = (ClusterNotifier::default(), Uuid::now_v7());
        drop((wakes.subscribe(cluster), wakes.subscribe(cluster)));
        assert!(wakes.channels.lock().unwrap().is_empty());
    }
}
