//! A small etcd client for load: tonic over our own TLS connector, one channel per endpoint.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use hyper_util::rt::TokioIo;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{
    HashKvRequest, HashKvResponse, PutRequest, RangeRequest, RangeResponse, StatusRequest,
    StatusResponse,
};
use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::{Channel, Endpoint};

/// Time limit of one connection attempt.
const CONNECT_LIMIT: Duration = Duration::from_millis(500);

/// Returns the TLS configuration for connections to nodes, made from `ca.crt`, `client.crt` and
/// `client.key` in `folder`.
pub fn tls_from(folder: &Path) -> Result<Arc<ClientConfig>> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(folder.join("ca.crt"))? {
        roots.add(certificate?)?;
    }
    let chain =
        CertificateDer::pem_file_iter(folder.join("client.crt"))?.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_file(folder.join("client.key"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// Returns a channel to one node. The channel connects on first use, and reconnects whenever it has
/// to.
pub fn channel(address: SocketAddr, tls: Option<Arc<ClientConfig>>) -> Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_LIMIT)
        .tcp_nodelay(true);
    let Some(tls) = tls else { return Ok(endpoint.connect_lazy()) };
    let name = ServerName::IpAddress(address.ip().into());
    let connector = TlsConnector::from(tls);
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(move |_| {
        let (connector, name) = (connector.clone(), name.clone());
        async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let stream = connector.connect(name, stream).await?;
            Ok::<_, std::io::Error>(TokioIo::new(stream))
        }
    })))
}

/// A client of one node, for load generators.
#[derive(Clone, Debug)]
pub struct EtcdClient {
    kv: KvClient<Channel>,
    maintenance: MaintenanceClient<Channel>,
    token: Option<AsciiMetadataValue>,
}

impl EtcdClient {
    /// Creates a client of the node at `address`. The client connects on first use, without TLS if
    /// `tls` is `None`.
    pub fn new(address: SocketAddr, tls: Option<Arc<ClientConfig>>) -> Result<Self> {
        let channel = channel(address, tls)?;
        Ok(Self {
            kv: KvClient::new(channel.clone()),
            maintenance: MaintenanceClient::new(channel),
            token: None,
        })
    }

    /// Sends `token` with every call. A token that isn't a valid header value is ignored.
    #[must_use]
    pub fn with_token(mut self, token: Option<String>) -> Self {
        self.token = token.and_then(|token| token.parse().ok());
        self
    }

    /// Writes one key and returns the revision of the write.
    pub async fn put(&mut self, key: &[u8], value: &[u8], limit: Duration) -> Result<i64> {
        let request = PutRequest {
            key: key.to_vec().into(),
            value: value.to_vec().into(),
            ..PutRequest::default()
        };
        let call = self.kv.put(request_with_token(request, self.token.as_ref()));
        let answer = tokio::time::timeout(limit, call).await.context("put")??;
        Ok(answer.into_inner().header.context("an answer has a header")?.revision)
    }

    /// Sends a range request, with `limit` as its time limit.
    pub async fn range(&mut self, request: RangeRequest, limit: Duration) -> Result<RangeResponse> {
        let call = self.kv.range(request_with_token(request, self.token.as_ref()));
        let answer = tokio::time::timeout(limit, call).await.context("range")??;
        Ok(answer.into_inner())
    }

    /// Returns the node's own view of its state (`Maintenance.Status`).
    pub async fn status(&mut self, limit: Duration) -> Result<StatusResponse> {
        let call =
            self.maintenance.status(request_with_token(StatusRequest {}, self.token.as_ref()));
        Ok(tokio::time::timeout(limit, call).await.context("status")??.into_inner())
    }

    /// Returns the hash of all keys up to `revision`; 0 means the latest revision.
    pub async fn hash_kv(&mut self, revision: i64, limit: Duration) -> Result<HashKvResponse> {
        let call = self
            .maintenance
            .hash_kv(request_with_token(HashKvRequest { revision }, self.token.as_ref()));
        Ok(tokio::time::timeout(limit, call).await.context("hash_kv")??.into_inner())
    }
}

/// Wraps `message` in a gRPC request that carries the token, if there is one.
fn request_with_token<T>(message: T, token: Option<&AsciiMetadataValue>) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token.clone());
    }
    request
}
