//! The console's listener: its certificate, and the URL under which browsers reach it.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use discovery_types::digest::Digest;
use muster_shares::slots::SlotPool;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use super::{ConsoleArgs, ServerError};
use crate::app::ConsoleSettings;
use crate::keydir::KeyDirectory;

/// Maximum size of the certificate chain and of the key, in bytes.
const MAX_PEM_FILE: u64 = 64 * 1024;
/// Maximum number of streams of all sessions. A further one gets 503, and its page has to be
/// reloaded by hand.
const MAX_STREAMS: usize = 256;
/// Maximum number of streams of one session: one for each visible page.
const MAX_STREAMS_PER_SESSION: usize = 8;

/// Warning if no --console-cert is given.
pub(super) const SERVICE_CERTIFICATE_WARNING: &str =
    "the console shows the service's certificate, which browsers don't trust";
/// Advice that follows [`SERVICE_CERTIFICATE_WARNING`].
pub(super) const CONSOLE_CERTIFICATE_ADVICE: &str =
    "give a certificate of your CA with --console-cert and --console-key";

/// TLS configuration and settings of the console's listener.
pub(super) struct ConsoleSetup {
    pub(super) tls: rustls::ServerConfig,
    pub(super) settings: Arc<ConsoleSettings>,
}

impl ConsoleSetup {
    /// Warns in the log if browsers can't trust the console's certificate.
    pub(super) fn warn_of_service_certificate(&self) {
        if self.settings.uses_service_certificate {
            tracing::warn!(
                sha256 = %self.settings.certificate_sha256,
                "{SERVICE_CERTIFICATE_WARNING}: {CONSOLE_CERTIFICATE_ADVICE}"
            );
        }
    }
}

/// Certificate chain and key of the console's listener.
struct ConsoleCertificate {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    /// Whether the certificate and the key are those of the API's listener.
    is_of_service: bool,
}

/// Makes the console's TLS configuration and settings. `first` is the first address on which the
/// console listens; `None` if it doesn't.
pub(super) fn prepare(
    args: &ConsoleArgs,
    keys: &KeyDirectory,
    first: Option<SocketAddr>,
) -> Result<Option<ConsoleSetup>, ServerError> {
    let Some(first) = first else { return Ok(None) };
    let certificate = certificate(args, keys)?;
    let fingerprint = certificate.chain.first().map(|leaf| Digest::of(leaf));
    let uses_service_certificate = certificate.is_of_service;
    let mut tls = muster_tls::tls13_server_without_client_auth()
        .with_single_cert(certificate.chain, certificate.key)
        .map_err(|error| ServerError::failed("--console-cert and --console-key", error))?;
    muster_tls::disable_resumption(&mut tls);
    let settings = ConsoleSettings {
        url: url(args, keys, first),
        certificate_sha256: fingerprint.expect("rustls takes no empty chain"),
        uses_service_certificate,
        stream_slots: SlotPool::new(MAX_STREAMS, MAX_STREAMS_PER_SESSION),
    };
    Ok(Some(ConsoleSetup { tls, settings: Arc::new(settings) }))
}

fn certificate(args: &ConsoleArgs, keys: &KeyDirectory) -> Result<ConsoleCertificate, ServerError> {
    let (Some(cert), Some(key)) = (&args.console_cert, &args.console_key) else {
        let chain = vec![keys.tls_certificate.clone()];
        return Ok(ConsoleCertificate {
            chain,
            key: keys.tls_key.clone_key(),
            is_of_service: true,
        });
    };
    let bad = |option: &str, file: &Path, error: &dyn std::fmt::Display| {
        ServerError::Usage(format!("{option} {}: {error}", file.display()))
    };
    let pem = muster_files::read_named(cert, MAX_PEM_FILE)
        .map_err(|error| bad("--console-cert", cert, &error))?;
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .map_err(|error| bad("--console-cert", cert, &error))?;
    if chain.is_empty() {
        return Err(bad("--console-cert", cert, &"it holds no certificate in PEM"));
    }
    let refused = |error: std::io::Error| bad("--console-key", key, &error);
    let mode = fs_err::metadata(key).map_err(refused)?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(bad("--console-key", key, &"others may read this private key: chmod 600 it"));
    }
    let pem = Zeroizing::new(muster_files::read_named(key, MAX_PEM_FILE).map_err(refused)?);
    let key = PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|_| bad("--console-key", key, &"it holds no private key in PEM"))?;
    Ok(ConsoleCertificate { chain, key, is_of_service: false })
}

/// Returns the URL of the console: as the operator said, or by the address on which it listens.
fn url(args: &ConsoleArgs, keys: &KeyDirectory, first: SocketAddr) -> String {
    if let Some(url) = &args.console_url {
        return url.to_string();
    }
    match keys.settings.urls.first().filter(|_| first.ip().is_unspecified()) {
        Some(service) => format!("https://{}:{}", service.host(), first.port()),
        None => format!("https://{first}"),
    }
}
