//! A node's client port, and how to open it: mutual TLS with a leaf of the cluster's, or plain.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use discovery_types::leaves;
use discovery_types::url::Host;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};
use zeroize::Zeroizing;

use crate::exit::chain;
use crate::state::Layout;
use crate::status::Status;

/// The most that a file with certificates or a key may hold.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// The longest that a connection may take, with its handshake.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(3);

/// Why there is no way to a node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DoorError {
    /// A file with a certificate or a key.
    #[error("can't use {what}")]
    Certificates {
        /// Which file.
        what: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The address is none.
    #[error("{0}: not an endpoint; say https://HOST:PORT")]
    Endpoint(String),
    /// TLS is asked for, and there is nothing to show.
    #[error(
        "{0}: https needs --cacert, --cert and --key, or the data directory of this host's agent"
    )]
    NoCertificates(String),
    /// There is something to show, and it would be shown to nobody.
    #[error("{0}: a member of a cluster with TLS, at an address without: it is not asked there")]
    Plain(String),
}

impl DoorError {
    fn file(path: &Path) -> impl Fn(Box<dyn std::error::Error + Send + Sync>) -> Self + use<> {
        let what = path.display().to_string();
        move |source| Self::Certificates { what: what.clone(), source }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, DoorError> {
    muster_files::read_named(path, MAX_FILE_BYTES)
        .map_err(|error| DoorError::file(path)(error.into()))
}

/// Bytes, with or without TLS around them.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// As whom to speak, and whom to believe.
#[derive(Clone, Debug)]
pub(crate) struct Identity(Arc<ClientConfig>);

impl Identity {
    /// From three PEM files: who may sign for servers, and the client's own.
    pub(crate) fn load(ca: &Path, certificate: &Path, key: &Path) -> Result<Self, DoorError> {
        let certificates = |path: &Path| {
            CertificateDer::pem_slice_iter(&read(path)?)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| DoorError::file(path)(error.into()))
        };
        let mut roots = RootCertStore::empty();
        for root in certificates(ca)? {
            roots.add(root).map_err(|error| DoorError::file(ca)(error.into()))?;
        }
        let chain = certificates(certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&Zeroizing::new(read(key)?))
            .map_err(|error| DoorError::file(key)(error.into()))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| DoorError::file(certificate)(error.into()))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|error| DoorError::file(certificate)(error.into()))?;
        Ok(Self(Arc::new(config)))
    }

    /// The leaf that the cluster gave this host for clients' ports, from the agent's `tls` folder.
    pub(crate) fn own(tls: &Path) -> Result<Self, DoorError> {
        let [ca, certificate, key] = ["client-ca.crt", "client.crt", "node.key"];
        Self::load(&tls.join(ca), &tls.join(certificate), &tls.join(key))
    }
}

/// Where and as whom to ask.
#[derive(Clone, Debug)]
pub(crate) struct Door {
    /// What to connect to.
    host: String,
    port: u16,
    /// The name or address that stands in its certificate.
    server_name: String,
    /// Plain without.
    identity: Option<Identity>,
}

impl Door {
    /// The node of this host, whose client listener is `listen`, with the files of `tls`. Its
    /// certificate is looked for by a name that it has, whatever the node is called by now.
    pub(crate) fn own(tls: &Path, listen: SocketAddr) -> Result<Self, DoorError> {
        let address = match listen.ip() {
            IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            address => address,
        };
        let certificate = tls.join("client.crt");
        let failed = DoorError::file(&certificate);
        let pem = read(&certificate)?;
        let server_name = match leaves::hosts(&pem).into_iter().next() {
            Some(Host::Address(address)) => address.to_string(),
            Some(Host::Dns(name)) => name,
            None => return Err(failed("it names no host".into())),
        };
        let identity = Some(Identity::own(tls)?);
        Ok(Self { host: address.to_string(), port: listen.port(), server_name, identity })
    }

    /// This host's own node, as the agent wrote down where it is; `None` if it has none yet.
    pub(crate) fn of_agent(layout: &Layout, status: &Status) -> Option<Result<Self, DoorError>> {
        let listen = status.client_listen.as_deref()?.parse().ok()?;
        Some(Self::own(&layout.tls(), listen))
    }

    /// Whoever is at `endpoint`: `https://HOST:PORT`, `http://HOST:PORT`, or without a scheme, which
    /// is https for those who have an identity.
    pub(crate) fn at(endpoint: &str, identity: Option<&Identity>) -> Result<Self, DoorError> {
        let wrong = || DoorError::Endpoint(endpoint.to_owned());
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
            ("https", None) => return Err(DoorError::NoCertificates(endpoint.to_owned())),
            _ => return Err(wrong()),
        };
        if host.is_empty() || host.contains(['/', '@', ' ']) {
            return Err(wrong());
        }
        Ok(Self { server_name: host.clone(), host, port, identity })
    }

    /// A member, where discovery or the cluster says that clients reach it. Whoever has an identity is
    /// led from there onto no connection without TLS, where anybody could answer.
    pub(crate) fn of_member(url: &str, identity: Option<&Identity>) -> Result<Self, DoorError> {
        let door = Self::at(url, identity)?;
        if identity.is_some() && door.identity.is_none() {
            return Err(DoorError::Plain(url.to_owned()));
        }
        Ok(door)
    }

    /// As whom it is opened.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    /// The name or address that a request is for.
    pub(crate) fn server_name(&self) -> &str {
        &self.server_name
    }

    /// A connection for `protocol`, as ALPN calls it; within [`CONNECT_DEADLINE`].
    pub(crate) async fn open(&self, protocol: &[u8]) -> io::Result<Box<dyn Stream>> {
        let opened = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
            stream.set_nodelay(true)?;
            let Some(Identity(config)) = &self.identity else {
                return Ok(Box::new(stream) as Box<dyn Stream>);
            };
            let name = ServerName::try_from(self.server_name.clone()).map_err(io::Error::other)?;
            let mut config = ClientConfig::clone(config);
            config.alpn_protocols = vec![protocol.to_vec()];
            let tls = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
            Ok(Box::new(tls) as Box<dyn Stream>)
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
        tokio::time::timeout(CONNECT_DEADLINE, opened).await.unwrap_or_else(|_| Err(late()))
    }

    /// A connection for gRPC. It is there: nothing that is sent over it waits for one.
    pub(crate) async fn channel(&self) -> io::Result<Channel> {
        // The connector speaks TLS; the scheme only keeps tonic from doing so as well.
        let host = if self.server_name.contains(':') {
            format!("[{}]", self.server_name)
        } else {
            self.server_name.clone()
        };
        let endpoint = Endpoint::from_shared(format!("http://{host}:{}", self.port))
            .map_err(io::Error::other)?;
        let door = self.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let door = door.clone();
            async move { door.open(b"h2").await.map(TokioIo::new) }
        });
        endpoint
            .connect_with_connector(connector)
            .await
            // What tonic says itself is only that it is an error of transport.
            .map_err(|error| {
                io::Error::other(
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), chain),
                )
            })
    }
}

impl std::fmt::Display for Door {
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

    fn identity() -> Identity {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        Identity(Arc::new(config))
    }

    #[test]
    fn who_has_an_identity_is_led_onto_no_plain_connection() {
        let identity = identity();
        let secure = Door::of_member("https://h:1", Some(&identity)).unwrap();
        assert!(secure.identity().is_some());
        let plain = Door::of_member("http://h:1", Some(&identity));
        assert!(matches!(plain, Err(DoorError::Plain(_))), "{plain:?}");
        assert!(Door::of_member("http://h:1", None).is_ok(), "a cluster without TLS");
        assert!(Door::at("http://h:1", Some(&identity)).is_ok(), "an operator may type it");
    }

    #[test]
    fn an_endpoint_is_typed_as_etcdctl_takes_it() {
        let at = |text: &str| Door::at(text, None).map(|door| door.to_string());
        assert_eq!(at("http://10.0.0.1:2379").unwrap(), "http://10.0.0.1:2379");
        assert_eq!(at("127.0.0.1:2379/").unwrap(), "http://127.0.0.1:2379");
        assert_eq!(at("http://[::1]:2379").unwrap(), "http://[::1]:2379");
        assert!(matches!(at("https://h:1"), Err(DoorError::NoCertificates(_))));
        for wrong in
            ["", "h", "h:", "ftp://h:1", "http://:1", "http://h:x", "http://a@h:1", "http://h/x:1"]
        {
            assert!(matches!(at(wrong), Err(DoorError::Endpoint(_))), "{wrong}");
        }
    }
}
