//! Refusal of the keys of removed members on the client port.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use node_engine::tls::ClientListenerTls;
use node_state::{identity::NodeKey, membership::MemberTable};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

/// Time for which the key of a removed member is still accepted on the client port. The member may
/// have requested its own removal here, and may still wait for the answer.
const REMOVED_MEMBER_GRACE: Duration = Duration::from_secs(10);

/// Refuses the keys of removed members, for as long as the store exists.
pub(super) async fn refuse_removed(
    members: watch::Receiver<Arc<MemberTable>>,
    tls: Option<Arc<ClientListenerTls>>,
) {
    if let Some(tls) = tls {
        report_removed_keys(members, move |keys| tls.set_refused_keys(keys)).await;
    }
}

/// Calls `refuse` with the keys of all removed members. The first call is made at once. After each
/// later removal, the next call is made when [`REMOVED_MEMBER_GRACE`] has passed. Returns once the
/// sender of `members` is dropped.
async fn report_removed_keys(
    mut members: watch::Receiver<Arc<MemberTable>>,
    refuse: impl Fn(HashSet<NodeKey>),
) {
    let mut newest = members.borrow_and_update().removed_keys();
    refuse(newest.clone());
    // Keys of all removed members after each later removal, with the time at which `refuse` gets
    // them. Members are removed rarely, so there are few such sets at a time.
    let mut pending: VecDeque<(Instant, HashSet<NodeKey>)> = VecDeque::new();
    loop {
        let due = pending.front().map_or_else(Instant::now, |(due, _)| *due);
        tokio::select! {
            changed = members.changed() => {
                if changed.is_err() {
                    return;
                }
                let removed = members.borrow_and_update().removed_keys();
                if removed != newest {
                    newest.clone_from(&removed);
                    pending.push_back((Instant::now() + REMOVED_MEMBER_GRACE, removed));
                }
            }
            () = sleep_until(due), if !pending.is_empty() => {
                if let Some((_, removed)) = pending.pop_front() {
                    refuse(removed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use node_state::{
        identity::MemberId,
        membership::{Member, MemberChange},
    };
    use tokio::time::advance;

    use super::*;

    fn member(id: u8) -> Member {
        Member {
            id: MemberId(id.into()),
            name: format!("n{id}"),
            peer_urls: vec![format!("http://10.0.0.{id}:2380")],
            client_urls: Vec::new(),
            is_learner: false,
            incarnation: None,
            node_key: Some(NodeKey([id; 32])),
            changed_at: 0,
            vote_when_ready: false,
            operations: Vec::new(),
        }
    }

    /// Advances the paused clock by `time`, and lets the task refuse the keys whose time has come.
    async fn pass(time: Duration) {
        advance(time).await;
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_removed_member_has_the_whole_grace_of_its_own() {
        let table = MemberTable::new([1, 2, 3].map(member));
        let (members, receiver) = watch::channel(Arc::new(table));
        let (sender, refused) = watch::channel(HashSet::new());
        let refusing = tokio::spawn(report_removed_keys(receiver, move |keys| {
            sender.send_replace(keys);
        }));
        let remove = |id: u64| {
            members.send_modify(|table| {
                let change = MemberChange::Remove(MemberId(id));
                Arc::make_mut(table).apply_change(change, 9 + id).unwrap();
            });
        };
        let refused_keys = || refused.borrow().clone();
        let keys = |ids: &[u8]| ids.iter().map(|id| NodeKey([*id; 32])).collect::<HashSet<_>>();
        let second = Duration::from_secs(1);
        pass(Duration::ZERO).await;
        remove(2);
        pass(Duration::ZERO).await;
        pass(REMOVED_MEMBER_GRACE - second).await;
        remove(3);
        pass(Duration::ZERO).await;
        assert_eq!(refused_keys(), keys(&[]));
        pass(2 * second).await;
        assert_eq!(refused_keys(), keys(&[2]));
        pass(REMOVED_MEMBER_GRACE - 3 * second).await;
        assert_eq!(refused_keys(), keys(&[2]));
        pass(2 * second).await;
        assert_eq!(refused_keys(), keys(&[2, 3]));
        drop(members);
        refusing.await.unwrap();
    }
}
