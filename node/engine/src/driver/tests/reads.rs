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
        cluster.settle(&ALL);
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
