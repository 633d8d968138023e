//! Tests of the connections that a member refuses, and of a member's reaction when peers refuse it.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use super::*;

#[test]
fn two_clusters_at_each_others_addresses_refuse_each_other() {
    let a = TransportNode::start(1);
    let other = LocalMember { cluster: ClusterId(0xc2), ..local(2) };
    let b = TransportNode::start_as(
        other,
        TransportEventRecorder::default(),
        TransportLimits::default(),
    );
    a.knows(&[&b]);
    b.knows(&[&a]);
    eventually("both have refused", || a.refused("cluster_id") > 1 && b.refused("cluster_id") > 1);
    assert!(a.transport.connected().is_empty() && b.transport.connected().is_empty());
    assert_eq!(a.transport.send(MemberId(2), Bytes::new()), Err(SendError::NotConnected));
}

#[test]
fn each_wrong_claim_is_answered_with_its_reason_and_nothing_after_it_is_read() {
    let a = TransportNode::start(1);
    let mut bound = peer_at(MemberId(2), "127.0.0.1:1".parse().unwrap());
    bound.incarnation = Some(Incarnation([2; 16]));
    let removed = BTreeSet::from([MemberId(3)]);
    a.transport.set_membership(PeerMembership {
        peers: vec![bound],
        removed,
        ..PeerMembership::default()
    });
    let right = hello_to(&a, local(2), 1);
    for (hello, refusal) in [
        (Hello { cluster: ClusterId(9), ..right }, StreamRefusal::Cluster),
        (Hello { to: MemberId(9), ..right }, StreamRefusal::Receiver),
        (Hello { from: MemberId(9), ..right }, StreamRefusal::Sender),
        (Hello { from: MemberId(1), ..right }, StreamRefusal::Sender),
        (Hello { from: MemberId(3), ..right }, StreamRefusal::Removed),
        (Hello { incarnation: Incarnation([9; 16]), ..right }, StreamRefusal::Incarnation),
        (Hello { answer: Some(StreamRefusal::Key), ..right }, StreamRefusal::Protocol),
    ] {
        let before = a.refused(refusal.label());
        let mut bytes = bytes::BytesMut::from(&hello.encode()[..]);
        wire::frame::put(&mut bytes, wire::frame::FrameKind::Message, b"must not be read");
        assert_eq!(answer(&exchange_bytes(&a, &bytes)), Some(refusal));
        assert_eq!(a.refused(refusal.label()), before + 1);
    }
    let mut bytes = bytes::BytesMut::from(&right.encode()[..]);
    wire::frame::put(&mut bytes, wire::frame::FrameKind::Message, b"may be read");
    assert_eq!(answer(&exchange_bytes(&a, &bytes)), None);
    eventually("the right one is read", || a.messages().len() == 1);
    assert_eq!(&a.messages()[0].1[..], b"may be read");
}

#[test]
fn a_lower_boot_counter_or_a_second_process_with_it_is_refused() {
    let a = TransportNode::start(1);
    let nowhere = peer_at(MemberId(2), "127.0.0.1:1".parse().unwrap());
    a.transport
        .set_membership(PeerMembership { peers: vec![nowhere], ..PeerMembership::default() });
    let at = |boot, run| {
        let hello = hello_to(&a, LocalMember { boot, ..local(2) }, run);
        answer(&exchange_bytes(&a, &hello.encode()))
    };
    assert_eq!(at(5, 1), None);
    assert_eq!(at(5, 1), None, "the same process again");
    assert_eq!(at(5, 2), Some(StreamRefusal::Boot), "another process with the same counter");
    assert_eq!(at(4, 1), Some(StreamRefusal::Boot));
    assert_eq!(at(6, 2), None);
}

#[test]
fn an_image_older_than_a_promise_is_refused_and_the_members_own_disk_accepted() {
    let a = TransportNode::start(1);
    let nowhere = peer_at(MemberId(2), "127.0.0.1:1".parse().unwrap());
    a.transport
        .set_membership(PeerMembership { peers: vec![nowhere], ..PeerMembership::default() });
    let shows = |as_local: LocalMember| {
        answer(&exchange_bytes(&a, &hello_to(&a, as_local, as_local.run).encode()))
    };
    assert_eq!(shows(local(2)), None);
    a.marks.record_promise(MemberId(2), acknowledged(10));
    assert_eq!(shows(restarted(9)), Some(StreamRefusal::Amnesia));
    assert_eq!(a.refused("amnesia"), 1);
    assert_eq!(shows(restarted(10)), None);
}

#[test]
fn an_accepted_process_is_disconnected_after_a_report_of_its_promises() {
    let (a, c) = (TransportNode::start(1), TransportNode::start(3));
    let b = TransportNode::start_as(
        restarted(9),
        TransportEventRecorder::default(),
        TransportLimits::default(),
    );
    a.marks.admit(MemberId(2), &local(2).process_claim()).unwrap();
    a.marks.record_promise(MemberId(2), acknowledged(10));
    b.knows(&[&a, &c]);
    c.knows(&[&b]);
    connect(&b, &c);
    a.knows(&[&c]);
    c.knows(&[&a, &b]);
    eventually("c cuts b off", || !c.transport.connected().contains_key(&MemberId(2)));
    a.knows(&[&b, &c]);
    let told = || b.events.disowned.lock().unwrap().contains(&StreamRefusal::Amnesia);
    eventually("b is told by both", told);
    assert!(c.refused("amnesia") > 0 && a.refused("amnesia") > 0);
    assert!(a.transport.connected().contains_key(&MemberId(3)));
}

#[test]
fn a_member_reports_its_own_promises_and_its_peers_keep_them() {
    let (a, b) = connected_pair();
    *b.events.promised.lock().unwrap() = acknowledged(10);
    let path = a._dir.path().join("marks");
    let refuses = || {
        let shown = restarted(9).process_claim();
        matches!(
            WitnessFile::open(&path).unwrap().admit(MemberId(2), &shown),
            Err(witness_file::AdmitError::Refused(StreamRefusal::Amnesia))
        )
    };
    eventually("a has it on its disk", refuses);
    assert!(a.transport.connected().contains_key(&MemberId(2)), "b is well");
}

#[test]
fn a_removed_member_is_told_so_by_a_peer() {
    let (a, b) = connected_pair();
    let removed = BTreeSet::from([MemberId(2)]);
    a.transport.set_membership(PeerMembership { removed, ..PeerMembership::default() });
    eventually("b hears it", || b.events.removed.lock().unwrap().contains(&MemberId(1)));
}

#[test]
fn refusals_are_reported_once_they_leave_no_quorum_and_not_after_one() {
    let (a, b, c) = (TransportNode::start(1), TransportNode::start(2), TransportNode::start(3));
    let knows_another_c = |node: &TransportNode, other: &TransportNode| {
        let bound = PeerRecord { incarnation: Some(Incarnation([9; 16])), ..c.as_peer() };
        let peers = vec![other.as_peer(), bound];
        node.transport.set_membership(PeerMembership { peers, ..PeerMembership::default() });
    };
    knows_another_c(&a, &b);
    b.knows(&[&a, &c]);
    c.knows(&[&a, &b]);
    connect(&b, &c);
    eventually("a refuses c again and again", || a.refused("incarnation") > 2);
    assert!(c.events.disowned.lock().unwrap().is_empty());
    knows_another_c(&b, &a);
    eventually("c is told", || {
        c.events.disowned.lock().unwrap().contains(&StreamRefusal::Incarnation)
    });
    assert!(b.events.disowned.lock().unwrap().is_empty());
}

#[test]
fn a_peer_known_only_from_lists_may_send_but_can_not_disown_a_member() {
    let (a, b, c, d) = (
        TransportNode::start(1),
        TransportNode::start(2),
        TransportNode::start(3),
        TransportNode::start(4),
    );
    let e = TransportNode::start(5);
    let with_told = |told: &[&TransportNode]| {
        let peers = [&a].iter().chain(told).map(|node| node.as_peer()).collect();
        let told = told.iter().map(|node| node.local.member).collect();
        b.transport.set_membership(PeerMembership {
            peers,
            reported_by_others: told,
            ..PeerMembership::default()
        });
    };
    for node in [&c, &d, &e] {
        let other_b = PeerRecord { incarnation: Some(Incarnation([9; 16])), ..b.as_peer() };
        node.transport
            .set_membership(PeerMembership { peers: vec![other_b], ..PeerMembership::default() });
    }
    a.knows(&[&b]);
    with_told(&[&c, &d, &e]);
    connect(&a, &b);
    let refused = || [&c, &d, &e].iter().all(|node| node.refused("incarnation") > 1);
    eventually("they refuse it again and again", refused);
    assert!(b.events.disowned.lock().unwrap().is_empty());
    let removed = BTreeSet::from([MemberId(2)]);
    d.transport.set_membership(PeerMembership { removed, ..PeerMembership::default() });
    eventually("one says that it was removed", || d.refused("removed") > 1);
    assert!(b.events.removed.lock().unwrap().is_empty());
    let state = Hello { purpose: StreamPurpose::State, ..hello_to(&b, d.local, 4) };
    assert_eq!(answer(&exchange_bytes(&b, &state.encode())), Some(StreamRefusal::Sender));
    c.knows(&[&b]);
    connect(&b, &c);
    c.transport.send(MemberId(2), Bytes::from_static(b"I lead")).unwrap();
    eventually("it is heard", || b.messages().contains(&(MemberId(3), "I lead".into())));
    with_told(&[]);
    eventually("it is dropped", || !b.transport.connected().contains_key(&MemberId(3)));
}

/// The peer accepts each stream and ends it. Without growing delays, the member would dial about
/// seventy times in the time of this test.
#[test]
fn a_peer_that_ends_each_stream_at_once_is_dialled_ever_less_often() {
    let redial = (Duration::from_millis(20), Duration::from_secs(3_600));
    let limits = TransportLimits { redial, ..TransportLimits::default() };
    let a = TransportNode::start_as(local(1), TransportEventRecorder::default(), limits);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = peer_at(MemberId(2), listener.local_addr().unwrap());
    let hello = hello_to(&a, local(2), 1).encode();
    let dials = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&dials);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            counted.fetch_add(1, Relaxed);
            let _ = stream.read_exact(&mut [0; HELLO_BYTES]);
            let _ = stream.write_all(&hello);
        }
    });
    a.transport.set_membership(PeerMembership { peers: vec![peer], ..PeerMembership::default() });
    eventually("it is dialled again", || dials.load(Relaxed) > 2);
    std::thread::sleep(Duration::from_secs(2));
    let dials = dials.load(Relaxed);
    assert!(dials < 20, "{dials} dials");
}
