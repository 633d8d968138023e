//! Tests of two members of which only one can connect to the other.

use super::*;

/// Returns a record of a peer at an address where nothing listens.
fn unreachable_peer(id: u64) -> PeerRecord {
    peer_at(MemberId(id), "127.0.0.1:1".parse().unwrap())
}

/// Returns connected members 1 and 2. Only member 2 can connect: member 1 has a wrong address of
/// member 2.
fn one_way_pair() -> (TransportNode, TransportNode) {
    let (a, b) = (TransportNode::start(1), TransportNode::start(2));
    let peers = vec![unreachable_peer(2)];
    a.transport.set_membership(PeerMembership { peers, ..PeerMembership::default() });
    b.knows(&[&a]);
    connect(&a, &b);
    (a, b)
}

#[test]
fn one_connection_carries_messages_in_order_in_both_directions() {
    let (a, b) = one_way_pair();
    let message = |n: u32| Bytes::copy_from_slice(&n.to_be_bytes());
    for n in 0..1000 {
        a.transport.send(MemberId(2), message(n)).unwrap();
        b.transport.send(MemberId(1), message(n)).unwrap();
    }
    let all = |node: &TransportNode| node.messages().len() == 1000;
    eventually("all have arrived", || all(&a) && all(&b));
    for (node, from) in [(&a, MemberId(2)), (&b, MemberId(1))] {
        let expected: Vec<_> = (0..1000).map(|n| (from, message(n))).collect();
        assert_eq!(node.messages(), expected);
    }
    assert_eq!((*a.events.reachable.lock().unwrap()).as_slice(), [true]);
}

#[test]
fn lists_of_members_and_promises_go_both_ways_over_one_connection() {
    let (a, b) = one_way_pair();
    let told = |node: &TransportNode| !node.events.counted.lock().unwrap().is_empty();
    eventually("both are told", || told(&a) && told(&b));
    *a.events.promised.lock().unwrap() = acknowledged(10);
    let path = b._dir.path().join("marks");
    let shown =
        LocalMember { boot: 2, run: 9, disk: DiskState { term: 3, vote: 0, last: 9 }, ..local(1) };
    let refuses = || {
        let taken = WitnessFile::open(&path).unwrap().admit(MemberId(1), &shown.process_claim());
        matches!(taken, Err(witness_file::AdmitError::Refused(StreamRefusal::Amnesia)))
    };
    eventually("b remembers what a promised", refuses);
}

#[test]
fn snapshots_and_requests_go_both_ways_over_connections_of_one_side() {
    let (a, b) = one_way_pair();
    for (from, to) in [(&a, &b), (&b, &a)] {
        let body: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
        let id = to.local.member;
        let mut writer = from.transport.open_snapshot(id, Bytes::from_static(b"head")).unwrap();
        writer.write_all(&body).unwrap();
        writer.finish().unwrap();
        assert!(to.events.snapshots.lock().unwrap()[0].2 == body);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let answer = runtime.block_on(from.transport.ask(id, Bytes::from_static(b"hi")));
        assert_eq!(answer.unwrap(), format!("{}: hi", from.local.member));
        assert!(runtime.block_on(from.transport.ask(id, Bytes::from_static(b"?"))).is_err());
    }
}

#[test]
fn a_peer_known_only_from_lists_gets_no_answer_on_an_invitation() {
    let (a, b) = (TransportNode::start(1), TransportNode::start(2));
    let peers = vec![unreachable_peer(2)];
    a.transport.set_membership(PeerMembership { peers, ..PeerMembership::default() });
    let (peers, told) = (vec![a.as_peer()], [MemberId(1)].into());
    b.transport.set_membership(PeerMembership {
        peers,
        reported_by_others: told,
        ..PeerMembership::default()
    });
    connect(&a, &b);
    let mut writer = a.transport.open_snapshot(MemberId(2), Bytes::new()).unwrap();
    writer.write_all(b"body").unwrap();
    writer.finish().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert!(runtime.block_on(a.transport.ask(MemberId(2), Bytes::from_static(b"hi"))).is_err());
    assert!(b.refused("unknown_member") > 0);
}

#[test]
fn a_second_process_is_refused_whichever_side_has_connected() {
    let (a, b) = one_way_pair();
    let another = LocalMember { boot: 2, run: 99, ..local(2) };
    let shown = || answer(&exchange_bytes(&a, &hello_to(&a, another, 99).encode()));
    eventually("the other process is seen to live", || shown() == Some(StreamRefusal::Boot));
    drop(b);
    eventually("it has ended", || shown().is_none());
}

#[test]
fn each_side_knows_which_direction_fails() {
    let (a, b) = one_way_pair();
    let connections = |node: &TransportNode| node.transport.traffic()[0].connections.clone();
    eventually("a has failed", || connections(&a).dial_failure.is_some());
    assert!(!connections(&a).outbound && connections(&a).inbound);
    assert!(connections(&b).outbound && !connections(&b).inbound);
    let later = Instant::now() + Duration::from_secs(60);
    let [by_a, by_b] = [(&a, 2), (&b, 1)]
        .map(|(node, id)| connections(node).one_way_warning(MemberId(id), later).unwrap());
    assert!(by_a.starts_with("this member cannot connect to peer 2 ("), "{by_a}");
    assert!(by_b.starts_with("peer 1 has not connected to this member"), "{by_b}");
    assert_eq!(connections(&a).one_way_warning(MemberId(2), Instant::now()), None, "not at once");
}
