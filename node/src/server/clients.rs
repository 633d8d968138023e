//! Listening for clients: HTTP/1.1 and HTTP/2 on one port, plain or TLS.
//!
//! Each front is a thread with a current-thread runtime of its own, so that a request is served
//! where its connection is, without waking another core.

use std::{
    io,
    net::{SocketAddr, TcpListener as StdListener},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use axum::Router;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    runtime,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

use crate::{http::Lenient, log_limit::LogLimit, tls::ClientListenerTls};

/// Connections of clients that may be open at once, all fronts together; more are closed at once.
/// Fewer if the process may not open twice as many files: log and store must always find some.
const MAX_CONNECTIONS: usize = 10_000;
/// Streams that one connection may have open, whatever `--max-concurrent-streams` allows beyond it:
/// each may keep a request in memory that is as large as requests may be.
const MAX_STREAMS_PER_CONNECTION: u32 = 4096;
/// Connections that may be in their TLS handshake at once on one front; more wait to be accepted.
const HANDSHAKES: usize = 256;
/// How long a TLS handshake, or the head of an HTTP/1 request, may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// After an accept failed (most often: too many open files).
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Bytes that one stream may send before it is read: more than etcd's largest request.
const STREAM_WINDOW: u32 = 2 << 20;
/// Bytes that one connection may send before it is read.
const CONNECTION_WINDOW: u32 = 8 << 20;
/// Bytes of an HTTP/2 request's header list.
const HEADER_LIST_BYTES: u32 = 16 << 10;

/// Who sent a request: in the extensions of each.
#[derive(Clone, Debug)]
pub struct ClientConnection {
    /// The socket's other end.
    pub remote: SocketAddr,
    /// Common name of its certificate, if it showed one.
    pub common_name: Option<Arc<str>>,
}

/// One address to listen on, and what is served there.
pub struct ClientListener {
    /// The bound socket.
    pub socket: StdListener,
    /// Its TLS, if its URL is https.
    pub tls: Option<Arc<ClientListenerTls>>,
    /// What answers.
    pub router: Router,
}

/// HTTP/2 settings that flags decide.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// `--max-concurrent-streams`
    pub max_concurrent_streams: u32,
    /// `--grpc-keepalive-interval`; zero: never
    pub keepalive_interval: Duration,
    /// `--grpc-keepalive-timeout`; zero: wait for ever
    pub keepalive_timeout: Duration,
}

/// The running fronts.
pub struct Fronts {
    stopping: CancellationToken,
    ended: Vec<mpsc::Receiver<()>>,
}

/// Binds a client address, reusable at once after a restart.
///
/// # Errors
/// As the system says.
pub fn bind(address: SocketAddr) -> io::Result<StdListener> {
    let socket = StdListener::bind(address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl Fronts {
    /// Serves `listeners` on `threads` threads.
    ///
    /// # Errors
    /// If a thread can't be made.
    pub fn start(
        threads: usize,
        listeners: &[ClientListener],
        limits: ClientLimits,
    ) -> io::Result<Self> {
        Self::start_bounded(threads, listeners, limits, max_connections())
    }

    fn start_bounded(
        threads: usize,
        listeners: &[ClientListener],
        limits: ClientLimits,
        max_connections: usize,
    ) -> io::Result<Self> {
        let stopping = CancellationToken::new();
        let places =
            Places { free: Arc::new(Semaphore::new(max_connections)), full: Arc::default() };
        let mut ended = Vec::new();
        for n in 0..threads {
            let mut tasks = Vec::new();
            for listener in listeners {
                tasks.push((
                    listener.socket.try_clone()?,
                    listener.tls.clone(),
                    listener.router.clone(),
                ));
            }
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            let (stop, places) = (stopping.clone(), places.clone());
            let (end, receiver) = mpsc::sync_channel(1);
            std::thread::Builder::new().name(format!("front-{n}")).spawn(move || {
                runtime.block_on(run(tasks, limits, places, stop));
                let _ = end.send(());
            })?;
            ended.push(receiver);
        }
        Ok(Self { stopping, ended })
    }

    /// Stops accepting, lets requests finish, and after `deadline` cuts off those that don't.
    pub fn stop(&self, deadline: Duration) {
        self.stopping.cancel();
        let end = std::time::Instant::now() + deadline;
        for ended in &self.ended {
            let left = end.saturating_duration_since(std::time::Instant::now());
            if ended.recv_timeout(left).is_err() {
                tracing::info!("cutting off clients' streams that are still open");
                return;
            }
        }
    }
}

/// What all fronts share of [`MAX_CONNECTIONS`].
#[derive(Clone)]
struct Places {
    free: Arc<Semaphore>,
    full: Arc<LogLimit<1>>,
}

impl Places {
    fn take(&self) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.free).try_acquire_owned().ok();
        if place.is_none()
            && let Some(suppressed) = self.full.pass(0, Instant::now())
        {
            tracing::warn!(suppressed, "too many connections of clients; closing new ones");
        }
        place
    }
}

fn max_connections() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let half = files.map_or(usize::MAX, |files| usize::try_from(files / 2).unwrap_or(usize::MAX));
    MAX_CONNECTIONS.min(half)
}

async fn run(
    listeners: Vec<(StdListener, Option<Arc<ClientListenerTls>>, Router)>,
    limits: ClientLimits,
    places: Places,
    stopping: CancellationToken,
) {
    let connections = TaskTracker::new();
    let builder = Arc::new(builder(limits));
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    let rejected = Arc::default();
    for (socket, tls, router) in listeners {
        let front = Front {
            builder: Arc::clone(&builder),
            handshakes: Arc::clone(&handshakes),
            places: places.clone(),
            rejected: Arc::clone(&rejected),
            connections: connections.clone(),
            stopping: stopping.clone(),
            tls,
            router,
        };
        connections.spawn(front.accept(socket));
    }
    stopping.cancelled().await;
    connections.close();
    connections.wait().await;
}

fn builder(limits: ClientLimits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HANDSHAKE_TIMEOUT);
    let mut http2 = builder.http2();
    http2
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(HEADER_LIST_BYTES)
        .max_concurrent_streams(limits.max_concurrent_streams.min(MAX_STREAMS_PER_CONNECTION));
    if !limits.keepalive_interval.is_zero() {
        http2.keep_alive_interval(limits.keepalive_interval);
        if !limits.keepalive_timeout.is_zero() {
            http2.keep_alive_timeout(limits.keepalive_timeout);
        }
    }
    builder
}

#[derive(Clone)]
struct Front {
    builder: Arc<auto::Builder<TokioExecutor>>,
    handshakes: Arc<Semaphore>,
    places: Places,
    rejected: Arc<LogLimit<1>>,
    connections: TaskTracker,
    stopping: CancellationToken,
    tls: Option<Arc<ClientListenerTls>>,
    router: Router,
}

impl Front {
    async fn accept(self, socket: StdListener) {
        let listener = match TcpListener::from_std(socket) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "cannot listen for clients"),
        };
        loop {
            let accepted = tokio::select! {
                () = self.stopping.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((tcp, remote)) => {
                    let Some(place) = self.places.take() else { continue };
                    let _ = tcp.set_nodelay(true);
                    let connection = self.clone().connection(tcp, remote);
                    self.connections.spawn(async move {
                        connection.await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client's connection");
                    sleep(ACCEPT_AGAIN).await;
                }
            }
        }
    }

    async fn connection(self, tcp: TcpStream, remote: SocketAddr) {
        let Some(tls) = &self.tls else {
            return self.serve(tcp, ClientConnection { remote, common_name: None }).await;
        };
        let accept = async {
            // Held only for the handshake.
            let _permit = self.handshakes.acquire().await;
            TlsAcceptor::from(tls.server_config()).accept(tcp).await
        };
        match timeout(HANDSHAKE_TIMEOUT, accept).await {
            Ok(Ok(stream)) => {
                let common_name = stream
                    .get_ref()
                    .1
                    .peer_certificates()
                    .and_then(<[_]>::first)
                    .and_then(|certificate| crate::tls::common_name_of(certificate))
                    .map(Arc::from);
                self.serve(stream, ClientConnection { remote, common_name }).await;
            }
            Ok(Err(error)) => self.rejected(remote, &error),
            Err(_) => self.rejected(remote, &"the TLS handshake took too long"),
        }
    }

    fn rejected(&self, remote: SocketAddr, error: &dyn std::fmt::Display) {
        if let Some(suppressed) = self.rejected.pass(0, Instant::now()) {
            tracing::warn!(%remote, %error, suppressed, "rejected connection on client endpoint");
        }
    }

    async fn serve<I>(&self, io: I, who: ClientConnection)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let service = self.router.clone().map_request(
            move |mut request: http::Request<hyper::body::Incoming>| {
                request.extensions_mut().insert(who.clone());
                request
            },
        );
        let service = TowerToHyperService::new(service);
        let connection =
            self.builder.serve_connection_with_upgrades(TokioIo::new(Lenient::new(io)), service);
        let mut connection = std::pin::pin!(connection);
        // How a connection ends is the client's affair.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = self.stopping.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use axum::{Extension, routing::get};

    use super::*;

    fn front(router: Router) -> (Fronts, SocketAddr) {
        front_for(router, MAX_CONNECTIONS)
    }

    fn front_for(router: Router, connections: usize) -> (Fronts, SocketAddr) {
        let socket = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = socket.local_addr().unwrap();
        let limits = ClientLimits {
            max_concurrent_streams: u32::MAX,
            keepalive_interval: Duration::ZERO,
            keepalive_timeout: Duration::ZERO,
        };
        let listener = ClientListener { socket, tls: None, router };
        (Fronts::start_bounded(1, &[listener], limits, connections).unwrap(), address)
    }

    fn request(address: SocketAddr, path: &str) -> String {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn a_request_knows_where_it_came_from() {
        let remote = |Extension(who): Extension<ClientConnection>| async move {
            who.remote.ip().to_string()
        };
        let (fronts, address) = front(Router::new().route("/", get(remote)));
        let answer = request(address, "/");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("127.0.0.1"), "{answer}");
        fronts.stop(Duration::from_secs(5));
        assert!(std::net::TcpStream::connect(address).is_err());
    }

    #[test]
    fn connections_above_the_bound_are_closed_and_places_come_free_again() {
        let (fronts, address) = front_for(Router::new().route("/", get(|| async { "x" })), 2);
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
            assert!(start.elapsed() < Duration::from_secs(60), "no place comes free");
        }
        fronts.stop(Duration::from_secs(5));
    }

    #[tokio::test]
    async fn a_connection_has_so_many_streams_and_no_more() {
        let (_fronts, address) = front(Router::new());
        let mut stream = TcpStream::connect(address).await.unwrap();
        // The preface and empty settings; the server's settings come first in its answer.
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
        let (fronts, address) = front(Router::new().route("/", get(forever)));
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        // Returns although the request doesn't.
        fronts.stop(Duration::from_millis(200));
    }
}
