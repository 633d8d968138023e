//! Tests of clusters whose members are spread over zones.

use super::*;

fn in_zone(host: u8, zone: &str) -> Arc<AgentRecord> {
    let zone = (!zone.is_empty()).then(|| zone.to_owned());
    Arc::new(AgentRecord { zone, ..plain_record(host) })
}

fn spread(size: u8) -> Service {
    let mut service = Service::of_size(size);
    service.cluster.statement.spreads_zones = true;
    service
}

impl Service {
    fn redeem_in(&mut self, host: u8, zone: &str) -> Option<AgentStanding> {
        self.accepted(redeem_with(in_zone(host, zone), session(host, 1), 0)).standing
    }

    fn explained(&self) -> WaitReason {
        explain(&self.cluster, &FormationSettings::DEFAULT, self.now).remove(0)
    }
}

#[test]
fn no_zone_gets_a_majority_of_the_seats() {
    let mut service = spread(3);
    assert_eq!(service.redeem_in(1, "a"), Some(AgentStanding::Seat(1)));
    assert_eq!(service.redeem_in(2, "a"), Some(AgentStanding::Standby { ahead: 0 }));
    assert_eq!(service.redeem_in(3, "b"), Some(AgentStanding::Seat(2)), "it overtakes the standby");
    let reason = service.explained();
    assert_eq!(reason.code, "seats_free");
    for part in [
        "their zones have all the seats",
        "host-2",
        "a has 1 of 1",
        "b has 1 of 1",
        "any other may have 1",
    ] {
        assert!(reason.explanation.contains(part), "{part}: {}", reason.explanation);
    }
    assert_eq!(service.redeem_in(4, "c"), Some(AgentStanding::Seat(3)));
    assert_eq!(service.cluster.phase, Phase::Preparing);
}

#[test]
fn a_seat_that_gets_free_goes_to_a_standby_whose_zone_has_room() {
    let mut service = spread(3);
    for (host, zone) in [(1, "a"), (2, "b"), (3, "c"), (4, "b"), (5, "a")] {
        let _ = service.redeem_in(host, zone);
    }
    service.pass_seconds(50);
    for host in [2, 3, 4, 5] {
        let _ = service.accepted(poll(host));
    }
    service.pass_seconds(41);
    let _ = service.accepted(ClusterEvent::Tick);
    assert_eq!(service.cluster.seats()[&1], key(5), "the longer wait of host 4 doesn't count");
}

#[test]
fn a_host_that_says_no_zone_is_refused() {
    let mut service = spread(3);
    let refusal = service.refused(redeem_with(in_zone(1, ""), session(1, 1), 0));
    assert_eq!(
        (variant(&refusal), refusal.code()),
        ("NoZone".to_owned(), RefusalCode::RecordRefused)
    );
    assert!(refusal.remedy(seconds(90)).contains("--zone"), "{refusal}");
    let mut plain = Service::of_size(3);
    assert_eq!(plain.redeem_in(1, ""), Some(AgentStanding::Seat(1)));
    assert_eq!(plain.redeem_in(2, "a"), Some(AgentStanding::Seat(2)));
    assert_eq!(plain.redeem_in(3, "a"), Some(AgentStanding::Seat(3)), "without a spread");
}

#[test]
fn a_seated_host_that_says_another_zone_loses_its_seat_if_that_zone_is_full() {
    let mut service = spread(5);
    for (host, zone) in [(1, "a"), (2, "a"), (3, "b")] {
        let _ = service.redeem_in(host, zone);
    }
    let moved = AgentRecord { hash: Hash([33; 32]), ..(*in_zone(3, "a")).clone() };
    let moved = redeem_with(Arc::new(moved), session(3, 2), 0);
    let standing = service.accepted(moved).standing;
    assert_eq!(standing, Some(AgentStanding::Standby { ahead: 0 }));
    assert_eq!(service.cluster.seats().len(), 2);
}
