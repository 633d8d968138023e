//! Listeners for clients: HTTP/1.1 and HTTP/2 on one port, with or without TLS.
//!
//! Connections are served by several threads, which are called fronts. Each front has its own
//! current-thread runtime. So a request is served on the thread of its connection, and wakes no
//! other core.

mod coalesced_writes;
mod decompression;
mod direct_calls;
mod unfinished_requests;
mod unread_answers;

use std::{
    convert::Infallible,
    future::poll_fn,
    io,
    net::{SocketAddr, TcpListener as StdListener},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use axum::Router;
use http::{Request, Response};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use muster_shares::admission::{
    AdmissionControl, AdmissionError, AdmissionLimits, PendingConnection,
};
use muster_shares::memory::MemoryBudget;
use node_engine::{log_limit::LogLimit, tls::ClientListenerTls};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    runtime,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

use self::direct_calls::ReplayedBody;
use self::unfinished_requests::{BodyKind, ConnectionAccount, Counted, RequestAccounting};
use self::unread_answers::{AnswerAccounting, AnswerBody};
use crate::{
    gateway,
    http::{AuthorityRewriter, is_grpc},
    rpc,
};

/// Maximum number of open client connections on all fronts. Further ones are closed at once. The
/// limit is half the number of files that the process can open, if that is lower. So log and store
/// can always open files.
const MAX_CONNECTIONS: usize = 10_000;
/// Maximum number of open streams per connection, even if `--max-concurrent-streams` is higher.
/// Each stream can hold a request of the maximum size in memory.
const MAX_STREAMS_PER_CONNECTION: u32 = 4096;
/// Maximum number of connections in the TLS handshake at a time. Further ones wait for their turn.
const HANDSHAKES: usize = 256;
/// Maximum number of TLS handshakes at a time for one client network.
const HANDSHAKES_EACH: usize = 64;
/// Time limit for each step before a connection is served: its first byte, its turn to do the
/// handshake, and the handshake.
const HANDSHAKE_STEP_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for receiving the head of an HTTP/1 request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Wait after a failed accept, most often because too many files are open.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// HTTP/2 flow-control window of a stream, in bytes: more than etcd's largest request.
const STREAM_WINDOW: u32 = 2 << 20;
/// HTTP/2 flow-control window of a connection, in bytes.
const CONNECTION_WINDOW: u32 = 8 << 20;
/// Time after which a connection is closed if answers wait for the client and it has read no byte.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of an HTTP/2 request's header list in bytes.
const HEADER_LIST_BYTES: u32 = 16 << 10;

/// Connection on which a request arrived. Each request carries it among its extensions.
#[derive(Clone, Debug)]
pub(crate) struct ClientConnection {
    /// Address of the other end of the socket.
    pub remote: SocketAddr,
    /// User named by the client's certificate, if any.
    pub user: Option<rpc::CertificateUser>,
}

/// A listening socket for clients, with its TLS settings and its router.
pub struct ClientListener {
    pub socket: StdListener,
    /// TLS settings, if the URL's scheme is https.
    pub tls: Option<Arc<ClientListenerTls>>,
    /// Router that answers requests.
    pub router: Router,
    /// KV methods whose ordinary calls are answered without the router (see module `direct_calls`).
    /// `None` if the listener serves no gRPC.
    pub direct: Option<rpc::DirectKv>,
}

/// HTTP/2 settings from the command line.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// Maximum number of streams per connection: `--max-concurrent-streams`.
    pub max_concurrent_streams: u32,
    /// Interval of HTTP/2 pings: `--grpc-keepalive-interval`. Zero means no pings.
    pub keepalive_interval: Duration,
    /// Time limit for the answer to a ping: `--grpc-keepalive-timeout`. Zero means no limit.
    pub keepalive_timeout: Duration,
    /// Maximum size of a gRPC message in bytes: the largest request, and what gRPC adds to it.
    pub largest_request: usize,
}

/// The running threads that serve client connections (the fronts).
pub struct ServingThreads {
    stopping: CancellationToken,
    ended: Vec<mpsc::Receiver<()>>,
}

/// Binds a client address. The address can be bound again at once after a restart.
///
/// # Errors
/// The error of the system call.
pub fn bind(address: SocketAddr) -> io::Result<StdListener> {
    let socket = StdListener::bind(address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl ServingThreads {
    /// Serves `listeners` on `threads` threads.
    ///
    /// # Errors
    /// Fails if a thread can't be created.
    pub fn start(
        threads: usize,
        listeners: &[ClientListener],
        limits: ClientLimits,
        bytes: Arc<rpc::ClientBytes>,
    ) -> io::Result<Self> {
        let waits = IdleTimeouts::default();
        let places = ConnectionLimits::new(max_connections(), limits.largest_request, waits, bytes);
        Self::start_bounded(threads, listeners, limits, &places)
    }

    fn start_bounded(
        threads: usize,
        listeners: &[ClientListener],
        limits: ClientLimits,
        places: &ConnectionLimits,
    ) -> io::Result<Self> {
        let stopping = CancellationToken::new();
        let mut ended = Vec::new();
        for n in 0..threads {
            let mut tasks = Vec::new();
            for listener in listeners {
                let socket = listener.socket.try_clone()?;
                tasks.push(ClientListener {
                    socket,
                    tls: listener.tls.clone(),
                    router: listener.router.clone(),
                    direct: listener.direct.clone(),
                });
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

    /// Stops accepting connections, and lets requests finish. After `deadline`, cuts off the
    /// remaining ones.
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

/// Time limits for clients that do nothing.
#[derive(Clone, Copy)]
struct IdleTimeouts {
    /// Time limit for each step of a new connection: its first byte, its turn to do the handshake,
    /// and the handshake.
    handshake_step: Duration,
    /// Maximum time without reading any byte while answers wait.
    unread: Duration,
}

impl Default for IdleTimeouts {
    fn default() -> Self {
        Self { handshake_step: HANDSHAKE_STEP_TIMEOUT, unread: UNREAD_TIMEOUT }
    }
}

/// State that all fronts share: counters, and the limits on all connections and on connections that
/// are not admitted yet.
#[derive(Clone)]
struct ConnectionLimits {
    connection_permits: Arc<Semaphore>,
    door: AdmissionControl,
    request_accounting: RequestAccounting,
    answers: Arc<MemoryBudget>,
    unread_timeout: Duration,
    bytes: Arc<rpc::ClientBytes>,
    full: Arc<LogLimit<1>>,
    rejected_log: Arc<LogLimit<1>>,
    stalled_log: Arc<LogLimit<1>>,
}

impl ConnectionLimits {
    fn new(
        max_connections: usize,
        largest_request: usize,
        waits: IdleTimeouts,
        bytes: Arc<rpc::ClientBytes>,
    ) -> Self {
        Self {
            connection_permits: Arc::new(Semaphore::new(max_connections)),
            door: AdmissionControl::new(AdmissionLimits {
                // At most half of the allowed connections may be ones that have sent nothing yet.
                silent: max_connections.div_ceil(2),
                handshakes: HANDSHAKES,
                max_handshakes_per_network: HANDSHAKES_EACH,
                step_timeout: waits.handshake_step,
            }),
            request_accounting: RequestAccounting::new(largest_request).with_counters(&bytes),
            answers: unread_answers::new_budget(),
            unread_timeout: waits.unread,
            bytes,
            full: Arc::default(),
            rejected_log: Arc::default(),
            stalled_log: Arc::default(),
        }
    }

    fn try_admit(&self, remote: SocketAddr) -> Option<(PendingConnection, OwnedSemaphorePermit)> {
        let pending = self.door.register(remote.ip());
        let taken = pending.zip(Arc::clone(&self.connection_permits).try_acquire_owned().ok());
        if taken.is_none()
            && let Some(suppressed) = self.full.pass(0, Instant::now())
        {
            tracing::warn!(%remote, suppressed, "too many connections of clients; closing new ones");
        }
        taken
    }

    fn log_rejected(&self, remote: SocketAddr, error: &AdmissionError) {
        if let Some(suppressed) = self.rejected_log.pass(0, Instant::now()) {
            tracing::warn!(%remote, %error, suppressed, "rejected connection on client endpoint");
        }
    }

    fn log_stalled(&self, remote: SocketAddr) {
        if let Some(suppressed) = self.stalled_log.pass(0, Instant::now()) {
            tracing::warn!(%remote, suppressed, "closing a connection whose answers nobody reads");
        }
    }
}

fn max_connections() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let half = files.map_or(usize::MAX, |files| usize::try_from(files / 2).unwrap_or(usize::MAX));
    MAX_CONNECTIONS.min(half)
}

async fn run(
    listeners: Vec<ClientListener>,
    limits: ClientLimits,
    places: ConnectionLimits,
    stopping: CancellationToken,
) {
    let connections = TaskTracker::new();
    let builder = Arc::new(builder(limits));
    for ClientListener { socket, tls, router, direct } in listeners {
        let front = ClientServer {
            builder: Arc::clone(&builder),
            limits: places.clone(),
            connections: connections.clone(),
            stopping: stopping.clone(),
            tls,
            router,
            direct,
        };
        connections.spawn(front.accept(socket));
    }
    stopping.cancelled().await;
    connections.close();
    connections.wait().await;
}

fn builder(limits: ClientLimits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
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
struct ClientServer {
    builder: Arc<auto::Builder<TokioExecutor>>,
    limits: ConnectionLimits,
    connections: TaskTracker,
    stopping: CancellationToken,
    tls: Option<Arc<ClientListenerTls>>,
    router: Router,
    direct: Option<rpc::DirectKv>,
}

impl ClientServer {
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
                    let Some((pending, place)) = self.limits.try_admit(remote) else { continue };
                    let _ = tcp.set_nodelay(true);
                    let connection = self.clone().connection(pending, tcp, remote);
                    self.connections.spawn(async move {
                        connection.await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client's connection");
                    sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            }
        }
    }

    async fn connection(self, pending: PendingConnection, tcp: TcpStream, remote: SocketAddr) {
        let Some(tls) = &self.tls else {
            let Some(tcp) = self.admit(pending, tcp, remote, async |tcp| Ok(tcp)).await else {
                return;
            };
            return self.serve(tcp, ClientConnection { remote, user: None }).await;
        };
        let accept = async |tcp| {
            let accepted = TlsAcceptor::from(tls.server_config()).accept(tcp).await;
            accepted.map_err(node_engine::tls::explain_handshake_error)
        };
        let Some(stream) = self.admit(pending, tcp, remote, accept).await else { return };
        let shown = stream.get_ref().1.peer_certificates().map(<[_]>::to_vec);
        let user = tls.user(shown.as_deref()).map(|name| rpc::CertificateUser(name.into()));
        tokio::select! {
            biased;
            () = tls.wait_until_refused(shown.as_deref()) => {
                let removed = io::Error::other("its key is that of a member that was removed");
                self.limits.log_rejected(remote, &removed.into());
            }
            () = self.serve(stream, ClientConnection { remote, user }) => {}
        }
    }

    /// Runs the handshake. Handshakes that are unfinished when the node stops are dropped.
    async fn admit<T>(
        &self,
        pending: PendingConnection,
        tcp: TcpStream,
        remote: SocketAddr,
        handshake: impl AsyncFnOnce(TcpStream) -> io::Result<T>,
    ) -> Option<T> {
        match self.stopping.run_until_cancelled(pending.admit(tcp, handshake)).await? {
            Ok(opened) => Some(opened),
            Err(error) => {
                self.limits.log_rejected(remote, &error);
                None
            }
        }
    }

    async fn serve<I>(&self, io: I, who: ClientConnection)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let remote = who.remote;
        let bytes = &self.limits.bytes;
        let sender = self.limits.request_accounting.open(remote.ip());
        let answers = AnswerAccounting::open(&self.limits.answers, remote.ip(), Arc::clone(bytes));
        let requests = RequestServer {
            router: self.router.clone(),
            direct: self.direct.clone(),
            who,
            sender,
            answers: Arc::clone(&answers),
        };
        let requests = Arc::new(requests);
        let service = service_fn(move |request| Arc::clone(&requests).answer(request));
        let (io, writes) = coalesced_writes::collect(io);
        let connection = self
            .builder
            .serve_connection_with_upgrades(TokioIo::new(AuthorityRewriter::new(io)), service);
        let mut connection = std::pin::pin!(connection);
        // The connection's result is ignored, since clients may end connections in any way.
        tokio::select! {
            () = poll_fn(|context| writes.poll(connection.as_mut(), context)) => return,
            () = answers.wait_until_stalled(self.limits.unread_timeout) => return self.limits.log_stalled(remote),
            () = self.stopping.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        poll_fn(|context| writes.poll(connection.as_mut(), context)).await;
    }
}

/// Answers the requests of one connection.
struct RequestServer {
    router: Router,
    direct: Option<rpc::DirectKv>,
    who: ClientConnection,
    sender: ConnectionAccount,
    answers: Arc<AnswerAccounting>,
}

impl RequestServer {
    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<AnswerBody>, Infallible> {
        let request = match &self.direct {
            Some(direct) if direct_calls::is_direct(&request) => {
                let request = request.map(|body| Counted::new(body, &self.sender, BodyKind::Unary));
                // The future is boxed. Otherwise the task of every request, even of a long-lived
                // watch, would hold the memory for a call without the router.
                let answer = direct_calls::answer(direct, request, &self.who, &self.answers);
                match Box::pin(answer).await {
                    Ok(response) => return Ok(response),
                    Err(request) => request,
                }
            }
            _ => return self.route(request).await,
        };
        self.call_router(request).await
    }

    /// Answers a request with the router. If the request is a unary call with a compressed message,
    /// the decompressed message stays charged until the router has answered. The messages of a
    /// stream need no such charge, because they are served one after the other.
    async fn route(
        &self,
        mut request: Request<Incoming>,
    ) -> Result<Response<AnswerBody>, Infallible> {
        let path = request.uri().path();
        let kind = match is_grpc(request.headers()) {
            false if gateway::takes_values(path) => BodyKind::Values,
            false => BodyKind::Plain,
            true if [rpc::WATCH_PATH, rpc::KEEP_ALIVE_PATH].contains(&path) => BodyKind::Stream,
            true => BodyKind::Unary,
        };
        let is_grpc = matches!(kind, BodyKind::Unary | BodyKind::Stream);
        let is_compressed = is_grpc && decompression::take_gzip_encoding(request.headers_mut());
        let unanswered =
            (is_compressed && kind == BodyKind::Unary).then(|| self.sender.decompressed_charge());
        let request = request.map(|body| {
            let body = Counted::new(body, &self.sender, kind);
            let body = if is_compressed { body.with_decompression(&self.sender) } else { body };
            ReplayedBody::unread(match &unanswered {
                Some(unanswered) => body.with_decompressed_charge(unanswered.clone()),
                None => body,
            })
        });
        let response = self.call_router(request).await;
        drop(unanswered);
        response
    }

    /// Calls the router. Before that, puts the request's origin, and the memory account for its
    /// answer, into the request's extensions.
    async fn call_router(
        &self,
        mut request: Request<ReplayedBody<Counted<Incoming>>>,
    ) -> Result<Response<AnswerBody>, Infallible> {
        let extensions = request.extensions_mut();
        if let Some(user) = &self.who.user {
            extensions.insert(user.clone());
        }
        extensions.insert(self.who.clone());
        extensions.insert(Arc::clone(&self.answers.account));
        let response = self.router.clone().oneshot(request).await?;
        Ok(self.answers.count(response))
    }
}

#[cfg(test)]
mod tests;
