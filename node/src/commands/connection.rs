//! Connections of commands to one member of a cluster.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use hyper_util::rt::TokioIo;
use node_engine::tls::{ClientFiles, TlsError, client_config};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// TLS files for the members of one cluster, as given on the command line.
#[derive(Clone, Debug)]
pub(super) struct ClientTls {
    /// Name of the flag for [`Self::ca`], which an error tells to give.
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
    /// Whether the command line is wrong.
    pub(super) fn is_usage(&self) -> bool {
        match self {
            Self::Url(_) | Self::NoCa(_) => true,
            Self::Tls(_) | Self::Connect(..) => false,
        }
    }
}

/// Connects to the member at `url`, whose scheme may be left out.
pub(super) async fn connect(url: &str, tls: &ClientTls) -> Result<Channel, ConnectError> {
    let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let wrong = || ConnectError::Url(url.clone());
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let host = uri.host().ok_or_else(wrong)?.trim_matches(['[', ']']).to_owned();
    let endpoint = Endpoint::from(uri.clone()).connect_timeout(CONNECT_TIMEOUT);
    let failed = |error| ConnectError::Connect(url.clone(), error);
    match uri.scheme_str() {
        Some("http") => endpoint.connect().await.map_err(failed),
        Some("https") => {
            let ca = tls.ca.clone().ok_or(ConnectError::NoCa(tls.ca_flag))?;
            let own = tls.own.clone();
            let config = client_config(&ClientFiles { ca, own }, b"h2");
            let config = config.map_err(|error| ConnectError::Tls(Box::new(error)))?;
            let address =
                format!("{}:{}", uri.host().unwrap_or_default(), uri.port_u16().unwrap_or(443));
            let name = ServerName::try_from(host).map_err(|_| wrong())?;
            // TLS is added by the connector below. With an https address the library would add TLS
            // a second time.
            let plain = Endpoint::from_shared(format!("http://{address}")).map_err(failed)?;
            let dial = tower::service_fn(move |_: Uri| {
                let (config, address, name) = (Arc::clone(&config), address.clone(), name.clone());
                async move {
                    let stream = TcpStream::connect(address).await?;
                    let tls = tokio_rustls::TlsConnector::from(config);
                    Ok::<_, io::Error>(TokioIo::new(tls.connect(name, stream).await?))
                }
            });
            let plain = plain.connect_timeout(CONNECT_TIMEOUT);
            plain.connect_with_connector(dial).await.map_err(failed)
        }
        _ => Err(wrong()),
    }
}
