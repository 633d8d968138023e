//! API bodies of access tokens and admins, and public facts about the service.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::admin::Admin;
use crate::digest::Digest;
use crate::jws::Jws;
use crate::key::PublicKey;
use crate::url::ServiceUrl;

/// Body of `POST /v1/token`, `application/x-www-form-urlencoded` as in RFC 7523.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct TokenRequest {
    /// Grant type, always [`crate::access::JWT_BEARER`].
    pub grant_type: String,
    /// Assertion that the client signed.
    pub assertion: Jws,
}

/// Access token response of RFC 6749, section 5.1.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct TokenResponse {
    /// Access token for later requests.
    pub access_token: Jws,
    /// Type of the token, always `Bearer`. The binding to the client's key is in the token (`cnf`).
    pub token_type: String,
    /// Validity of the token in seconds.
    pub expires_in: u64,
}

/// Answer of the public route `GET /v1/context`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ContextResponse {
    /// Name of the service as issuer and audience.
    pub issuer: String,
    /// URLs of the service.
    pub urls: Vec<ServiceUrl>,
    /// SHA-256 of the service's TLS keys (SPKI).
    pub pins: Vec<Digest>,
    /// Owner key that the service's admin chain starts at.
    pub root_owner: PublicKey,
    /// Hash of the last element of the service's admin chain.
    pub admin_head: Digest,
    /// Time of the service, in milliseconds since 1970.
    pub now_ms: i64,
    /// Longest deadline that a statement may set at this service, in seconds.
    #[serde(default = "one_day")]
    pub max_deadline_seconds: u64,
    /// Version of the service's program.
    pub version: String,
}

/// Returns the default of [`ContextResponse::max_deadline_seconds`], for services that don't send
/// this field.
fn one_day() -> u64 {
    86_400
}

/// Answer of `POST /v1/console/links`: a link by which a browser signs in to the console, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleLink {
    /// URL to open in a browser. It holds a secret: the first to press the button on its page signs
    /// in as the caller.
    pub url: String,
    /// Time at which the link expires, in milliseconds since 1970.
    pub expires_at_ms: i64,
    /// Longest life of the session that the link begins, in seconds.
    pub session_seconds: u64,
    /// SHA-256 of the certificate that the console shows to browsers.
    pub certificate_sha256: Digest,
    /// Whether the console shows browsers the service's own certificate, which they don't trust.
    pub uses_service_certificate: bool,
}

/// One key of a JWKS (RFC 8037).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Jwk {
    /// Key type, always `OKP`.
    pub kty: String,
    /// Curve of the key, always `Ed25519`.
    pub crv: String,
    /// Public key, in base64url.
    pub x: String,
    /// Id of the key, its RFC 7638 thumbprint.
    pub kid: crate::key::KeyId,
    /// Algorithm of the key, always `EdDSA`.
    pub alg: String,
    /// Use of the key, always `sig` (signatures).
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

/// Answer of `GET /v1/jwks`: the service's signing keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Jwks {
    /// Signing keys of the service, newest first.
    pub keys: Vec<Jwk>,
}

/// Answer of `GET /v1/admins`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdminList {
    /// Owner key that the admin chain starts at.
    pub root_owner: PublicKey,
    /// Admin chain, for the client to verify.
    pub chain: Vec<Jws>,
    /// Admins at the end of the chain.
    pub admins: Vec<Admin>,
}

/// Body of `POST /v1/db/accept`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AcceptRequest {
    /// Postgres system identifier that the owner was shown. With it, the owner can't accept another
    /// database by mistake. Without it, the service accepts the database that it uses now.
    pub system_identifier: Option<String>,
}

/// Answer of `POST /v1/db/accept`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AcceptResponse {
    /// Postgres system identifier of the accepted database.
    pub system_identifier: String,
    /// Postgres timeline of the accepted database.
    pub timeline: i64,
    /// Clusters that were abandoned because they had not committed.
    pub abandoned: Vec<uuid::Uuid>,
    /// Number of tokens that were revoked.
    pub revoked_tokens: u64,
    /// Number of commits that were restored from ledgers.
    pub restored_commits: u64,
}
