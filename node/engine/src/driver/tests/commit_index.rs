//! Followers learn the commit index from the next append, or from a message without entries.

use super::cluster::{DriverCluster, write};
use super::*;

const ALL: [u64; 3] = [1, 2, 3];

/// Returns a cluster led by member 1 in which entry 2, a write with id 1, is committed. No follower
/// knows of that.
fn with_unsent_commit() -> DriverCluster {
    let mut cluster = DriverCluster::led(3);
    cluster.drivers[0].propose([write(1)]);
    cluster.run_until_idle(0);
    while cluster.deliver(&ALL) {}
    assert_eq!(applied(&cluster), [vec![1], vec![], vec![]]);
    assert!(cluster.drivers[0].has_unsent_commit());
    cluster
}

/// Returns the writes that each member has applied.
fn applied(cluster: &DriverCluster) -> [Vec<u64>; 3] {
    [0, 1, 2].map(|n| cluster.served[n].0.clone())
}

/// Returns the number of entries of each append that is under way.
fn appends(cluster: &DriverCluster) -> Vec<usize> {
    let appends = cluster.network.iter().filter(|message| message.kind == MessageKind::Append);
    appends.map(|message| message.entries.len()).collect()
}

#[test]
fn followers_in_a_quiet_cluster_apply_the_last_entry_without_a_tick() {
    let mut cluster = with_unsent_commit();
    cluster.notify(0, Notice::SendCommitIndex);
    assert_eq!(appends(&cluster), [0, 0]);
    assert!(!cluster.drivers[0].has_unsent_commit());
    while cluster.deliver(&ALL) {}
    assert_eq!(applied(&cluster), [[1], [1], [1]]);
}

#[test]
fn the_append_of_the_next_entry_informs_the_followers() {
    let mut cluster = with_unsent_commit();
    cluster.drivers[0].propose([write(2)]);
    cluster.run_until_idle(0);
    assert!(!cluster.drivers[0].has_unsent_commit());
    assert_eq!(appends(&cluster), [1, 1]);
    while cluster.deliver(&[2, 3]) {}
    assert_eq!(applied(&cluster), [[1], [1], [1]]);
}

/// The leader delays sending the commit index, because the next append can carry it. Here the delay
/// ends (`SendCommitIndex`) in the round in which the leader takes the next write.
#[test]
fn no_message_without_entries_is_sent_beside_an_append_with_entries() {
    let mut cluster = with_unsent_commit();
    cluster.drivers[0].propose([write(2)]);
    cluster.notify(0, Notice::SendCommitIndex);
    assert_eq!(appends(&cluster), [1, 1]);
}

/// The message to member 3 is dropped. The heartbeat of the next tick repeats the commit index.
#[test]
fn a_follower_whose_message_was_dropped_applies_the_entry_at_the_next_tick() {
    let mut cluster = with_unsent_commit();
    cluster.notify(0, Notice::SendCommitIndex);
    cluster.network.retain(|message| message.to != 3);
    cluster.notify(0, Notice::Unreachable(3));
    cluster.settle(&ALL);
    assert_eq!(applied(&cluster), [vec![1], vec![1], vec![]]);
    cluster.drivers[0].tick();
    cluster.run_until_idle(0);
    cluster.settle(&ALL);
    assert_eq!(applied(&cluster), [[1], [1], [1]]);
}

/// The read confirms an index that the follower doesn't know to be committed.
#[test]
fn a_followers_read_waits_for_no_tick() {
    let mut cluster = with_unsent_commit();
    cluster.drivers[1].read([7]);
    cluster.run_until_idle(1);
    cluster.settle(&ALL);
    assert_eq!(cluster.served[1], (vec![1], vec![7]));
}

#[test]
fn a_learner_applies_the_last_entry_without_a_tick() {
    let mut cluster = DriverCluster::of(&Members { voters: vec![1, 2], learners: vec![3] });
    cluster.drivers[0].propose([write(1)]);
    cluster.run_until_idle(0);
    cluster.settle(&ALL);
    assert_eq!(applied(&cluster), [[1], [1], [1]]);
}

/// A tick takes longer than the test may wait, so that no heartbeat informs the followers.
#[tokio::test]
async fn threads_inform_followers_without_a_heartbeat() {
    let mut cluster = ThreadedCluster::new(3);
    cluster.tick = Duration::from_secs(600);
    // Member 1 campaigns as soon as it is connected, so it starts last. An append to a member that
    // isn't running would be repeated at the next tick.
    let nodes = [2, 3, 1].map(|member| cluster.start(member));
    let written = put(&nodes[2], 1).await.unwrap();
    for node in &nodes {
        let mut status = node.handle.status();
        let applied = status.wait_for(|now| now.applied.index >= written);
        tokio::time::timeout(Duration::from_secs(60), applied).await.unwrap().unwrap();
    }
    for (member, node) in [2, 3, 1].into_iter().zip(nodes) {
        cluster.stop(member, node);
    }
}
