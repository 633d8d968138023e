//! A leader transfers leadership while clients write and read. The tests make no clock tick during
//! the transfer, so a request that needs a tick would wait for ever.

use super::cluster::DriverCluster;
use super::*;

#[test]
fn no_request_waits_for_a_tick_while_leadership_is_transferred() {
    let orders = [[1, 2, 3], [1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]];
    for order in orders {
        // In each run, clients send requests after a different number of steps, from none to all
        // steps of the transfer.
        for before in 0.. {
            let mut cluster = DriverCluster::led(3);
            cluster.notify(0, Notice::Transfer(Some(2)));
            let is_over = !(0..before).all(|_| cluster.deliver(&order));
            (0..3).for_each(|n| cluster.send_write_and_read(n));
            cluster.settle(&order);
            let at = format!("asked after {before} steps, {order:?}");
            assert_eq!(cluster.leaders(), [2, 2, 2], "{at}");
            assert_eq!(cluster.lost, [[0; 0]; 3], "nothing is lost, {at}");
            for (n, (applied, read)) in cluster.served.iter_mut().enumerate() {
                applied.sort_unstable();
                assert_eq!(*applied, [1, 2, 3], "member {}, {at}", n + 1);
                assert_eq!(*read, [n as u64 + 1], "{at}");
            }
            if is_over {
                assert!(before > 5, "it takes some steps");
                break;
            }
        }
    }
}

/// At each quorum check, a leader forgets which peers are active until they answer again.
#[test]
fn a_leader_has_a_successor_at_any_tick() {
    for ticks in 1..=40 {
        let mut cluster = DriverCluster::led(3);
        for _ in 1..ticks {
            cluster.drivers[0].tick();
            cluster.run_until_idle(0);
            cluster.settle(&[1, 2, 3]);
        }
        // When the transfer begins, the messages of this tick have not been delivered yet.
        cluster.drivers[0].tick();
        cluster.run_until_idle(0);
        cluster.notify(0, Notice::Transfer(None));
        cluster.settle(&[1, 2, 3]);
        assert_ne!(cluster.leaders()[0], 1, "after {ticks} ticks");
    }
}

/// Returns a cluster of five, with leader 1, after `ticks` ticks. Meanwhile the members in `silent`
/// received and answered nothing.
fn led_beside_silent(silent: &[u64], ticks: u64) -> DriverCluster {
    let mut cluster = DriverCluster::led(5);
    let others: Vec<u64> = (1..=5).filter(|member| !silent.contains(member)).collect();
    for _ in 0..ticks {
        cluster.drivers[0].tick();
        cluster.run_until_idle(0);
        cluster.settle(&others);
        cluster.network.clear();
    }
    cluster
}

/// Member 5 is unreachable, but its log is as long as the leader's, because nothing was written
/// after its stream had ended.
#[test]
fn a_leader_never_hands_over_to_a_disconnected_peer() {
    let mut cluster = DriverCluster::led(5);
    cluster.notify(0, Notice::Disconnected(5));
    assert_ne!(cluster.drivers[0].successor(), Some(5));
    cluster.notify(0, Notice::Transfer(None));
    cluster.settle(&[1, 2, 3, 4]);
    assert!((2..=4).contains(&cluster.leaders()[0]), "{:?}", cluster.leaders());
}

/// The members in `silent` stay connected but don't answer, like a paused process or a host behind
/// a cut cable.
#[test]
fn a_leader_prefers_a_successor_that_answers() {
    for ticks in 3..30 {
        for silent in [[4, 5], [2, 3], [2, 5]] {
            let cluster = led_beside_silent(&silent, ticks);
            let successor = cluster.drivers[0].successor().unwrap();
            assert!(!silent.contains(&successor), "{successor} after {ticks} ticks");
        }
    }
}

#[test]
fn a_leader_prefers_the_longest_log_among_those_who_answer() {
    let mut cluster = DriverCluster::led(5);
    cluster.send_write_and_read(0);
    // Only member 3 receives the write and acknowledges it. The messages to members 2, 4 and 5 stay
    // undelivered.
    while cluster.deliver(&[3]) {}
    while cluster.deliver(&[1]) {}
    assert_eq!(cluster.drivers[0].successor(), Some(3));
}

#[test]
fn a_leader_without_any_peer_that_answers_keeps_leading() {
    let mut cluster = led_beside_silent(&[2, 3, 4, 5], 9);
    assert!(cluster.drivers[0].successor().is_some(), "they may still be there");
    cluster.drivers[0].tick();
    cluster.run_until_idle(0);
    assert_eq!(cluster.drivers[0].successor(), None);
    cluster.network.clear();
    cluster.notify(0, Notice::Transfer(None));
    assert!(cluster.network.is_empty(), "{:?}", cluster.network);
}

#[test]
fn a_learner_is_no_successor() {
    let mut cluster = DriverCluster::of(&Members { voters: vec![1, 2], learners: vec![3] });
    assert_eq!(cluster.drivers[0].successor(), Some(2));
    cluster.notify(0, Notice::Disconnected(2));
    assert_eq!(cluster.drivers[0].successor(), None);
}
