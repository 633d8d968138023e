//! API bodies of etcd tokens, by which stock etcd forms clusters through this service.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::digest::{Digest, MemberId};
use crate::etcd_token::EtcdProtocol;
use crate::grant::GrantId;
use crate::name::Name;

/// Body of `PUT /v1/etcd-tokens`: a token that the caller has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EtcdTokenRequest {
    /// Id of the token.
    pub id: GrantId,
    /// Hash of the token's secret.
    pub secret_hash: Digest,
    /// Name of the cluster, only for people.
    pub name: Name,
    /// Protocol by which the members register.
    pub protocol: EtcdProtocol,
    /// Number of members that form the cluster.
    pub size: u8,
    /// Time in seconds for which the token is valid.
    pub lifetime_seconds: u64,
    /// Networks from which members may register; empty for any.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub cidrs: Vec<IpNet>,
}

/// State of an etcd token, by the service's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EtcdTokenState {
    /// The list of members has room, and the token is valid.
    Open,
    /// All members have registered, so the list of members never changes any more.
    Complete,
    /// The token has expired.
    Expired,
    /// An admin revoked the token.
    Revoked,
    /// The token was made before the last change of the database, which may have lost
    /// registrations.
    Void,
}

impl EtcdTokenState {
    /// Returns the state's name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            EtcdTokenState::Open => "open",
            EtcdTokenState::Complete => "complete",
            EtcdTokenState::Expired => "expired",
            EtcdTokenState::Revoked => "revoked",
            EtcdTokenState::Void => "void",
        }
    }
}

/// A member that registered with an etcd token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EtcdMember {
    /// Id of the member in its cluster.
    pub id: MemberId,
    /// Name that the member registered.
    pub name: String,
    /// Peer URLs that the member advertises.
    pub peer_urls: Vec<String>,
    /// Source address of the registration.
    pub address: String,
    /// Time of the registration, in milliseconds since 1970.
    pub at_ms: i64,
    /// Whether the member stopped waiting before all members had registered. Its place is free
    /// again.
    pub lapsed: bool,
}

/// An etcd token and the members that registered with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EtcdTokenView {
    /// Id of the token.
    pub id: GrantId,
    /// Name of the cluster.
    pub name: Name,
    /// Protocol by which the members register.
    pub protocol: EtcdProtocol,
    /// Number of members that form the cluster.
    pub size: u8,
    /// State of the token.
    pub state: EtcdTokenState,
    /// Name of the admin who made the token.
    pub made_by: String,
    /// Time at which the token was made, in milliseconds since 1970.
    pub made_at_ms: i64,
    /// Time at which the token expires, in milliseconds since 1970.
    pub expires_at_ms: i64,
    /// Networks from which members may register; empty for any.
    #[schema(value_type = Vec<String>)]
    pub cidrs: Vec<IpNet>,
    /// Members in the order of their registration, lapsed ones last.
    pub members: Vec<EtcdMember>,
}

/// Answer of `PUT /v1/etcd-tokens`: the token, and what else etcd needs to use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EtcdTokenResponse {
    /// Token as the service has stored it.
    pub token: EtcdTokenView,
    /// The service's TLS certificate in PEM, by which etcd recognises the service.
    pub service_certificate: String,
    /// Addresses (`host:port`) at which this process serves etcd's discovery protocol v3; empty if
    /// it doesn't.
    pub v3_endpoints: Vec<String>,
}

/// Query of `GET /v1/etcd-tokens`: which page of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EtcdTokenQuery {
    /// Position after which the page begins: [`EtcdTokenList::next`] of the page before.
    pub after: Option<String>,
    /// Maximum number of tokens in the answer, at most [`MAX_PAGE`](super::MAX_PAGE).
    pub limit: Option<u16>,
}

/// Answer of `GET /v1/etcd-tokens`: one page of the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EtcdTokenList {
    /// Tokens of this page, newest first.
    pub tokens: Vec<EtcdTokenView>,
    /// Position at which the next page begins, for `after`. None on the last page.
    #[serde(default)]
    pub next: Option<String>,
}
