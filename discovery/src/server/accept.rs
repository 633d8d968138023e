//! The accept path: socket → limits per address → `muster_shares::admission` → TLS handshake →
//! HTTP.
//!
//! Three limits apply to each address: open sockets, new connections a second, and concurrent
//! handshakes. Silent connections don't use up handshakes. A connection over a limit is closed
//! without an answer.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use actix_http::{HttpService, Protocol, Request};
use actix_service::{IntoServiceFactory, Service, ServiceFactory, ServiceFactoryExt, map_config};
use actix_tls::accept::rustls_0_23::{Acceptor, AcceptorService, TlsStream};
use actix_web::body::BoxBody;
use actix_web::dev::{AppConfig, ServiceRequest, ServiceResponse};
use actix_web::middleware::{self, Next};
use actix_web::rt::net::TcpStream;
use actix_web::web::{Data, ServiceConfig};
use futures_util::future::LocalBoxFuture;
use muster_shares::admission::{
    AdmissionControl, AdmissionError, AdmissionLimits, PendingConnection,
};
use muster_shares::network_of;
use muster_shares::slots::{Slot, SlotPool};
use tokio_util::sync::CancellationToken;

use super::tls::remember_peer;
use super::unread::WriteTimeoutStream;
use crate::app::App;
use crate::console;
use crate::limits::AddressLimit;
use crate::routes;
use crate::throttle_log::{ThrottleKind, ThrottleLog};

/// Time limit for a request's headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time in which a client must read the rest of a connection's last response.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of concurrent handshakes, over all workers.
pub(super) const MAX_HANDSHAKES: usize = 256;
/// Maximum number of concurrent handshakes of one address. Further sockets of the address wait.
const MAX_HANDSHAKES_PER_ADDRESS: usize = 32;

/// Limits on connections, shared by all workers.
#[derive(Clone, Debug)]
pub(super) struct ConnectionLimits {
    sockets: SlotPool<IpAddr>,
    handshake_limits: AdmissionControl,
    rate: Arc<AddressLimit>,
    throttle_log: Arc<ThrottleLog>,
    handshake_timeout: Duration,
    write_timeout: Duration,
}

/// Limits on the service's sockets, over all workers.
pub(super) struct SocketLimits {
    /// Maximum number of open sockets.
    pub(super) max: usize,
    /// Maximum number of open sockets of one address.
    pub(super) max_per_address: usize,
    /// Time limit for each step of a new connection: the first byte, the start of the TLS
    /// handshake, and the end of the handshake.
    pub(super) handshake_timeout: Duration,
    /// How long a response waits for a client that accepts no bytes.
    pub(super) write_timeout: Duration,
}

impl ConnectionLimits {
    /// Makes the limits on connections. `rate` limits how often one address may open a socket.
    pub(super) fn new(
        sockets: &SocketLimits,
        rate: Arc<AddressLimit>,
        throttle_log: Arc<ThrottleLog>,
    ) -> Self {
        let &SocketLimits {
            max,
            max_per_address: each,
            handshake_timeout: handshake,
            write_timeout: unread,
        } = sockets;
        let bounds = AdmissionLimits {
            // Connections that have sent nothing may take at most half of the sockets.
            silent: max.div_ceil(2),
            handshakes: MAX_HANDSHAKES,
            max_handshakes_per_network: MAX_HANDSHAKES_PER_ADDRESS,
            step_timeout: handshake,
        };
        let strangers = AdmissionControl::new(bounds);
        ConnectionLimits {
            sockets: SlotPool::new(max, each),
            handshake_limits: strangers,
            rate,
            throttle_log,
            handshake_timeout: handshake,
            write_timeout: unread,
        }
    }

    fn reserve_slots(&self, address: IpAddr) -> Option<(PendingConnection, Slot<IpAddr>)> {
        let entered = self.rate.check(address).ok().and_then(|()| {
            Some((
                self.handshake_limits.register(address)?,
                self.sockets.take(network_of(address))?,
            ))
        });
        if entered.is_none() {
            self.throttle_log.note(ThrottleKind::Connection, address);
        }
        entered
    }
}

/// The set of routes that a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteSet {
    /// The API, for agents, admins and stock etcd.
    Api,
    /// The console, for browsers.
    Console,
}

impl RouteSet {
    /// Returns the name of the server's listeners.
    pub(super) fn name(self) -> &'static str {
        match self {
            RouteSet::Api => "muster",
            RouteSet::Console => "console",
        }
    }

    /// Returns the log message for a bound address.
    pub(super) fn listening(self) -> &'static str {
        match self {
            RouteSet::Api => "listening",
            RouteSet::Console => "listening for browsers (console)",
        }
    }

    fn configure(self) -> fn(&mut ServiceConfig) {
        match self {
            RouteSet::Api => routes::configure,
            RouteSet::Console => console::configure,
        }
    }

    async fn wrap_request(
        self,
        request: ServiceRequest,
        next: Next<BoxBody>,
    ) -> Result<ServiceResponse, actix_web::Error> {
        match self {
            RouteSet::Api => routes::wrap_request(request, next).await,
            // Box the console's future. Otherwise every API request would reserve its size.
            RouteSet::Console => Box::pin(console::wrap_request(request, next)).await,
        }
    }
}

type AcceptedConnection = (WriteTimeoutStream<TlsStream<TcpStream>>, Protocol, Option<SocketAddr>);

/// Makes a factory of connection services. Each worker makes one service for each listener.
pub(super) fn connection_service(
    route_set: RouteSet,
    app: &App,
    limits: &ConnectionLimits,
    tls: &rustls::ServerConfig,
) -> impl ServiceFactory<TcpStream, Config = (), Response = (), Error = (), InitError = ()> + use<>
{
    let data = Data::new(app.clone());
    let application = actix_web::App::new()
        .app_data(data)
        .wrap(middleware::from_fn(move |request: ServiceRequest, next: Next<BoxBody>| {
            route_set.wrap_request(request, next)
        }))
        .configure(route_set.configure());
    let application = IntoServiceFactory::<_, Request>::into_factory(application)
        .map_err(|error: actix_web::Error| error.error_response());
    let draining = app.draining.clone();
    let http = HttpService::<_, _, BoxBody>::build()
        .graceful_shutdown_signal(move || wait_for_drain(draining.clone()))
        .client_request_timeout(HEADER_TIMEOUT)
        .client_disconnect_timeout(DISCONNECT_TIMEOUT)
        .on_connect_ext(|connection: &WriteTimeoutStream<TlsStream<TcpStream>>, extensions| {
            remember_peer(&connection.stream, extensions);
        })
        .finish::<_, BoxBody>(map_config(application, |()| AppConfig::default()));
    let mut tls = tls.clone();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let mut acceptor = Acceptor::new(tls);
    acceptor.set_handshake_timeout(limits.handshake_timeout);
    let limits = limits.clone();
    actix_service::fn_factory(move || {
        let (acceptor, http) = (
            ServiceFactory::<TcpStream>::new_service(&acceptor, ()),
            ServiceFactory::<AcceptedConnection>::new_service(&http, ()),
        );
        let limits = limits.clone();
        async move {
            let acceptor = Rc::new(acceptor.await?);
            Ok::<_, ()>(ConnectionService {
                acceptor,
                http: Rc::new(http.await?),
                connection_limits: limits,
            })
        }
    })
}

async fn wait_for_drain(draining: CancellationToken) {
    draining.cancelled().await;
}

struct ConnectionService<H> {
    acceptor: Rc<AcceptorService>,
    http: Rc<H>,
    connection_limits: ConnectionLimits,
}

impl<H> Service<TcpStream> for ConnectionService<H>
where
    H: Service<AcceptedConnection, Response = ()> + 'static,
{
    type Response = ();
    type Error = ();
    type Future = LocalBoxFuture<'static, Result<(), ()>>;

    fn poll_ready(&self, context: &mut Context<'_>) -> Poll<Result<(), ()>> {
        let ready = ready!(Service::<TcpStream>::poll_ready(&*self.acceptor, context));
        ready.map_err(|_| ())?;
        self.http.poll_ready(context).map_err(|_| ())
    }

    fn call(&self, socket: TcpStream) -> Self::Future {
        let address = socket.peer_addr().ok();
        let entered = address.and_then(|address| {
            Some((address, self.connection_limits.reserve_slots(address.ip())?))
        });
        let Some((address, (pending, place))) = entered else {
            return Box::pin(std::future::ready(Ok(())));
        };
        let (acceptor, http, limits) =
            (self.acceptor.clone(), self.http.clone(), self.connection_limits.clone());
        Box::pin(async move {
            let handshake = async |socket: TcpStream| {
                let _ = socket.set_nodelay(true);
                acceptor.call(socket).await.map_err(std::io::Error::other)
            };
            let opened = pending.admit(socket, handshake).await.map_err(|error| {
                if matches!(error, AdmissionError::Evicted) {
                    limits.throttle_log.note(ThrottleKind::Connection, address.ip());
                }
            })?;
            let opened = WriteTimeoutStream::new(opened, limits.write_timeout);
            let served = http.call((opened, Protocol::Http1, Some(address))).await;
            drop(place);
            served.map_err(|_| ())
        })
    }
}
