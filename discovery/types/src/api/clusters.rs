//! API bodies of clusters, as admins see them.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::formation::ProbeResult;
use crate::csr::Csr;
use crate::digest::{Digest, Incarnation, MemberId};
use crate::grant::GrantId;
use crate::jws::Jws;
use crate::key::KeyId;
use crate::leaves::Leaves;
use crate::name::Name;
use crate::url::NodeUrl;

/// The shortest time until an agent reports again that its member runs; jitter adds at most as much.
pub const REPORT_AGAIN: Duration = Duration::from_secs(60);

/// A member whose agent reported nothing for this long is called silent: several reports are missing.
pub const SILENT_AFTER: Duration = Duration::from_secs(300);

/// State of a cluster in discovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ClusterState {
    /// The cluster has CAs, and waits for its statement.
    Draft,
    /// Agents take seats in the cluster.
    Open,
    /// The list of members is frozen, and acks come in.
    Preparing,
    /// The list of members is decided, for ever.
    Committed,
    /// A majority of the members reported the running cluster.
    Formed,
    /// An admin gave the cluster up.
    Abandoned,
    /// The deadline passed before the commit.
    Expired,
    /// An owner ended the cluster after its commit.
    Retired,
}

impl ClusterState {
    /// Returns the state's name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            ClusterState::Draft => "draft",
            ClusterState::Open => "open",
            ClusterState::Preparing => "preparing",
            ClusterState::Committed => "committed",
            ClusterState::Formed => "formed",
            ClusterState::Abandoned => "abandoned",
            ClusterState::Expired => "expired",
            ClusterState::Retired => "retired",
        }
    }
}

impl std::fmt::Display for ClusterState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// `POST /v1/drafts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DraftRequest {
    /// Name of the cluster; no other live one may have it.
    pub name: Name,
    /// How many members.
    pub size: u8,
}

/// A draft: what the statement is signed over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DraftResponse {
    /// Its id.
    pub cluster: Uuid,
    /// CA of the members' peer certificates, PEM.
    pub peer_ca: String,
    /// CA of client certificates, PEM.
    pub client_ca: String,
    /// When the draft dies unless a statement comes, in milliseconds since 1970.
    pub expires_at_ms: i64,
    /// Longest deadline that this service takes, in seconds.
    pub max_deadline_seconds: u64,
}

/// One cluster in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterSummary {
    /// Its id.
    pub cluster: Uuid,
    /// Its name.
    pub name: Name,
    /// How many members it forms of.
    pub size: u8,
    /// Its state.
    pub state: ClusterState,
    /// Its epoch.
    pub epoch: u64,
    /// Seats that are taken.
    pub seated: u8,
    /// Agents that wait.
    pub standbys: u32,
    /// When it was made, in milliseconds since 1970.
    pub created_at_ms: i64,
    /// When it expires unless it commits, in milliseconds since 1970; none once committed.
    pub deadline_at_ms: Option<i64>,
    /// How many members it has now; none before the commit.
    #[serde(default)]
    pub members: Option<u32>,
    /// How many members' agents reported within [`SILENT_AFTER`]; none before the commit.
    #[serde(default)]
    pub heard: Option<u32>,
}

/// `GET /v1/clusters`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterList {
    /// Newest first; with `?name=` only those with that name.
    pub clusters: Vec<ClusterSummary>,
}

/// An agent of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SeatView {
    /// Seat, from 1; none for a standby.
    pub seat: Option<u8>,
    /// The member's name.
    pub name: Name,
    /// The agent's key.
    pub agent: KeyId,
    /// This life of the member.
    pub incarnation: Incarnation,
    /// Peer URLs.
    pub peer_urls: Vec<NodeUrl>,
    /// Client URLs.
    pub client_urls: Vec<NodeUrl>,
    /// The grant that it came with.
    pub grant: GrantId,
    /// Address that it last came from, as the service saw it.
    pub source: Option<String>,
    /// Addresses that its token is bound to; empty where it is bound to none.
    #[schema(value_type = Vec<String>)]
    pub bound_to: Vec<IpNet>,
    /// When its lease lapses, in milliseconds since 1970; none once committed.
    pub lease_until_ms: Option<i64>,
    /// Whether it signed the current proposal.
    pub acked: bool,
    /// Its row of the matrix in this epoch.
    pub probes: Vec<ProbeResult>,
    /// Why it refused last.
    pub last_nack: Option<String>,
}

impl SeatView {
    /// Whether the agent comes from elsewhere than its token was bound to.
    pub fn is_out_of_bounds(&self) -> bool {
        self.is_outside(&self.bound_to)
    }

    /// Whether the agent comes from outside `blocks` or from an unknown address, or advertises an
    /// address outside of them. Empty `blocks` restrict nothing.
    pub fn is_outside(&self, blocks: &[IpNet]) -> bool {
        is_outside(self.source.as_deref(), self.peer_urls.iter(), blocks)
    }
}

fn is_outside<'a>(
    source: Option<&str>,
    peer_urls: impl Iterator<Item = &'a NodeUrl>,
    blocks: &[IpNet],
) -> bool {
    let inside = |address: IpAddr| blocks.iter().any(|block| block.contains(&address));
    let source = source.and_then(|text| text.parse::<IpAddr>().ok());
    let mut hosts = peer_urls.filter_map(|url| url.host().address());
    let is_inside = source.is_some_and(inside) && hosts.all(inside);
    !blocks.is_empty() && !is_inside
}

/// A member of a cluster that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberView {
    /// Its id.
    pub id: MemberId,
    /// Its name.
    pub name: String,
    /// Whether it has no vote.
    pub is_learner: bool,
    /// Whether the members named it as the leader last.
    pub is_leader: bool,
    /// Where its peers reach it.
    pub peer_urls: Vec<String>,
    /// Where clients reach it.
    pub client_urls: Vec<String>,
    /// When its agent was heard last, in milliseconds since 1970; none if it never was.
    pub last_heard_ms: Option<i64>,
    /// Whether its agent was not heard for [`SILENT_AFTER`].
    pub is_silent: bool,
    /// How the members that it names differ from the confirmed ones.
    pub disagreement: Option<String>,
    /// Why its node has no leader, as its agent said last.
    pub last_error: Option<String>,
    /// The address that its agent redeemed its token from; none where no token brought it.
    pub source: Option<String>,
    /// Addresses that its token was bound to; empty where it was bound to none.
    #[schema(value_type = Vec<String>)]
    pub bound_to: Vec<IpNet>,
}

impl MemberView {
    /// Whether the member's agent has reported lately and its node has a leader.
    pub fn is_well(&self) -> bool {
        !self.is_silent && self.last_error.is_none()
    }

    /// Returns the member's name, or its id while it has none.
    pub fn called(&self) -> String {
        match self.name.is_empty() {
            true => self.id.to_string(),
            false => self.name.clone(),
        }
    }

    /// Whether the member came from outside `blocks`, or advertises an address outside of them.
    /// Empty `blocks` restrict nothing.
    pub fn is_outside(&self, blocks: &[IpNet]) -> bool {
        let urls: Result<Vec<NodeUrl>, _> = self.peer_urls.iter().map(|url| url.parse()).collect();
        match urls {
            Ok(urls) => is_outside(self.source.as_deref(), urls.iter(), blocks),
            Err(_) => !blocks.is_empty(),
        }
    }
}

/// A cluster's members now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MembersView {
    /// Whether a quorum of the voters confirmed this list; if not, it is the commit document's.
    pub confirmed: bool,
    /// The members, by id; empty before the commit.
    pub members: Vec<MemberView>,
}

/// How a cluster ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndView {
    /// When, in milliseconds since 1970.
    pub at_ms: i64,
    /// By whom, and why.
    pub by: String,
    /// Until when an owner may take a retirement back, in milliseconds since 1970; none if nobody may.
    pub unretire_until_ms: Option<i64>,
}

/// A host that holds a boot token of a cluster which has its members already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AskingHost {
    /// The name that it would have.
    pub name: String,
    /// Its agent's key.
    pub agent: KeyId,
    /// Address that it last came from, as the service saw it.
    pub source: String,
    /// When it asked first, in milliseconds since 1970.
    pub first_ms: i64,
    /// When it asked last, in milliseconds since 1970.
    pub last_ms: i64,
    /// How often it asked.
    pub times: u64,
}

/// A point in a cluster's life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Moment {
    /// What happened: `open`, `full`, `preparing`, `committed`, `formed`, ….
    pub event: String,
    /// When, in milliseconds since 1970.
    pub at_ms: i64,
    /// Milliseconds since the last missing agent came (negative before); none until then.
    pub since_full_ms: Option<i64>,
}

/// One thing that a cluster waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Stable name of the reason, such as `seats_missing`.
    pub code: String,
    /// What is missing, in a sentence.
    pub missing: String,
    /// Who holds it: names of members, or `admin`, `service`.
    pub held_by: Vec<String>,
    /// The last error about it.
    pub last_error: Option<String>,
    /// When it is tried again, in milliseconds since 1970.
    pub next_retry_ms: Option<i64>,
    /// Command that would help.
    pub command: Option<String>,
}

impl std::fmt::Display for Explanation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.missing)?;
        if !self.held_by.is_empty() {
            write!(f, " (held by {})", self.held_by.join(", "))?;
        }
        if let Some(error) = &self.last_error {
            write!(f, "; last error: {error}")?;
        }
        if let Some(command) = &self.command {
            write!(f, "; run: {command}")?;
        }
        Ok(())
    }
}

/// `GET /v1/clusters/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterView {
    /// The same as in the list.
    #[serde(flatten)]
    pub summary: ClusterSummary,
    /// Hash of the newest statement; none for a draft.
    pub statement: Option<Digest>,
    /// Agents: seats in order, then standbys, longest waiting first.
    pub seats: Vec<SeatView>,
    /// The cluster's life so far.
    pub timeline: Vec<Moment>,
    /// What it waits for.
    pub explain: Vec<Explanation>,
    /// `h`, once committed.
    pub document: Option<Digest>,
    /// The Raft cluster id that a majority reported, or that the last recovery made; 16 hexadecimal
    /// digits.
    pub raft_cluster_id: Option<String>,
    /// Alarms, such as two documents.
    pub alarms: Vec<String>,
    /// The members now.
    #[serde(default)]
    pub present: MembersView,
    /// Hosts that hold a boot token and have no place.
    #[serde(default)]
    pub asking: Vec<AskingHost>,
    /// How it ended; none as long as it lives.
    #[serde(default)]
    pub ended: Option<EndView>,
}

/// `GET /v1/clusters/{id}/statements`: the whole chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StatementList {
    /// In order.
    pub statements: Vec<Jws>,
}

/// `GET /v1/clusters/{id}/explain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainResponse {
    /// Its state.
    pub state: ClusterState,
    /// Its epoch.
    pub epoch: u64,
    /// Agents, as in [`ClusterView::seats`].
    pub seats: Vec<SeatView>,
    /// What it waits for; empty if for nothing.
    pub explain: Vec<Explanation>,
    /// The members now.
    #[serde(default)]
    pub present: MembersView,
    /// Hosts that hold a boot token and have no place.
    #[serde(default)]
    pub asking: Vec<AskingHost>,
}

/// A committed list, with what is needed to verify it; to a member, with its certificates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommitDocument {
    /// The signed document.
    pub document: Jws,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
    /// The member's certificates; none for an admin.
    pub leaves: Option<Leaves>,
}

/// `POST /v1/clusters/{id}/abandon`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AbandonRequest {
    /// Why, for those who are turned away.
    pub reason: String,
}

/// `POST /v1/clusters/{id}/credentials`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CredentialsRequest {
    /// The client's key.
    pub csr: Csr,
}

/// A client certificate for `etcdctl` and applications.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CredentialsResponse {
    /// The certificate, a PEM chain, leaf first.
    pub certificate: String,
    /// CA of the members' server certificates on the client port, PEM.
    pub client_ca: String,
    /// When it ends, in milliseconds since 1970.
    pub expires_at_ms: i64,
    /// Client URLs of the cluster; empty before the commit.
    pub endpoints: Vec<NodeUrl>,
}
