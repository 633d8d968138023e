//! Reads that share one ReadIndex round at a time, and rounds that are repeated.

use super::cluster::DriverCluster;
use super::*;

const ALL: [u64; 3] = [1, 2, 3];

/// Sends a read of a client to one member.
fn read(cluster: &mut DriverCluster, n: usize, token: u64) {
    cluster.drivers[n].read([token]);
    cluster.run_until_idle(n);
}

/// Returns the reads that a member has answered, ascending.
fn answered(cluster: &DriverCluster, n: usize) -> Vec<u64> {
    let mut tokens = cluster.served[n].1.clone();
    tokens.sort_unstable();
    tokens
}

/// Lets each clock tick once, and delivers all messages.
fn tick(cluster: &mut DriverCluster) {
    for n in 0..3 {
        cluster.drivers[n].tick();
        cluster.run_until_idle(n);
    }
    cluster.settle(&ALL);
}

/// No clock ticks, so the second round must begin as soon as the first one is confirmed.
#[test]
fn reads_that_arrive_during_a_round_share_the_next_one() {
    for n in 0..3 {
        let mut cluster = DriverCluster::led(3);
        for token in 1..=5 {
            read(&mut cluster, n, token);
        }
        assert_eq!(cluster.drivers[n].read_rounds(), 1);
        cluster.settle(&ALL);
        assert_eq!(answered(&cluster, n), [1, 2, 3, 4, 5]);
        assert_eq!(cluster.drivers[n].read_rounds(), 2);
    }
}

#[test]
fn reads_are_answered_although_messages_of_the_first_round_were_lost() {
    let kinds = [
        MessageKind::ReadIndex,
        MessageKind::Heartbeat,
        MessageKind::HeartbeatResponse,
        MessageKind::ReadIndexResponse,
    ];
    for lost in kinds {
        let mut cluster = DriverCluster::led(3);
        read(&mut cluster, 1, 7);
        loop {
            cluster.network.retain(|message| message.kind != lost);
            if !cluster.deliver(&ALL) {
                break;
            }
        }
        read(&mut cluster, 1, 8);
        while cluster.deliver(&ALL) {}
        assert_eq!(answered(&cluster, 1), [0; 0], "{lost:?}");
        (0..3).for_each(|_| tick(&mut cluster));
        assert_eq!(answered(&cluster, 1), [7, 8], "{lost:?}");
    }
}

/// The old leader never receives the request. The new leader receives the repeated one, perhaps
/// before it has committed an entry in its term.
#[test]
fn a_change_of_leader_repeats_the_round_without_a_tick() {
    for order in [[1, 2, 3], [1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]] {
        let mut cluster = DriverCluster::led(3);
        read(&mut cluster, 1, 7);
        read(&mut cluster, 1, 8);
        cluster.network.clear();
        cluster.notify(0, Notice::Transfer(Some(3)));
        cluster.settle(&order);
        assert_eq!(cluster.leaders(), [3; 3], "{order:?}");
        assert_eq!(answered(&cluster, 1), [7, 8], "{order:?}");
    }
}

/// Returns the members to which a heartbeat that carries a read's context is under way.
fn asked(cluster: &DriverCluster) -> Vec<u64> {
    let mut asked: Vec<u64> = cluster
        .network
        .iter()
        .filter(|message| message.kind == MessageKind::Heartbeat && !message.context.is_empty())
        .map(|message| message.to)
        .collect();
    asked.sort_unstable();
    asked
}

/// Delivers all messages, but no answer of `silent`.
fn settle_without_answers_of(cluster: &mut DriverCluster, silent: u64) {
    loop {
        cluster.network.retain(|message| message.from != silent);
        if !cluster.deliver(&ALL) {
            return;
        }
    }
}

#[test]
fn a_leader_asks_the_voters_that_answered_most_quickly_whether_it_still_leads() {
    let mut cluster = DriverCluster::led(3);
    read(&mut cluster, 0, 1);
    assert_eq!(asked(&cluster), [2], "nobody has answered yet, so the ids decide");
    // A tick asks all members, and member 3 answers first.
    cluster.drivers[0].tick();
    cluster.run_until_idle(0);
    assert_eq!(asked(&cluster), [2, 2, 3]);
    cluster.settle(&[3, 1, 2]);
    read(&mut cluster, 0, 2);
    assert_eq!(asked(&cluster), [3]);
    cluster.settle(&ALL);
    assert_eq!(answered(&cluster, 0), [1, 2]);
    assert_eq!(cluster.drivers[0].oldest_held_heartbeats(), None, "the round is confirmed");
}

#[test]
fn the_other_voters_are_asked_once_the_quick_ones_are_late() {
    let mut cluster = DriverCluster::led(3);
    read(&mut cluster, 0, 1);
    settle_without_answers_of(&mut cluster, 2);
    assert_eq!(answered(&cluster, 0), [0; 0]);
    assert!(cluster.drivers[0].oldest_held_heartbeats().is_some());
    cluster.notify(0, Notice::SendHeldHeartbeats);
    assert_eq!(asked(&cluster), [3]);
    settle_without_answers_of(&mut cluster, 2);
    assert_eq!(answered(&cluster, 0), [1]);
    // Member 3 has answered more quickly, so it is asked first now.
    read(&mut cluster, 0, 2);
    assert_eq!(asked(&cluster), [3]);
}

#[test]
fn the_other_voters_are_asked_at_once_if_a_connection_to_a_quick_one_ends() {
    for lost in [Notice::Unreachable(2), Notice::Disconnected(2)] {
        let mut cluster = DriverCluster::led(3);
        read(&mut cluster, 0, 1);
        cluster.network.clear();
        cluster.notify(0, lost);
        assert_eq!(asked(&cluster), [3]);
        cluster.settle(&ALL);
        assert_eq!(answered(&cluster, 0), [1]);
    }
}

#[test]
fn a_read_of_a_follower_is_confirmed_by_the_quickest_quorum_too() {
    let mut cluster = DriverCluster::led(3);
    read(&mut cluster, 2, 1);
    assert!(cluster.deliver(&[1]));
    assert_eq!(asked(&cluster), [2]);
    cluster.settle(&ALL);
    assert_eq!(answered(&cluster, 2), [1]);
    assert_eq!(cluster.drivers[0].oldest_held_heartbeats(), None);
}

#[test]
fn two_of_five_voters_and_no_learner_are_asked() {
    let members = Members { voters: vec![1, 2, 3, 4, 5], learners: vec![6] };
    let mut cluster = DriverCluster::of(&members);
    read(&mut cluster, 0, 1);
    assert_eq!(asked(&cluster), [2, 3]);
    cluster.notify(0, Notice::SendHeldHeartbeats);
    assert_eq!(asked(&cluster), [2, 3, 4, 5, 6]);
    cluster.settle(&[1, 5, 4, 3, 2, 6]);
    read(&mut cluster, 0, 2);
    assert_eq!(asked(&cluster), [4, 5]);
}

/// A new leader must not send what it held back when it led before.
#[test]
fn heartbeats_of_an_earlier_term_are_not_sent() {
    let mut cluster = DriverCluster::led(3);
    read(&mut cluster, 0, 1);
    cluster.network.clear();
    for next in [3, 1] {
        let leader = usize::try_from(cluster.leaders()[2] - 1).unwrap();
        cluster.notify(leader, Notice::Transfer(Some(next)));
        cluster.settle(&ALL);
    }
    assert_eq!(cluster.leaders(), [1; 3]);
    cluster.network.clear();
    cluster.notify(0, Notice::SendHeldHeartbeats);
    assert_eq!(asked(&cluster), [0; 0]);
    assert_eq!(cluster.drivers[0].oldest_held_heartbeats(), None);
}

#[test]
fn a_voter_without_a_connection_is_asked_last() {
    let mut cluster = DriverCluster::led(3);
    cluster.drivers[0].notice(Notice::Disconnected(2));
    read(&mut cluster, 0, 1);
    assert_eq!(asked(&cluster), [3]);
    cluster.notify(0, Notice::Connected(2));
    cluster.settle(&ALL);
    assert_eq!(answered(&cluster, 0), [1]);
}

/// The tests' drivers delay rounds from 4 reads at the same time on.
#[test]
fn a_round_waits_until_all_active_readers_share_it() {
    let mut cluster = DriverCluster::led(3);
    (1..=4).for_each(|token| read(&mut cluster, 0, token));
    while cluster.deliver(&ALL) {}
    // The first read had a round of its own. The other three waited during it, so four readers are
    // active, and three alone start no round.
    assert_eq!(cluster.drivers[0].read_rounds(), 1);
    assert_eq!(cluster.drivers[0].delayed_read_round(), Some(1));
    read(&mut cluster, 0, 5);
    assert_eq!(cluster.drivers[0].read_rounds(), 2, "the fourth one has come");
    assert_eq!(cluster.drivers[0].delayed_read_round(), None);
    while cluster.deliver(&ALL) {}
    assert_eq!(answered(&cluster, 0), [1, 2, 3, 4, 5]);
}

#[test]
fn a_delayed_round_starts_when_its_delay_ends_or_at_a_tick() {
    for ends_by_tick in [false, true] {
        let mut cluster = DriverCluster::led(3);
        (1..=8).for_each(|token| read(&mut cluster, 0, token));
        while cluster.deliver(&ALL) {}
        assert_eq!(answered(&cluster, 0), [1], "the round of seven reads is delayed");
        if ends_by_tick {
            cluster.drivers[0].tick();
            cluster.run_until_idle(0);
        } else {
            cluster.notify(0, Notice::StartReadRound);
        }
        while cluster.deliver(&ALL) {}
        assert_eq!(answered(&cluster, 0), [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}

/// A reader that ends is expected for a few rounds only.
#[test]
fn readers_that_have_ended_delay_no_round_for_ever() {
    let mut cluster = DriverCluster::led(3);
    (1..=20).for_each(|token| read(&mut cluster, 0, token));
    cluster.notify(0, Notice::StartReadRound);
    let mut delayed = 0;
    for token in 21..60 {
        while cluster.deliver(&ALL) {}
        read(&mut cluster, 0, token);
        if cluster.drivers[0].delayed_read_round().is_some() {
            delayed += 1;
            cluster.notify(0, Notice::StartReadRound);
        }
    }
    while cluster.deliver(&ALL) {}
    assert!((1..15).contains(&delayed), "{delayed} rounds were delayed");
    assert_eq!(answered(&cluster, 0), (1..60).collect::<Vec<_>>());
}

/// Otherwise the core thread would wake up again and again, until another leader is elected.
#[test]
fn no_round_is_delayed_while_there_is_no_leader() {
    let mut cluster = DriverCluster::led(3);
    (1..=8).for_each(|token| read(&mut cluster, 0, token));
    while cluster.deliver(&ALL) {}
    assert_eq!(cluster.drivers[0].delayed_read_round(), Some(1));
    // An answer of a later term makes the leader step down.
    let later = Message { term: 9, ..Message::new(MessageKind::AppendResponse, 2, 1) };
    cluster.drivers[0].message(later);
    cluster.run_until_idle(0);
    assert_eq!(cluster.leaders()[0], 0);
    assert_eq!(cluster.drivers[0].delayed_read_round(), None);
}
