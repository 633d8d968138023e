//! Instance identity documents of AWS: JSON in a CMS signature, as base64 in lines.
//!
//! Source: <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/verify-rsa2048.html>.

use data_encoding::BASE64;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use serde::Deserialize;

use crate::cms::SignedData;
use crate::{Cloud, HostIdentity, IdentityError, TrustedKeys, Verifier};

/// Verifier of AWS' documents.
pub(crate) struct Aws;

/// Fields of the document that are used. AWS adds others from time to time.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct InstanceDocument {
    account_id: String,
    instance_id: String,
    region: String,
    /// Time of the instance's last start.
    pending_time: jiff::Timestamp,
}

impl Verifier for Aws {
    fn verify(&self, text: &str, keys: &TrustedKeys) -> Result<HostIdentity, IdentityError> {
        let malformed = IdentityError::Malformed;
        let base64: String = text.split_ascii_whitespace().collect();
        let bytes = BASE64.decode(base64.as_bytes()).map_err(|_| malformed("no base64"))?;
        let signed = SignedData::parse(&bytes).map_err(malformed)?;
        let is_signed = keys.aws.iter().any(|key| {
            let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, key);
            key.verify(&signed.message, signed.signature).is_ok()
        });
        if !is_signed {
            return Err(IdentityError::BadSignature(Cloud::Aws));
        }
        let document: InstanceDocument = serde_json::from_slice(&signed.content)
            .map_err(|_| malformed("no instance identity document"))?;
        let started_at = u64::try_from(document.pending_time.as_second())
            .map_err(|_| malformed("the instance was started before 1970"))?;
        Ok(HostIdentity {
            cloud: Cloud::Aws,
            account: document.account_id,
            tenant: None,
            region: Some(document.region),
            instance: document.instance_id,
            started_at: Some(started_at),
            audience: None,
            expires_at: None,
        })
    }
}
