//! The node's key (ECDSA P-256) and its signing request.
//!
//! The key is made on this host and never leaves it. The key is in the file that the node reads,
//! and is fsynced before the agent's record names it. `state` keeps the agent's own key (Ed25519).

use discovery_types::csr::{Csr, NodeKey};
use zeroize::Zeroizing;

use crate::state::{self, Layout, StateError};

/// Returns a signing request for the node's key on disk. Makes a new key if there is none.
pub(crate) fn node_request(layout: &Layout) -> Result<Csr, StateError> {
    let path = layout.node_key();
    if let Some(bytes) = state::read(&path)? {
        let bytes = Zeroizing::new(bytes);
        let damaged = || StateError::Damaged {
            path: path.clone(),
            what: "it holds no P-256 key in PEM".to_owned(),
        };
        let text = std::str::from_utf8(&bytes).map_err(|_| damaged())?;
        let pair =
            rcgen::KeyPair::from_pkcs8_pem_and_sign_algo(text, &rcgen::PKCS_ECDSA_P256_SHA256);
        return Ok(Csr::new(&pair.map_err(|_| damaged())?));
    }
    let key = NodeKey::generate();
    muster_files::data::replace(&path, key.key_pem.as_bytes())?;
    Ok(key.csr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_stays_the_same_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        let first = node_request(&layout).unwrap().verify().unwrap();
        let second = node_request(&layout).unwrap().verify().unwrap();
        assert_eq!(first.node_key, second.node_key);
    }

    #[test]
    fn a_damaged_key_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        layout.create().unwrap();
        std::fs::write(layout.node_key(), "junk").unwrap();
        assert!(matches!(node_request(&layout), Err(StateError::Damaged { .. })));
        assert_eq!(std::fs::read(layout.node_key()).unwrap(), b"junk");
    }
}
