//! Tests of fronts (the threads that serve clients) on loopback: their limits, and fairness between
//! clients.

use std::io::{Read, Write};

use axum::{Extension, routing::get};

use node_engine::tls::{TlsFiles, TlsPolicy, node_key_of};
use node_state::identity::NodeKey;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

use super::*;

fn start_front(router: Router) -> (ServingThreads, SocketAddr) {
    start_with_max_connections(router, MAX_CONNECTIONS)
}

fn start_with_max_connections(router: Router, connections: usize) -> (ServingThreads, SocketAddr) {
    start(router, None, connections)
}

fn start(
    router: Router,
    tls: Option<Arc<ClientListenerTls>>,
    connections: usize,
) -> (ServingThreads, SocketAddr) {
    let socket = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let limits = ClientLimits {
        max_concurrent_streams: u32::MAX,
        keepalive_interval: Duration::ZERO,
        keepalive_timeout: Duration::ZERO,
        largest_request: 2 << 20,
    };
    let listener = ClientListener { socket, tls, router, direct: None };
    let waits = IdleTimeouts { handshake_step: FOR_EVER, unread: UNREAD };
    let places = ConnectionLimits::new(connections, limits.largest_request, waits, Arc::default());
    (ServingThreads::start_bounded(1, &[listener], limits, &places).unwrap(), address)
}

/// Maximum time without reading any byte while answers wait.
const UNREAD: Duration = Duration::from_secs(2);
/// Time limit for handshakes that no test reaches.
const FOR_EVER: Duration = Duration::from_secs(3_600);
/// Time limit after which a test fails. It is much longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn request(address: SocketAddr, path: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_request_has_the_address_of_its_client() {
    let remote =
        |Extension(who): Extension<ClientConnection>| async move { who.remote.ip().to_string() };
    let (fronts, address) = start_front(Router::new().route("/", get(remote)));
    let answer = request(address, "/");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("127.0.0.1"), "{answer}");
    fronts.stop(Duration::from_secs(5));
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn a_request_to_upgrade_is_answered_although_the_connection_closes() {
    let (_fronts, address) = start_front(Router::new().route("/", get(|| async { "x" })));
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    let head = "GET / HTTP/1.1\r\nHost: h\r\nUpgrade: h2c\r\nConnection: close, Upgrade\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with('x'), "{answer:?}");
}

#[test]
fn connections_above_the_limit_are_closed_until_others_end() {
    let (fronts, address) =
        start_with_max_connections(Router::new().route("/", get(|| async { "x" })), 2);
    let connect = || std::net::TcpStream::connect(address).unwrap();
    let held = [connect(), connect()];
    let mut third = connect();
    assert!(matches!(third.read(&mut [0]), Ok(0) | Err(_)));
    drop(held);
    let start = Instant::now();
    loop {
        let mut stream = connect();
        let _ = write!(stream, "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
        let mut answer = String::new();
        if stream.read_to_string(&mut answer).is_ok() && answer.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "no place comes free");
    }
    fronts.stop(Duration::from_secs(5));
}

#[tokio::test]
async fn the_number_of_streams_of_a_connection_is_limited() {
    let (_fronts, address) = start_front(Router::new());
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The client sends the preface and empty settings. The server's answer begins with its
    // settings.
    let hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    tokio::io::AsyncWriteExt::write_all(&mut stream, hello).await.unwrap();
    let mut head = [0; 9];
    tokio::io::AsyncReadExt::read_exact(&mut stream, &mut head).await.unwrap();
    assert_eq!(head[3], 4, "a SETTINGS frame");
    let mut settings = vec![0; usize::from(head[2])];
    tokio::io::AsyncReadExt::read_exact(&mut stream, &mut settings).await.unwrap();
    let streams = settings.chunks(6).find(|setting| setting[..2] == [0, 3]).unwrap();
    assert_eq!(streams[2..], MAX_STREAMS_PER_CONNECTION.to_be_bytes());
}

#[test]
fn a_request_that_never_ends_is_cut_off_at_the_deadline() {
    let forever = || async { std::future::pending::<()>().await };
    let (fronts, address) = start_front(Router::new().route("/", get(forever)));
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    // `stop` returns although the request doesn't end.
    fronts.stop(Duration::from_millis(200));
}

/// Makes the TLS settings of a listener, and a connector for its clients.
fn secure() -> (Arc<ClientListenerTls>, TlsConnector) {
    let (tls, connector, _) = secure_for(false);
    (tls, connector)
}

/// Makes the TLS settings of a listener, a connector for its clients, and the key of the listener's
/// certificate. If `mutual`, the clients present that certificate too.
fn secure_for(mutual: bool) -> (Arc<ClientListenerTls>, TlsConnector, NodeKey) {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let (cert, key) = (dir.path().join("crt"), dir.path().join("key"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let trusted_ca = mutual.then(|| cert.clone());
    let files = TlsFiles { cert, key, trusted_ca, ..TlsFiles::default() };
    let tls = ClientListenerTls::new(&files, &TlsPolicy::default(), &[]).unwrap();
    let certificate = CertificateDer::from(made.cert.der().to_vec());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let node_key = node_key_of(&certificate).unwrap();
    let config = if mutual {
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        builder.with_client_auth_cert(vec![certificate], key).unwrap()
    } else {
        builder.with_no_client_auth()
    };
    (Arc::new(tls), TlsConnector::from(Arc::new(config)), node_key)
}

#[tokio::test]
async fn a_client_with_the_key_of_a_removed_member_is_disconnected_and_refused() {
    let (tls, connector, key) = secure_for(true);
    let router = Router::new().route("/", get(|| async { "x" }));
    let (_fronts, address) = start(router, Some(Arc::clone(&tls)), 8);
    let open = async || {
        let tcp = TcpStream::connect(address).await.unwrap();
        connector.connect(ServerName::try_from("127.0.0.1").unwrap(), tcp).await
    };
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";
    let mut stream = open().await.unwrap();
    stream.write_all(REQUEST).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    tls.set_refused_keys([NodeKey([1; 32])].into());
    stream.write_all(REQUEST).await.unwrap();
    tls.set_refused_keys([key].into());
    // The client can still read an answer that the server sent before it refused the key. Then the
    // connection ends.
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest));
    let _ = ended.await.expect("it is put out");
    let mut again = Vec::new();
    if let Ok(mut stream) = open().await {
        let _ = stream.write_all(REQUEST).await;
        let _ = stream.read_to_end(&mut again).await;
    }
    assert!(again.is_empty(), "{}", String::from_utf8_lossy(&again));
}

async fn connect_from(from: &str, to: SocketAddr) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    socket.connect(to).await.unwrap()
}

#[tokio::test]
async fn silent_connections_of_one_host_do_not_block_other_hosts() {
    let (tls, connector) = secure();
    let (_fronts, address) = start(Router::new(), Some(tls), MAX_CONNECTIONS);
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(connect_from("127.0.0.66", address).await);
    }
    // While the 300 silent connections stay open, another host can connect.
    let tcp = connect_from("127.0.0.9", address).await;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let entered = tokio::time::timeout(PATIENCE, connector.connect(name, tcp)).await;
    entered.expect("it is let in").unwrap();
}

/// HTTP/2 client that writes frames by hand. It begins requests and doesn't end them, and sends
/// only as much as flow control allows.
struct HalfSender {
    media: &'static str,
    stream: TcpStream,
    window: usize,
    ended: std::collections::BTreeSet<u32>,
}

impl HalfSender {
    /// Connects a client whose requests have the media type `media`.
    async fn connect(media: &'static str, address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        stream.write_all(hello).await.unwrap();
        let ended = std::collections::BTreeSet::new();
        let mut client = Self { media, stream, window: 65_535, ended };
        // The server's limits apply to this connection once the client has acknowledged the
        // server's settings.
        client.read().await;
        client.write(4, 1, 0, &[]).await;
        client
    }

    async fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.stream.write_all(&frame).await.unwrap();
    }

    async fn read(&mut self) {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).await.unwrap();
        let number = |bytes: &[u8]| bytes.iter().fold(0, |n, byte| n << 8 | u32::from(*byte));
        let mut payload = vec![0; number(&head[..3]) as usize];
        self.stream.read_exact(&mut payload).await.unwrap();
        let stream = number(&head[5..]);
        match head[3] {
            // The frame is the headers of an answer, or a reset of the stream. Either of them ends
            // the request.
            1 | 3 => drop(self.ended.insert(stream)),
            8 if stream == 0 => self.window += number(&payload) as usize,
            _ => {}
        }
    }

    async fn open(&mut self, stream: u32) {
        let mut headers = vec![0x83, 0x86, 0x04, 2, b'/', b'x', 0x01, 1, b'h'];
        headers.extend([0x0f, 0x10, u8::try_from(self.media.len()).unwrap()]);
        headers.extend(self.media.as_bytes());
        self.write(1, 4, stream, &headers).await;
    }

    /// Begins a message of 2 MB, and sends 4000 bytes of it.
    async fn claim(&mut self, stream: u32) {
        self.open(stream).await;
        while self.window < 1 << 15 {
            self.read().await;
        }
        let mut message = vec![0, 0, 0x1f, 0, 0];
        message.resize(4_000, 0);
        self.window -= message.len();
        self.write(0, 0, stream, &message).await;
    }

    /// Begins a message of 2 MB, and sends half of it.
    async fn begin(&mut self, stream: u32) {
        self.open(stream).await;
        self.write(0, 0, stream, &[0, 0, 0x1f, 0, 0]).await;
        for _ in 0..64 {
            while self.window < 1 << 15 {
                self.read().await;
            }
            if self.ended.contains(&stream) {
                return;
            }
            self.window -= 1 << 14;
            self.write(0, 0, stream, &[0; 1 << 14]).await;
        }
    }
}

#[tokio::test]
async fn a_client_with_too_many_unfinished_requests_is_refused_more() {
    let gather = async |body: axum::body::Body| {
        axum::body::to_bytes(body, usize::MAX).await.is_ok().to_string()
    };
    let (_fronts, address) = start_front(Router::new().route("/x", axum::routing::post(gather)));
    let mut client = HalfSender::connect("application/grpc", address).await;
    for number in 0..24 {
        client.begin(2 * number + 1).await;
    }
    // The client has begun messages of 48 MB in total, but the server may hold only 32 MiB.
    let refused = async {
        while client.ended.len() < 8 {
            client.read().await;
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.expect("some are refused");
    let answer = tokio::task::spawn_blocking(move || request(address, "/y")).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 404"), "others are served: {answer}");
}

#[tokio::test]
async fn a_client_that_announces_too_many_bytes_is_refused_more() {
    let gather = async |body: axum::body::Body| {
        axum::body::to_bytes(body, usize::MAX).await.is_ok().to_string()
    };
    let (_fronts, address) = start_front(Router::new().route("/x", axum::routing::post(gather)));
    let mut client = HalfSender::connect("application/grpc", address).await;
    for number in 0..1_000 {
        client.claim(2 * number + 1).await;
    }
    // The headers announce messages of 2 GB in total, but the server may hold only 32 MiB.
    let refused = async {
        while client.ended.len() < 980 {
            client.read().await;
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.expect("most are refused");
}

#[tokio::test]
async fn a_body_that_is_not_grpc_announces_no_length() {
    let gather = async |body: axum::body::Body| {
        axum::body::to_bytes(body, usize::MAX).await.is_ok().to_string()
    };
    let (_fronts, address) = start_front(Router::new().route("/x", axum::routing::post(gather)));
    let mut client = HalfSender::connect("application/json", address).await;
    // The media type isn't gRPC's. So the first bytes of a body are no gRPC message header, and
    // announce no length.
    for number in 0..500 {
        client.claim(2 * number + 1).await;
    }
    // This is the only request that ends, so it is the only one that is answered.
    client.open(1_001).await;
    client.write(0, 1, 1_001, b"x").await;
    let answered = async {
        while !client.ended.contains(&1_001) {
            client.read().await;
        }
    };
    tokio::time::timeout(PATIENCE, answered).await.expect("it is answered");
    assert_eq!(client.ended.len(), 1);
}

#[test]
fn stopping_does_not_wait_for_unfinished_handshakes() {
    let (tls, _) = secure();
    let (fronts, address) = start(Router::new(), Some(tls), MAX_CONNECTIONS);
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    // First bytes of a TLS ClientHello.
    stream.write_all(&[22, 3, 1]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let (stopped, told) = mpsc::channel();
    std::thread::spawn(move || {
        fronts.stop(FOR_EVER);
        let _ = stopped.send(());
    });
    told.recv_timeout(PATIENCE).expect("it has stopped");
}

#[test]
fn a_client_that_reads_nothing_is_disconnected_and_a_slow_one_is_not() {
    const BYTES: usize = 40 << 20;
    let large = || async { "x".repeat(BYTES) };
    let (_fronts, address) = start_front(Router::new().route("/", get(large)));
    let ask = || {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
        stream
    };
    let (mut never, mut slow) = (ask(), ask());
    let start = Instant::now();
    let (mut got, mut part) = (0, vec![0; 1 << 20]);
    while start.elapsed() < 3 * UNREAD {
        got += slow.read(&mut part).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    got += slow.read_to_end(&mut Vec::new()).unwrap();
    assert!(got > BYTES, "who reads a little gets all of it: {got}");
    let mut left = Vec::new();
    let _ = never.read_to_end(&mut left);
    assert!(left.len() < BYTES, "who reads nothing for long does not");
}

#[tokio::test]
async fn a_client_with_a_zero_window_is_disconnected() {
    let answer = || async { "x".repeat(100) };
    let (_fronts, address) = start_front(Router::new().route("/x", axum::routing::post(answer)));
    let mut client = HalfSender::connect("application/grpc", address).await;
    // The client sets the window of new streams to 0, so the server can't send any bytes on them.
    client.write(4, 0, 0, &[0, 4, 0, 0, 0, 0]).await;
    client.open(1).await;
    client.write(0, 1, 1, &[]).await;
    let closed = async { while client.stream.read_u8().await.is_ok() {} };
    tokio::time::timeout(PATIENCE, closed).await.expect("it is closed");
}

/// TLS accepts bytes that the socket doesn't take yet. They must be sent although the connection
/// has nothing more to write.
#[tokio::test]
async fn a_slow_reader_gets_all_of_each_large_answer_over_tls() {
    let (tls, connector) = secure();
    let large = |axum::extract::Path(n): axum::extract::Path<usize>| async move { "x".repeat(n) };
    let (_fronts, address) = start(Router::new().route("/{n}", get(large)), Some(tls), 64);
    for step in 0..16 {
        let bytes = (4 << 20) + step * (64 << 10);
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(8 << 10).unwrap();
        let tcp = socket.connect(address).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let mut stream = connector.connect(name, tcp).await.unwrap();
        // The request lets the connection stay open. If it were closed after the answer, closing
        // would flush the remaining bytes, and the test would show nothing.
        let request = format!("GET /{bytes} HTTP/1.1\r\nHost: h\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let mut body = vec![0; bytes];
        let read = tokio::time::timeout(PATIENCE, stream.read_exact(&mut body));
        read.await.expect("all of it comes").unwrap();
    }
}
