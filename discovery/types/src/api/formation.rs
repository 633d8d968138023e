//! API bodies of an agent's part in forming a cluster.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::access::{Jwks, TokenResponse};
use super::clusters::{ClusterState, CommitDocument, Explanation};
use super::intents::Membership;
use crate::digest::{Digest, Nonce};
use crate::jws::Jws;
use crate::proposal::Proposal;

/// Identifies one run of an agent. Two processes with copies of one key have different sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Session {
    /// Number of times that the agent has started with this key.
    pub boot: u64,
    /// Random number of this run.
    pub nonce: Nonce,
}

/// Header of preferences (RFC 7240).
pub const PREFER: &str = "prefer";
/// Preference for an answer without a body, if the body would tell nothing new. A poll that sends
/// it is answered 204 if nothing has changed.
pub const RETURN_MINIMAL: &str = "return=minimal";

/// Body of `POST /v1/clusters/{id}/poll`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PollRequest {
    /// Value of the cluster's change counter (`rev`) that the agent has seen. The service delays
    /// its answer until the value differs. Without this field, the service answers at once.
    pub after: Option<u64>,
    /// Number of times that the agent has started with this key.
    pub boot: u64,
    /// Random number of this run of the agent.
    pub nonce: Nonce,
    /// Highest epoch of which the agent has signed a list or a release; 0 if none.
    pub highest_epoch: u64,
}

/// Relation of the requesting agent to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// The agent has this seat (from 1).
    Seated(u8),
    /// The agent waits for a seat. The number counts the standbys before it.
    Standby(u32),
    /// The agent is in the committed list of members, at this seat.
    Member(u8),
    /// The requester is no agent of the cluster, but an admin.
    Reader,
}

/// State of a cluster for one of its agents: the answer to poll, ack, nack, probes and release.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PollResponse {
    /// Value of the cluster's change counter. A change of any other field increments it, except for
    /// `now_ms` and leases.
    pub rev: u64,
    /// Time of the service, in milliseconds since 1970. Agents measure their clock skew against it.
    pub now_ms: i64,
    /// State of the cluster.
    pub state: ClusterState,
    /// Epoch of the present proposal (the frozen list of members), or of the next one.
    pub epoch: u64,
    /// Relation of the requesting agent to the cluster.
    pub standing: Standing,
    /// Number of seats that are taken.
    pub seated: u8,
    /// Number of seats of the cluster.
    pub size: u8,
    /// Milliseconds until the agent's lease lapses without another request.
    pub lease_ms: Option<u64>,
    /// Milliseconds until the frozen list of members is abandoned; none if no list is frozen.
    pub prepare_ms: Option<u64>,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
    /// The frozen list of members, while preparing.
    pub proposal: Option<Proposal>,
    /// Approvals of the listed agents, if the statement asks for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approvals: Vec<Jws>,
    /// Rows of the probe matrix of this epoch.
    pub matrix: Vec<MatrixRow>,
    /// Signed releases. Each is an agent's promise never to be a member of a list of the release's
    /// epoch or of an earlier one.
    pub releases: Vec<Jws>,
    /// Committed list of members; a member also gets its certificates.
    pub document: Option<CommitDocument>,
    /// Reasons why the cluster waits.
    pub explain: Vec<Explanation>,
}

/// Row of the probe matrix: the results of one seat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MatrixRow {
    /// Seat that probed the others.
    pub seat: u8,
    /// Result for each other seat.
    pub results: Vec<ProbeResult>,
}

/// Result of a probe. One seat connects to another seat's peer URLs and checks that seat's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProbeResult {
    /// Seat that was probed.
    pub seat: u8,
    /// Whether all peer URLs of the seat answered with the right key and incarnation.
    pub reached: bool,
    /// Error of the last attempt, at most 300 characters; none if the seat was reached.
    pub error: Option<String>,
    /// Round trip in microseconds, if the seat was reached.
    pub round_trip_us: Option<u64>,
}

/// Body of `POST /v1/clusters/{id}/probes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProbesRequest {
    /// Session of the agent.
    pub session: Session,
    /// Epoch of the proposal.
    pub epoch: u64,
    /// Hash of the proposal.
    pub h: Digest,
    /// One result per other seat.
    pub results: Vec<ProbeResult>,
}

/// Reason why an agent doesn't sign a proposal. Each one concerns the agent's own host. An
/// unreachable peer is reported in the probe matrix instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NackReason {
    /// A record in the list of members isn't valid, or the agent's own record isn't the one that it
    /// signed.
    Record,
    /// Two seats share a name, address, key or machine.
    Duplicate,
    /// The clock of the agent's host differs from the service's by more than 30 s.
    ClockSkew,
    /// The agent has already signed a list of members of this epoch or of a later one, or released
    /// the epoch.
    Epoch,
    /// The agent has signed an earlier list of members, and too few members of that list have
    /// signed a release.
    Unreleased,
    /// The data directory of the agent's node isn't empty.
    Directory,
    /// The agent already holds a commit document.
    DocumentHeld,
    /// The agent is about to stop.
    Stopping,
}

/// Body of `POST /v1/clusters/{id}/nack`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NackRequest {
    /// Session of the agent.
    pub session: Session,
    /// Epoch of the proposal.
    pub epoch: u64,
    /// Hash of the proposal.
    pub h: Digest,
    /// Reason why the agent doesn't sign.
    pub reason: NackReason,
    /// Reason in a sentence of at most 300 characters.
    pub detail: String,
}

/// Answer of `POST /v1/redeem`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RedeemResponse {
    /// First access token of the agent.
    pub token: TokenResponse,
    /// Name of the service, the audience of later assertions.
    pub issuer: String,
    /// Signing keys of the service.
    pub jwks: Jwks,
    /// Signed grant, for the agent to verify.
    pub grant: Jws,
    /// State of the cluster, as in the answer to a poll.
    pub poll: PollResponse,
}

/// Body of `POST /v1/clusters/{id}/report`: the state of the agent's own node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportRequest {
    /// Session of the agent.
    pub session: Session,
    /// Hash of the commit document that the node was started from.
    pub h: Digest,
    /// Raft cluster id of the node, 16 hexadecimal digits.
    pub raft_cluster_id: String,
    /// Member id of the node, 16 hexadecimal digits.
    pub member_id: String,
    /// Member id of the leader, 16 hexadecimal digits; none if the node knows no leader.
    pub leader_id: Option<String>,
    /// Raft term of the node.
    pub raft_term: u64,
    /// Highest Raft index that the node knows to be committed.
    pub raft_index: u64,
    /// Members of the cluster as the node lists them. None if the agent didn't ask the node.
    #[serde(default)]
    pub membership: Option<Membership>,
    /// CAs of the member. Absent in a cluster whose CAs were never replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cas: Option<MemberCas>,
}

/// Progress of a member in the replacement of its cluster's CAs. The numbers are positions in the
/// cluster's statement chain (`seq`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemberCas {
    /// Number of the statement since which all statements trust the CAs that the member's node
    /// trusts. 0 if the agent doesn't know which CAs the node trusts.
    pub trusted: u64,
    /// Number of the earliest statement from which on the CAs that signed the member's certificates
    /// have been the issuing CAs. `None` if the newest statement that the member knows has other
    /// issuing CAs.
    pub certified: Option<u64>,
}

/// Text of [`TroubleRequest::detail`] with which an agent reports that it no longer runs its
/// member's node. The node goes on without an agent.
pub const RELEASED: &str = "released (muster-agent release): the node runs without an agent";

/// Body of `POST /v1/clusters/{id}/trouble`: the reason why a member's node finds no leader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TroubleRequest {
    /// Session of the agent.
    pub session: Session,
    /// Hash of the commit document that the node was started from.
    pub h: Digest,
    /// Message from the node's log, at most 300 characters; or [`RELEASED`].
    pub detail: String,
}

/// Answer of `POST /v1/clusters/{id}/report`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReportResponse {
    /// State of the cluster at present.
    pub state: ClusterState,
    /// Raft cluster whose members' reports the service accepts, 16 hexadecimal digits. This is the
    /// founded Raft cluster, or the one after the last recovery. None if the report names no
    /// members.
    #[serde(default)]
    pub raft_cluster_id: Option<String>,
}

/// Body of `POST /v1/clusters/{id}/adopt`: a commit document that the service may have lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// Cluster of the commit document.
    pub cluster: Uuid,
    /// Commit document, signed by the service.
    pub document: Jws,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
}
