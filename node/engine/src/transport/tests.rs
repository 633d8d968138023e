//! Tests of transports on the loopback interface, with each other and with connections that are no
//! members.

mod ended_process;
mod hand_made;
mod one_way;
mod refusals;

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Mutex,
    time::Instant,
};

use super::{
    wire::hello::{HELLO_BYTES, Hello, StreamPurpose},
    *,
};

const CLUSTER: ClusterId = ClusterId(0xc1);
/// Time limit for an expected event, long enough for a loaded machine. A successful test doesn't
/// wait this long.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct TransportEventRecorder {
    messages: Mutex<Vec<(MemberId, Bytes)>>,
    snapshots: Mutex<Vec<(MemberId, Bytes, Vec<u8>)>>,
    removed: Mutex<Vec<MemberId>>,
    disowned: Mutex<Vec<StreamRefusal>>,
    promised: Mutex<Promise>,
    changed: Mutex<Option<Bytes>>,
    counted: Mutex<Vec<(MemberId, Bytes)>>,
    reachable: Mutex<Vec<bool>>,
    ended_processes: Mutex<Vec<MemberId>>,
    refuse_snapshots: bool,
}

impl PeerEvents for TransportEventRecorder {
    fn receive_message(&self, from: MemberId, message: Bytes) -> bool {
        self.messages.lock().unwrap().push((from, message));
        true
    }

    fn receive_snapshot(
        &self,
        from: MemberId,
        header: Bytes,
        mut body: SnapshotReader,
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        body.read_to_end(&mut bytes)?;
        self.snapshots.lock().unwrap().push((from, header, bytes));
        if self.refuse_snapshots { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn member_list(&self) -> Option<Bytes> {
        let changed = self.changed.lock().unwrap().clone();
        Some(changed.unwrap_or(Bytes::from_static(b"members")))
    }

    fn member_list_received(&self, from: MemberId, census: Bytes) {
        self.counted.lock().unwrap().push((from, census));
    }

    fn request(&self, from: MemberId, request: Bytes) -> BoxFuture<'static, Option<Bytes>> {
        let answer = format!("{from}: {}", String::from_utf8_lossy(&request));
        Box::pin(async move { (request != "?").then(|| answer.into()) })
    }

    fn state(&self, to: MemberId, mut out: SnapshotWriter) -> io::Result<()> {
        out.write_all(&[u8::try_from(to.0).unwrap(); 1 << 20])?;
        out.finish()
    }

    fn promised(&self) -> Promise {
        *self.promised.lock().unwrap()
    }

    fn process_ended(&self, peer: MemberId) {
        self.ended_processes.lock().unwrap().push(peer);
    }

    fn reachable(&self, _: MemberId, reachable: bool) {
        self.reachable.lock().unwrap().push(reachable);
    }

    fn removal_reported(&self, by: MemberId) {
        self.removed.lock().unwrap().push(by);
    }

    fn refused_by_quorum(&self, why: StreamRefusal) {
        self.disowned.lock().unwrap().push(why);
    }
}

struct TransportNode {
    transport: Transport,
    events: Arc<TransportEventRecorder>,
    local: LocalMember,
    marks: Arc<WitnessFile>,
    _dir: tempfile::TempDir,
}

impl TransportNode {
    fn start(member: u64) -> Self {
        // The time after which a silent stream counts as dead is so long that no stream breaks on a
        // slow machine.
        let limits = TransportLimits { dead_after: PATIENCE, ..TransportLimits::default() };
        Self::start_as(local(member), TransportEventRecorder::default(), limits)
    }

    fn start_as(local: LocalMember, seen: TransportEventRecorder, limits: TransportLimits) -> Self {
        Self::start_with(local, seen, limits, None)
    }

    fn start_with(
        local: LocalMember,
        seen: TransportEventRecorder,
        limits: TransportLimits,
        tls: Option<Arc<crate::tls::PeerTls>>,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let marks = Arc::new(WitnessFile::open(&dir.path().join("marks")).unwrap());
        let options = TransportOptions {
            local,
            listen: vec![ListenAddress {
                address: "127.0.0.1:0".parse().unwrap(),
                tls: tls.is_some(),
            }],
            tls,
            witness_file: Arc::clone(&marks),
            address_hints: None,
            limits,
        };
        let seen = Arc::new(seen);
        let transport = Transport::start(options, Arc::clone(&seen) as _).unwrap();
        Self { transport, events: seen, local, marks, _dir: dir }
    }

    fn address(&self) -> SocketAddr {
        self.transport.local_addresses()[0]
    }

    fn as_peer(&self) -> PeerRecord {
        peer_at(self.local.member, self.address())
    }

    fn knows(&self, others: &[&TransportNode]) {
        let peers = others.iter().map(|node| node.as_peer()).collect();
        self.transport.set_membership(PeerMembership { peers, ..PeerMembership::default() });
    }

    fn refused(&self, label: &str) -> u64 {
        let counters = self.transport.counters();
        counters.refused.into_iter().find(|(known, _)| *known == label).unwrap().1
    }

    fn messages(&self) -> Vec<(MemberId, Bytes)> {
        self.events.messages.lock().unwrap().clone()
    }
}

impl Drop for TransportNode {
    fn drop(&mut self) {
        self.transport.stop(PATIENCE);
    }
}

fn local(member: u64) -> LocalMember {
    let incarnation = Incarnation([u8::try_from(member).unwrap(); 16]);
    let (member, run, disk) = (MemberId(member), member, DiskState::default());
    LocalMember { cluster: CLUSTER, member, incarnation, boot: 1, run, disk }
}

fn peer_at(id: MemberId, address: SocketAddr) -> PeerRecord {
    let urls = vec![PeerUrl::parse(&format!("http://{address}")).unwrap()];
    PeerRecord { id, urls, incarnation: None, node_key: None }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn connected_pair() -> (TransportNode, TransportNode) {
    let (a, b) = (TransportNode::start(1), TransportNode::start(2));
    a.knows(&[&b]);
    b.knows(&[&a]);
    connect(&a, &b);
    (a, b)
}

fn connect(a: &TransportNode, b: &TransportNode) {
    eventually("both are connected", || {
        a.transport.connected().contains_key(&b.local.member)
            && b.transport.connected().contains_key(&a.local.member)
    });
}

/// Sends `bytes` to `node`. Returns the bytes that `node` sends before it closes the connection.
fn exchange_bytes(node: &TransportNode, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(node.address()).unwrap();
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn hello_to(node: &TransportNode, from: LocalMember, run: u64) -> Hello {
    Hello::new(&LocalMember { run, ..from }, node.local.member, StreamPurpose::Messages)
}

fn answer(bytes: &[u8]) -> Option<StreamRefusal> {
    let hello: [u8; HELLO_BYTES] = bytes.try_into().expect("exactly one hello comes back");
    Hello::decode(&hello).unwrap().answer
}

fn acknowledged(matched: u64) -> Promise {
    Promise { term: 3, matched, ..Promise::default() }
}

/// Returns member 2 after a restart, with `last` as the last log index on its disk.
fn restarted(last: u64) -> LocalMember {
    let disk = DiskState { term: 3, vote: 0, last };
    LocalMember { boot: 2, run: 22, disk, ..local(2) }
}

#[test]
fn messages_arrive_in_order_in_both_directions() {
    let (a, b) = connected_pair();
    for n in 0..1000u32 {
        a.transport.send(MemberId(2), Bytes::copy_from_slice(&n.to_be_bytes())).unwrap();
    }
    b.transport.send(MemberId(1), Bytes::from_static(b"back")).unwrap();
    eventually("all have arrived", || b.messages().len() == 1000 && a.messages().len() == 1);
    for (n, (from, message)) in (0u32..).zip(b.messages()) {
        assert_eq!((from, &message[..]), (MemberId(1), &n.to_be_bytes()[..]));
    }
}

#[test]
fn a_peer_is_connected_once_it_knows_this_member() {
    let (a, b) = (TransportNode::start(1), TransportNode::start(2));
    b.knows(&[]);
    a.knows(&[&b]);
    eventually("b refuses whom it does not know yet", || b.refused("unknown_member") > 0);
    b.knows(&[&a]);
    connect(&a, &b);
}

#[test]
fn sends_to_unknown_and_unconnected_peers_fail_with_different_errors() {
    let a = TransportNode::start(1);
    let nowhere = peer_at(MemberId(2), "127.0.0.1:1".parse().unwrap());
    a.transport
        .set_membership(PeerMembership { peers: vec![nowhere], ..PeerMembership::default() });
    assert_eq!(a.transport.send(MemberId(2), Bytes::new()), Err(SendError::NotConnected));
    assert_eq!(a.transport.send(MemberId(3), Bytes::new()), Err(SendError::Unknown));
    assert_eq!(a.transport.counters().dropped_not_connected, 1);
}

#[test]
fn a_message_too_long_for_a_frame_is_refused_at_once() {
    let limits = TransportLimits { frame_bytes: 100, ..TransportLimits::default() };
    let a = TransportNode::start_as(local(1), TransportEventRecorder::default(), limits);
    let nowhere = peer_at(MemberId(2), "127.0.0.1:1".parse().unwrap());
    a.transport
        .set_membership(PeerMembership { peers: vec![nowhere], ..PeerMembership::default() });
    let long = Bytes::from(vec![0; 101]);
    assert_eq!(a.transport.send(MemberId(2), long), Err(SendError::TooLong));
}

#[test]
fn a_member_sends_its_list_of_members_on_connecting_and_after_changes() {
    let (a, b) = connected_pair();
    let told = || b.events.counted.lock().unwrap().clone();
    eventually("b is told", || !told().is_empty());
    std::thread::sleep(TransportLimits::default().ping_interval * 2);
    let by_a = |text: &'static str| (MemberId(1), Bytes::from_static(text.as_bytes()));
    assert_eq!(told(), [by_a("members")], "it is not told again what it knows");
    *a.events.changed.lock().unwrap() = Some(Bytes::from_static(b"others"));
    eventually("b is told again", || told().len() == 2);
    assert_eq!(told(), [by_a("members"), by_a("others")]);
}

#[test]
fn a_removal_answer_from_another_cluster_is_ignored() {
    let a = TransportNode::start(1);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let impostor = peer_at(MemberId(2), listener.local_addr().unwrap());
    a.transport
        .set_membership(PeerMembership { peers: vec![impostor], ..PeerMembership::default() });
    // The sender of the refusal claims to be member 2, but of another cluster.
    let foreign = LocalMember { cluster: ClusterId(9), ..local(2) };
    let lie = Hello { answer: Some(StreamRefusal::Removed), ..hello_to(&a, foreign, 1) };
    let (mut stream, _) = listener.accept().unwrap();
    stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
    stream.write_all(&lie.encode()).unwrap();
    eventually("it is refused", || a.refused("cluster_id") == 1);
    assert!(a.events.removed.lock().unwrap().is_empty());
}

#[test]
fn junk_on_the_port_changes_nothing() {
    let (a, b) = connected_pair();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..200usize {
        let mut junk = vec![0; (round * 37) % 300];
        for byte in &mut junk {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (seed >> 33) as u8;
        }
        let good = hello_to(&a, local(2), 1).encode();
        match round % 3 {
            0 => {}
            1 => junk.splice(..0, good[..HELLO_BYTES / 2].iter().copied()).for_each(drop),
            _ => junk.splice(..0, *b"MUSTERP1\0\x01").for_each(drop),
        }
        exchange_bytes(&a, &junk);
    }
    a.transport.send(MemberId(2), Bytes::from_static(b"still here")).unwrap();
    eventually("it still works", || b.messages().len() == 1);
    assert!(a.messages().is_empty());
}

#[test]
fn the_queue_for_a_peer_that_reads_nothing_is_bounded() {
    let limits = TransportLimits {
        queue_bytes: 1 << 20,
        dead_after: PATIENCE,
        ..TransportLimits::default()
    };
    let a = TransportNode::start_as(local(1), TransportEventRecorder::default(), limits);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let slow = peer_at(MemberId(2), listener.local_addr().unwrap());
    a.transport.set_membership(PeerMembership { peers: vec![slow], ..PeerMembership::default() });
    let (mut stream, _) = listener.accept().unwrap();
    stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
    stream.write_all(&hello_to(&a, local(2), 1).encode()).unwrap();
    eventually("it is connected", || !a.transport.connected().is_empty());
    let message = Bytes::from(vec![7; 64 * 1024]);
    // The sockets' buffers hold a few MiB. After that the queue fills, and further messages are
    // dropped at once.
    let sent = (0..4096).filter(|_| a.transport.send(MemberId(2), message.clone()).is_ok()).count();
    assert!(sent < 2048, "{sent} of 64 KiB were taken");
    assert!(a.transport.counters().dropped_full > 0);
}

#[test]
fn connections_without_a_hello_are_bounded_and_closed() {
    let start = |handshake_timeout| {
        let limits = TransportLimits {
            waiting_connections: 4,
            handshake_timeout,
            ..TransportLimits::default()
        };
        let a = TransportNode::start_as(local(1), TransportEventRecorder::default(), limits);
        a.knows(&[]);
        a
    };
    let idle = |a: &TransportNode| TcpStream::connect(a.address()).unwrap();
    let a = start(Duration::from_secs(3_600));
    let mut silent: Vec<TcpStream> = (0..20).map(|_| idle(&a)).collect();
    eventually("those above the limit are closed at once", || {
        a.transport.counters().handshakes_over_limit == 16
    });
    for stream in &mut silent[4..] {
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
    let a = start(Duration::from_millis(200));
    assert!(matches!(idle(&a).read(&mut [0; 1]), Ok(0) | Err(_)), "after its time");
    eventually("it is counted", || a.transport.counters().handshakes_failed == 1);
}

#[test]
fn a_snapshot_arrives_whole_while_messages_overtake_it() {
    let (a, b) = connected_pair();
    let body: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let mut writer = a.transport.open_snapshot(MemberId(2), Bytes::from_static(b"head")).unwrap();
    assert!(a.transport.open_snapshot(MemberId(2), Bytes::new()).is_err(), "one at a time");
    writer.write_all(&body[..1_500_000]).unwrap();
    a.transport.send(MemberId(2), Bytes::from_static(b"meanwhile")).unwrap();
    eventually("a message passes it", || b.messages().len() == 1);
    writer.write_all(&body[1_500_000..]).unwrap();
    writer.finish().unwrap();
    let seen = b.events.snapshots.lock().unwrap();
    assert_eq!((&seen[0].1[..], seen[0].2.len()), (&b"head"[..], body.len()));
    assert!(seen[0].2 == body);
}

#[test]
fn a_snapshot_that_cannot_be_installed_is_reported() {
    let a = TransportNode::start(1);
    let full =
        TransportEventRecorder { refuse_snapshots: true, ..TransportEventRecorder::default() };
    let b = TransportNode::start_as(local(2), full, TransportLimits::default());
    a.knows(&[&b]);
    b.knows(&[&a]);
    connect(&a, &b);
    let mut writer = a.transport.open_snapshot(MemberId(2), Bytes::new()).unwrap();
    writer.write_all(b"body").unwrap();
    assert!(writer.finish().is_err());
}

#[test]
fn an_aborted_snapshot_is_not_installed() {
    let (a, b) = connected_pair();
    let mut writer = a.transport.open_snapshot(MemberId(2), Bytes::new()).unwrap();
    writer.write_all(&vec![1; 600_000]).unwrap();
    drop(writer);
    eventually("the next one is possible", || {
        a.transport.open_snapshot(MemberId(2), Bytes::new()).is_ok_and(|w| w.finish().is_ok())
    });
    assert!(b.events.snapshots.lock().unwrap().iter().all(|(_, _, body)| body.is_empty()));
}

#[test]
fn a_peer_that_restarts_is_reached_again() {
    let (a, b) = connected_pair();
    let address = b.address();
    drop(b);
    eventually("its absence is seen", || a.transport.connected().is_empty());
    let dir = tempfile::tempdir().unwrap();
    let options = TransportOptions {
        local: LocalMember { boot: 2, ..local(2) },
        listen: vec![ListenAddress { address, tls: false }],
        tls: None,
        witness_file: Arc::new(WitnessFile::open(&dir.path().join("marks")).unwrap()),
        address_hints: None,
        limits: TransportLimits::default(),
    };
    let again = Transport::start(options, Arc::new(TransportEventRecorder::default())).unwrap();
    again.set_membership(PeerMembership { peers: vec![a.as_peer()], ..PeerMembership::default() });
    eventually("it is reached", || !a.transport.connected().is_empty());
    again.stop(PATIENCE);
}

#[test]
fn a_connected_peer_is_checked_again_when_its_record_binds_an_incarnation() {
    let (a, b) = connected_pair();
    let bind = |incarnation| {
        let peers = vec![PeerRecord { incarnation: Some(incarnation), ..b.as_peer() }];
        a.transport.set_membership(PeerMembership { peers, ..PeerMembership::default() });
    };
    bind(b.local.incarnation);
    eventually("it is reached again", || !a.transport.connected().is_empty());
    assert_eq!(a.refused("incarnation"), 0);
    bind(Incarnation([9; 16]));
    eventually("it is refused", || a.refused("incarnation") > 0);
    assert!(a.transport.connected().is_empty());
}

#[tokio::test]
async fn a_request_of_a_member_is_answered_and_of_a_stranger_is_not() {
    let (a, b) = connected_pair();
    let to = b.local.member;
    assert_eq!(a.transport.ask(to, Bytes::from_static(b"hi")).await.unwrap(), "1: hi");
    assert!(a.transport.ask(to, Bytes::from_static(b"?")).await.is_err(), "it has no answer");
    assert!(a.transport.ask(MemberId(9), Bytes::new()).await.is_err());
    let stranger = TransportNode::start(9);
    stranger.knows(&[&b]);
    assert!(stranger.transport.ask(to, Bytes::from_static(b"hi")).await.is_err());
    assert!(b.refused("unknown_member") > 0);
}

#[tokio::test]
async fn a_joining_member_gets_the_list_of_members_and_the_state() {
    let (b, joiner) = (TransportNode::start(2), local(3));
    let url = b.as_peer().urls.remove(0);
    b.transport.set_membership(PeerMembership {
        peers: vec![peer_at(joiner.member, "127.0.0.1:9".parse().unwrap())],
        ..PeerMembership::default()
    });
    assert_eq!(ask_members(&url, None).await.unwrap(), "members");
    let read = |mut body: SnapshotReader| {
        let mut bytes = Vec::new();
        body.read_to_end(&mut bytes).map(|_| bytes)
    };
    let source = StateSource { member: b.local.member, url, key: None };
    let fetched = fetch_state(&source, None, &joiner, read).await.unwrap();
    assert_eq!(fetched, [3; 1 << 20]);
    let wiped = LocalMember { incarnation: Incarnation([7; 16]), ..joiner };
    for (who, why) in [(local(4), StreamRefusal::Sender), (wiped, StreamRefusal::Incarnation)] {
        match fetch_state(&source, None, &who, read).await {
            Err(JoinError::RefusedBy(refusal)) => assert_eq!(refusal, why),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_joining_member_takes_the_state_only_from_the_bound_key() {
    let dir = tempfile::tempdir().unwrap();
    let tls = crate::tls::tests::on_loopback(dir.path());
    let b = TransportNode::start_with(
        local(2),
        TransportEventRecorder::default(),
        TransportLimits::default(),
        Some(Arc::clone(&tls)),
    );
    // Each attempt has its own joining member, because the permit of the previous one may still be
    // in use.
    let joiners = [3, 4, 5].map(local);
    let peer = |joiner: &LocalMember| peer_at(joiner.member, "127.0.0.1:9".parse().unwrap());
    b.transport.set_membership(PeerMembership {
        peers: joiners.iter().map(peer).collect(),
        ..PeerMembership::default()
    });
    let url = PeerUrl::parse(&format!("https://{}", b.address())).unwrap();
    let read = |mut body: SnapshotReader| io::copy(&mut body, &mut io::sink());
    let keys = [(None, true), (tls.node_key(), true), (Some(NodeKey([7; 32])), false)];
    for (joiner, (key, fetched)) in joiners.iter().zip(keys) {
        let source = StateSource { member: b.local.member, url: url.clone(), key };
        let result = fetch_state(&source, Some(&tls), joiner, read).await;
        assert_eq!(result.is_ok(), fetched, "{key:?}: {result:?}");
    }
}

/// A change of address must not close a working stream, because messages on it would be lost.
#[test]
fn a_stream_stays_open_when_a_peers_address_changes() {
    let (a, b) = connected_pair();
    let port = b.address().port();
    let urls = ["http://localhost", "http://127.0.0.1", "http://192.0.2.1", "http://127.0.0.1"];
    let messages = (0u32..).map(|n| Bytes::copy_from_slice(&n.to_be_bytes()));
    for (url, message) in urls.into_iter().zip(messages) {
        let urls = vec![PeerUrl::parse(&format!("{url}:{port}")).unwrap()];
        let peers = vec![PeerRecord { urls, ..b.as_peer() }];
        a.transport.send(MemberId(2), message).unwrap();
        a.transport.set_membership(PeerMembership { peers, ..PeerMembership::default() });
        b.transport.send(MemberId(1), Bytes::from_static(b"back")).unwrap();
    }
    eventually("all have arrived", || b.messages().len() == 4 && a.messages().len() == 4);
    for node in [&a, &b] {
        assert_eq!(node.transport.traffic()[0].disconnects, 0);
    }
}

#[test]
fn a_peer_is_dialled_at_its_new_address() {
    let (a, b) = (TransportNode::start(1), TransportNode::start(2));
    b.knows(&[&a]);
    // Nothing answers at this address, so an attempt to connect to it takes the full time limit.
    let nowhere = peer_at(MemberId(2), "192.0.2.1:1".parse().unwrap());
    a.transport
        .set_membership(PeerMembership { peers: vec![nowhere], ..PeerMembership::default() });
    a.knows(&[&b]);
    connect(&a, &b);
}
