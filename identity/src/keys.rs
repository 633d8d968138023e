//! The keys of the clouds, in files that an operator keeps up to date.

use std::path::{Path, PathBuf};

use data_encoding::BASE64URL_NOPAD;
use serde::Deserialize;
use x509_parser::pem::Pem;

use crate::Cloud;

/// Name of the file with AWS' certificates, in PEM.
pub const AWS_CERTIFICATES: &str = "aws.pem";
/// Names of the files with a JWKS (RFC 7517), and their clouds.
pub const JWKS_FILES: [(Cloud, &str); 2] = [(Cloud::Gcp, "gcp.json"), (Cloud::Azure, "azure.json")];

/// Largest file of keys, in bytes. All AWS regions have about 60 KiB of certificates.
const MAX_FILE: u64 = 512 * 1024;
/// Largest number of keys of one cloud. AWS has a key for each region.
const MAX_KEYS: usize = 256;

/// Keys with which the clouds sign identity documents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedKeys {
    /// RSA public keys of AWS, in DER (RFC 8017, appendix A.1.1).
    pub(crate) aws: Vec<Vec<u8>>,
    pub(crate) gcp: Vec<Jwk>,
    pub(crate) azure: Vec<Jwk>,
}

/// An RSA public key of a JWKS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Jwk {
    /// Id of the key.
    pub kid: String,
    /// Modulus, most significant byte first.
    pub n: Vec<u8>,
    /// Exponent, most significant byte first.
    pub e: Vec<u8>,
}

/// Reason why the keys in a directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file can't be read.
    #[error("can't read the clouds' keys in {}", path.display())]
    File {
        /// File in the directory that was read.
        path: PathBuf,
        /// Reason of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The file doesn't contain keys of its form.
    #[error("{} has no usable keys: {fault}", path.display())]
    Content {
        /// File in the directory that was read.
        path: PathBuf,
        /// Fault in the file.
        fault: &'static str,
    },
    /// The directory has none of the files.
    #[error(
        "{} has none of the files aws.pem (AWS' certificates), gcp.json and azure.json (JWKS): put \
         those of your clouds there",
        .0.display()
    )]
    Empty(PathBuf),
}

#[derive(Deserialize)]
struct JwkSet {
    keys: Vec<JwkEntry>,
}

/// Entry of a JWKS. Keys of other kinds are skipped.
#[derive(Deserialize)]
struct JwkEntry {
    kty: String,
    kid: Option<String>,
    n: Option<String>,
    e: Option<String>,
}

impl TrustedKeys {
    /// Reads the keys in a directory: [`AWS_CERTIFICATES`] and [`JWKS_FILES`], of which some may be
    /// missing.
    ///
    /// # Errors
    /// If a file can't be read or has no key in it, or if none of the files is there.
    pub fn load(directory: &Path) -> Result<Self, KeysError> {
        let mut keys = Self::default();
        if let Some(bytes) = read(&directory.join(AWS_CERTIFICATES))? {
            let fault = |fault| content_error(directory, AWS_CERTIFICATES, fault);
            keys.aws = aws_keys(&bytes).map_err(fault)?;
        }
        for (cloud, name) in JWKS_FILES {
            if let Some(bytes) = read(&directory.join(name))? {
                let found = jwks(&bytes).map_err(|fault| content_error(directory, name, fault))?;
                match cloud {
                    Cloud::Azure => keys.azure = found,
                    Cloud::Gcp | Cloud::Aws => keys.gcp = found,
                }
            }
        }
        match keys == Self::default() {
            true => Err(KeysError::Empty(directory.to_owned())),
            false => Ok(keys),
        }
    }

    /// Whether there is a key of this cloud.
    #[must_use]
    pub fn has_keys_of(&self, cloud: Cloud) -> bool {
        self.count(cloud) > 0
    }

    /// Returns the number of keys of this cloud.
    #[must_use]
    pub fn count(&self, cloud: Cloud) -> usize {
        match cloud {
            Cloud::Aws => self.aws.len(),
            Cloud::Gcp => self.gcp.len(),
            Cloud::Azure => self.azure.len(),
        }
    }
}

fn content_error(directory: &Path, name: &str, fault: &'static str) -> KeysError {
    KeysError::Content { path: directory.join(name), fault }
}

/// Reads a file; `None` if there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>, KeysError> {
    match muster_files::read_named(path, MAX_FILE) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(KeysError::File { path: path.to_owned(), source }),
    }
}

/// Returns the RSA keys of certificates in PEM. Neither signatures nor dates of the certificates
/// count: the operator trusts the keys.
fn aws_keys(pem: &[u8]) -> Result<Vec<Vec<u8>>, &'static str> {
    let mut keys = Vec::new();
    for block in Pem::iter_from_buffer(pem) {
        let block = block.map_err(|_| "it is not PEM")?;
        let certificate = block.parse_x509().map_err(|_| "a block of it is no certificate")?;
        let key = certificate.public_key();
        match key.parsed() {
            Ok(x509_parser::public_key::PublicKey::RSA(_)) => {}
            _ => return Err("a certificate's key is not RSA: take those for RSA-2048"),
        }
        keys.push(key.subject_public_key.data.to_vec());
    }
    bounded(keys)
}

fn jwks(json: &[u8]) -> Result<Vec<Jwk>, &'static str> {
    let set: JwkSet = serde_json::from_slice(json).map_err(|_| "it is no JWKS")?;
    let decode = |text: &str| BASE64URL_NOPAD.decode(text.as_bytes());
    let mut keys = Vec::new();
    for entry in set.keys.into_iter().filter(|entry| entry.kty == "RSA") {
        let (Some(kid), Some(n), Some(e)) = (entry.kid, entry.n, entry.e) else {
            return Err("an RSA key lacks kid, n or e");
        };
        let (Ok(n), Ok(e)) = (decode(&n), decode(&e)) else {
            return Err("an RSA key is not in base64url");
        };
        keys.push(Jwk { kid, n, e });
    }
    bounded(keys)
}

fn bounded<T>(keys: Vec<T>) -> Result<Vec<T>, &'static str> {
    match keys.len() {
        0 => Err("no RSA key is in it"),
        1..=MAX_KEYS => Ok(keys),
        _ => Err("more than 256 keys are in it"),
    }
}
