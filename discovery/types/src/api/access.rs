//! API bodies of access tokens and admins, and public facts about the service.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::admin::Admin;
use crate::digest::Digest;
use crate::jws::Jws;
use crate::key::PublicKey;
use crate::url::ServiceUrl;

/// `POST /v1/token`, `application/x-www-form-urlencoded` as RFC 7523 has it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct TokenRequest {
    /// [`crate::access::JWT_BEARER`].
    pub grant_type: String,
    /// The assertion.
    pub assertion: Jws,
}

/// RFC 6749, section 5.1.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct TokenResponse {
    /// The access token.
    pub access_token: Jws,
    /// `Bearer`: the binding to the client's key is in the token (`cnf`).
    pub token_type: String,
    /// Seconds that it is valid.
    pub expires_in: u64,
}

/// `GET /v1/context`: public.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ContextResponse {
    /// The service's name as issuer and audience.
    pub issuer: String,
    /// Where it is.
    pub urls: Vec<ServiceUrl>,
    /// SHA-256 of its TLS keys (SPKI).
    pub pins: Vec<Digest>,
    /// The owner key that its admin chain starts at.
    pub root_owner: PublicKey,
    /// Hash of the last element of its admin chain.
    pub admin_head: Digest,
    /// Its time, in milliseconds since 1970.
    pub now_ms: i64,
    /// The longest deadline that a statement may set here.
    #[serde(default = "one_day")]
    pub max_deadline_seconds: u64,
    /// Version of the program.
    pub version: String,
}

/// Longest deadline in seconds that a service allows by default; assumed if the service doesn't
/// say.
fn one_day() -> u64 {
    86_400
}

/// One key of a JWKS (RFC 8037).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Jwk {
    /// `OKP`.
    pub kty: String,
    /// `Ed25519`.
    pub crv: String,
    /// The key, base64url.
    pub x: String,
    /// Its id.
    pub kid: crate::key::KeyId,
    /// `EdDSA`.
    pub alg: String,
    /// `sig`.
    #[serde(rename = "use")]
    pub usage: String,
}

impl Jwk {
    /// Returns the JWK of `key`.
    pub fn new(key: &PublicKey) -> Self {
        Self {
            kty: "OKP".into(),
            crv: "Ed25519".into(),
            x: key.jwk_x(),
            kid: key.key_id(),
            alg: "EdDSA".into(),
            usage: "sig".into(),
        }
    }

    /// Returns the public key, if it is an Ed25519 key and `kid` is its own id.
    pub fn public_key(&self) -> Option<PublicKey> {
        let ours = self.kty == "OKP" && self.crv == "Ed25519";
        let key: PublicKey = format!("ed25519:{}", self.x).parse().ok()?;
        (ours && key.key_id() == self.kid).then_some(key)
    }
}

/// `GET /v1/jwks`: the service's signing keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Jwks {
    /// The keys, newest first.
    pub keys: Vec<Jwk>,
}

/// `GET /v1/admins`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdminList {
    /// The owner key that the chain starts at.
    pub root_owner: PublicKey,
    /// The chain, for the client to verify.
    pub chain: Vec<Jws>,
    /// Who that makes admin.
    pub admins: Vec<Admin>,
}

/// `POST /v1/db/accept`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AcceptRequest {
    /// The Postgres system identifier that the owner was told about, so that it is this one that
    /// is accepted and not the next; none accepts what is there.
    pub system_identifier: Option<String>,
}

/// What accepting did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AcceptResponse {
    /// Postgres' system identifier.
    pub system_identifier: String,
    /// Postgres' timeline.
    pub timeline: i64,
    /// Clusters that were abandoned, because they had not committed.
    pub abandoned: Vec<uuid::Uuid>,
    /// Tokens that were revoked.
    pub revoked_tokens: u64,
    /// Commits that ledgers put back.
    pub restored_commits: u64,
}
