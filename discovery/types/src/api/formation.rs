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

/// One run of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Session {
    /// How many times it has started with this key.
    pub boot: u64,
    /// Random, for this run.
    pub nonce: Nonce,
}

/// `POST /v1/clusters/{id}/poll`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PollRequest {
    /// The revision that the agent has seen; the answer waits for a later one. None answers at
    /// once.
    pub after: Option<u64>,
    /// How many times the agent has started with this key.
    pub boot: u64,
    /// Random, for this run of the agent.
    pub nonce: Nonce,
    /// The highest epoch that it signed or released, 0 if none.
    pub highest_epoch: u64,
}

/// What an agent is to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// Has this seat (from 1).
    Seated(u8),
    /// Waits; this many wait before it.
    Standby(u32),
    /// Is in the committed list, at this seat.
    Member(u8),
    /// The asker is no agent of the cluster (an admin who reads).
    Reader,
}

/// What an agent needs to know now. The same answer to poll, ack, nack, probes and release.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PollResponse {
    /// Moves when anything here but `now_ms` and leases has changed.
    pub rev: u64,
    /// The service's time, in milliseconds since 1970: what clock skew is judged against.
    pub now_ms: i64,
    /// The cluster's state.
    pub state: ClusterState,
    /// Its epoch.
    pub epoch: u64,
    /// What the asker is to it.
    pub standing: Standing,
    /// Seats that are taken.
    pub seated: u8,
    /// How many there are.
    pub size: u8,
    /// Milliseconds until the asker's lease lapses if it says nothing.
    pub lease_ms: Option<u64>,
    /// Milliseconds until the frozen list is given up; none if none is.
    pub prepare_ms: Option<u64>,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
    /// The frozen list, while preparing.
    pub proposal: Option<Proposal>,
    /// The matrix in this epoch: each row by the seat that probed.
    pub matrix: Vec<MatrixRow>,
    /// Releases that agents of earlier lists signed.
    pub releases: Vec<Jws>,
    /// The committed list; to its members with their certificates.
    pub document: Option<CommitDocument>,
    /// What the cluster waits for.
    pub explain: Vec<Explanation>,
}

/// One seat's probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MatrixRow {
    /// The seat that probed.
    pub seat: u8,
    /// What it found, for each other seat.
    pub results: Vec<ProbeResult>,
}

/// Whether one seat reached another at its peer URLs, with its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProbeResult {
    /// The seat that was probed.
    pub seat: u8,
    /// Whether all its peer URLs answered with the right key and incarnation.
    pub reached: bool,
    /// What the last attempt ended with, at most 300 characters; none if reached.
    pub error: Option<String>,
    /// Round trip in microseconds, if reached.
    pub round_trip_us: Option<u64>,
}

/// `POST /v1/clusters/{id}/probes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProbesRequest {
    /// This run of the agent.
    pub session: Session,
    /// The proposal's epoch.
    pub epoch: u64,
    /// The proposal's hash.
    pub h: Digest,
    /// One per other seat.
    pub results: Vec<ProbeResult>,
}

/// Why an agent doesn't sign: always about itself. An unreachable peer is no reason, it stands in
/// the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NackReason {
    /// S1: a record isn't valid, or the agent's own isn't the one that it signed.
    Record,
    /// S2: two seats share a name, address, key or machine.
    Duplicate,
    /// S4: the agent's clock differs by more than 30 s from the service's.
    ClockSkew,
    /// S5: the agent has signed or released this epoch or a later one.
    Epoch,
    /// S6: releases from an earlier signed list are missing.
    Unreleased,
    /// S7: the directory of the agent's node is not blank.
    Directory,
    /// S7: the agent holds a commit document.
    DocumentHeld,
    /// The agent is about to stop.
    Stopping,
}

/// `POST /v1/clusters/{id}/nack`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NackRequest {
    /// This run of the agent.
    pub session: Session,
    /// The proposal's epoch.
    pub epoch: u64,
    /// The proposal's hash.
    pub h: Digest,
    /// Why.
    pub reason: NackReason,
    /// Why, in a sentence of at most 300 characters.
    pub detail: String,
}

/// `POST /v1/redeem`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RedeemResponse {
    /// The first access token.
    pub token: TokenResponse,
    /// The service's name as audience of later assertions.
    pub issuer: String,
    /// The service's signing keys.
    pub jwks: Jwks,
    /// The grant, for the agent to verify.
    pub grant: Jws,
    /// How things stand.
    pub poll: PollResponse,
}

/// `POST /v1/clusters/{id}/report`: what the agent's own node says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportRequest {
    /// This run of the agent.
    pub session: Session,
    /// Hash of the document that the node was started from.
    pub h: Digest,
    /// Raft cluster id, 16 hexadecimal digits.
    pub raft_cluster_id: String,
    /// The node's member id, 16 hexadecimal digits.
    pub member_id: String,
    /// The leader's member id, 16 hexadecimal digits; none if there is none.
    pub leader_id: Option<String>,
    /// Raft term.
    pub raft_term: u64,
    /// Raft index.
    pub raft_index: u64,
    /// What the node says that its cluster is, if it was asked.
    #[serde(default)]
    pub membership: Option<Membership>,
}

/// `POST /v1/clusters/{id}/trouble`: what keeps a member's node from finding a leader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TroubleRequest {
    /// This run of the agent.
    pub session: Session,
    /// Hash of the document that the node was started from.
    pub h: Digest,
    /// What the node's log says, for people; at most 300 characters.
    pub detail: String,
}

/// Answer to a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReportResponse {
    /// The cluster's state now.
    pub state: ClusterState,
    /// Raft cluster whose members the service listens to, 16 hexadecimal digits: the founded one,
    /// or the one that the last recovery made. None where the report names no members.
    #[serde(default)]
    pub raft_cluster_id: Option<String>,
}

/// `POST /v1/clusters/{id}/adopt`: a document that the service may have lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// The cluster.
    pub cluster: Uuid,
    /// The document.
    pub document: Jws,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
}
