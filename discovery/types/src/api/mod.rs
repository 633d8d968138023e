//! Bodies of the service's API: one module per group of routes.
//!
//! | route | request | response |
//! |---|---|---|
//! | `POST /v1/drafts` | [`DraftRequest`] | [`DraftResponse`] |
//! | `PUT /v1/clusters/{id}/statement` | [`SignedBody`] | [`ClusterSummary`] |
//! | `GET /v1/clusters[?name=&state=&…]` | [`ClusterQuery`] | [`ClusterList`] |
//! | `GET /v1/clusters/{id}` | – | [`ClusterView`] |
//! | `GET /v1/clusters/{id}/statements` | – | [`StatementList`] |
//! | `PUT /v1/clusters/{id}/service` | [`SignedBody`] | [`StatementList`] |
//! | `GET /v1/clusters/{id}/explain` | – | [`ExplainResponse`] |
//! | `GET /v1/clusters/{id}/document` | – | [`CommitDocument`] |
//! | `POST /v1/clusters/{id}/approvals` | [`SignedBody`] | [`ClusterSummary`] |
//! | `POST /v1/clusters/{id}/abandon` | [`AbandonRequest`] | [`ClusterSummary`] |
//! | `POST /v1/clusters/{id}/retire` | [`SignedBody`] | [`ClusterSummary`] |
//! | `POST /v1/clusters/{id}/unretire` | [`SignedBody`] | [`ClusterSummary`] |
//! | `POST /v1/clusters/{id}/reopen` | – | [`ClusterSummary`] |
//! | `POST /v1/clusters/{id}/credentials` | [`CredentialsRequest`] | [`CredentialsResponse`] |
//! | `PUT /v1/grants` | [`SignedBody`] | [`GrantView`] |
//! | `GET /v1/clusters/{id}/grants` | [`GrantQuery`] | [`GrantList`] |
//! | `GET /v1/grants/{id}` | – | [`GrantView`] |
//! | `GET /v1/grants/{id}/redemptions` | – | [`RedemptionList`] |
//! | `POST /v1/grants/{id}/confirm` | [`SignedBody`] | [`GrantView`] |
//! | `POST /v1/grants/{id}/revoke` | – | [`GrantView`] |
//! | `PUT /v1/etcd-tokens` | [`EtcdTokenRequest`] | [`EtcdTokenResponse`] |
//! | `GET /v1/etcd-tokens` | [`EtcdTokenQuery`] | [`EtcdTokenList`] |
//! | `GET /v1/etcd-tokens/{id}` | – | [`EtcdTokenView`] |
//! | `POST /v1/etcd-tokens/{id}/revoke` | – | [`EtcdTokenView`] |
//! | `GET /v1/events?stream=` | [`EventQuery`] | [`EventList`] |
//! | `POST /v1/console/links` | – | [`ConsoleLink`] |
//! | `GET /v1/admins` | – | [`AdminList`] |
//! | `PUT /v1/admins` | [`SignedBody`] | [`AdminList`] |
//! | `POST /v1/token` | [`TokenRequest`] (a form) | [`TokenResponse`] |
//! | `POST /v1/db/accept` | [`AcceptRequest`] | [`AcceptResponse`] |
//! | `GET /v1/processes` | – | [`ProcessList`] |
//! | `POST /v1/processes/{id}/forget` | – | [`ProcessList`] |
//! | `GET /v1/context` | – | [`ContextResponse`] |
//! | `GET /v1/jwks` | – | [`Jwks`] |
//! | `GET /v1/clusters/{id}/checkpoint` | [`CheckpointQuery`] | [`SignedBody`] |
//! | `POST /v1/redeem` | [`SignedBody`] | [`RedeemResponse`] |
//! | `POST /v1/clusters/{id}/poll` | [`PollRequest`] | [`PollResponse`] |
//! | `GET /v1/clusters/{id}/poll?after=` | – | [`PollResponse`] |
//! | `POST /v1/clusters/{id}/ack` | [`SignedBody`] | [`PollResponse`] |
//! | `POST /v1/clusters/{id}/nack` | [`NackRequest`] | [`PollResponse`] |
//! | `POST /v1/clusters/{id}/probes` | [`ProbesRequest`] | [`PollResponse`] |
//! | `POST /v1/clusters/{id}/release` | [`SignedBody`] | [`PollResponse`] |
//! | `POST /v1/clusters/{id}/report` | [`ReportRequest`] | [`ReportResponse`] |
//! | `POST /v1/clusters/{id}/addresses` | [`AddressesRequest`] | [`AddressesResponse`] |
//! | `POST /v1/clusters/{id}/trouble` | [`TroubleRequest`] | [`ReportResponse`] |
//! | `POST /v1/join[?program=]` | [`SignedBody`] | [`JoinResponse`] |
//! | `PUT /v1/orders` | [`SignedBody`] | [`IntentView`] |
//! | `GET /v1/clusters/{id}/intents[?after=&all=]` | – | [`IntentList`] |
//! | `GET /v1/clusters/{id}/intents/{operation}[?after=]` | – | [`IntentView`] |
//! | `POST /v1/clusters/{id}/intents/{operation}/outcome` | [`OutcomeRequest`] | [`IntentView`] |
//! | `POST /v1/clusters/{id}/intents/{operation}/wait` | [`WaitRequest`] | [`IntentView`] |
//! | `POST /v1/clusters/{id}/intents/{operation}/withdraw` | – | [`IntentView`] |
//! | `POST /v1/clusters/{id}/recoveries` | [`RecoveriesRequest`] | [`RecoveriesResponse`] |
//! | `GET /v1/clusters/{id}/directory` | – | [`DirectoryResponse`] |
//! | `POST /v1/clusters/{id}/leaves` | [`LeavesRequest`] | [`Leaves`](crate::leaves::Leaves) |
//! | `GET /v1/clusters/{id}/export` | – | [`ClusterExport`] |
//! | `POST /v1/clusters/{id}/adopt` | [`AdoptRequest`] | [`ClusterSummary`] |
//! | `POST /v1/clusters/{id}/readmit` | [`ReadmitRequest`](crate::readmission::ReadmitRequest) | [`IntentView`] |
//!
//! Requests with unknown fields are refused. Responses may get new fields later, so clients ignore
//! fields that they don't know.

mod access;
mod clusters;
mod etcd_tokens;
mod events;
mod formation;
mod grants;
mod intents;
mod processes;

pub use access::{
    AcceptRequest, AcceptResponse, AdminList, ConsoleLink, ContextResponse, Jwk, Jwks,
    TokenRequest, TokenResponse,
};
pub use clusters::{
    AbandonRequest, AddressesRequest, AddressesResponse, AskingHost, BadClusterState, ClusterList,
    ClusterQuery, ClusterState, ClusterStates, ClusterSummary, ClusterView, CommitDocument,
    CredentialsRequest, CredentialsResponse, DraftRequest, DraftResponse, EndView, ExplainResponse,
    Explanation, MAX_PAGE, MIN_REPORT_INTERVAL, MemberRotation, MemberView, MembersView, Moment,
    RotationView, SILENT_AFTER, SeatView, StatementList, StatementsRequest, UnknownMember,
};
pub use etcd_tokens::{
    EtcdMember, EtcdTokenList, EtcdTokenQuery, EtcdTokenRequest, EtcdTokenResponse, EtcdTokenState,
    EtcdTokenView,
};
pub use events::{CheckpointQuery, EventList, EventQuery, EventView};
pub use formation::{
    AdoptRequest, MatrixRow, MemberCas, NackReason, NackRequest, PREFER, PollRequest, PollResponse,
    ProbeResult, ProbesRequest, RELEASED, RETURN_MINIMAL, RedeemResponse, ReportRequest,
    ReportResponse, Session, Standing, TroubleRequest,
};
pub use grants::{
    CertificatePurpose, GrantList, GrantQuery, GrantState, GrantView, IssuedCertificate,
    MAX_REDEMPTIONS, Redemption, RedemptionList, RevokeQuery,
};
pub use intents::{
    ClusterExport, DirectoryResponse, DirectoryView, InitialMember, IntentList, IntentState,
    IntentView, JoinResponse, LeavesRequest, ListedMember, MAX_MEMBER_NAME, MAX_MEMBERS,
    Membership, NodeProgram, Outcome, OutcomeRequest, PolicyView, RecoveriesRequest,
    RecoveriesResponse, WaitRequest, WaitView,
};
pub use processes::{ProcessList, ProcessView};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::jws::{Jws, JwsType, MAX_JWS};
use crate::statement::MAX_CHAIN;

/// Longest request body in bytes, except for [`MAX_ADOPT_BODY_BYTES`],
/// [`MAX_STATEMENTS_BODY_BYTES`] and [`MAX_RECOVERIES_BODY_BYTES`].
pub const MAX_BODY_BYTES: usize = 64 * 1024;
/// Longest body with recovery statements, in bytes. It has room for the maximum number of
/// statements of the maximum length, as JSON.
pub const MAX_RECOVERIES_BODY_BYTES: usize = 136 * 1024;
/// Longest body with a cluster's statement chain, in bytes. It has room for the maximum number of
/// statements of the maximum length, as JSON.
pub const MAX_STATEMENTS_BODY_BYTES: usize =
    MAX_CHAIN * (JwsType::Statement.max_bytes() + 8) + MAX_BODY_BYTES;
/// Longest body of an `adopt` request, in bytes: a commit document and its statement chain.
pub const MAX_ADOPT_BODY_BYTES: usize = MAX_STATEMENTS_BODY_BYTES + MAX_JWS;
/// Longest response body that the client accepts, in bytes.
pub const MAX_RESPONSE: usize = 4 * 1024 * 1024;

/// A request body that is one signed message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignedBody {
    /// Message as a compact JWS.
    pub jws: Jws,
}
