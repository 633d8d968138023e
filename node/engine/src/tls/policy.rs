//! TLS versions and cipher suites that clients are offered.

use std::sync::Arc;

use rustls::{
    CipherSuite, SupportedProtocolVersion,
    crypto::{CryptoProvider, ring},
    version::{TLS12, TLS13},
};

/// TLS protocol version that can be configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TlsVersion {
    /// Version 1.2 (RFC 5246).
    V12,
    /// Version 1.3 (RFC 8446).
    V13,
}

/// TLS versions and cipher suites that a listener for clients may offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPolicy {
    /// Lowest version that is offered.
    pub min: TlsVersion,
    /// Highest version that is offered.
    pub max: TlsVersion,
    /// TLS 1.2 cipher suites that are offered; empty for the default ones.
    pub cipher_suites: Vec<CipherSuite>,
}

impl Default for TlsPolicy {
    fn default() -> Self {
        Self { min: TlsVersion::V12, max: TlsVersion::V13, cipher_suites: Vec::new() }
    }
}

/// Names that `--cipher-suites` accepts (those of Go's crypto/tls), with their suites.
pub(crate) const CIPHER_SUITES: [(&str, CipherSuite); 9] = [
    ("TLS_AES_128_GCM_SHA256", CipherSuite::TLS13_AES_128_GCM_SHA256),
    ("TLS_AES_256_GCM_SHA384", CipherSuite::TLS13_AES_256_GCM_SHA384),
    ("TLS_CHACHA20_POLY1305_SHA256", CipherSuite::TLS13_CHACHA20_POLY1305_SHA256),
    (
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    ),
    (
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    ),
    (
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
        CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
    ),
    ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256),
    ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384),
    (
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    ),
];

/// Cipher suites that Go's crypto/tls has and rustls does not have. They lack forward secrecy or an
/// AEAD.
const UNSUPPORTED_CIPHER_SUITES: [&str; 16] = [
    "TLS_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
];

/// Whether rustls has a cipher suite of Go's crypto/tls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoCipherSuite {
    /// Rustls also has this suite.
    Offered(CipherSuite),
    /// Rustls does not have this suite.
    Unsupported,
}

/// Returns the suite that Go calls `name`. The short names of Go's two ChaCha20 suites are accepted
/// as well.
#[must_use]
pub fn go_cipher_suite(name: &str) -> Option<GoCipherSuite> {
    if UNSUPPORTED_CIPHER_SUITES.contains(&name) {
        return Some(GoCipherSuite::Unsupported);
    }
    CIPHER_SUITES
        .iter()
        .find(|(known, _)| {
            *known == name
                || known.strip_suffix("_SHA256") == Some(name) && name.ends_with("POLY1305")
        })
        .map(|(_, suite)| GoCipherSuite::Offered(*suite))
}

/// Returns whether the suite belongs to TLS 1.2. All others belong to TLS 1.3.
#[must_use]
pub fn is_of_tls_1_2(suite: CipherSuite) -> bool {
    CIPHER_SUITES.iter().any(|(name, known)| *known == suite && name.contains("_WITH_"))
}

impl TlsPolicy {
    pub(super) fn provider(&self) -> Arc<CryptoProvider> {
        let mut provider = ring::default_provider();
        if !self.cipher_suites.is_empty() {
            // All cipher suites of TLS 1.3 stay enabled. As in Go, only those of TLS 1.2 can be
            // configured.
            provider.cipher_suites.retain(|suite| {
                suite.version().version == rustls::ProtocolVersion::TLSv1_3
                    || self.cipher_suites.contains(&suite.suite())
            });
        }
        Arc::new(provider)
    }

    pub(super) fn versions(&self) -> Vec<&'static SupportedProtocolVersion> {
        [(TlsVersion::V13, &TLS13), (TlsVersion::V12, &TLS12)]
            .into_iter()
            .filter(|(version, _)| (self.min..=self.max).contains(version))
            .map(|(_, supported)| supported)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_outside_the_bounds_are_not_offered() {
        let count = |min, max| TlsPolicy { min, max, cipher_suites: Vec::new() }.versions().len();
        assert_eq!(count(TlsVersion::V12, TlsVersion::V13), 2);
        assert_eq!(count(TlsVersion::V13, TlsVersion::V13), 1);
        assert_eq!(count(TlsVersion::V12, TlsVersion::V12), 1);
    }

    #[test]
    fn named_suites_restrict_tls_1_2_only() {
        let one = CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256;
        let policy = TlsPolicy { cipher_suites: vec![one], ..TlsPolicy::default() };
        assert_eq!(policy.provider().cipher_suites.len(), 1 + 3);
    }

    #[test]
    fn suites_are_known_by_gos_names() {
        use GoCipherSuite::{Offered, Unsupported};
        let chacha = CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256;
        for (name, suite) in [
            ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", Some(Offered(chacha))),
            ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", Some(Offered(chacha))),
            ("TLS_RSA_WITH_AES_256_GCM_SHA384", Some(Unsupported)),
            ("TLS_RSA_WITH_RC4_128_SHA", Some(Unsupported)),
            ("TLS_RSA_WITH_NULL_SHA", None),
        ] {
            assert_eq!(go_cipher_suite(name), suite, "{name}");
        }
        assert!(is_of_tls_1_2(chacha));
        assert!(!is_of_tls_1_2(CipherSuite::TLS13_AES_128_GCM_SHA256));
    }
}
