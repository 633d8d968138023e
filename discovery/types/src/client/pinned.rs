//! TLS connections to a pinned key.

use std::sync::Arc;

use muster_tls::{CertificateRule, PeerCertificate};
use rustls::{CertificateError, OtherError};

use crate::digest::Digest;
use crate::key::SigningKey;
use crate::tls::spki_hash;

/// The key in the server's certificate isn't among the pinned keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server's key has the hash {found}, which is not pinned")]
pub struct PinMismatch {
    /// SHA-256 of the server's key (SPKI).
    pub found: Digest,
}

/// Server certificate verifier that checks the key against the pins, and nothing else. Validity
/// dates are ignored, because a host may boot with a wrong clock. Names are ignored, because they
/// prove nothing beyond the key.
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

/// Returns the client's TLS 1.3 configuration. It accepts only a server whose key has one of
/// `pins`, and presents a client certificate of `key`.
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
