//! Tests with clocks that were ahead and are set right, and with clocks that jump.

use super::*;

const AHEAD: u64 = 1_800;

#[test]
fn a_clock_that_was_ahead_for_seconds_does_not_delay_the_next_list() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    service.pass_seconds(AHEAD);
    for host in [1, 2, 3] {
        let _ = service.accepted(poll(host));
    }
    let epoch = service.cluster.epoch;
    let _ = service.accepted(nack(2, epoch));
    service.pass_seconds(12);
    service.now = UnixMicros(service.now.0 - AHEAD * 1_000_000);
    let outcome = service.step(ClusterEvent::Tick);
    assert!(outcome.changed, "what was taken back is saved, or it is ahead again when next loaded");
    let next = next_deadline(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert!(next <= Some(service.now.after(seconds(60))), "{next:?}");
    for _ in 0..7 {
        service.pass_seconds(10);
        for host in [1, 2, 3] {
            let _ = service.accepted(poll(host));
        }
    }
    assert_eq!(service.cluster.phase, Phase::Preparing);
}

#[test]
fn a_list_frozen_by_a_clock_a_day_ahead_is_given_up_in_time() {
    let mut service = Service::joined(3, &[1, 2]);
    let day = 23 * 3_600;
    service.pass_seconds(day);
    for host in [1, 2] {
        let _ = service.accepted(poll(host));
    }
    let _ = service.accepted(redeem_late(3));
    assert_eq!(service.cluster.phase, Phase::Preparing);
    let epoch = service.cluster.epoch;
    service.now = UnixMicros(service.now.0 - day * 1_000_000);
    let _ = service.accepted(ClusterEvent::Tick);
    let frozen_at = service.cluster.frozen.as_ref().map(|frozen| frozen.at);
    assert_eq!(frozen_at, Some(service.now));
    // Host 3 is dead from here on, and host 4 waits.
    let _ = service.accepted(redeem(4));
    for _ in 0..10 {
        service.pass_seconds(10);
        for host in [1, 2, 4] {
            let _ = service.accepted(poll(host));
        }
    }
    assert!(service.cluster.epoch > epoch);
    assert_eq!(service.cluster.seats()[&3], key(4), "its lease has ended too");
}

/// Returns a redeem event whose token hasn't expired even by a clock that is ahead.
fn redeem_late(host: u8) -> ClusterEvent {
    let ClusterEvent::Redeem(mut event) = redeem(host) else { unreachable!() };
    event.grant.expires = UnixMicros(u64::MAX);
    ClusterEvent::Redeem(event)
}

#[test]
fn a_passed_deadline_counts_only_after_the_clock_has_run_evenly() {
    let mut service = Service::joined(3, &[1]);
    let day = 86_400;
    service.pass_seconds(day);
    service.steady = false;
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.phase, Phase::Open, "a jump expires nothing");
    let next = next_deadline(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert_eq!(next, Some(service.now.after(seconds(60))), "and is looked at again, not at once");
    service.pass_seconds(60);
    service.steady = true;
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.phase, Phase::Expired);
}
