//! The listener of the protocol v3: gRPC over TLS 1.3, with limits on connections and handshakes.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use muster_shares::network_of;
use muster_shares::slots::{Slot, SlotPool};
use node_proto::etcdserverpb::auth_server::AuthServer;
use node_proto::etcdserverpb::kv_server::KvServer;
use node_proto::etcdserverpb::watch_server::WatchServer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use super::DiscoveryApi;
use crate::app::App;
use crate::throttle_log::ThrottleKind;

/// Largest number of open connections.
const MAX_CONNECTIONS: usize = 1_024;
/// Largest number of open connections of one address, or of one /64 with IPv6.
const MAX_CONNECTIONS_PER_ADDRESS: usize = 64;
/// Largest number of concurrent calls on one connection. etcd makes one after the other.
const MAX_STREAMS: u32 = 16;
/// Largest request in bytes. A registration has at most 2 KiB.
const MAX_REQUEST: usize = 16 * 1024;
/// Largest headers of a request, in bytes.
const MAX_HEADERS: u32 = 8 * 1024;
/// Interval between two keepalive pings on a connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
/// Time in which a client has to answer a keepalive ping.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of connections that wait to be served after their handshake.
const HANDSHAKEN_QUEUE: usize = 16;
/// Pause after the system refused to accept a connection, for example without file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Remote address of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EtcdClientAddress(pub(crate) SocketAddr);

/// Serves until the process drains. Calls that go on after that have `drain` time to end.
pub(crate) async fn serve(
    app: App,
    listener: TcpListener,
    mut tls: rustls::ServerConfig,
    handshake_timeout: Duration,
    drain: Duration,
) {
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(std::sync::Arc::new(tls));
    let (sender, mut connections) = mpsc::channel(HANDSHAKEN_QUEUE);
    let draining = app.draining.clone();
    let accepting = tokio::spawn({
        let (app, draining) = (app.clone(), draining.clone());
        async move {
            let accept = accept(&app, &listener, &acceptor, handshake_timeout, &sender);
            let _ = draining.run_until_cancelled(accept).await;
        }
    });
    let incoming = futures_util::stream::poll_fn(move |context| connections.poll_recv(context));
    let api = DiscoveryApi::new(app);
    let served = Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_header_list_size(MAX_HEADERS)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(KvServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST))
        .add_service(WatchServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST))
        .add_service(AuthServer::new(api).max_decoding_message_size(MAX_REQUEST))
        .serve_with_incoming_shutdown(incoming, draining.clone().cancelled_owned());
    // A client can hold a call open for ever, so the wait for open calls has a time limit.
    let end_of_drain = async {
        draining.cancelled().await;
        tokio::time::sleep(drain).await;
    };
    tokio::select! {
        served = served => if let Err(error) = served {
            tracing::error!(%error, "etcd's discovery protocol v3 is served no longer");
        },
        () = end_of_drain => tracing::warn!("some calls of etcds didn't finish in time"),
    }
    accepting.abort();
}

async fn accept(
    app: &App,
    listener: &TcpListener,
    acceptor: &TlsAcceptor,
    handshake_timeout: Duration,
    sender: &mpsc::Sender<io::Result<V3Connection>>,
) {
    let slots = SlotPool::new(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS);
    loop {
        let (socket, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "can't accept a connection of an etcd");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let ip = address.ip().to_canonical();
        let slot = app.connection_limit.check(ip).ok().and_then(|()| slots.take(network_of(ip)));
        let Some(slot) = slot else {
            app.throttle_log.note(ThrottleKind::Connection, ip);
            continue;
        };
        let (acceptor, sender) = (acceptor.clone(), sender.clone());
        tokio::spawn(async move {
            let _ = socket.set_nodelay(true);
            let handshake = tokio::time::timeout(handshake_timeout, acceptor.accept(socket));
            if let Ok(Ok(stream)) = handshake.await {
                let _ = sender.send(Ok(V3Connection { stream, address, _slot: slot })).await;
            }
        });
    }
}

/// A connection after its handshake.
struct V3Connection {
    stream: TlsStream<TcpStream>,
    address: SocketAddr,
    /// Place among the open connections of the client's address; freed when the connection ends.
    _slot: Slot<IpAddr>,
}

impl Connected for V3Connection {
    type ConnectInfo = EtcdClientAddress;

    fn connect_info(&self) -> EtcdClientAddress {
        EtcdClientAddress(self.address)
    }
}

impl AsyncRead for V3Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for V3Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
