//! Explanations for certificates that etcd may accept and this program can't use. Each explanation
//! names the flaw and a command that makes a usable certificate.

use std::{fmt, io, sync::Arc};

use rustls::{AlertDescription, CertificateError, Error, OtherError, pki_types::CertificateDer};
use x509_parser::{
    certificate::X509Certificate,
    prelude::FromDer,
    public_key::PublicKey,
    x509::{SubjectPublicKeyInfo, X509Version},
};

use super::purpose::CertificatePurpose;

/// RSA key sizes in bits whose signatures the TLS library can check.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;
const P_256: &str = "1.2.840.10045.3.1.7";
const P_384: &str = "1.3.132.0.34";
/// Supported keys, as a text for error messages.
const SUPPORTED_KEYS: &str = "keys may be ECDSA P-256 or P-384, Ed25519, or RSA from 2048 bits on";
const ED25519: &str = "1.3.101.112";
/// OIDs of supported signatures: ECDSA with SHA-256 and SHA-384, RSA (PKCS#1 and PSS) with SHA-2,
/// Ed25519.
const SUPPORTED_SIGNATURES: [&str; 7] = [
    "1.2.840.10045.4.3.2",
    "1.2.840.10045.4.3.3",
    "1.2.840.113549.1.1.10",
    "1.2.840.113549.1.1.11",
    "1.2.840.113549.1.1.12",
    "1.2.840.113549.1.1.13",
    ED25519,
];
/// Maximum length of a certificate's subject in an error message. An unknown client may have chosen
/// the subject.
const MAX_SUBJECT_CHARS: usize = 200;

/// Role in which a certificate is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CertificateRole {
    /// Leaf certificate with this purpose.
    Leaf(CertificatePurpose),
    /// CA that other certificates are checked against.
    Ca,
}

/// A certificate that can't be used, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableCertificate {
    subject: String,
    flaw: Flaw,
    role: CertificateRole,
}

/// Flaw of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Flaw {
    Version(u32),
    IsCa,
    RsaBits(usize),
    Key(String),
    Signature(String),
    Purpose,
}

impl fmt::Display for UnusableCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the certificate of \"{}\" cannot be used: ", self.subject)?;
        match &self.flaw {
            Flaw::Version(version) => write!(
                f,
                "it is of X.509 version {version}, which can't say what it is for; version 3 is needed"
            )?,
            Flaw::IsCa => {
                f.write_str(
                    "it is a CA's certificate (CA:TRUE), which nobody may show as their own",
                )?;
            }
            Flaw::RsaBits(bits) => write!(
                f,
                "its RSA key has {bits} bits; {} to {} are needed",
                RSA_BITS.start(),
                RSA_BITS.end()
            )?,
            Flaw::Key(kind) => write!(
                f,
                "its key is of the kind {kind}; ECDSA P-256 or P-384, Ed25519 or RSA is needed"
            )?,
            Flaw::Signature(algorithm) => write!(
                f,
                "it is signed with {algorithm}; ECDSA or RSA with SHA-256 or SHA-384, or Ed25519 is \
                 needed"
            )?,
            Flaw::Purpose => write!(f, "its extendedKeyUsage lacks {}", purpose_name(self.role))?,
        }
        write!(f, ". Make one that works: {}", openssl_command(self.role))
    }
}

impl std::error::Error for UnusableCertificate {}

fn purpose_name(role: CertificateRole) -> &'static str {
    match role {
        CertificateRole::Leaf(CertificatePurpose::Client) => "clientAuth",
        CertificateRole::Leaf(CertificatePurpose::Server) | CertificateRole::Ca => "serverAuth",
    }
}

/// Returns an openssl command (3.0 or newer) that makes a usable certificate for `role`.
fn openssl_command(role: CertificateRole) -> String {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    let leaf = "openssl req -x509 -CA ca.crt -CAkey ca.key";
    let no_ca = "-addext basicConstraints=critical,CA:FALSE";
    match role {
        CertificateRole::Ca => {
            format!("openssl req -x509 {key} -keyout ca.key -out ca.crt -days 3650 -subj /CN=ca")
        }
        CertificateRole::Leaf(CertificatePurpose::Client) => format!(
            "{leaf} {key} -keyout client.key -out client.crt -days 365 -subj /CN=NAME {no_ca} -addext \
             extendedKeyUsage=clientAuth"
        ),
        CertificateRole::Leaf(CertificatePurpose::Server) => format!(
            "{leaf} {key} -keyout member.key -out member.crt -days 365 -subj /CN=NAME {no_ca} -addext \
             extendedKeyUsage=serverAuth,clientAuth -addext subjectAltName=DNS:NAME,IP:ADDRESS"
        ),
    }
}

impl UnusableCertificate {
    /// Returns the flaw that makes `certificate` unusable in `role`, or `None` if the certificate
    /// has none.
    pub(super) fn find(certificate: &CertificateDer<'_>, role: CertificateRole) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let flaw = match role {
            CertificateRole::Ca => flaw_of_key(parsed.public_key()),
            CertificateRole::Leaf(purpose) => flaw_of_leaf(&parsed, purpose),
        };
        let subject = parsed.subject().to_string().chars().take(MAX_SUBJECT_CHARS).collect();
        flaw.map(|flaw| Self { subject, flaw, role })
    }
}

fn flaw_of_leaf(parsed: &X509Certificate<'_>, purpose: CertificatePurpose) -> Option<Flaw> {
    if parsed.version() != X509Version::V3 {
        return Some(Flaw::Version(parsed.version().0.saturating_add(1)));
    }
    if let Some(flaw) = flaw_of_key(parsed.public_key()) {
        return Some(flaw);
    }
    if parsed.is_ca() {
        return Some(Flaw::IsCa);
    }
    let signature = parsed.signature_algorithm.algorithm.to_id_string();
    if !SUPPORTED_SIGNATURES.contains(&signature.as_str()) {
        return Some(Flaw::Signature(signature));
    }
    let usage = parsed.extended_key_usage().ok().flatten()?;
    let is_for = match purpose {
        CertificatePurpose::Client => usage.value.client_auth,
        CertificatePurpose::Server => usage.value.server_auth,
    };
    (!is_for && !usage.value.any).then_some(Flaw::Purpose)
}

fn flaw_of_key(key: &SubjectPublicKeyInfo<'_>) -> Option<Flaw> {
    let algorithm = key.algorithm.algorithm.to_id_string();
    match key.parsed() {
        Ok(PublicKey::RSA(rsa)) => {
            let bits = significant_bits(rsa.modulus);
            (!RSA_BITS.contains(&bits)).then_some(Flaw::RsaBits(bits))
        }
        Ok(PublicKey::EC(_)) => {
            let curve = key.algorithm.parameters.as_ref().and_then(|curve| curve.as_oid().ok());
            let curve = curve.map_or_else(|| "unnamed".to_owned(), |curve| curve.to_id_string());
            let is_known = [P_256, P_384].contains(&curve.as_str());
            (!is_known).then(|| Flaw::Key(format!("ECDSA with {}", curve_name(&curve))))
        }
        _ => (algorithm != ED25519).then_some(Flaw::Key(algorithm)),
    }
}

/// Returns the number of significant bits of a big-endian number.
fn significant_bits(number: &[u8]) -> usize {
    let zeros = number.iter().take_while(|byte| **byte == 0).count();
    let first = number.get(zeros).map_or(0, |first| first.leading_zeros() as usize);
    (number.len() - zeros) * 8 - first
}

fn curve_name(oid: &str) -> &str {
    match oid {
        "1.3.132.0.35" => "P-521",
        "1.3.132.0.33" => "P-224",
        "1.3.132.0.10" => "secp256k1",
        other => other,
    }
}

/// Returns the error for a certificate that was refused with `error`. If the certificate has a
/// known flaw, the result explains the flaw.
pub(super) fn explain(
    error: Error,
    certificate: &CertificateDer<'_>,
    purpose: CertificatePurpose,
) -> Error {
    match UnusableCertificate::find(certificate, CertificateRole::Leaf(purpose)) {
        Some(unusable) => {
            Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(unusable))))
        }
        None => error,
    }
}

/// Replaces certain TLS handshake errors by a text for operators. Other errors are returned
/// unchanged.
pub fn explain_handshake_error(error: io::Error) -> io::Error {
    let words = match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::InvalidCertificate(CertificateError::Other(OtherError(inner)))) => {
            inner.downcast_ref::<UnusableCertificate>().map(ToString::to_string)
        }
        Some(Error::NoCertificatesPresented) => Some(format!(
            "the other end showed no certificate. It was given none, or one of another kind than is \
             taken here: {SUPPORTED_KEYS}"
        )),
        Some(Error::AlertReceived(alert @ AlertDescription::HandshakeFailure)) => Some(format!(
            "the other end broke the handshake off ({alert:?}). It shares no cipher suite with this \
             member, or its certificate is of another kind than is taken here: {SUPPORTED_KEYS}"
        )),
        _ => None,
    };
    words.map_or(error, |words| io::Error::new(io::ErrorKind::InvalidData, words))
}
