//! API bodies of grants, as admins see them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::grant::Grant;
use crate::jws::Jws;
use crate::key::KeyId;

/// Whether a token is worth anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum GrantState {
    /// The token can be redeemed.
    Valid,
    /// The token has expired.
    Expired,
    /// An admin revoked the token.
    Revoked,
    /// The cluster takes no more members by this token.
    Closed,
}

/// One grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GrantView {
    /// What the issuer signed.
    pub grant: Grant,
    /// The signed form.
    pub jws: Jws,
    /// Who signed it.
    pub issuer: KeyId,
    /// Whether it is worth anything, by the service's clock.
    pub state: GrantState,
    /// How many different keys have used it.
    pub keys: u32,
}

/// `GET /v1/clusters/{id}/grants`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GrantList {
    /// Newest first.
    pub grants: Vec<GrantView>,
}
