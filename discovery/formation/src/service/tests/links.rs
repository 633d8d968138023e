//! Tests of broken links between two hosts that both reach all other hosts.

use super::*;

/// Lets every member of the frozen list probe the others; only links outside `broken` work. Each
/// member that reaches all others signs.
fn probe_and_sign(service: &mut Service, broken: &[(u8, u8)]) {
    let both = |&(one, other): &(u8, u8)| [(one, other), (other, one)];
    probe_one_way_and_sign(service, &broken.iter().flat_map(both).collect::<Vec<_>>());
}

/// Lets the members probe and sign as [`probe_and_sign`] does, but each broken link works in one
/// direction. Only probes from its first host to its second fail.
fn probe_one_way_and_sign(service: &mut Service, broken: &[(u8, u8)]) {
    let list: Vec<u8> = service.cluster.seats().values().map(|key| key.0[0]).collect();
    let epoch = service.cluster.epoch;
    for &prober in &list {
        let works = |peer: u8| !broken.contains(&(prober, peer));
        let probe = |peer: u8| match works(peer) {
            true => ProbeOutcome::Reached,
            false => ProbeOutcome::Failed("connection timed out".to_owned()),
        };
        let peers = list.iter().copied().filter(|&peer| peer != prober);
        let row: ProbeResults = peers.clone().map(|peer| (key(peer), probe(peer))).collect();
        let _ = service.accepted(ClusterEvent::Probes { key: key(prober), epoch, row });
        if peers.into_iter().all(works) {
            let _ = service.accepted(ack(prober, epoch, &list));
        }
    }
}

/// Lets time pass until the list has timed out and the next one is frozen, while `hosts` poll.
fn next_list(service: &mut Service, hosts: &[u8]) {
    let epoch = service.cluster.epoch;
    for _ in 0..13 {
        if service.cluster.epoch > epoch && service.cluster.phase == Phase::Preparing {
            return;
        }
        service.pass_seconds(10);
        for &host in hosts {
            let _ = service.step(poll(host));
        }
    }
    panic!("no list after {epoch} within two minutes");
}

#[test]
fn one_of_two_hosts_that_miss_each_other_is_replaced_by_a_standby() {
    let hosts = [1, 2, 3, 4, 5];
    let mut service = Service::joined(3, &hosts);
    for tries in 1..=10 {
        probe_and_sign(&mut service, &[(1, 2)]);
        if service.cluster.phase == Phase::Committed {
            assert_eq!(tries, 4, "the two are counted in turn, and the first that was twice goes");
            assert_eq!(
                service.cluster.seats().into_values().collect::<Vec<_>>(),
                [1, 4, 3].map(key)
            );
            return;
        }
        next_list(&mut service, &hosts);
    }
    panic!("still {:?} after ten lists", service.cluster.seats());
}

#[test]
fn explain_names_the_direction_of_a_link_that_works_one_way() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    probe_one_way_and_sign(&mut service, &[(2, 1)]);
    let lines = explain(&service.cluster, &FormationSettings::DEFAULT, service.now);
    let broken = "host-2 (02020202) at 10.0.0.2:2380 can't reach host-1 (01010101) at \
                  10.0.0.1:2380, but is reached from there: connection timed out";
    assert_eq!((lines[0].code, lines[0].explanation.as_str()), ("unreachable", broken));
}

#[test]
fn explain_names_both_ends_of_a_broken_link_with_addresses_and_port() {
    let mut service = Service::joined(3, &[1, 2, 3]);
    probe_and_sign(&mut service, &[(1, 2)]);
    let explained = |service: &Service| {
        let lines = explain(&service.cluster, &FormationSettings::DEFAULT, service.now);
        let text = |line: &WaitReason| {
            let error = line.last_error.clone().unwrap_or_default();
            format!("{}: {} [{}] {}", line.code, line.explanation, error, line.remedy)
        };
        lines.iter().map(text).collect::<Vec<_>>().join("\n")
    };
    let broken = "host-1 (01010101) at 10.0.0.1:2380 and host-2 (02020202) at 10.0.0.2:2380 can't \
                  reach each other: connection timed out";
    let open = "open TCP port 2380 between these addresses";
    let preparing = explained(&service);
    assert!(preparing.starts_with(&format!("unreachable: {broken} [] {open}")), "{preparing}");
    service.pass_seconds(60);
    let _ = service.accepted(ClusterEvent::Tick);
    let held = explained(&service);
    assert!(held.contains("held back after a failed try: host-2"), "{held}");
    let timed_out = format!("[epoch 1 timed out with 2 acks missing; {broken}]");
    assert!(held.contains(&timed_out), "{held}");
}
