//! One byte stream to a peer, with or without TLS.

use std::{io, net::SocketAddr, sync::Arc};

use node_state::identity::NodeKey;
use node_state::membership::PeerUrl;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::tls::{PEER_ALPN, PeerTls, explain_handshake_error, node_key_of};

/// Common interface of plain TCP and TLS streams.
pub(in crate::transport) trait Duplex:
    AsyncRead + AsyncWrite + Send + Unpin
{
}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connected stream, with the key of the certificate that the other end has presented.
pub(in crate::transport) struct PeerStream {
    pub io: Box<dyn Duplex>,
    pub key: Option<NodeKey>,
}

/// Connects to `url`. If the URL is https and `bound` is given, the other end's certificate must be
/// for that key.
pub(in crate::transport) async fn dial(
    url: &PeerUrl,
    tls: Option<&Arc<PeerTls>>,
    bound: Option<NodeKey>,
) -> io::Result<PeerStream> {
    let tcp = TcpStream::connect((url.host(), url.port())).await?;
    tcp.set_nodelay(true)?;
    if !url.is_https() {
        return Ok(PeerStream { io: Box::new(tcp), key: None });
    }
    let tls = tls.ok_or_else(|| invalid("https, but no peer certificate is configured"))?;
    let config = tls.client_config(bound);
    // A certificate's name has no zone, such as `%eth0`, so the zone is cut off.
    let host = url.host().split_once('%').map_or(url.host(), |(address, _)| address);
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let stream =
        TlsConnector::from(config).connect(name, tcp).await.map_err(explain_handshake_error)?;
    let (_, session) = stream.get_ref();
    check_alpn(session.alpn_protocol())?;
    let key = session.peer_certificates().and_then(<[_]>::first).and_then(node_key_of);
    Ok(PeerStream { io: Box::new(stream), key })
}

/// Performs TLS on an accepted connection, if the listener uses it.
pub(in crate::transport) async fn accept(
    tcp: TcpStream,
    tls: Option<&Arc<PeerTls>>,
) -> io::Result<PeerStream> {
    tcp.set_nodelay(true)?;
    let Some(tls) = tls else {
        return Ok(PeerStream { io: Box::new(tcp), key: None });
    };
    let stream = TlsAcceptor::from(tls.server_config())
        .accept(tcp)
        .await
        .map_err(explain_handshake_error)?;
    let (_, session) = stream.get_ref();
    check_alpn(session.alpn_protocol())?;
    let key = session.peer_certificates().and_then(<[_]>::first).and_then(node_key_of);
    Ok(PeerStream { io: Box::new(stream), key })
}

fn check_alpn(negotiated: Option<&[u8]>) -> io::Result<()> {
    if negotiated == Some(PEER_ALPN) {
        Ok(())
    } else {
        Err(invalid("the other end does not speak muster-peer/1"))
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Binds `address`. The address can be bound again right after a restart.
pub(in crate::transport) fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    // On Unix, std sets SO_REUSEADDR on the socket, so the address can be bound again.
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
