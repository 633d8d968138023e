//! Loads the keys that sign tokens, from the same files and formats as etcd.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use muster_jws::{Algorithm, AlgorithmFamily, DecodingKey, EncodingKey, Signer, Verifier};
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

/// Describes the keys of `method`, for an error message.
fn describe_keys(method: Algorithm) -> &'static str {
    match method {
        Algorithm::ES256 => "a P-256 key",
        Algorithm::ES384 => "a P-384 key",
        Algorithm::EdDSA => "an Ed25519 key",
        _ if method.family() == AlgorithmFamily::Hmac => "any bytes",
        _ => "an RSA key of 2048 to 8192 bits",
    }
}

/// Why tokens can't be signed or verified. The messages say what to do, and show nothing of a
/// file's contents.
#[derive(Debug, thiserror::Error)]
pub enum JwtError {
    /// No key was given, or the HMAC key file is empty.
    #[error("--auth-token: {0:?} needs {needs}", needs = match .0.family() {
        AlgorithmFamily::Hmac => "priv-key=FILE, whose bytes are the key",
        _ => "priv-key=FILE to sign tokens, or at least pub-key=FILE to check them",
    })]
    NoKey(Algorithm),
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
        "--auth-token: {option} {} holds no key that {method:?} can use: give {keys} in PEM{}",
        path.display(), if *.option == PRIVATE_KEY_OPTION { ", not encrypted" } else { "" },
        keys = describe_keys(*.method)
    )]
    Unusable {
        /// Suboption that names the file: `priv-key` or `pub-key`.
        option: &'static str,
        path: PathBuf,
        /// Method that needs the key.
        method: Algorithm,
    },
    /// The public key is not that of the private key.
    #[error(
        "--auth-token: pub-key and priv-key don't belong together: leave pub-key away, which priv-key holds as well"
    )]
    Mismatch,
}

const PRIVATE_KEY_OPTION: &str = "priv-key";
const PUBLIC_KEY_OPTION: &str = "pub-key";

/// Loads the signer, if there is a private key, and the verifier.
pub(super) fn load(options: &JwtOptions) -> Result<(Option<Signer>, Verifier), JwtError> {
    let method = options.method;
    let private =
        options.private_key.as_deref().map(|path| read(PRIVATE_KEY_OPTION, path)).transpose()?;
    let public =
        options.public_key.as_deref().map(|path| read(PUBLIC_KEY_OPTION, path)).transpose()?;
    let unusable = |option, path: &Option<PathBuf>| {
        let path = path.clone().unwrap_or_default();
        JwtError::Unusable { option, path, method }
    };
    let no_private = || unusable(PRIVATE_KEY_OPTION, &options.private_key);
    let no_public = || unusable(PUBLIC_KEY_OPTION, &options.public_key);
    if method.family() == AlgorithmFamily::Hmac {
        let key = private.filter(|key| !key.is_empty()).ok_or(JwtError::NoKey(method))?;
        let signer = Signer::new(method, &EncodingKey::from_secret(&key));
        let verifier = Verifier::new(method, &DecodingKey::from_secret(&key));
        return signer.ok().map(Some).zip(verifier.ok()).ok_or_else(no_private);
    }
    let signer = private.map(|pem| {
        let signer = private_key(&pem, method).map(|key| Signer::new(method, &key));
        signer.and_then(Result::ok).ok_or_else(no_private)
    });
    let signer = signer.transpose()?;
    let public = public.map(|pem| public_key(&pem, method).ok_or_else(no_public)).transpose()?;
    let own = signer.as_ref().and_then(Signer::public_key);
    if own.zip(public.as_deref()).is_some_and(|(own, public)| own != public) {
        return Err(JwtError::Mismatch);
    }
    let key = own.or(public.as_deref()).ok_or(JwtError::NoKey(method))?;
    let key = match method.family() {
        AlgorithmFamily::Rsa => DecodingKey::from_rsa_der(key),
        AlgorithmFamily::Ec => DecodingKey::from_ec_der(key),
        AlgorithmFamily::Ed | AlgorithmFamily::Hmac => DecodingKey::from_ed_der(key),
    };
    let verifier = Verifier::new(method, &key).map_err(|_| no_public())?;
    Ok((signer, verifier))
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

/// Returns the label and contents of the first PEM block that is no block of curve parameters.
fn first_key_block(pem: &[u8]) -> Option<(String, Zeroizing<Vec<u8>>)> {
    let found = Pem::iter_from_buffer(pem).filter_map(Result::ok);
    let mut keys = found.filter(|found| found.label != EC_PARAMETERS_LABEL);
    keys.next().map(|key| (key.label, Zeroizing::new(key.contents)))
}

/// Reads a private key of the method's family from PEM. The JWT library is not used for this: it
/// reads no SEC 1 keys, and does not check that the key has the method's curve.
fn private_key(pem: &[u8], method: Algorithm) -> Option<EncodingKey> {
    let (label, der) = first_key_block(pem)?;
    match (method.family(), label.as_str()) {
        (AlgorithmFamily::Rsa, "RSA PRIVATE KEY" | "PRIVATE KEY") => {
            Some(EncodingKey::from_rsa_der(&der))
        }
        (AlgorithmFamily::Ec, "EC PRIVATE KEY") => {
            Some(EncodingKey::from_ec_der(&pkcs8(&curve_of(method)?, &der)))
        }
        (AlgorithmFamily::Ec, "PRIVATE KEY") => Some(EncodingKey::from_ec_der(&der)),
        (AlgorithmFamily::Ed, "PRIVATE KEY") => Some(EncodingKey::from_ed_der(&der)),
        _ => None,
    }
}

/// Returns the id of the method's curve, if it is a method of ECDSA.
fn curve_of(method: Algorithm) -> Option<Oid<'static>> {
    match method {
        Algorithm::ES256 => Some(OID_EC_P256),
        Algorithm::ES384 => Some(OID_NIST_EC_P384),
        _ => None,
    }
}

/// Wraps a SEC 1 key in a PKCS #8 envelope, which names its curve (RFC 5208).
fn pkcs8(curve: &Oid<'_>, sec1: &[u8]) -> Zeroizing<Vec<u8>> {
    const INTEGER_0: &[u8] = &[0x02, 0x01, 0x00];
    const OBJECT: u8 = 0x06;
    const OCTETS: u8 = 0x04;
    const SEQUENCE: u8 = 0x30;
    let object = |oid: &Oid<'_>| encode_der(OBJECT, &[oid.as_bytes()]);
    let kind = [object(&OID_KEY_TYPE_EC_PUBLIC_KEY), object(curve)];
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
fn public_key(pem: &[u8], method: Algorithm) -> Option<Vec<u8>> {
    let (label, der) = first_key_block(pem)?;
    match label.as_str() {
        "PUBLIC KEY" => public_key_bits(&SubjectPublicKeyInfo::from_der(&der).ok()?.1, method),
        "CERTIFICATE" => {
            public_key_bits(X509Certificate::from_der(&der).ok()?.1.public_key(), method)
        }
        "RSA PUBLIC KEY" if method.family() == AlgorithmFamily::Rsa => rsa_key_of_valid_size(&der),
        _ => None,
    }
}

fn rsa_key_of_valid_size(rsa: &[u8]) -> Option<Vec<u8>> {
    let bits = RSAPublicKey::from_der(rsa).ok()?.1.key_size();
    (2048..=8192).contains(&bits).then(|| rsa.to_vec())
}

fn public_key_bits(key: &SubjectPublicKeyInfo<'_>, method: Algorithm) -> Option<Vec<u8>> {
    let (of, parameters) = (&key.algorithm.algorithm, &key.algorithm.parameters);
    let data = &key.subject_public_key.data;
    let fits = match method.family() {
        AlgorithmFamily::Rsa if *of == OID_PKCS1_RSAENCRYPTION => {
            return rsa_key_of_valid_size(data);
        }
        AlgorithmFamily::Ec => {
            let named = parameters.as_ref().and_then(|named| named.as_oid().ok());
            *of == OID_KEY_TYPE_EC_PUBLIC_KEY && named.is_some() && named == curve_of(method)
        }
        AlgorithmFamily::Ed => *of == OID_SIG_ED25519,
        AlgorithmFamily::Rsa | AlgorithmFamily::Hmac => false,
    };
    fits.then(|| data.to_vec())
}
