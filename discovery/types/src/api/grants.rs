//! API bodies of grants, as admins see them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::intents::IntentState;
use crate::digest::{MemberId, OperationId};
use crate::grant::Grant;
use crate::jws::Jws;
use crate::key::KeyId;
use crate::name::Name;

/// State of a token, by the service's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum GrantState {
    /// The token can be redeemed.
    Valid,
    /// The token has expired.
    Expired,
    /// An admin revoked the token.
    Revoked,
    /// The token was made before the last change of the database, which may have lost its
    /// revocation. It admits no new host until an issuer confirms it.
    Void,
    /// The cluster accepts no more members with this token.
    Closed,
}

impl GrantState {
    /// Returns the state's name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            GrantState::Valid => "valid",
            GrantState::Expired => "expired",
            GrantState::Revoked => "revoked",
            GrantState::Void => "void",
            GrantState::Closed => "closed",
        }
    }
}

/// A grant, and the state of its token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GrantView {
    /// Payload that the issuer signed.
    pub grant: Grant,
    /// Grant in its signed form.
    pub jws: Jws,
    /// Key id of the issuer.
    pub issuer: KeyId,
    /// Name of the admin who stored the grant. None if the service is older than this field.
    #[serde(default)]
    pub made_by: Option<String>,
    /// State of the token, by the service's clock.
    pub state: GrantState,
    /// Number of different keys that have redeemed the token.
    pub keys: u32,
    /// Name of the cluster that the token is for. None if the service is older than this field.
    #[serde(default)]
    pub cluster_name: Option<Name>,
    /// Time of the change of the database that made the token void, in microseconds since 1970.
    /// Only in the state [`GrantState::Void`]. An issuer who confirms the token signs this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub void_before_us: Option<u64>,
}

/// Largest number of redemptions in one answer; the newest ones are shown.
pub const MAX_REDEMPTIONS: usize = 1_000;

/// A host that has redeemed a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Redemption {
    /// Name of the host's member.
    pub name: Name,
    /// Id of the agent's key.
    pub agent: KeyId,
    /// Source address of the first redeem.
    pub address: Option<String>,
    /// Virtual machine of the host, as its cloud's identity document names it: `aws:i-…`. None if
    /// the token requires no such document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Zone of the host, as its agent said.
    pub zone: Option<Name>,
    /// Time of the first redeem, in milliseconds since 1970.
    pub at_ms: i64,
    /// Seat of the host, if it took one while the cluster formed.
    pub seat: Option<u8>,
    /// State of the change by which the host joins or joined a running cluster.
    pub change: Option<IntentState>,
    /// Operation id of that change.
    pub operation: Option<OperationId>,
    /// Member that the host became in a running cluster.
    pub member: Option<MemberId>,
    /// Certificates that the service is known to have issued to the host, oldest first: the newest
    /// 64, and before them a founder's first two.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub certificates: Vec<IssuedCertificate>,
}

/// A certificate of a host's member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IssuedCertificate {
    /// Purpose of the certificate, which tells the CA that signed it.
    pub purpose: CertificatePurpose,
    /// Serial number, in hexadecimal digits as `openssl x509 -serial` prints them.
    pub serial: String,
    /// End of the certificate's validity, in milliseconds since 1970.
    pub expires_at_ms: i64,
}

/// Purpose of a member's certificate, which is that of the CA that signed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CertificatePurpose {
    /// The CA of the connections between members.
    Peer,
    /// The CA of the client port.
    Client,
}

impl CertificatePurpose {
    /// Returns the purpose's name.
    pub fn as_str(self) -> &'static str {
        match self {
            CertificatePurpose::Peer => "peer",
            CertificatePurpose::Client => "client",
        }
    }
}

/// Answer of `GET /v1/grants/{id}/redemptions`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RedemptionList {
    /// Hosts that have redeemed the token, newest first: at most [`MAX_REDEMPTIONS`].
    pub redemptions: Vec<Redemption>,
}

/// Query of `POST /v1/grants/{id}/revoke`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RevokeQuery {
    /// Whether hosts that have used the token lose their seats in a cluster that still forms. They
    /// get seats again only with another token.
    pub free_seats: Option<bool>,
}

/// Query of `GET /v1/grants` and `GET /v1/clusters/{id}/grants`: which page of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GrantQuery {
    /// Position after which the page begins: [`GrantList::next`] of the page before.
    pub after: Option<String>,
    /// Maximum number of grants in the answer, at most [`MAX_PAGE`](super::MAX_PAGE).
    pub limit: Option<u16>,
    /// Whether to list only replacement policies, and no tokens of other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<bool>,
}

/// Answer of `GET /v1/grants` and `GET /v1/clusters/{id}/grants`: one page of the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GrantList {
    /// Grants of this page, newest first.
    pub grants: Vec<GrantView>,
    /// Position at which the next page begins, for `after`. None on the last page.
    #[serde(default)]
    pub next: Option<String>,
}
