//! Clocks that were ahead and are set right, and clocks that jump.

use super::*;

const AHEAD: u64 = 1_800;

#[test]
fn twelve_seconds_of_a_clock_half_an_hour_ahead_hold_nobody_back_for_half_an_hour() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    service.pass(AHEAD);
    for host in [1, 2, 3] {
        let _ = service.yes(poll(host));
    }
    let epoch = service.cluster.epoch;
    let _ = service.yes(nack(2, epoch));
    service.pass(12);
    service.now = UnixMicros(service.now.0 - AHEAD * 1_000_000);
    let outcome = service.step(ClusterEvent::Tick);
    assert!(outcome.changed, "what was taken back is saved, or it is ahead again when next loaded");
    let next = next_deadline(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert!(next <= Some(service.now.after(seconds(60))), "{next:?}");
    for _ in 0..7 {
        service.pass(10);
        for host in [1, 2, 3] {
            let _ = service.yes(poll(host));
        }
    }
    assert_eq!(service.cluster.phase, Phase::Preparing);
}

#[test]
fn a_list_that_a_clock_a_day_ahead_froze_is_given_up_in_time() {
    let mut service = Service::joined(3, &[1, 2]);
    let day = 23 * 3_600;
    service.pass(day);
    for host in [1, 2] {
        let _ = service.yes(poll(host));
    }
    let _ = service.yes(redeem_late(3));
    assert_eq!(service.cluster.phase, Phase::Preparing);
    let epoch = service.cluster.epoch;
    service.now = UnixMicros(service.now.0 - day * 1_000_000);
    let _ = service.yes(ClusterEvent::Tick);
    let frozen_at = service.cluster.frozen.as_ref().map(|frozen| frozen.at);
    assert_eq!(frozen_at, Some(service.now));
    // Host 3 is dead from here on, and host 4 waits.
    let _ = service.yes(redeem(4));
    for _ in 0..10 {
        service.pass(10);
        for host in [1, 2, 4] {
            let _ = service.yes(poll(host));
        }
    }
    assert!(service.cluster.epoch > epoch);
    assert_eq!(service.cluster.seats()[&3], key(4), "its lease has ended too");
}

/// Returns a redeem event whose token is still valid by a clock that is ahead.
fn redeem_late(host: u8) -> ClusterEvent {
    let ClusterEvent::Redeem(mut event) = redeem(host) else { unreachable!() };
    event.grant.expires = UnixMicros(u64::MAX);
    ClusterEvent::Redeem(event)
}

#[test]
fn a_deadline_is_believed_once_the_clock_has_gone_evenly() {
    let mut service = Service::joined(3, &[1]);
    let day = 86_400;
    service.pass(day);
    service.steady = false;
    let _ = service.yes(ClusterEvent::Tick);
    assert_eq!(service.cluster.phase, Phase::Open, "a jump expires nothing");
    let next = next_deadline(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert_eq!(next, Some(service.now.after(seconds(60))), "and is looked at again, not at once");
    service.pass(60);
    service.steady = true;
    let _ = service.yes(ClusterEvent::Tick);
    assert_eq!(service.cluster.phase, Phase::Expired);
}
