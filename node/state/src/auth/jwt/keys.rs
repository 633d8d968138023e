//! Loads the keys that sign tokens, from the same files and formats as etcd.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED,
    ECDSA_P384_SHA384_FIXED_SIGNING, ED25519, EcdsaKeyPair, EcdsaSigningAlgorithm,
    EcdsaVerificationAlgorithm, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RSA_PKCS1_SHA256, RSA_PKCS1_SHA384,
    RSA_PKCS1_SHA512, RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512,
    RSA_PSS_SHA256, RSA_PSS_SHA384, RSA_PSS_SHA512, RsaEncoding, RsaKeyPair, UnparsedPublicKey,
    VerificationAlgorithm,
};
use x509_parser::certificate::X509Certificate;
use x509_parser::oid_registry::{
    OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_NIST_EC_P384, OID_PKCS1_RSAENCRYPTION,
    OID_SIG_ED25519, Oid,
};
use x509_parser::pem::Pem;
use x509_parser::prelude::FromDer;
use x509_parser::public_key::RSAPublicKey;
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

use super::JwtOptions;

/// Maximum size of a key file in bytes.
const MAX_KEY_BYTES: u64 = 64 << 10;
/// PEM label of the block of curve parameters that OpenSSL writes before some keys.
const EC_PARAMETERS_LABEL: &str = "EC PARAMETERS";

/// Algorithm that signs tokens (RFC 7518 and RFC 8037).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SigningMethod {
    /// HMAC with SHA-256; all members share the one secret key.
    Hs256,
    /// HMAC with SHA-384; all members share the one secret key.
    Hs384,
    /// HMAC with SHA-512; all members share the one secret key.
    Hs512,
    /// RSA, PKCS #1 v1.5, with SHA-256.
    Rs256,
    /// RSA, PKCS #1 v1.5, with SHA-384.
    Rs384,
    /// RSA, PKCS #1 v1.5, with SHA-512.
    Rs512,
    /// RSA, PSS, with SHA-256.
    Ps256,
    /// RSA, PSS, with SHA-384.
    Ps384,
    /// RSA, PSS, with SHA-512.
    Ps512,
    /// ECDSA over P-256 with SHA-256.
    Es256,
    /// ECDSA over P-384 with SHA-384.
    Es384,
    EdDsa,
}

impl SigningMethod {
    /// All methods that `--auth-token` accepts.
    pub const ALL: [Self; 12] = [
        Self::Hs256,
        Self::Hs384,
        Self::Hs512,
        Self::Rs256,
        Self::Rs384,
        Self::Rs512,
        Self::Ps256,
        Self::Ps384,
        Self::Ps512,
        Self::Es256,
        Self::Es384,
        Self::EdDsa,
    ];

    /// Returns the method's name in `--auth-token` and in token headers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hs256 => "HS256",
            Self::Hs384 => "HS384",
            Self::Hs512 => "HS512",
            Self::Rs256 => "RS256",
            Self::Rs384 => "RS384",
            Self::Rs512 => "RS512",
            Self::Ps256 => "PS256",
            Self::Ps384 => "PS384",
            Self::Ps512 => "PS512",
            Self::Es256 => "ES256",
            Self::Es384 => "ES384",
            Self::EdDsa => "EdDSA",
        }
    }

    fn kind(self) -> KeyAlgorithm {
        let ec = |curve, signs, verifies| {
            KeyAlgorithm::Ecdsa(EcdsaCurve { oid: curve, signing: signs, verification: verifies })
        };
        match self {
            Self::Hs256 => KeyAlgorithm::Hmac(hmac::HMAC_SHA256),
            Self::Hs384 => KeyAlgorithm::Hmac(hmac::HMAC_SHA384),
            Self::Hs512 => KeyAlgorithm::Hmac(hmac::HMAC_SHA512),
            Self::Rs256 => KeyAlgorithm::Rsa(&RSA_PKCS1_SHA256, &RSA_PKCS1_2048_8192_SHA256),
            Self::Rs384 => KeyAlgorithm::Rsa(&RSA_PKCS1_SHA384, &RSA_PKCS1_2048_8192_SHA384),
            Self::Rs512 => KeyAlgorithm::Rsa(&RSA_PKCS1_SHA512, &RSA_PKCS1_2048_8192_SHA512),
            Self::Ps256 => KeyAlgorithm::Rsa(&RSA_PSS_SHA256, &RSA_PSS_2048_8192_SHA256),
            Self::Ps384 => KeyAlgorithm::Rsa(&RSA_PSS_SHA384, &RSA_PSS_2048_8192_SHA384),
            Self::Ps512 => KeyAlgorithm::Rsa(&RSA_PSS_SHA512, &RSA_PSS_2048_8192_SHA512),
            Self::Es256 => {
                ec(OID_EC_P256, &ECDSA_P256_SHA256_FIXED_SIGNING, &ECDSA_P256_SHA256_FIXED)
            }
            Self::Es384 => {
                ec(OID_NIST_EC_P384, &ECDSA_P384_SHA384_FIXED_SIGNING, &ECDSA_P384_SHA384_FIXED)
            }
            Self::EdDsa => KeyAlgorithm::Ed25519,
        }
    }

    /// Describes the method's keys, for an error message.
    fn keys(self) -> &'static str {
        match self.kind() {
            KeyAlgorithm::Hmac(_) => "any bytes",
            KeyAlgorithm::Rsa(..) => "an RSA key of 2048 to 8192 bits",
            KeyAlgorithm::Ecdsa(_) if self == Self::Es256 => "a P-256 key",
            KeyAlgorithm::Ecdsa(_) => "a P-384 key",
            KeyAlgorithm::Ed25519 => "an Ed25519 key",
        }
    }
}

enum KeyAlgorithm {
    Hmac(hmac::Algorithm),
    Rsa(&'static dyn RsaEncoding, &'static dyn VerificationAlgorithm),
    Ecdsa(EcdsaCurve),
    Ed25519,
}

struct EcdsaCurve {
    oid: Oid<'static>,
    signing: &'static EcdsaSigningAlgorithm,
    verification: &'static EcdsaVerificationAlgorithm,
}

/// Why tokens can't be signed or verified. The messages say what to do, and show nothing of a
/// file's contents.
#[derive(Debug, thiserror::Error)]
pub enum JwtError {
    /// No key was given, or the HMAC key file is empty.
    #[error("--auth-token: {method} needs {needs}", method = .0.name(), needs = match .0.kind() {
        KeyAlgorithm::Hmac(_) => "priv-key=FILE, whose bytes are the key",
        _ => "priv-key=FILE to sign tokens, or at least pub-key=FILE to check them",
    })]
    NoKey(SigningMethod),
    /// A key file can't be read.
    #[error("--auth-token: cannot read {option} {}", path.display())]
    Read {
        /// Suboption that names the file: `priv-key` or `pub-key`.
        option: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// A key file holds no key of the method's kind.
    #[error(
        "--auth-token: {option} {} holds no key that {method} can use: give {keys} in PEM{}",
        path.display(), if *.option == PRIVATE_KEY_OPTION { ", not encrypted" } else { "" },
        method = method.name(), keys = method.keys()
    )]
    Unusable {
        /// Suboption that names the file: `priv-key` or `pub-key`.
        option: &'static str,
        path: PathBuf,
        /// Method that needs the key.
        method: SigningMethod,
    },
    /// The public key is not that of the private key.
    #[error(
        "--auth-token: pub-key and priv-key don't belong together: leave pub-key away, which priv-key holds as well"
    )]
    Mismatch,
}

const PRIVATE_KEY_OPTION: &str = "priv-key";
const PUBLIC_KEY_OPTION: &str = "pub-key";

pub(super) enum Signer {
    Hmac(hmac::Key),
    Rsa(Box<RsaKeyPair>, &'static dyn RsaEncoding),
    Ecdsa(Box<EcdsaKeyPair>),
    Ed25519(Box<Ed25519KeyPair>),
}

impl Signer {
    /// Returns the signature, or `None` if signing fails because the system has no random numbers.
    pub(super) fn sign(&self, message: &[u8]) -> Option<Vec<u8>> {
        let random = SystemRandom::new();
        match self {
            Self::Hmac(key) => Some(hmac::sign(key, message).as_ref().to_vec()),
            Self::Rsa(key, padding) => {
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(*padding, &random, message, &mut signature).ok()?;
                Some(signature)
            }
            Self::Ecdsa(key) => Some(key.sign(&random, message).ok()?.as_ref().to_vec()),
            Self::Ed25519(key) => Some(key.sign(message).as_ref().to_vec()),
        }
    }

    fn public(&self) -> Option<&[u8]> {
        match self {
            Self::Hmac(_) => None,
            Self::Rsa(key, _) => Some(key.public_key().as_ref()),
            Self::Ecdsa(key) => Some(key.public_key().as_ref()),
            Self::Ed25519(key) => Some(key.public_key().as_ref()),
        }
    }
}

pub(super) enum Verifier {
    Hmac(hmac::Key),
    Public(UnparsedPublicKey<Vec<u8>>),
}

impl Verifier {
    pub(super) fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Hmac(key) => hmac::verify(key, message, signature).is_ok(),
            Self::Public(key) => key.verify(message, signature).is_ok(),
        }
    }
}

/// Loads the signer, if there is a private key, and the verifier.
pub(super) fn load(options: &JwtOptions) -> Result<(Option<Signer>, Verifier), JwtError> {
    let method = options.method;
    let private =
        options.private_key.as_deref().map(|path| read(PRIVATE_KEY_OPTION, path)).transpose()?;
    let public =
        options.public_key.as_deref().map(|path| read(PUBLIC_KEY_OPTION, path)).transpose()?;
    let kind = method.kind();
    if let KeyAlgorithm::Hmac(algorithm) = kind {
        let key = private.filter(|key| !key.is_empty()).ok_or(JwtError::NoKey(method))?;
        let key = || hmac::Key::new(algorithm, &key);
        return Ok((Some(Signer::Hmac(key())), Verifier::Hmac(key())));
    }
    let unusable = |option, path: &Option<PathBuf>| {
        let path = path.clone().unwrap_or_default();
        JwtError::Unusable { option, path, method }
    };
    let signer = match &private {
        Some(pem) => {
            let signer = signer(pem, &kind)
                .ok_or_else(|| unusable(PRIVATE_KEY_OPTION, &options.private_key));
            Some(signer?)
        }
        None => None,
    };
    let public = match &public {
        Some(pem) => Some(
            public_key(pem, &kind)
                .ok_or_else(|| unusable(PUBLIC_KEY_OPTION, &options.public_key))?,
        ),
        None => None,
    };
    let own = signer.as_ref().and_then(Signer::public);
    if own.zip(public.as_deref()).is_some_and(|(own, public)| own != public) {
        return Err(JwtError::Mismatch);
    }
    let key = own.map(<[u8]>::to_vec).or(public).ok_or(JwtError::NoKey(method))?;
    let algorithm: &'static dyn VerificationAlgorithm = match kind {
        KeyAlgorithm::Rsa(_, verifies) => verifies,
        KeyAlgorithm::Ecdsa(curve) => curve.verification,
        KeyAlgorithm::Ed25519 | KeyAlgorithm::Hmac(_) => &ED25519,
    };
    Ok((signer, Verifier::Public(UnparsedPublicKey::new(algorithm, key))))
}

fn read(option: &'static str, path: &Path) -> Result<Zeroizing<Vec<u8>>, JwtError> {
    let failed = |source| JwtError::Read { option, path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Zeroizing::new(Vec::new());
    // A truncated HMAC key would still sign, but no other holder of the key would accept the
    // tokens.
    let read = file.take(MAX_KEY_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if read as u64 > MAX_KEY_BYTES {
        return Err(failed(std::io::ErrorKind::FileTooLarge.into()));
    }
    Ok(bytes)
}

/// Returns the label and contents of the first PEM block that may be a key.
fn first_key_block(pem: &[u8]) -> Option<(String, Zeroizing<Vec<u8>>)> {
    let found = Pem::iter_from_buffer(pem).filter_map(Result::ok);
    let mut keys = found.filter(|found| found.label != EC_PARAMETERS_LABEL);
    keys.next().map(|key| (key.label, Zeroizing::new(key.contents)))
}

fn signer(pem: &[u8], kind: &KeyAlgorithm) -> Option<Signer> {
    let (label, der) = first_key_block(pem)?;
    match (kind, label.as_str()) {
        (KeyAlgorithm::Rsa(padding, _), "RSA PRIVATE KEY") => {
            Some(Signer::Rsa(Box::new(RsaKeyPair::from_der(&der).ok()?), *padding))
        }
        (KeyAlgorithm::Rsa(padding, _), "PRIVATE KEY") => {
            Some(Signer::Rsa(Box::new(RsaKeyPair::from_pkcs8(&der).ok()?), *padding))
        }
        (KeyAlgorithm::Ecdsa(curve), "EC PRIVATE KEY") => ecdsa_signer(&pkcs8(curve, &der), curve),
        (KeyAlgorithm::Ecdsa(curve), "PRIVATE KEY") => ecdsa_signer(&der, curve),
        (KeyAlgorithm::Ed25519, "PRIVATE KEY") => {
            Some(Signer::Ed25519(Box::new(Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der).ok()?)))
        }
        _ => None,
    }
}

fn ecdsa_signer(pkcs8: &[u8], curve: &EcdsaCurve) -> Option<Signer> {
    let key = EcdsaKeyPair::from_pkcs8(curve.signing, pkcs8, &SystemRandom::new()).ok()?;
    Some(Signer::Ecdsa(Box::new(key)))
}

/// Wraps a SEC 1 key in a PKCS #8 envelope, which names its curve (RFC 5208).
fn pkcs8(curve: &EcdsaCurve, sec1: &[u8]) -> Zeroizing<Vec<u8>> {
    const INTEGER_0: &[u8] = &[0x02, 0x01, 0x00];
    const OBJECT: u8 = 0x06;
    const OCTETS: u8 = 0x04;
    const SEQUENCE: u8 = 0x30;
    let object = |oid: &Oid<'_>| encode_der(OBJECT, &[oid.as_bytes()]);
    let kind = [object(&OID_KEY_TYPE_EC_PUBLIC_KEY), object(&curve.oid)];
    let kind = encode_der(SEQUENCE, &[&kind[0], &kind[1]]);
    encode_der(SEQUENCE, &[INTEGER_0, &kind, &encode_der(OCTETS, &[sec1])])
}

/// Encodes one DER value. The encoding is wrong for a value of 64 KiB or more, which no key has.
fn encode_der(tag: u8, parts: &[&[u8]]) -> Zeroizing<Vec<u8>> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut out = Zeroizing::new(vec![tag]);
    match u8::try_from(length) {
        Ok(short) if short < 0x80 => out.push(short),
        Ok(byte) => out.extend([0x81, byte]),
        Err(_) => {
            out.push(0x82);
            out.extend(u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
        }
    }
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

/// Returns the key bits of a PEM public key, or of a certificate's public key.
fn public_key(pem: &[u8], kind: &KeyAlgorithm) -> Option<Vec<u8>> {
    let (label, der) = first_key_block(pem)?;
    match label.as_str() {
        "PUBLIC KEY" => public_key_bits(&SubjectPublicKeyInfo::from_der(&der).ok()?.1, kind),
        "CERTIFICATE" => {
            public_key_bits(X509Certificate::from_der(&der).ok()?.1.public_key(), kind)
        }
        "RSA PUBLIC KEY" if matches!(kind, KeyAlgorithm::Rsa(..)) => rsa_key_of_valid_size(&der),
        _ => None,
    }
}

fn rsa_key_of_valid_size(rsa: &[u8]) -> Option<Vec<u8>> {
    let bits = RSAPublicKey::from_der(rsa).ok()?.1.key_size();
    (2048..=8192).contains(&bits).then(|| rsa.to_vec())
}

fn public_key_bits(key: &SubjectPublicKeyInfo<'_>, kind: &KeyAlgorithm) -> Option<Vec<u8>> {
    let (of, parameters) = (&key.algorithm.algorithm, &key.algorithm.parameters);
    let data = &key.subject_public_key.data;
    let fits = match kind {
        KeyAlgorithm::Rsa(..) if *of == OID_PKCS1_RSAENCRYPTION => {
            return rsa_key_of_valid_size(data);
        }
        KeyAlgorithm::Rsa(..) => false,
        KeyAlgorithm::Ecdsa(curve) => {
            let named = parameters.as_ref().and_then(|named| named.as_oid().ok());
            *of == OID_KEY_TYPE_EC_PUBLIC_KEY && named.as_ref() == Some(&curve.oid)
        }
        KeyAlgorithm::Ed25519 => *of == OID_SIG_ED25519,
        KeyAlgorithm::Hmac(_) => false,
    };
    fits.then(|| data.to_vec())
}
