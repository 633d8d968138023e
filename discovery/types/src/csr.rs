//! The node's key and its certificate signing request (CSR).
//!
//! Only two parts of a CSR are used: the public key, and the self-signature, which proves
//! possession of the private key. Names, addresses and key usages in the CSR are ignored. They come
//! from the committed record.

use data_encoding::BASE64URL_NOPAD;
use rcgen::CertificateSigningRequestParams;
use rustls::pki_types::CertificateSigningRequestDer;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;
use zeroize::Zeroizing;

use crate::digest::Digest;
use crate::text::wire_text;

/// DER before the uncompressed point in a P-256 SubjectPublicKeyInfo (RFC 5480).
const P256_SPKI_PREFIX: [u8; 27] = [
    0x30, 0x59, 0x30, 0x13, 6, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1, 6, 8, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 3, 1, 7, 3, 0x42, 0, 4,
];

/// Longest request in DER, in bytes.
pub const MAX_CSR: usize = 1024;

/// Reason why a signing request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsrError {
    /// The bytes are no PKCS#10 request of at most [`MAX_CSR`] bytes, or the request has an
    /// extension that this program doesn't know.
    #[error("not a PKCS#10 signing request of at most {MAX_CSR} bytes")]
    Malformed,
    /// The key isn't ECDSA P-256. Server certificates need that, because some clients refuse other
    /// keys.
    #[error("the key of a signing request must be ECDSA P-256")]
    NotP256,
    /// The request is not signed by its own key.
    #[error("the signing request is not signed by its own key")]
    BadSignature,
    /// The request has another key than the one that was verified.
    #[error("the signing request has another key than the one that was verified")]
    OtherKey,
}

/// A PKCS#10 request in DER, written as base64url. Nothing is checked before [`Csr::verify`].
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Csr(Vec<u8>);

/// A request that is signed by its own P-256 key.
#[derive(Debug)]
pub struct VerifiedCsr {
    /// Key to certify. No other part of the request may be copied into a certificate.
    pub public_key: rcgen::PublicKey,
    /// SHA-256 of the key's SubjectPublicKeyInfo. `muster-node` identifies a node's key by this
    /// hash.
    pub node_key: Digest,
}

/// Public key of a request that was verified before ([`Csr::verified_key`]), to be certified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePublicKey {
    /// Uncompressed point on P-256 (SEC 1, section 2.3.3).
    point: Vec<u8>,
}

impl rcgen::PublicKeyData for NodePublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.point
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

/// A P-256 private key with its request.
#[derive(Debug)]
pub struct NodeKey {
    /// Private key, as PEM PKCS#8.
    pub key_pem: Zeroizing<String>,
    /// Signing request for the key.
    pub csr: Csr,
}

impl NodeKey {
    /// Generates a new random P-256 key.
    pub fn generate() -> Self {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)
            .expect("ring makes P-256 keys");
        let key_pem = Zeroizing::new(pair.serialize_pem());
        Self { csr: Csr::new(&pair), key_pem }
    }
}

impl Csr {
    /// Makes a request that `pair` signs. It contains only what PKCS#10 requires.
    pub fn new(pair: &rcgen::KeyPair) -> Self {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        let request = params.serialize_request(pair).expect("a P-256 key signs any request");
        Self(request.der().to_vec())
    }

    /// Wraps DER bytes without a check.
    pub fn from_der(der: Vec<u8>) -> Self {
        Self(der)
    }

    /// Returns the DER bytes.
    pub fn der(&self) -> &[u8] {
        &self.0
    }

    /// Checks the self-signature and the kind of key.
    pub fn verify(&self) -> Result<VerifiedCsr, CsrError> {
        let spki = self.spki()?;
        let der = CertificateSigningRequestDer::from(self.0.as_slice());
        let params = CertificateSigningRequestParams::from_der(&der).map_err(|e| match e {
            rcgen::Error::InvalidCertificationRequestSignature => CsrError::BadSignature,
            _ => CsrError::Malformed,
        })?;
        Ok(VerifiedCsr { public_key: params.public_key, node_key: Digest::of(&spki) })
    }

    /// Returns the key of a request that was verified before, without verifying its signature
    /// again. `node_key` is the hash in the earlier result ([`VerifiedCsr::node_key`]), so the key
    /// is the one that proved possession then.
    pub fn verified_key(&self, node_key: &Digest) -> Result<NodePublicKey, CsrError> {
        let spki = self.spki()?;
        if Digest::of(&spki) != *node_key {
            return Err(CsrError::OtherKey);
        }
        // The last byte of the prefix is the first one of the point.
        Ok(NodePublicKey { point: spki[P256_SPKI_PREFIX.len() - 1..].to_vec() })
    }

    /// Returns the SubjectPublicKeyInfo of the request's key, which must be on P-256. Doesn't check
    /// the self-signature.
    fn spki(&self) -> Result<Vec<u8>, CsrError> {
        if self.0.len() > MAX_CSR {
            return Err(CsrError::Malformed);
        }
        let (rest, parsed) =
            X509CertificationRequest::from_der(&self.0).map_err(|_| CsrError::Malformed)?;
        if !rest.is_empty() {
            return Err(CsrError::Malformed);
        }
        let spki = parsed.certification_request_info.subject_pki.raw;
        // Check the curve in the key: the request's signature algorithm names only a hash function.
        match spki.starts_with(&P256_SPKI_PREFIX) {
            true => Ok(spki.to_vec()),
            false => Err(CsrError::NotP256),
        }
    }
}

impl std::fmt::Debug for Csr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Csr({})", Digest::of(&self.0))
    }
}

impl std::fmt::Display for Csr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&BASE64URL_NOPAD.encode(&self.0))
    }
}

impl std::str::FromStr for Csr {
    type Err = CsrError;

    fn from_str(text: &str) -> Result<Self, CsrError> {
        BASE64URL_NOPAD.decode(text.as_bytes()).map(Self).map_err(|_| CsrError::Malformed)
    }
}

wire_text!(Csr, "^[A-Za-z0-9_-]+$");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verified_request_has_the_hash_of_its_key() {
        let node = NodeKey::generate();
        let pair = rcgen::KeyPair::from_pem(&node.key_pem).unwrap();
        let verified = node.csr.verify().unwrap();
        let spki = rcgen::PublicKeyData::subject_public_key_info(&pair);
        assert_eq!(verified.node_key, Digest::of(&spki));
    }

    #[test]
    fn a_request_that_was_verified_before_has_the_verified_key() {
        let (one, two) = (NodeKey::generate(), NodeKey::generate());
        let verified = one.csr.verify().unwrap();
        let key = one.csr.verified_key(&verified.node_key).unwrap();
        let spki = rcgen::PublicKeyData::subject_public_key_info(&key);
        assert_eq!(Digest::of(&spki), verified.node_key);
        assert_eq!(two.csr.verified_key(&verified.node_key), Err(CsrError::OtherKey));
    }

    #[test]
    fn a_request_with_another_key_put_into_it_is_refused() {
        let (one, two) = (NodeKey::generate(), NodeKey::generate());
        let key = |node: &NodeKey| {
            let pair = rcgen::KeyPair::from_pem(&node.key_pem).unwrap();
            pair.public_key_raw().to_vec()
        };
        let (old, new) = (key(&one), key(&two));
        let mut der = one.csr.der().to_vec();
        let at = der.windows(old.len()).position(|window| window == old).unwrap();
        der[at..at + new.len()].copy_from_slice(&new);
        assert_eq!(Csr::from_der(der).verify().err(), Some(CsrError::BadSignature));
    }

    #[test]
    fn an_ed25519_key_is_refused() {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        assert_eq!(Csr::new(&pair).verify().err(), Some(CsrError::NotP256));
    }

    /// The request was made by `openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:secp384r1
    /// -sha256`.
    #[test]
    fn a_p384_key_is_refused_whatever_hash_it_signs_with() {
        let sha256 = "MIIBAzCBiwIBADAMMQowCAYDVQQDDAF4MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAEtICaWPqmRO\
                      1ngAESz3KmN_kWJUv-ygQ9HpRXEAM64zT1-FzyCxp7sCy5CPW7sYLKDYXKhDRJRa6ocllkrdLE\
                      Z21MD2PfB2_hPhuJxYQWUdWQGXCM0Rk4cOpBlD1YHbnFoAAwCgYIKoZIzj0EAwIDZwAwZAIwa2\
                      m8hf0qziV7xYI1lCwnX2EN9t_GvMaQCNA8830BV-flPVokp1_MdzAirvtpfq9UAjBVsuezCdJ0\
                      07Q3q7dgTjmIZgALcfOFWSo-rg2gN_cPjpsBc_m-r0rW8DyVcfBYf2U";
        assert_eq!(sha256.parse::<Csr>().unwrap().verify().err(), Some(CsrError::NotP256));
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        assert_eq!(Csr::new(&pair).verify().err(), Some(CsrError::NotP256));
    }

    #[test]
    fn a_request_with_trailing_bytes_or_above_the_maximum_length_is_refused() {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let named = |name: &str| {
            let mut params = rcgen::CertificateParams::default();
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            params.serialize_request(&pair).unwrap().der().to_vec()
        };
        let short = named("x");
        assert!(Csr::from_der(short.clone()).verify().is_ok());
        let long = named(&"x".repeat(MAX_CSR));
        for der in [[&short[..], &[0]].concat(), long] {
            assert_eq!(Csr::from_der(der).verify().err(), Some(CsrError::Malformed));
        }
    }

    #[test]
    fn junk_is_refused() {
        for der in [vec![], vec![0x30, 0x80], vec![0; 4096]] {
            assert_eq!(Csr::from_der(der).verify().err(), Some(CsrError::Malformed));
        }
    }
}
