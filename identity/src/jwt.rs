//! Identity JWTs of GCP and Azure: RS256, by keys from a configured JWKS.
//!
//! Sources: <https://cloud.google.com/compute/docs/instances/verifying-instance-identity>,
//! <https://learn.microsoft.com/entra/identity-platform/access-token-claims-reference>.

use muster_jws::CompactParts;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::keys::Jwk;
use crate::{Cloud, HostIdentity, IdentityError, TrustedKeys, Verifier};

/// Issuers that Google's JWTs name.
const GOOGLE: [&str; 2] = ["https://accounts.google.com", "accounts.google.com"];
/// Part of the resource id of an Azure virtual machine, in lower case.
const AZURE_MACHINE: &str = "/providers/microsoft.compute/";

/// Verifier of GCP's JWTs.
pub(crate) struct Gcp;
/// Verifier of Azure's JWTs.
pub(crate) struct Azure;

/// Header of a JWT. Other parameters than these are ignored: no key is taken from a header.
#[derive(Deserialize)]
struct JwtHeader {
    alg: String,
    kid: String,
    /// Extensions that a reader has to know (RFC 7515, section 4.1.11).
    #[serde(default)]
    crit: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct GcpClaims {
    iss: String,
    aud: String,
    exp: u64,
    google: Google,
}

#[derive(Deserialize)]
struct Google {
    compute_engine: ComputeEngine,
}

#[derive(Deserialize)]
struct ComputeEngine {
    project_id: String,
    instance_id: String,
    zone: String,
    instance_creation_timestamp: u64,
}

#[derive(Deserialize)]
struct AzureClaims {
    iss: String,
    aud: String,
    exp: u64,
    tid: String,
    /// Resource of the managed identity. For a system-assigned identity this is the virtual
    /// machine.
    xms_mirid: Option<String>,
    /// Resource that requested the JWT, for a user-assigned identity.
    xms_az_rid: Option<String>,
}

impl Verifier for Gcp {
    fn verify(&self, text: &str, keys: &TrustedKeys) -> Result<HostIdentity, IdentityError> {
        let claims: GcpClaims = open(text, Cloud::Gcp, &keys.gcp)?;
        if !GOOGLE.contains(&&*claims.iss) {
            return Err(IdentityError::Malformed("the issuer is not Google"));
        }
        let engine = claims.google.compute_engine;
        let region = engine.zone.rsplit_once('-').map(|(region, _)| region.to_owned());
        Ok(HostIdentity {
            cloud: Cloud::Gcp,
            account: engine.project_id,
            tenant: None,
            region,
            instance: engine.instance_id,
            started_at: Some(engine.instance_creation_timestamp),
            audience: Some(claims.aud),
            expires_at: Some(claims.exp),
        })
    }
}

impl Verifier for Azure {
    fn verify(&self, text: &str, keys: &TrustedKeys) -> Result<HostIdentity, IdentityError> {
        let claims: AzureClaims = open(text, Cloud::Azure, &keys.azure)?;
        let tenant = claims.tid;
        let issuers = [
            format!("https://sts.windows.net/{tenant}/"),
            format!("https://login.microsoftonline.com/{tenant}/v2.0"),
        ];
        if !issuers.contains(&claims.iss) {
            return Err(IdentityError::Malformed("the issuer is not the tenant's"));
        }
        // Azure writes resource ids in varying case.
        let resource = claims.xms_az_rid.or(claims.xms_mirid).unwrap_or_default();
        let resource = resource.to_ascii_lowercase();
        if !resource.contains(AZURE_MACHINE) {
            return Err(IdentityError::Malformed("it is not of a virtual machine"));
        }
        let subscription = resource
            .strip_prefix("/subscriptions/")
            .and_then(|rest| rest.split_once('/'))
            .map(|(subscription, _)| subscription.to_owned())
            .ok_or(IdentityError::Malformed("the machine has no subscription"))?;
        Ok(HostIdentity {
            cloud: Cloud::Azure,
            account: subscription,
            tenant: Some(tenant),
            region: None,
            instance: resource,
            started_at: None,
            audience: Some(claims.aud),
            expires_at: Some(claims.exp),
        })
    }
}

/// Verifies a JWT's signature with the key that its header names, and returns the claims.
fn open<T: DeserializeOwned>(text: &str, cloud: Cloud, keys: &[Jwk]) -> Result<T, IdentityError> {
    let malformed = IdentityError::Malformed;
    let parts = CompactParts::split(text).ok_or(malformed("no JWT"))?;
    let header = parts.header().ok_or(malformed("no JWT"))?;
    let header: JwtHeader =
        serde_json::from_slice(&header).map_err(|_| malformed("no header of a JWT"))?;
    if header.alg != "RS256" || header.crit.is_some() {
        return Err(malformed("the algorithm is not RS256, or the header has extensions"));
    }
    let signature = parts.signature().ok_or(malformed("no JWT"))?;
    let is_signed = keys.iter().filter(|key| key.kid == header.kid).any(|key| {
        let key = RsaPublicKeyComponents { n: &key.n, e: &key.e };
        key.verify(&RSA_PKCS1_2048_8192_SHA256, parts.signed(), &signature).is_ok()
    });
    if !is_signed {
        return Err(IdentityError::BadSignature(cloud));
    }
    let payload = parts.payload().ok_or(malformed("no JWT"))?;
    serde_json::from_slice(&payload)
        .map_err(|_| malformed("it lacks claims that say which machine it is for"))
}
