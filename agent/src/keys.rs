//! The host's two keys: the agent's (Ed25519) and the node's (ECDSA P-256).
//!
//! Both are made here, fsynced before anything depends on them, and never leave the host.

use std::path::Path;

use zeroize::Zeroizing;

use crate::state::{StateError, durable};

/// Why a key could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The disk, or a damaged file.
    #[error(transparent)]
    State(#[from] StateError),
    /// The system's generator or the key's encoding.
    #[error("can't make a key")]
    Generate(#[from] rcgen::Error),
}

/// A new Ed25519 key for the agent, PKCS#8 PEM.
pub fn generate_agent_key() -> Result<Zeroizing<String>, KeyError> {
    Ok(Zeroizing::new(rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519)?.serialize_pem()))
}

/// A new P-256 key for the node, PKCS#8 PEM.
pub fn generate_node_key() -> Result<Zeroizing<String>, KeyError> {
    let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    Ok(Zeroizing::new(pair.serialize_pem()))
}

/// A certificate request for the node's key. Only its public key counts: the service sets names.
pub fn certificate_request(node_key_pem: &str) -> Result<Vec<u8>, KeyError> {
    let pair = rcgen::KeyPair::from_pem(node_key_pem)?;
    let mut parameters = rcgen::CertificateParams::default();
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    parameters.distinguished_name.push(rcgen::DnType::CommonName, "muster-node");
    Ok(parameters.serialize_request(&pair)?.der().to_vec())
}

/// A PEM file of this agent's; nothing if there is none.
pub fn read(path: &Path) -> Result<Option<Zeroizing<String>>, StateError> {
    let Some(bytes) = durable::read(path)? else { return Ok(None) };
    let damaged =
        |_| StateError::Damaged { path: path.to_owned(), what: "it is no PEM text".to_owned() };
    String::from_utf8(bytes).map(|text| Some(Zeroizing::new(text))).map_err(damaged)
}
