//! The listener's TLS configuration: TLS 1.3 only. Client certificates are requested but not
//! required.
//!
//! A client's certificate is self-signed, so only its key is used and there is no chain to check.
//! The handshake's signature proves that the client holds the key. `auth` decides what the key may
//! do.

use std::any::Any;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::dev::Extensions;
use actix_web::rt::net::TcpStream;
use discovery_types::access::AccessToken;
use discovery_types::digest::Digest;
use discovery_types::key::KeyId;
use muster_tls::{CertificateRule, PeerCertificate};
use rustls::pki_types::CertificateDer;
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, Error};

use crate::keydir::KeyDirectory;

/// DER of an Ed25519 SubjectPublicKeyInfo before its 32 key bytes (RFC 8410, section 4).
const ED25519_SPKI: [u8; 12] =
    [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0];

/// The remote end of a connection.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionPeer {
    /// Remote address of the socket.
    pub address: SocketAddr,
    /// The client's certificate, if it sent one.
    pub certificate: Option<ClientCertificate>,
    /// Access token that the connection got or showed last.
    pub last_token: LastToken,
}

/// Last access token of a connection. Either this process issued it to the connection, or the
/// connection showed it and its signature was verified. Clones share the token.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastToken(Arc<Mutex<Option<HashedToken>>>);

/// Hash of a token's text, id of the key that signed it, and the token.
type HashedToken = (Digest, KeyId, Arc<AccessToken>);

impl LastToken {
    /// Returns the token if its text has this hash, and the id of the key that signed it. The caller
    /// checks that the service still has that key.
    pub(crate) fn with_hash(&self, hash: &Digest) -> Option<(KeyId, Arc<AccessToken>)> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = last.as_ref().filter(|(known, _, _)| known == hash);
        known.map(|(_, signer, token)| (*signer, token.clone()))
    }

    /// Remembers a token whose text has this hash, instead of the last one. The caller has signed it
    /// with the key `signer`, or verified its signature.
    pub(crate) fn set(&self, hash: Digest, signer: KeyId, token: Arc<AccessToken>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((hash, signer, token));
    }
}

/// The parts of a client's certificate that requests use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClientCertificate {
    /// SHA-256 of the certificate's DER: `x5t#S256` of RFC 8705.
    pub thumbprint: [u8; 32],
    /// The certificate's public key, if it is an Ed25519 key.
    pub ed25519: Option<[u8; 32]>,
}

impl ClientCertificate {
    fn read(certificate: &CertificateDer<'_>) -> Option<Self> {
        let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
        let thumbprint = digest.as_ref().try_into().expect("SHA-256 has 32 bytes");
        let parsed = ParsedCertificate::try_from(certificate).ok()?;
        let spki = parsed.subject_public_key_info();
        let ed25519 = spki.strip_prefix(&ED25519_SPKI[..]).and_then(|key| key.try_into().ok());
        Some(ClientCertificate { thumbprint, ed25519 })
    }
}

/// actix-web's `on_connect` hook: stores a [`ConnectionPeer`] in the connection's extensions.
pub(crate) fn remember_peer(connection: &dyn Any, extensions: &mut Extensions) {
    let Some(stream) = connection.downcast_ref::<TlsStream<TcpStream>>() else { return };
    let (socket, session) = stream.get_ref();
    let Ok(address) = socket.peer_addr() else { return };
    let certificate = session
        .peer_certificates()
        .and_then(|chain| chain.first())
        .and_then(ClientCertificate::read);
    extensions.insert(ConnectionPeer { address, certificate, last_token: LastToken::default() });
}

/// Makes the listener's TLS configuration.
pub(crate) fn server_config(keys: &KeyDirectory) -> Result<rustls::ServerConfig, Error> {
    let mut config = muster_tls::tls13_server(AnyKeyRule)
        .with_single_cert(vec![keys.tls_certificate.clone()], keys.tls_key.clone_key())?;
    muster_tls::disable_resumption(&mut config);
    Ok(config)
}

/// Accepts any client certificate whose key signed this handshake.
#[derive(Debug)]
struct AnyKeyRule;

impl CertificateRule for AnyKeyRule {
    fn verify(&self, shown: &PeerCertificate<'_>) -> Result<(), Error> {
        ParsedCertificate::try_from(shown.end_entity)
            .map(drop)
            .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))
    }

    fn is_mandatory(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use discovery_types::access::{ClientKind, Confirmation};
    use discovery_types::digest::Nonce;
    use discovery_types::key::SigningKey;

    use super::*;

    #[test]
    fn a_connection_remembers_only_its_last_token() {
        let id = SigningKey::generate().key_id();
        let token = AccessToken {
            iss: "i".into(),
            aud: "i".into(),
            sub: id,
            subject: ClientKind::Admin,
            iat: 1,
            exp: 2,
            jti: Nonce::random(),
            cnf: Confirmation { jkt: id },
        };
        let other = AccessToken { exp: 3, ..token.clone() };
        let (first, second) = (Digest::of(b"first"), Digest::of(b"second"));
        let last = LastToken::default();
        assert_eq!(last.with_hash(&first), None);
        last.set(first, id, Arc::new(token.clone()));
        assert_eq!(last.clone().with_hash(&first), Some((id, Arc::new(token))), "clones share it");
        assert_eq!(last.with_hash(&second), None);
        last.set(second, id, Arc::new(other.clone()));
        assert_eq!(last.with_hash(&first), None);
        assert_eq!(last.with_hash(&second), Some((id, Arc::new(other))));
    }
}
