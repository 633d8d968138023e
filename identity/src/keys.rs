//! The keys of the clouds, in files that an operator keeps up to date.

use std::path::{Path, PathBuf};

use data_encoding::BASE64URL_NOPAD;
use serde::Deserialize;
use x509_parser::pem::Pem;

use crate::Cloud;

/// Name of the file with AWS' certificates, in PEM.
const AWS_FILE: &str = "aws.pem";
/// Name of the file with Google's JWKS (RFC 7517).
const GCP_FILE: &str = "gcp.json";
/// Name of the file with Microsoft's JWKS.
const AZURE_FILE: &str = "azure.json";

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
    /// The file has no keys in the form that its name promises: certificates in PEM, or a JWKS.
    #[error("{} has no usable keys: {fault}", path.display())]
    Content {
        /// File in the directory that was read.
        path: PathBuf,
        /// Fault in the file.
        fault: &'static str,
    },
    /// The directory has no file with the keys of a cloud.
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
    /// Reads the keys in a directory: AWS' certificates in `aws.pem`, and JWKS in `gcp.json` and
    /// `azure.json`. Some of the files may be missing.
    ///
    /// # Errors
    /// If a file can't be read or has no key in it, or if none of the files is there.
    pub fn load(directory: &Path) -> Result<Self, KeysError> {
        let keys = Self {
            aws: load_file(directory, AWS_FILE, aws_keys)?,
            gcp: load_file(directory, GCP_FILE, jwks)?,
            azure: load_file(directory, AZURE_FILE, jwks)?,
        };
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

/// Reads the keys in one file. Returns an empty list if there is no such file.
fn load_file<T>(
    directory: &Path,
    name: &str,
    parse: impl Fn(&[u8]) -> Result<Vec<T>, &'static str>,
) -> Result<Vec<T>, KeysError> {
    let path = directory.join(name);
    match muster_files::read_named(&path, MAX_FILE) {
        Ok(bytes) => parse(&bytes).map_err(|fault| KeysError::Content { path, fault }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(KeysError::File { path, source }),
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
