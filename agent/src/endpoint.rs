//! Connections to a node's client port: mutual TLS with a leaf certificate of the cluster, or
//! plain.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::leaves;
use discovery_types::url::UrlHost;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};
use zeroize::Zeroizing;

use crate::exit::error_chain;

/// Maximum size in bytes of a file with certificates or a key.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// The longest that connecting may take, TLS handshake included.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(3);

/// Why a node can't be connected to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EndpointError {
    /// A file with a certificate or a key can't be used.
    #[error("can't use {what}")]
    Certificates {
        /// Path of the file.
        what: String,
        /// The error of the file or of TLS.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The text is not an endpoint.
    #[error("{0}: not an endpoint; say https://HOST:PORT")]
    Endpoint(String),
    /// The endpoint is https, but no client certificate is known.
    #[error(
        "{0}: https needs --cacert, --cert and --key, or the data directory of this host's agent"
    )]
    NoCertificates(String),
    /// A certificate is known, but the endpoint is without TLS, so the server could not be
    /// authenticated.
    #[error("{0}: a member of a cluster with TLS, at an address without: it is not asked there")]
    WithoutTls(String),
}

impl EndpointError {
    fn for_file(path: &Path) -> impl Fn(Box<dyn std::error::Error + Send + Sync>) -> Self + use<> {
        let what = path.display().to_string();
        move |source| Self::Certificates { what: what.clone(), source }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, EndpointError> {
    muster_files::read_named(path, MAX_FILE_BYTES)
        .map_err(|error| EndpointError::for_file(path)(error.into()))
}

/// A byte stream, with or without TLS.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// TLS identity of a client: its certificate and key, and the CAs with which servers are verified.
#[derive(Clone, Debug)]
pub(crate) struct ClientTlsIdentity(Arc<ClientConfig>);

impl ClientTlsIdentity {
    /// Loads an identity from three PEM files: the servers' CA, and the client's certificate and
    /// key.
    pub(crate) fn load(ca: &Path, certificate: &Path, key: &Path) -> Result<Self, EndpointError> {
        Self::load_trusting(ca, "", certificate, key)
    }

    /// Loads an identity that also trusts servers of the CAs in `more_cas`, a PEM text.
    pub(crate) fn load_trusting(
        ca: &Path,
        more_cas: &str,
        certificate: &Path,
        key: &Path,
    ) -> Result<Self, EndpointError> {
        let certificates = |path: &Path| {
            CertificateDer::pem_slice_iter(&read(path)?)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| EndpointError::for_file(path)(error.into()))
        };
        let mut roots = RootCertStore::empty();
        for root in certificates(ca)? {
            roots.add(root).map_err(|error| EndpointError::for_file(ca)(error.into()))?;
        }
        let more = CertificateDer::pem_slice_iter(more_cas.as_bytes());
        roots.add_parsable_certificates(more.filter_map(Result::ok));
        let chain = certificates(certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&Zeroizing::new(read(key)?))
            .map_err(|error| EndpointError::for_file(key)(error.into()))?;
        let provider = muster_tls::provider();
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| EndpointError::for_file(certificate)(error.into()))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|error| EndpointError::for_file(certificate)(error.into()))?;
        Ok(Self(Arc::new(config)))
    }

    /// Loads the leaf certificate that the cluster issued to this host for client ports, from the
    /// agent's `tls` directory.
    pub(crate) fn load_own(tls: &Path) -> Result<Self, EndpointError> {
        let [ca, certificate, key] = ["client-ca.crt", "client.crt", "node.key"];
        Self::load(&tls.join(ca), &tls.join(certificate), &tls.join(key))
    }
}

/// A node's client port, and the identity for connecting to it.
#[derive(Clone, Debug)]
pub(crate) struct ClientEndpoint {
    /// Host name or address to connect to.
    host: String,
    port: u16,
    /// The name or address that the node's certificate must contain.
    server_name: String,
    /// The TLS identity; `None` connects without TLS.
    identity: Option<ClientTlsIdentity>,
}

impl ClientEndpoint {
    /// Returns the client port of this host's own node, which listens on `listen`; `tls` is the
    /// directory with its certificates. The server name is taken from the certificate itself, which
    /// may be older than the node's current address.
    pub(crate) fn own_node(tls: &Path, listen: SocketAddr) -> Result<Self, EndpointError> {
        // Take the server name from the certificate that the etcd serves. An etcd that ran before
        // its agent may serve another certificate than the agent's.
        let served = tls.join("served-client.crt");
        let certificate = if served.exists() { served } else { tls.join("client.crt") };
        Self::serving(&certificate, listen, ClientTlsIdentity::load_own(tls)?)
    }

    /// Returns the client port of a node on this host. The node listens on `listen`, and serves the
    /// certificate in the file `certificate`.
    pub(crate) fn serving(
        certificate: &Path,
        listen: SocketAddr,
        identity: ClientTlsIdentity,
    ) -> Result<Self, EndpointError> {
        let address = match listen.ip() {
            IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            address => address,
        };
        let failed = EndpointError::for_file(certificate);
        let pem = read(certificate)?;
        let server_name = match leaves::certificate_hosts(&pem).into_iter().next() {
            Some(UrlHost::Address(address)) => address.to_string(),
            Some(UrlHost::Dns(name)) => name,
            None => return Err(failed("it names no host".into())),
        };
        let host = address.to_string();
        Ok(Self { host, port: listen.port(), server_name, identity: Some(identity) })
    }

    /// Returns the client port at `endpoint`: `https://HOST:PORT`, `http://HOST:PORT`, or
    /// `HOST:PORT`. A text without a scheme means https if there is an identity, else http.
    pub(crate) fn parse(
        endpoint: &str,
        identity: Option<&ClientTlsIdentity>,
    ) -> Result<Self, EndpointError> {
        let wrong = || EndpointError::Endpoint(endpoint.to_owned());
        let (scheme, rest) = match endpoint.split_once("://") {
            Some(parts) => parts,
            None if identity.is_some() => ("https", endpoint),
            None => ("http", endpoint),
        };
        let (host, port) = rest.trim_end_matches('/').rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().map_err(|_| wrong())?;
        let host = host.trim_matches(['[', ']']).to_owned();
        let identity = match (scheme, identity) {
            ("http", _) => None,
            ("https", Some(identity)) => Some(identity.clone()),
            ("https", None) => return Err(EndpointError::NoCertificates(endpoint.to_owned())),
            _ => return Err(wrong()),
        };
        if host.is_empty() || host.contains(['/', '@', ' ']) {
            return Err(wrong());
        }
        Ok(Self { server_name: host.clone(), host, port, identity })
    }

    /// Parses a member's client URL, which discovery or the cluster has reported. If the agent has
    /// a TLS identity, a URL without TLS is refused, because any host could answer there.
    pub(crate) fn of_member(
        url: &str,
        identity: Option<&ClientTlsIdentity>,
    ) -> Result<Self, EndpointError> {
        let parsed = Self::parse(url, identity)?;
        if identity.is_some() && parsed.identity.is_none() {
            return Err(EndpointError::WithoutTls(url.to_owned()));
        }
        Ok(parsed)
    }

    /// Returns the TLS identity; `None` without TLS.
    pub(crate) fn identity(&self) -> Option<&ClientTlsIdentity> {
        self.identity.as_ref()
    }

    /// Returns the name or address for a request's `Host` header.
    pub(crate) fn server_name(&self) -> &str {
        &self.server_name
    }

    /// Opens a connection with the ALPN protocol `protocol`, within [`CONNECT_DEADLINE`].
    pub(crate) async fn open(&self, protocol: &[u8]) -> io::Result<Box<dyn ByteStream>> {
        let opened = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
            stream.set_nodelay(true)?;
            let Some(ClientTlsIdentity(config)) = &self.identity else {
                return Ok(Box::new(stream) as Box<dyn ByteStream>);
            };
            let name = ServerName::try_from(self.server_name.clone()).map_err(io::Error::other)?;
            let mut config = ClientConfig::clone(config);
            config.alpn_protocols = vec![protocol.to_vec()];
            let tls = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
            Ok(Box::new(tls) as Box<dyn ByteStream>)
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
        tokio::time::timeout(CONNECT_DEADLINE, opened).await.unwrap_or_else(|_| Err(late()))
    }

    /// Opens a gRPC connection. The connection is established when this function returns, so no
    /// request waits for it.
    pub(crate) async fn channel(&self) -> io::Result<Channel> {
        // The connector itself speaks TLS; the scheme http keeps tonic from adding TLS of its own.
        let host = if self.server_name.contains(':') {
            format!("[{}]", self.server_name)
        } else {
            self.server_name.clone()
        };
        let endpoint = Endpoint::from_shared(format!("http://{host}:{}", self.port))
            .map_err(io::Error::other)?;
        let target = self.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let target = target.clone();
            async move { target.open(b"h2").await.map(TokioIo::new) }
        });
        endpoint
            .connect_with_connector(connector)
            .await
            // tonic's own text says only that it is a transport error, so use its cause.
            .map_err(|error| {
                io::Error::other(
                    std::error::Error::source(&error)
                        .map_or_else(|| error.to_string(), error_chain),
                )
            })
    }
}

impl std::fmt::Display for ClientEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.identity.is_some() { "https" } else { "http" };
        let host = &self.host;
        if host.contains(':') {
            write!(f, "{scheme}://[{host}]:{}", self.port)
        } else {
            write!(f, "{scheme}://{host}:{}", self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> ClientTlsIdentity {
        let provider = muster_tls::provider();
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        ClientTlsIdentity(Arc::new(config))
    }

    #[test]
    fn an_identity_is_never_used_without_tls() {
        let identity = identity();
        let secure = ClientEndpoint::of_member("https://h:1", Some(&identity)).unwrap();
        assert!(secure.identity().is_some());
        let plain = ClientEndpoint::of_member("http://h:1", Some(&identity));
        assert!(matches!(plain, Err(EndpointError::WithoutTls(_))), "{plain:?}");
        assert!(ClientEndpoint::of_member("http://h:1", None).is_ok(), "a cluster without TLS");
        assert!(
            ClientEndpoint::parse("http://h:1", Some(&identity)).is_ok(),
            "an operator may type it"
        );
    }

    #[test]
    fn an_endpoint_is_typed_as_etcdctl_takes_it() {
        let at =
            |text: &str| ClientEndpoint::parse(text, None).map(|endpoint| endpoint.to_string());
        assert_eq!(at("http://10.0.0.1:2379").unwrap(), "http://10.0.0.1:2379");
        assert_eq!(at("127.0.0.1:2379/").unwrap(), "http://127.0.0.1:2379");
        assert_eq!(at("http://[::1]:2379").unwrap(), "http://[::1]:2379");
        assert!(matches!(at("https://h:1"), Err(EndpointError::NoCertificates(_))));
        for wrong in
            ["", "h", "h:", "ftp://h:1", "http://:1", "http://h:x", "http://a@h:1", "http://h/x:1"]
        {
            assert!(matches!(at(wrong), Err(EndpointError::Endpoint(_))), "{wrong}");
        }
    }
}
