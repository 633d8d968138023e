//! Connections of commands to one member of a cluster.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use hyper_util::rt::TokioIo;
use node_engine::tls::{ClientFiles, TlsError, client_config};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// TLS files for the members of one cluster, as given on the command line.
#[derive(Clone, Debug)]
pub(super) struct ClientTls {
    /// Name of the flag for [`Self::ca`], for errors that ask for it.
    pub ca_flag: &'static str,
    /// CA that must have signed the members' certificates.
    pub ca: Option<PathBuf>,
    /// Client certificate and its private key.
    pub own: Option<(PathBuf, PathBuf)>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("{0:?} is not the URL of a member: http://HOST:PORT or https://HOST:PORT")]
    Url(String),
    #[error("an https endpoint needs {0}, which says whose certificate to trust")]
    NoCa(&'static str),
    #[error(transparent)]
    Tls(Box<TlsError>),
    #[error("cannot connect to {0}")]
    Connect(String, #[source] tonic::transport::Error),
}

impl ConnectError {
    /// Whether a wrong command line caused the error. The command then exits with the code for
    /// wrong usage.
    pub(super) fn is_usage(&self) -> bool {
        match self {
            Self::Url(_) | Self::NoCa(_) => true,
            Self::Tls(_) | Self::Connect(..) => false,
        }
    }
}

/// Address of a member, with the settings for a connection to it.
struct Destination {
    url: String,
    /// Address of the TCP connection, always with the scheme `http`.
    endpoint: Endpoint,
    /// Set if the URL has the scheme `https`.
    tls: Option<TlsDestination>,
}

/// Server of a TLS connection, and the configuration that the connection uses.
struct TlsDestination {
    config: Arc<ClientConfig>,
    /// Host and port, separated by a colon.
    address: String,
    /// Name that the member's certificate must have.
    name: ServerName<'static>,
}

impl Destination {
    /// Parses the URL, and reads the TLS files that it needs.
    fn new(url: &str, tls: &ClientTls) -> Result<Self, ConnectError> {
        let url = full_url(url);
        let wrong = || ConnectError::Url(url.clone());
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let host = uri.host().ok_or_else(wrong)?;
        let (endpoint, tls) = match uri.scheme_str() {
            Some("http") => (Endpoint::from(uri.clone()), None),
            Some("https") => {
                let ca = tls.ca.clone().ok_or(ConnectError::NoCa(tls.ca_flag))?;
                let own = tls.own.clone();
                let config = client_config(&ClientFiles { ca, own }, b"h2");
                let config = config.map_err(|error| ConnectError::Tls(Box::new(error)))?;
                let address = format!("{host}:{}", uri.port_u16().unwrap_or(443));
                let name = host.trim_matches(['[', ']']).to_owned();
                let name = ServerName::try_from(name).map_err(|_| wrong())?;
                // TLS is added by the connector. With an https address the library would add TLS a
                // second time.
                let plain = Endpoint::from_shared(format!("http://{address}"));
                let plain = plain.map_err(|error| ConnectError::Connect(url.clone(), error))?;
                (plain, Some(TlsDestination { config, address, name }))
            }
            _ => return Err(wrong()),
        };
        let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT);
        Ok(Self { url, endpoint, tls })
    }
}

/// Returns the URL with its scheme, which may be left out.
pub(super) fn full_url(url: &str) -> String {
    if url.contains("://") { url.to_owned() } else { format!("http://{url}") }
}

/// Checks what can be checked without a connection: the URL, and the TLS files.
pub(super) fn check_url_and_files(url: &str, tls: &ClientTls) -> Result<(), ConnectError> {
    Destination::new(url, tls).map(drop)
}

/// Connects to the member at `url`, whose scheme may be left out.
pub(super) async fn connect(url: &str, tls: &ClientTls) -> Result<Channel, ConnectError> {
    let Destination { url, endpoint, tls } = Destination::new(url, tls)?;
    let connected = match tls {
        None => endpoint.connect().await,
        Some(TlsDestination { config, address, name }) => {
            let dial = tower::service_fn(move |_: Uri| {
                let (config, address, name) = (Arc::clone(&config), address.clone(), name.clone());
                async move {
                    let stream = TcpStream::connect(address).await?;
                    let tls = tokio_rustls::TlsConnector::from(config);
                    Ok::<_, io::Error>(TokioIo::new(tls.connect(name, stream).await?))
                }
            });
            endpoint.connect_with_connector(dial).await
        }
    };
    connected.map_err(|error| ConnectError::Connect(url, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_and_its_tls_files_are_checked_without_a_connection() {
        let without = ClientTls { ca_flag: "--target-cacert", ca: None, own: None };
        for right in ["a:2379", "http://a:2379", "http://[::1]:2379"] {
            assert!(check_url_and_files(right, &without).is_ok(), "{right}");
        }
        for wrong in ["", "ftp://a:2379", "https://a:2379"] {
            let refused = check_url_and_files(wrong, &without);
            assert!(refused.is_err_and(|error| error.is_usage()), "{wrong}");
        }
        let ca = Some(PathBuf::from("/nonexistent/ca.crt"));
        let missing = check_url_and_files("https://a:2379", &ClientTls { ca, ..without });
        assert!(matches!(missing, Err(ConnectError::Tls(_))), "{missing:?}");
    }
}
