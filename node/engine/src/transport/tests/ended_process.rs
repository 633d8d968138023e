//! Tests of how a member notices that the process of a peer has ended.

use super::*;

fn ended(node: &TransportNode) -> Vec<MemberId> {
    node.events.ended_processes.lock().unwrap().clone()
}

#[test]
fn the_end_of_a_process_is_reported_once() {
    let (a, b) = connected_pair();
    // The stream has now been open for so long that the peer is dialled again as soon as the stream
    // ends.
    std::thread::sleep(Duration::from_millis(1_100));
    drop(b);
    eventually("a learns of the end", || !ended(&a).is_empty());
    // Within these 500 ms, the peer is dialled several times more.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(ended(&a), [MemberId(2)]);
    assert_eq!(a.events.reachable.lock().unwrap().last(), Some(&false));
}

/// The peer's process hangs: its listening socket remains open.
#[test]
fn a_peer_that_still_listens_has_not_ended() {
    let (a, b) = connected_pair();
    let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = peer_at(MemberId(2), listening.local_addr().unwrap());
    a.transport.set_membership(PeerMembership { peers: vec![other], ..PeerMembership::default() });
    drop(b);
    eventually("the streams end", || a.events.reachable.lock().unwrap().last() == Some(&false));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(ended(&a), []);
}

/// One of the peer's two addresses refuses connections.
#[test]
fn all_addresses_must_refuse_connections() {
    let (a, b) = connected_pair();
    let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut record = b.as_peer();
    record.urls.extend(peer_at(MemberId(2), listening.local_addr().unwrap()).urls);
    a.transport.set_membership(PeerMembership { peers: vec![record], ..PeerMembership::default() });
    connect(&a, &b);
    drop(b);
    eventually("the streams end", || a.events.reachable.lock().unwrap().last() == Some(&false));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(ended(&a), []);
    drop(listening);
    eventually("the second address refuses, too", || ended(&a) == [MemberId(2)]);
}
