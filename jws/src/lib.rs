//! Compact JWS (RFC 7515) with one algorithm for each key. `jsonwebtoken` handles the tokens, and
//! ring the cryptography.
//!
//! The programs don't contain `jsonwebtoken`'s own cryptography. So [`encode`] and [`decode`] give
//! `jsonwebtoken` our provider, which makes a [`Signer`] or [`Verifier`] on ring. Callers whose
//! headers don't have `jsonwebtoken`'s form use [`Signer`] and [`Verifier`] directly, with
//! [`CompactParts`].
//!
//! All callers follow the rules of RFC 8725:
//!
//! - A key is loaded for one algorithm. The caller refuses a message whose header names another
//!   algorithm, before it verifies the signature.
//! - A key of another family is refused: no public key is ever used as an HMAC secret.
//! - Only one encoding of the bytes is accepted: base64url without padding, whose unused bits are
//!   0.

mod key;
mod parts;

use std::sync::Once;

use jsonwebtoken::TokenData;
use jsonwebtoken::crypto::{CryptoProvider, KeyUtils};
pub use jsonwebtoken::errors::{Error, ErrorKind};
pub use jsonwebtoken::{
    Algorithm, AlgorithmFamily, DecodingKey, EncodingKey, Header, Validation, signature,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use key::{Signer, Verifier};
pub use parts::CompactParts;

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: |algorithm, key| Ok(Box::new(Signer::new(*algorithm, key)?)),
    verifier_factory: |algorithm, key| Ok(Box::new(Verifier::new(*algorithm, key)?)),
    // Only the library's JWK functions need key utilities, and we don't call them.
    key_utils: KeyUtils::new_unimplemented(),
};

/// Signs `payload` with the algorithm of `header`, and returns the compact form.
///
/// # Errors
/// If the payload is not JSON, or the key doesn't fit the algorithm.
pub fn encode<T: Serialize>(
    header: &Header,
    payload: &T,
    key: &EncodingKey,
) -> Result<String, Error> {
    install();
    jsonwebtoken::encode(header, payload, key)
}

/// Verifies the signature of `compact`, and its claims by `validation`. Returns the payload.
///
/// # Errors
/// If the message is refused.
pub fn decode<T: DeserializeOwned>(
    compact: &str,
    key: &DecodingKey,
    validation: &Validation,
) -> Result<T, Error> {
    install();
    let decoded: TokenData<T> = jsonwebtoken::decode(compact, key, validation)?;
    Ok(decoded.claims)
}

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        PROVIDER.install_default().expect("nothing else in the process installs a provider");
    });
}
