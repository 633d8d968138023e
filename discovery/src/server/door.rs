//! The accept path: socket → limits per address → crate `muster-door` → TLS handshake → HTTP.
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
use actix_web::dev::AppConfig;
use actix_web::middleware;
use actix_web::rt::net::TcpStream;
use actix_web::web::Data;
use futures_util::future::LocalBoxFuture;
use muster_door::{Bounds, Knock, Turned, network};
use tokio_util::sync::CancellationToken;

use super::tls::remember_peer;
use super::unread::Unread;
use crate::app::App;
use crate::limits::{AddressLimit, Place, Places};
use crate::metrics::Metrics;
use crate::routes;

/// Time limit for a request's headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may read the rest of a response when the connection is closed.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of concurrent handshakes, over all workers.
pub(super) const HANDSHAKES: usize = 256;
/// Maximum number of concurrent handshakes of one address. Its other sockets wait.
const HANDSHAKES_EACH: usize = 32;

/// Limits on connections, shared by all workers.
#[derive(Clone, Debug)]
pub(super) struct Door {
    sockets: Places<IpAddr>,
    strangers: muster_door::Door,
    rate: Arc<AddressLimit>,
    metrics: Arc<Metrics>,
    handshake: Duration,
    unread: Duration,
}

/// Limits on the service's sockets, over all workers.
pub(super) struct Sockets {
    /// Maximum number of open sockets.
    pub(super) max: usize,
    /// Maximum number of open sockets of one address.
    pub(super) each: usize,
    /// Time limit for each step of a new connection: first byte, start of the handshake, its end.
    pub(super) handshake: Duration,
    /// How long a response waits for a client that doesn't read it.
    pub(super) unread: Duration,
}

impl Door {
    /// Makes the limits. `rate` limits how often one address opens a socket.
    pub(super) fn new(sockets: &Sockets, rate: Arc<AddressLimit>, metrics: Arc<Metrics>) -> Self {
        let &Sockets { max, each, handshake, unread } = sockets;
        let bounds = Bounds {
            // Silent connections may take at most half of the sockets.
            silent: max.div_ceil(2),
            handshakes: HANDSHAKES,
            each: HANDSHAKES_EACH,
            step: handshake,
        };
        let strangers = muster_door::Door::new(bounds);
        Door { sockets: Places::new(max, each), strangers, rate, metrics, handshake, unread }
    }

    fn enter(&self, address: IpAddr) -> Option<(Knock, Place<IpAddr>)> {
        let entered = self.rate.check(address).ok().and_then(|()| {
            Some((self.strangers.knock(address)?, self.sockets.take(network(address))?))
        });
        if entered.is_none() {
            self.metrics.alarm("connections_refused");
        }
        entered
    }
}

type Opened = (Unread<TlsStream<TcpStream>>, Protocol, Option<SocketAddr>);

/// Makes the factory for the service that handles one worker's connections of one listener.
pub(super) fn service(
    app: &App,
    door: &Door,
    tls: &rustls::ServerConfig,
) -> impl ServiceFactory<TcpStream, Config = (), Response = (), Error = (), InitError = ()> + use<>
{
    let data = Data::new(app.clone());
    let application = actix_web::App::new()
        .app_data(data)
        .wrap(middleware::from_fn(routes::surround))
        .configure(routes::configure);
    let application = IntoServiceFactory::<_, Request>::into_factory(application)
        .map_err(|error: actix_web::Error| error.error_response());
    let draining = app.draining.clone();
    let http = HttpService::<_, _, BoxBody>::build()
        .graceful_shutdown_signal(move || ended(draining.clone()))
        .client_request_timeout(HEADER_TIMEOUT)
        .client_disconnect_timeout(DISCONNECT_TIMEOUT)
        .on_connect_ext(|connection: &Unread<TlsStream<TcpStream>>, extensions| {
            remember_peer(&connection.stream, extensions);
        })
        .finish::<_, BoxBody>(map_config(application, |()| AppConfig::default()));
    let mut tls = tls.clone();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let mut acceptor = Acceptor::new(tls);
    acceptor.set_handshake_timeout(door.handshake);
    let door = door.clone();
    actix_service::fn_factory(move || {
        let (acceptor, http) = (
            ServiceFactory::<TcpStream>::new_service(&acceptor, ()),
            ServiceFactory::<Opened>::new_service(&http, ()),
        );
        let door = door.clone();
        async move {
            let acceptor = Rc::new(acceptor.await?);
            Ok::<_, ()>(Entrance { acceptor, http: Rc::new(http.await?), door })
        }
    })
}

async fn ended(draining: CancellationToken) {
    draining.cancelled().await;
}

struct Entrance<H> {
    acceptor: Rc<AcceptorService>,
    http: Rc<H>,
    door: Door,
}

impl<H> Service<TcpStream> for Entrance<H>
where
    H: Service<Opened, Response = ()> + 'static,
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
        let entered = address.and_then(|address| Some((address, self.door.enter(address.ip())?)));
        let Some((address, (knock, place))) = entered else {
            return Box::pin(std::future::ready(Ok(())));
        };
        let (acceptor, http, door) = (self.acceptor.clone(), self.http.clone(), self.door.clone());
        Box::pin(async move {
            let handshake = async |socket: TcpStream| {
                let _ = socket.set_nodelay(true);
                acceptor.call(socket).await.map_err(std::io::Error::other)
            };
            let opened = knock.admit(socket, handshake).await.map_err(|turned| {
                if matches!(turned, Turned::Crowded) {
                    door.metrics.alarm("connections_refused");
                }
            })?;
            let opened = Unread::new(opened, door.unread);
            let served = http.call((opened, Protocol::Http1, Some(address))).await;
            drop(place);
            served.map_err(|_| ())
        })
    }
}
