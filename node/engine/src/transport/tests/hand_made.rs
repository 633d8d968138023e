//! Tests with peers that the test simulates. They prove their identity, and then act as no real
//! member does.

use super::*;

/// Opens a stream to `node`, and returns it once `node` has accepted the hello.
fn open(node: &TransportNode, purpose: StreamPurpose) -> TcpStream {
    open_as(local(2), node, purpose)
}

fn open_as(local: LocalMember, node: &TransportNode, purpose: StreamPurpose) -> TcpStream {
    let mut stream = TcpStream::connect(node.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let hello = Hello { purpose, ..hello_to(node, local, 1) };
    stream.write_all(&hello.encode()).unwrap();
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(answer(&bytes), None);
    stream
}

fn write(stream: &mut TcpStream, kind: wire::frame::FrameKind, payload: &[u8]) {
    let mut bytes = bytes::BytesMut::new();
    super::wire::frame::put(&mut bytes, kind, payload);
    stream.write_all(&bytes).unwrap();
}

/// Returns the payload of the next frame of kind `kind`; skips other frames.
fn read(stream: &mut TcpStream, kind: wire::frame::FrameKind) -> Vec<u8> {
    loop {
        let mut head = [0; super::wire::frame::HEADER_BYTES];
        stream.read_exact(&mut head).unwrap();
        let [a, b, c, d, found] = head;
        let mut payload = vec![0; u32::from_be_bytes([a, b, c, d]) as usize - 1];
        stream.read_exact(&mut payload).unwrap();
        if found == kind as u8 {
            return payload;
        }
    }
}

/// Accepts the next connection of `node`, and answers its hello as the member `local`.
fn accept_stream(
    listener: &std::net::TcpListener,
    node: &TransportNode,
    local: LocalMember,
) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
    stream.write_all(&hello_to(node, local, 1).encode()).unwrap();
    stream
}

fn knows_member_two(node: &TransportNode) {
    let nowhere = peer_at(MemberId(2), "127.0.0.1:1".parse().unwrap());
    node.transport
        .set_membership(PeerMembership { peers: vec![nowhere], ..PeerMembership::default() });
}

#[test]
fn a_snapshot_with_a_wrong_length_or_checksum_at_its_end_is_refused() {
    let a = TransportNode::start(1);
    knows_member_two(&a);
    let body = b"the whole store";
    let (len, crc) = (body.len() as u64, crc32c::crc32c(body));
    for (len, crc, installed) in [(len + 1, crc, 0), (len, crc ^ 1, 0), (len, crc, 1)] {
        let mut stream = open(&a, StreamPurpose::Snapshot);
        write(&mut stream, wire::frame::FrameKind::SnapshotHeader, b"head");
        write(&mut stream, wire::frame::FrameKind::SnapshotChunk, body);
        let end = [&len.to_be_bytes()[..], &crc.to_be_bytes()].concat();
        write(&mut stream, wire::frame::FrameKind::SnapshotEnd, &end);
        assert_eq!(read(&mut stream, wire::frame::FrameKind::SnapshotAnswer), [installed]);
    }
    assert_eq!(a.events.snapshots.lock().unwrap().len(), 1);
}

#[test]
fn the_newer_of_two_streams_of_a_peer_ends_the_older() {
    // The time-out is longer than any wait in this test. So the older stream can only end because
    // of the newer one.
    let limits = TransportLimits { dead_after: PATIENCE * 2, ..TransportLimits::default() };
    let a = TransportNode::start_as(local(1), TransportEventRecorder::default(), limits);
    knows_member_two(&a);
    let mut older = open(&a, StreamPurpose::Messages);
    write(&mut older, wire::frame::FrameKind::Message, b"1");
    eventually("the first is read", || a.messages().len() == 1);
    let mut newer = open(&a, StreamPurpose::Messages);
    let ended = older.read(&mut [0]);
    assert!(matches!(&ended, Ok(0)) || ended.is_err_and(|e| e.kind() != io::ErrorKind::WouldBlock));
    write(&mut newer, wire::frame::FrameKind::Message, b"2");
    eventually("the second is read", || a.messages().len() == 2);
}

/// Returns a transport of member 1. It dials `listener` as its peer 2.
fn node_that_dials(listener: &std::net::TcpListener) -> TransportNode {
    let limits = TransportLimits { dead_after: PATIENCE * 2, ..TransportLimits::default() };
    let node = TransportNode::start_as(local(1), TransportEventRecorder::default(), limits);
    let slow = peer_at(MemberId(2), listener.local_addr().unwrap());
    node.transport
        .set_membership(PeerMembership { peers: vec![slow], ..PeerMembership::default() });
    node
}

/// Accepts a message stream that `node` opens, reads nothing from it, and fills its queue. Returns
/// the stream and the number of queued messages.
fn open_and_fill_queue(
    listener: &std::net::TcpListener,
    node: &TransportNode,
    message: &Bytes,
) -> (TcpStream, usize) {
    let unread = accept_stream(listener, node, local(2));
    eventually("it is connected", || !node.transport.connected().is_empty());
    // First fill the sockets' buffers, and the batch that is being written.
    let (mut sent, before) = (0, node.transport.counters().dropped_full);
    eventually("the queue is full", || {
        while node.transport.send(MemberId(2), message.clone()).is_ok() {
            sent += 1;
        }
        node.transport.counters().dropped_full > before + 8
    });
    (unread, sent)
}

fn drop_and_wait_for_loss(stream: TcpStream, node: &TransportNode) {
    drop(stream);
    eventually("its loss is seen", || node.transport.connected().is_empty());
}

#[test]
fn messages_queued_for_a_lost_stream_are_not_sent_on_the_next() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let a = node_that_dials(&listener);
    // With messages of 64 KiB, the queue holds more than one batch.
    let (unread, _) = open_and_fill_queue(&listener, &a, &Bytes::from(vec![7; 64 << 10]));
    drop_and_wait_for_loss(unread, &a);
    let mut next = accept_stream(&listener, &a, local(2));
    eventually("it is connected again", || !a.transport.connected().is_empty());
    a.transport.send(MemberId(2), Bytes::from_static(b"fresh")).unwrap();
    assert_eq!(read(&mut next, wire::frame::FrameKind::Message), b"fresh");
}

#[test]
fn messages_lost_with_a_stream_free_their_room_in_the_queue() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let a = node_that_dials(&listener);
    let message = Bytes::from(vec![7; 1 << 20]);
    for round in 0..3 {
        let (unread, sent) = open_and_fill_queue(&listener, &a, &message);
        assert!(sent >= 60, "{sent} of 64 MiB in round {round}");
        drop_and_wait_for_loss(unread, &a);
    }
}

#[test]
fn an_answer_by_another_member_than_the_dialled_one_is_refused() {
    let a = TransportNode::start(1);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dialled = peer_at(MemberId(2), listener.local_addr().unwrap());
    let other = peer_at(MemberId(3), "127.0.0.1:1".parse().unwrap());
    let peers = vec![dialled, other];
    a.transport.set_membership(PeerMembership { peers, ..PeerMembership::default() });
    let mut stream = accept_stream(&listener, &a, local(3));
    let ended = stream.read(&mut [0]);
    assert!(matches!(&ended, Ok(0)) || ended.is_err_and(|e| e.kind() != io::ErrorKind::WouldBlock));
    assert_eq!(a.refused("unknown_member"), 1);
    assert!(a.transport.connected().is_empty());
}

/// Opens a stream to `node` as its peer, and makes it two-way.
fn open_two_way(node: &TransportNode) -> TcpStream {
    let mut stream = open(node, StreamPurpose::Messages);
    write(&mut stream, wire::frame::FrameKind::TwoWay, &[]);
    stream
}

fn is_connected(node: &TransportNode) -> bool {
    !node.transport.connected().is_empty()
}

#[test]
fn a_peer_of_an_older_build_is_sent_nothing_on_the_stream_that_it_opens() {
    let a = TransportNode::start(1);
    knows_member_two(&a);
    let mut stream = open(&a, StreamPurpose::Messages);
    write(&mut stream, wire::frame::FrameKind::Message, b"1");
    write(&mut stream, wire::frame::FrameKind::Ping, &[]);
    read(&mut stream, wire::frame::FrameKind::Pong);
    eventually("its message has arrived", || a.messages().len() == 1);
    assert!(!is_connected(&a));
    assert_eq!(a.transport.send(MemberId(2), Bytes::new()), Err(SendError::NotConnected));
    write(&mut stream, wire::frame::FrameKind::TwoWay, &[]);
    eventually("it has said that it is a newer one", || is_connected(&a));
    a.transport.send(MemberId(2), Bytes::from_static(b"hello")).unwrap();
    assert_eq!(read(&mut stream, wire::frame::FrameKind::Message), b"hello");
}

#[test]
fn an_older_build_that_was_dialled_is_sent_only_frames_that_it_knows() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let a = node_that_dials(&listener);
    let mut stream = accept_stream(&listener, &a, local(2));
    eventually("it is connected", || is_connected(&a));
    a.transport.send(MemberId(2), Bytes::from_static(b"hello")).unwrap();
    let mut kind = wire::frame::FrameKind::Ping as u8;
    while kind != wire::frame::FrameKind::Message as u8 {
        let mut head = [0; super::wire::frame::HEADER_BYTES];
        stream.read_exact(&mut head).unwrap();
        kind = head[4];
        assert!(kind <= wire::frame::FrameKind::MemberList as u8, "a frame of kind {kind}");
        let length = u32::from_be_bytes(head[..4].try_into().unwrap()) as usize;
        stream.read_exact(&mut vec![0; length - 1]).unwrap();
    }
    // This stream is not two-way, so a message to the side that opened it is not allowed.
    write(&mut stream, wire::frame::FrameKind::Message, b"no");
    eventually("the stream ends", || !is_connected(&a));
    assert!(a.messages().is_empty());
}

#[test]
fn messages_take_the_other_stream_when_the_carrier_breaks() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let a = node_that_dials(&listener);
    let mut dialled = accept_stream(&listener, &a, local(2));
    eventually("it is connected", || is_connected(&a));
    let mut stands_by = open_two_way(&a);
    write(&mut stands_by, wire::frame::FrameKind::Ping, &[]);
    read(&mut stands_by, wire::frame::FrameKind::Pong);
    a.transport.send(MemberId(2), Bytes::from_static(b"1")).unwrap();
    assert_eq!(read(&mut dialled, wire::frame::FrameKind::Message), b"1");
    drop(dialled);
    eventually("the loss is told", || a.events.reachable.lock().unwrap().ends_with(&[false, true]));
    a.transport.send(MemberId(2), Bytes::from_static(b"2")).unwrap();
    assert_eq!(read(&mut stands_by, wire::frame::FrameKind::Message), b"2");
    // The transport dials the peer again, but still sends its messages on the present stream.
    let _again = accept_stream(&listener, &a, local(2));
    a.transport.send(MemberId(2), Bytes::from_static(b"3")).unwrap();
    assert_eq!(read(&mut stands_by, wire::frame::FrameKind::Message), b"3");
}

#[test]
fn malformed_invitations_and_unknown_tokens_are_refused() {
    let unknown = [0xff, 0, 0, 0, 0, 0, 0, 0, 1];
    let messages = [0, 0, 0, 0, 0, 0, 0, 0, 1];
    for invitation in [&messages[..], &unknown[..], &[5], &[]] {
        let a = TransportNode::start(1);
        knows_member_two(&a);
        let mut stream = open_two_way(&a);
        write(&mut stream, wire::frame::FrameKind::Invite, invitation);
        eventually("the stream ends", || matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)));
    }
    let a = TransportNode::start(1);
    knows_member_two(&a);
    let mut stream = open(&a, StreamPurpose::TakeSnapshot);
    write(&mut stream, wire::frame::FrameKind::InvitationToken, &7_u64.to_be_bytes());
    let ended = stream.read(&mut [0]);
    assert!(matches!(ended, Ok(0) | Err(_)), "nobody has invited it");
}
