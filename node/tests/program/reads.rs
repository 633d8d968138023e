//! Linearizable reads on a member that lags behind or is cut off: it never returns old data.

use crate::common::{TestMember, three_members, wait_settled};
use rustix::process::Signal;

/// Starts three members, and returns them with the leader's index.
async fn started(root: &std::path::Path) -> (Vec<TestMember>, usize) {
    let mut members = three_members(root);
    members.iter_mut().for_each(TestMember::start);
    members.iter_mut().for_each(TestMember::wait_ready);
    let leader = wait_settled(&members.iter().collect::<Vec<_>>()).await;
    (members, leader)
}

#[tokio::test]
async fn a_follower_that_reaches_nobody_answers_no_linearizable_read() {
    let root = tempfile::tempdir().unwrap();
    let (members, leader) = started(root.path()).await;
    let alone = (leader + 1) % 3;
    members[alone].put("k", "old").await.unwrap();
    assert_eq!(members[alone].get("k").await.unwrap().as_deref(), Some("old"));
    // From here on the other members are stopped, so this member can't learn of any write by them.
    let others = || members.iter().enumerate().filter(|(n, _)| *n != alone).map(|(_, m)| m);
    others().for_each(|member| member.signal(Signal::STOP));
    let (get, txn, parts) = tokio::join!(
        members[alone].get("k"),
        members[alone].get_in_txn("k"),
        members[alone].get_by_range_stream("k")
    );
    others().for_each(|member| member.signal(Signal::CONT));
    for answer in [get, txn, parts] {
        assert_eq!(answer.unwrap_err().code(), tonic::Code::Unavailable);
    }
}

#[tokio::test]
async fn a_lagging_follower_answers_a_linearizable_read_once_it_has_caught_up() {
    let root = tempfile::tempdir().unwrap();
    let (members, leader) = started(root.path()).await;
    let behind = &members[(leader + 1) % 3];
    behind.put("k", "old").await.unwrap();
    behind.signal(Signal::STOP);
    for n in 0..200 {
        members[leader].put(&format!("k{n}"), &"x".repeat(20_000)).await.unwrap();
    }
    members[leader].put("k", "new").await.unwrap();
    // The reads are sent while the member is stopped, and it has received none of these writes yet.
    let ask = async {
        tokio::join!(behind.get("k"), behind.get_in_txn("k"), behind.get_by_range_stream("k"))
    };
    let wake = async {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        behind.signal(Signal::CONT);
    };
    let ((get, txn, parts), ()) = tokio::join!(ask, wake);
    for answer in [get, txn, parts] {
        assert_eq!(answer.unwrap().as_deref(), Some("new"));
    }
}
