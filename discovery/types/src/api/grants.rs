//! API bodies of grants, as admins see them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

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
    /// The token was made before the last change of the database, which can have lost its
    /// revocation. It admits no new host until an issuer confirms it.
    Void,
    /// The cluster accepts no more members with this token.
    Closed,
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
    /// State of the token, by the service's clock.
    pub state: GrantState,
    /// Number of different keys that have redeemed the token.
    pub keys: u32,
    /// Name of the cluster that the token is for. None if the service is older than this field.
    #[serde(default)]
    pub cluster_name: Option<Name>,
    /// Time of the change of the database that made the token void, in microseconds since 1970. Only
    /// in the state [`GrantState::Void`]. A confirmation repeats it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub void_before_us: Option<u64>,
}

/// Query of `GET /v1/grants` and `GET /v1/clusters/{id}/grants`: which page of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GrantQuery {
    /// Continues the list there. The value is [`GrantList::next`] of the page before.
    pub after: Option<String>,
    /// Maximum number of grants in the answer, at most [`MAX_PAGE`](super::MAX_PAGE).
    pub limit: Option<u16>,
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
