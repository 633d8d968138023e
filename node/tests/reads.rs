//! A member that can't know what is newest doesn't say what it has.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use common::{Member, settled, three};
use rustix::process::Signal;

/// Three members, and which of them leads.
async fn started(root: &std::path::Path) -> (Vec<Member>, usize) {
    let mut members = three(root);
    members.iter_mut().for_each(Member::start);
    members.iter_mut().for_each(Member::ready);
    let leader = settled(&members.iter().collect::<Vec<_>>()).await;
    (members, leader)
}

#[tokio::test]
async fn a_follower_that_reaches_nobody_answers_no_linearizable_read() {
    let root = tempfile::tempdir().unwrap();
    let (members, leader) = started(root.path()).await;
    let alone = (leader + 1) % 3;
    members[alone].put("k", "old").await.unwrap();
    assert_eq!(members[alone].get("k").await.unwrap().as_deref(), Some("old"));
    // Whatever the two others do from here on, this one can't hear of it.
    let others = || members.iter().enumerate().filter(|(n, _)| *n != alone).map(|(_, m)| m);
    others().for_each(|member| member.signal(Signal::STOP));
    let (get, txn) = tokio::join!(members[alone].get("k"), members[alone].get_in_txn("k"));
    others().for_each(|member| member.signal(Signal::CONT));
    let (get, txn) = (get.unwrap_err(), txn.unwrap_err());
    assert_eq!((get.code(), txn.code()), (tonic::Code::Unavailable, tonic::Code::Unavailable));
}

#[tokio::test]
async fn a_follower_that_is_behind_answers_a_linearizable_read_once_it_is_not() {
    let root = tempfile::tempdir().unwrap();
    let (members, leader) = started(root.path()).await;
    let behind = &members[(leader + 1) % 3];
    behind.put("k", "old").await.unwrap();
    behind.signal(Signal::STOP);
    for n in 0..200 {
        members[leader].put(&format!("k{n}"), &"x".repeat(20_000)).await.unwrap();
    }
    members[leader].put("k", "new").await.unwrap();
    // The questions are there before anything of that is.
    let ask = async {
        let asked = tokio::join!(behind.get("k"), behind.get_in_txn("k"));
        (asked.0.unwrap(), asked.1.unwrap())
    };
    let wake = async {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        behind.signal(Signal::CONT);
    };
    let ((get, txn), ()) = tokio::join!(ask, wake);
    assert_eq!((get.as_deref(), txn.as_deref()), (Some("new"), Some("new")));
}
