use super::*;
use crate::Members;

/// A follower of three that has been sent a snapshot, which nobody has installed yet.
fn restoring() -> Consensus {
    let members = Members { voters: vec![1, 2, 3], learners: Vec::new() };
    let initial = Initial { members: members.clone(), ..Initial::default() };
    let mut follower = Consensus::new(&Config::new(2, 1, 7), &initial).unwrap();
    let at = Position { index: 38, term: 3 };
    follower
        .step(Message {
            term: 3,
            snapshot: Some(at),
            members: Some(members),
            ..Message::new(MessageKind::Snapshot, 1, 2)
        })
        .unwrap();
    assert_eq!(follower.ready().persist.snapshot, Some(at));
    follower
}

#[test]
fn who_takes_over_a_snapshot_does_not_stand_for_election() {
    let mut follower = restoring();
    // Its leader falls silent for many time-outs, somebody would hand over to it, and it is told to.
    for _ in 0..100 {
        follower.tick();
    }
    let term = follower.status().term;
    follower.step(Message { term, ..Message::new(MessageKind::TimeoutNow, 1, 2) }).unwrap();
    follower.campaign();
    assert_eq!(follower.status().role, Role::Follower);

    follower.persisted(1);
    follower.applied(38);
    for _ in 0..100 {
        follower.tick();
    }
    assert_eq!(follower.status().role, Role::PreCandidate, "then it does again");
}
