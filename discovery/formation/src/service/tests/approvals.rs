//! Tests of clusters in which an issuer approves each host before the list of members is frozen.

use super::*;

fn needing_approval(hosts: &[u8]) -> Service {
    let mut service = Service::of_size(3);
    service.cluster.statement.needs_approval = true;
    for &host in hosts {
        let _ = service.accepted(redeem(host));
    }
    service
}

fn approve(host: u8) -> ClusterEvent {
    ClusterEvent::Approve { key: key(host), jws: Arc::from("approval") }
}

#[test]
fn the_list_is_frozen_when_each_seated_host_is_approved() {
    let mut service = needing_approval(&[1, 2, 3]);
    assert_eq!((service.cluster.phase, service.cluster.seats().len()), (Phase::Open, 3));
    let reasons = explain(&service.cluster, &FormationSettings::DEFAULT, service.now);
    assert_eq!(reasons[0].code, "approvals_missing");
    assert_eq!(reasons[0].blocking_agents, [key(1), key(2), key(3)]);
    for host in [1, 2] {
        let step = service.step(approve(host));
        assert!(step.has_new_revision() && service.cluster.phase == Phase::Open);
    }
    assert!(!service.step(approve(1)).changed, "approved once");
    let _ = service.accepted(approve(3));
    assert_eq!(service.cluster.phase, Phase::Preparing);
}

/// Hosts with a stolen bundle take all seats first. The owner's hosts come later, are approved, and
/// replace them.
#[test]
fn an_approved_host_takes_the_seat_of_one_that_nobody_approved() {
    let mut service = needing_approval(&[7, 8, 9, 1, 2, 3]);
    for host in [2, 1, 3] {
        let _ = service.accepted(approve(host));
    }
    assert_eq!(service.cluster.phase, Phase::Preparing);
    let seated: Vec<_> = service.cluster.seats().into_values().collect();
    assert_eq!(seated, [key(2), key(1), key(3)]);
    assert_eq!(
        service.accepted(poll(7)).standing,
        Some(AgentStanding::Standby { ahead: 0 }),
        "it waits again"
    );
}

#[test]
fn a_free_seat_goes_to_an_approved_standby_first() {
    let mut service = needing_approval(&[1, 2, 3, 4, 5]);
    for host in [1, 2, 5] {
        let _ = service.accepted(approve(host));
    }
    // Host 5 took the seat of host 3. Hosts 3 and 4 wait, and host 4 is approved. Host 1 stops
    // polling.
    let _ = service.accepted(approve(4));
    service.pass_seconds(50);
    for host in [2, 3, 4, 5] {
        let _ = service.accepted(poll(host));
    }
    service.pass_seconds(41);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.seats()[&1], key(4));
}

#[test]
fn only_agents_that_have_redeemed_are_approved_and_only_while_the_list_is_open() {
    let mut service = needing_approval(&[1]);
    assert_eq!(variant(&service.refused(approve(9))), "UnknownKey");
    let mut decided = Service::committed();
    let before = decided.cluster.clone();
    assert!(!decided.step(approve(1)).changed);
    assert_eq!(decided.cluster, before);
    let mut ended = needing_approval(&[1]);
    ended.expire();
    assert_eq!(variant(&ended.refused(approve(1))), "Ended");
}
