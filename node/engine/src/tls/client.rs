//! TLS of commands that connect to a member's client port.

use std::{path::PathBuf, sync::Arc};

use rustls::ClientConfig;

use super::{
    TlsError,
    files::{load_key, load_roots},
    purpose::CertificatePurpose,
};

/// TLS files of a command that connects to a member.
#[derive(Clone, Debug)]
pub struct ClientFiles {
    /// CA that issued the member's certificate.
    pub ca: PathBuf,
    /// Client certificate and its private key, for a member that requires a client certificate.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// Returns the configuration for connecting to a member, with `alpn` as the protocol inside TLS.
///
/// # Errors
/// If a file can't be used.
pub fn client_config(files: &ClientFiles, alpn: &[u8]) -> Result<Arc<ClientConfig>, TlsError> {
    let roots = load_roots(&files.ca)?.get();
    let provider = muster_tls::provider();
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Policy)?
        .with_root_certificates(roots);
    let mut config = match &files.own {
        Some((cert, key)) => builder.with_client_cert_resolver(Arc::new(load_key(
            cert,
            key,
            &[CertificatePurpose::Client],
        )?)),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    Ok(Arc::new(config))
}
