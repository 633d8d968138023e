//! API bodies of grants, as admins see them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::grant::Grant;
use crate::jws::Jws;
use crate::key::KeyId;

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
}

/// Answer of `GET /v1/clusters/{id}/grants`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GrantList {
    /// Grants of the cluster, newest first.
    pub grants: Vec<GrantView>,
}
