//! `keys rotate`: makes the next keys of the service.

use discovery_types::digest::Digest;
use serde::Serialize;

use super::ServerError;
use super::args::RotateKeysArgs;
use crate::keydir::{KeyDirectory, KeyDirectoryError};

/// Keys that were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RotatedKeys {
    /// Version of the new signing key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signing: Option<u32>,
    /// Version of the new key-encryption key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kek: Option<u32>,
    /// SHA-256 of the SPKI of the service's present TLS key.
    pub pin: Digest,
    /// SHA-256 of the SPKI of the new TLS key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_pin: Option<Digest>,
}

/// Makes the keys that `args` asks for.
pub(crate) fn rotate_keys(args: &RotateKeysArgs) -> Result<RotatedKeys, ServerError> {
    let failed = |error: KeyDirectoryError| match error {
        KeyDirectoryError::NotEmpty(_) => ServerError::Usage(format!("--out: {error}")),
        error => ServerError::failed("can't make the keys", error),
    };
    let keys = KeyDirectory::load(&args.keys).map_err(|error| {
        ServerError::permanent_if(error.is_permanent(), "can't read the keys", error)
    })?;
    let signing = args.signing.then(|| keys.add_signing_key(&args.keys)).transpose();
    let kek = args.kek.then(|| keys.add_kek(&args.keys)).transpose();
    let (signing, kek) = (signing.map_err(failed)?, kek.map_err(failed)?);
    // Copy last, so that the copy has the other new keys, too.
    let copy = args.out.as_ref().filter(|_| args.tls);
    let copy = copy.map(|out| keys.copy_with_new_tls_key(&args.keys, out)).transpose();
    let new_pin = copy.map_err(failed)?.map(|copy| copy.pin());
    Ok(RotatedKeys { signing, kek, pin: keys.pin(), new_pin })
}
