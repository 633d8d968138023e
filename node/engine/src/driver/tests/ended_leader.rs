//! The leader's process ends, and its followers learn of that before an election time-out.

use super::cluster::DriverCluster;
use super::*;

/// Lets member `n + 1` learn that the process of member 1 has ended.
fn report_end(cluster: &mut DriverCluster, n: usize) {
    cluster.notify(n, Notice::Disconnected(1));
    cluster.notify(n, Notice::ProcessEnded(1));
}

/// Drops the messages to member 1, because it has ended.
fn drop_messages_to_leader(cluster: &mut DriverCluster) {
    cluster.network.retain(|message| message.to != 1);
}

#[test]
fn followers_elect_another_leader_without_a_tick() {
    for voters in [3, 5] {
        let members: Vec<u64> = (2..=voters).collect();
        for order in [members.clone(), members.iter().rev().copied().collect::<Vec<_>>()] {
            // In each run, a different number of messages is delivered between the moments at which
            // the followers learn of the leader's end.
            for between in 0..12 {
                let mut cluster = DriverCluster::led(voters);
                for member in &order {
                    report_end(&mut cluster, usize::try_from(member - 1).unwrap());
                    for _ in 0..between {
                        drop_messages_to_leader(&mut cluster);
                        cluster.deliver(&members);
                    }
                }
                for _ in 0..100 {
                    drop_messages_to_leader(&mut cluster);
                    cluster.deliver(&order);
                }
                let leaders = &cluster.leaders()[1..];
                let at = format!("{voters} voters, {order:?}, {between}: {leaders:?}");
                assert!(leaders[0] > 1 && leaders.iter().all(|one| *one == leaders[0]), "{at}");
            }
        }
    }
}

#[test]
fn a_member_whose_turn_it_is_but_that_is_silent_is_passed_over() {
    let mut cluster = DriverCluster::led(5);
    (2..5).for_each(|n| report_end(&mut cluster, n));
    let awake = [3, 4, 5];
    let mut ticks = 0;
    while cluster.leaders()[2] == 0 {
        ticks += 1;
        assert!(ticks <= 4, "the second turn comes after two ticks");
        for n in 2..5 {
            cluster.drivers[n].tick();
            cluster.run_until_idle(n);
        }
        while cluster.deliver(&awake) {}
    }
    assert!(awake.contains(&cluster.leaders()[2]));
}

#[test]
fn a_wrong_report_unseats_no_leader_that_a_majority_hears() {
    let mut cluster = DriverCluster::led(5);
    let (_, _, term) = cluster.drivers[0].leadership();
    for n in [1, 2] {
        cluster.notify(n, Notice::ProcessEnded(1));
    }
    for _ in 0..30 {
        for n in 0..5 {
            cluster.drivers[n].tick();
            cluster.run_until_idle(n);
        }
        cluster.settle(&[1, 2, 3, 4, 5]);
    }
    assert_eq!(cluster.leaders(), [1; 5]);
    assert_eq!(cluster.drivers[0].leadership().2, term);
}

#[test]
fn the_end_of_another_process_changes_nothing() {
    let mut cluster = DriverCluster::led(3);
    cluster.notify(1, Notice::Disconnected(3));
    cluster.notify(1, Notice::ProcessEnded(3));
    assert_eq!(cluster.leaders(), [1; 3]);
    cluster.notify(0, Notice::ProcessEnded(2));
    assert_eq!(cluster.leaders(), [1; 3]);
}

/// A learner has no vote. It forgets the leader so that its proposals wait for the next one.
#[test]
fn a_learner_forgets_the_leader_and_does_not_campaign() {
    let members = Members { voters: vec![1, 2, 3], learners: vec![4] };
    let mut cluster = DriverCluster::of(&members);
    report_end(&mut cluster, 3);
    assert_eq!(cluster.leaders()[3], 0);
    assert!(cluster.network.is_empty());
}

#[test]
fn writes_to_an_ended_leader_are_reported_as_lost_once_another_leads() {
    let mut cluster = DriverCluster::led(3);
    cluster.send_write_and_read(1);
    // The leader ends before it reads the forwarded write.
    drop_messages_to_leader(&mut cluster);
    (1..3).for_each(|n| cluster.notify(n, Notice::Disconnected(1)));
    cluster.notify(1, Notice::ProcessEnded(1));
    // This write waits for the next leader.
    cluster.drivers[1].propose([ClientProposal {
        id: RequestId(9),
        kind: EntryKind::Normal,
        data: payload(9, 0),
    }]);
    cluster.notify(2, Notice::ProcessEnded(1));
    for _ in 0..100 {
        drop_messages_to_leader(&mut cluster);
        cluster.deliver(&[2, 3]);
    }
    assert_ne!(cluster.leaders()[1], 0);
    assert_eq!(cluster.lost[1], [2]);
    assert_eq!(cluster.served[1], (vec![9], vec![2]), "the read is answered, too");
    assert_eq!(cluster.lost[2], [0; 0]);
}

/// Returns the number of ticks, out of `ticks`, at which a member asks for pre-votes. No message
/// arrives.
fn campaigns(cluster: &mut DriverCluster, n: usize, ticks: usize) -> usize {
    let asks = |message: &Message| message.kind == MessageKind::RequestPreVote;
    (0..ticks)
        .filter(|_| {
            cluster.network.clear();
            cluster.drivers[n].tick();
            cluster.run_until_idle(n);
            cluster.network.iter().any(asks)
        })
        .count()
}

/// If these turns to campaign never ended, a member that reaches no other member would campaign
/// again and again for ever.
#[test]
fn turns_end_after_an_election_time_out() {
    let mut cluster = DriverCluster::led(3);
    report_end(&mut cluster, 1);
    // The member's turns to campaign come at the ticks 4 and 8. An election time-out takes 10 to 19
    // ticks.
    assert_eq!(campaigns(&mut cluster, 1, 9), 2);
    let later = campaigns(&mut cluster, 1, 40);
    assert!((2..=5).contains(&later), "{later}");
}

#[test]
fn a_leader_that_is_heard_again_ends_the_turns() {
    let mut cluster = DriverCluster::led(3);
    cluster.notify(2, Notice::ProcessEnded(1));
    cluster.drivers[0].tick();
    cluster.run_until_idle(0);
    cluster.settle(&[1, 2, 3]);
    assert_eq!(cluster.leaders()[2], 1);
    assert_eq!(campaigns(&mut cluster, 2, 9), 0);
}

/// When the request is received, its candidate has long given up, or another member leads.
#[test]
fn an_old_pre_vote_request_is_not_answered() {
    let mut cluster = DriverCluster::led(3);
    report_end(&mut cluster, 1);
    while cluster.deliver(&[3]) {}
    for _ in 0..4 {
        cluster.drivers[2].tick();
        cluster.run_until_idle(2);
    }
    cluster.network.clear();
    report_end(&mut cluster, 2);
    let answers = |message: &Message| message.kind == MessageKind::RequestPreVoteResponse;
    assert!(!cluster.network.iter().any(answers), "{:?}", cluster.network);
}
