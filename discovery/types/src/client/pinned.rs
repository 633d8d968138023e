//! TLS connections to a pinned key.

use std::sync::Arc;

use muster_tls::{CertificateRule, PeerCertificate};
use rustls::{CertificateError, OtherError};

use crate::digest::Digest;
use crate::key::SigningKey;
use crate::tls::spki_hash;

/// The server showed another key than the pinned ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server's key has the hash {found}, which is not pinned")]
pub struct PinMismatch {
    /// SHA-256 of the shown key (SPKI).
    pub found: Digest,
}

/// Rule that checks the server's key, and nothing else of its certificate. A host may boot before
/// it knows the time, and the name proves nothing that the key doesn't.
#[derive(Debug)]
struct PinnedKeyRule(Vec<Digest>);

impl CertificateRule for PinnedKeyRule {
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), rustls::Error> {
        let found = spki_hash(shown.end_entity)
            .map_err(|_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding))?;
        if self.0.contains(&found) {
            return Ok(());
        }
        let mismatch = OtherError(Arc::new(PinMismatch { found }));
        Err(rustls::Error::InvalidCertificate(CertificateError::Other(mismatch)))
    }
}

/// Returns the configuration for TLS 1.3 to a server whose key has one of `pins`, with a client
/// certificate over `key`.
pub fn client_tls_config(pins: &[Digest], key: Option<&SigningKey>) -> rustls::ClientConfig {
    let builder = muster_tls::tls13_client(PinnedKeyRule(pins.to_vec()));
    match key {
        None => builder.with_no_client_auth(),
        Some(key) => {
            let identity = key.tls_identity();
            builder
                .with_client_auth_cert(identity.chain, identity.key)
                .expect("our own certificate is over our own key")
        }
    }
}
