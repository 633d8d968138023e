//! API bodies of clusters, as admins see them.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::formation::{MemberCas, ProbeResult};
use crate::csr::Csr;
use crate::digest::{Digest, Incarnation, MemberId};
use crate::features::{AgentBuild, MemberBuild};
use crate::grant::GrantId;
use crate::jws::Jws;
use crate::key::{KeyId, PublicKey};
use crate::leaves::Leaves;
use crate::member_address::SignedMemberAddress;
use crate::name::Name;
use crate::url::NodeUrl;

/// Shortest interval between an agent's reports about its running member. Jitter at most doubles
/// the interval.
pub const MIN_REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Time without a report after which a member counts as silent. By then several reports are
/// missing.
pub const SILENT_AFTER: Duration = Duration::from_secs(300);

/// Maximum number of items in one page of a list. A query without a limit gets pages of this size.
pub const MAX_PAGE: u16 = 1_000;

/// State of a cluster in the discovery service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ClusterState {
    /// The cluster has CAs, and waits for its statement.
    Draft,
    /// Agents take seats in the cluster.
    Open,
    /// The list of members is frozen, and the members' signatures of it (acks) come in.
    Preparing,
    /// The list of members is final.
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
    /// All states, in the order of a cluster's life.
    pub const ALL: [ClusterState; 8] = [
        ClusterState::Draft,
        ClusterState::Open,
        ClusterState::Preparing,
        ClusterState::Committed,
        ClusterState::Formed,
        ClusterState::Abandoned,
        ClusterState::Expired,
        ClusterState::Retired,
    ];

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

/// Body of `POST /v1/drafts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DraftRequest {
    /// Name of the cluster; no other live cluster may have it.
    pub name: Name,
    /// Number of members that form the cluster.
    pub size: u8,
}

/// Draft of a cluster, which the first statement completes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DraftResponse {
    /// Id of the cluster.
    pub cluster: Uuid,
    /// CA of the members' peer certificates, PEM.
    pub peer_ca: String,
    /// CA of client certificates, PEM.
    pub client_ca: String,
    /// Time at which the draft is deleted unless a statement comes, in milliseconds since 1970.
    pub expires_at_ms: i64,
    /// Longest deadline that this service accepts, in seconds.
    pub max_deadline_seconds: u64,
}

/// Body of `POST /v1/clusters/{id}/statements`: the statement chain that a member's agent knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StatementsRequest {
    /// All statements of the cluster that the agent knows, in order.
    pub statements: Vec<Jws>,
}

/// Body of `POST /v1/clusters/{id}/addresses`: the new addresses of the agent's member, if the
/// member has moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddressesRequest {
    /// The member's newest statement of its addresses; `None` if it hasn't moved.
    pub own: Option<SignedMemberAddress>,
}

/// Answer of `POST /v1/clusters/{id}/addresses`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AddressesResponse {
    /// The newest address statement of each present member that has moved.
    pub addresses: Vec<SignedMemberAddress>,
}

/// Answer of `GET /v1/clusters/{id}/cas`: progress of the members in the replacement of the
/// cluster's CAs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RotationView {
    /// Members of the list that a quorum of the voters confirmed last.
    pub members: Vec<MemberRotation>,
}

/// Progress of a present member in the replacement of its cluster's CAs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberRotation {
    /// Id of the member in the Raft cluster.
    pub id: MemberId,
    /// The member's name, or its id if it has none.
    pub name: String,
    /// CAs of the member, as its agent reported last; none if it has reported none.
    pub cas: Option<MemberCas>,
    /// Whether the member's agent has not reported for a while.
    pub is_silent: bool,
}

/// Summary of one cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterSummary {
    /// Id of the cluster.
    pub cluster: Uuid,
    /// Name of the cluster.
    pub name: Name,
    /// Number of members that form the cluster.
    pub size: u8,
    /// State of the cluster.
    pub state: ClusterState,
    /// Epoch of the present proposal (the frozen list of members), or of the next one.
    pub epoch: u64,
    /// Number of seats that are taken.
    pub seated: u8,
    /// Number of agents that wait for a seat.
    pub standbys: u32,
    /// Time at which the cluster was created, in milliseconds since 1970.
    pub created_at_ms: i64,
    /// Time at which the cluster expires unless it commits, in milliseconds since 1970; none after
    /// the commit.
    pub deadline_at_ms: Option<i64>,
    /// Number of members that the cluster has now; none before the commit.
    #[serde(default)]
    pub members: Option<u32>,
    /// Number of members whose agents reported within [`SILENT_AFTER`]; none before the commit.
    #[serde(default)]
    pub heard: Option<u32>,
}

/// Query of `GET /v1/clusters`: which clusters to list, and which page of the list. A cluster is
/// listed if it fits every filter that is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ClusterQuery {
    /// Name of the clusters to list.
    pub name: Option<Name>,
    /// States of the clusters to list, separated by commas.
    #[param(value_type = Option<String>)]
    pub state: Option<ClusterStates>,
    /// Lists the clusters that were created at this time or later, in milliseconds since 1970.
    pub created_from_ms: Option<u64>,
    /// Lists the clusters that were created before this time, in milliseconds since 1970.
    pub created_before_ms: Option<u64>,
    /// Position after which the page begins: [`ClusterList::next`] of the page before.
    pub after: Option<String>,
    /// Maximum number of clusters in the answer, at most [`MAX_PAGE`].
    pub limit: Option<u16>,
}

/// A set of cluster states. In a query, their names are separated by commas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClusterStates(Vec<ClusterState>);

/// Error for a text that isn't a list of cluster states; holds the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a state of a cluster: name one or more of draft, open, preparing, committed, \
         formed, abandoned, expired, retired, separated by commas"
)]
pub struct BadClusterState(String);

impl ClusterStates {
    /// Makes a set of these states. Repeated ones count once.
    pub fn new(states: impl IntoIterator<Item = ClusterState>) -> Self {
        let mut set = Vec::new();
        for state in states {
            if !set.contains(&state) {
                set.push(state);
            }
        }
        Self(set)
    }

    /// Returns the states, each once.
    pub fn as_slice(&self) -> &[ClusterState] {
        &self.0
    }
}

impl TryFrom<String> for ClusterStates {
    type Error = BadClusterState;

    fn try_from(text: String) -> Result<Self, BadClusterState> {
        let parse = |name: &str| {
            let state = ClusterState::ALL.into_iter().find(|state| state.as_str() == name);
            state.ok_or_else(|| BadClusterState(name.to_owned()))
        };
        Ok(Self::new(text.split(',').map(parse).collect::<Result<Vec<_>, _>>()?))
    }
}

impl From<ClusterStates> for String {
    fn from(states: ClusterStates) -> Self {
        states.0.iter().map(|state| state.as_str()).collect::<Vec<_>>().join(",")
    }
}

/// Answer of `GET /v1/clusters`: one page of the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterList {
    /// Clusters that fit the query, newest first.
    pub clusters: Vec<ClusterSummary>,
    /// Position at which the next page begins, for `after`. None on the last page.
    #[serde(default)]
    pub next: Option<String>,
}

/// An agent that has a seat in a cluster, or waits for one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SeatView {
    /// Number of the seat, from 1; none for a standby.
    pub seat: Option<u8>,
    /// Name of the member.
    pub name: Name,
    /// Id of the agent's key.
    pub agent: KeyId,
    /// Incarnation of the member.
    pub incarnation: Incarnation,
    /// Peer URLs of the member.
    pub peer_urls: Vec<NodeUrl>,
    /// Client URLs of the member.
    pub client_urls: Vec<NodeUrl>,
    /// Grant that the agent redeemed.
    pub grant: GrantId,
    /// Address from which the agent came last, as the service saw it.
    pub source: Option<String>,
    /// Address blocks that the agent's token is bound to; empty without a binding.
    #[schema(value_type = Vec<String>)]
    pub bound_to: Vec<IpNet>,
    /// Time at which the agent's lease lapses, in milliseconds since 1970; none after the commit.
    pub lease_until_ms: Option<i64>,
    /// Whether an issuer has approved the agent. None if the cluster needs no approvals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_approved: Option<bool>,
    /// Public key of the agent. None if the service is older than this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_key: Option<PublicKey>,
    /// Whether the agent has signed the present proposal (the frozen list of members).
    pub acked: bool,
    /// The agent's probes in this epoch: for each other seat, whether the agent reached that seat.
    pub probes: Vec<ProbeResult>,
    /// Reason of the agent's last refusal.
    pub last_nack: Option<String>,
}

impl SeatView {
    /// Whether the agent's source address or an advertised address is outside of the blocks that
    /// its token is bound to. An unknown source address counts as outside.
    pub fn is_outside_binding(&self) -> bool {
        self.is_outside(&self.bound_to)
    }

    /// Whether the agent's source address is unknown or outside `blocks`, or an advertised address
    /// is outside them. Empty `blocks` restrict nothing.
    pub fn is_outside(&self, blocks: &[IpNet]) -> bool {
        has_address_outside(self.source.as_deref(), self.peer_urls.iter(), blocks)
    }
}

fn has_address_outside<'a>(
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

/// A member of a running cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberView {
    /// Id of the member in its Raft cluster.
    pub id: MemberId,
    /// Name of the member; empty if it has not started yet.
    pub name: String,
    /// Whether the member is a learner, without a vote.
    pub is_learner: bool,
    /// Whether the members' latest reports name this member as the leader.
    pub is_leader: bool,
    /// URLs at which peers reach the member.
    pub peer_urls: Vec<String>,
    /// URLs at which clients reach the member.
    pub client_urls: Vec<String>,
    /// Time of the last report by the member's agent, in milliseconds since 1970; none without a
    /// report.
    pub last_heard_ms: Option<i64>,
    /// Whether the member's agent has not reported for [`SILENT_AFTER`], although it could have.
    pub is_silent: bool,
    /// Whether the member's agent has not reported for [`SILENT_AFTER`], but could not have
    /// reported for all of that time. The service or its database was down meanwhile, or the
    /// database's clock was set.
    #[serde(default)]
    pub is_awaited: bool,
    /// Whether the member's agent has reported that it no longer runs the node. Such a member is
    /// neither silent nor awaited.
    #[serde(default)]
    pub is_released: bool,
    /// How the members that this member's agent reports differ from the confirmed members.
    pub disagreement: Option<String>,
    /// Reason why the member's node has no leader, as its agent reported last.
    pub last_error: Option<String>,
    /// Address from which the member's agent redeemed its token; none for a member without a token.
    pub source: Option<String>,
    /// Address blocks that the member's token was bound to; empty without a binding.
    #[schema(value_type = Vec<String>)]
    pub bound_to: Vec<IpNet>,
    /// Zone of the member's host, as its agent said when it redeemed its token.
    #[serde(default)]
    pub zone: Option<Name>,
    /// Version and features of the member's agent, as it reported last; none without a report.
    #[serde(default)]
    pub agent: Option<AgentBuild>,
}

impl MembersView {
    /// Returns the members whose agents have reported, with the agents' builds.
    pub fn reported_builds(&self) -> Vec<MemberBuild<'_>> {
        let reported = self.members.iter().filter(|member| member.agent.is_some());
        reported.map(|member| (member.display_name(), member.agent.as_ref())).collect()
    }
}

impl MemberView {
    /// Whether the member's agent has reported lately and its node has a leader.
    pub fn is_healthy(&self) -> bool {
        let is_heard = !self.is_silent && !self.is_awaited && !self.is_released;
        is_heard && self.last_error.is_none()
    }

    /// Returns the member's role in one word.
    pub fn role_name(&self) -> &'static str {
        match (self.is_learner, self.is_leader) {
            (true, _) => "learner",
            (false, true) => "leader",
            (false, false) => "voter",
        }
    }

    /// Describes what is known of the member's health in a few words.
    pub fn health_name(&self) -> &'static str {
        match (self.last_heard_ms, self.is_silent) {
            _ if self.is_awaited => "not heard yet",
            (None, true) => "never heard",
            (None, false) => "not heard yet",
            (Some(_), true) => "silent",
            (Some(_), false) if self.is_released => "released",
            (Some(_), false) if self.last_error.is_some() => "no leader",
            (Some(_), false) if self.disagreement.is_some() => "disagrees",
            (Some(_), false) => "well",
        }
    }

    /// Returns the member's name, or its id while it has none.
    pub fn display_name(&self) -> String {
        match self.name.is_empty() {
            true => self.id.to_string(),
            false => self.name.clone(),
        }
    }

    /// Whether the member's source address is unknown or outside `blocks`, or a peer URL is invalid
    /// or outside them. Empty `blocks` restrict nothing.
    pub fn is_outside(&self, blocks: &[IpNet]) -> bool {
        let urls: Result<Vec<NodeUrl>, _> = self.peer_urls.iter().map(|url| url.parse()).collect();
        match urls {
            Ok(urls) => has_address_outside(self.source.as_deref(), urls.iter(), blocks),
            Err(_) => !blocks.is_empty(),
        }
    }
}

/// Present members of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MembersView {
    /// Whether a quorum of the voters confirmed this list of members. If not, the list is that of
    /// the commit document.
    pub confirmed: bool,
    /// Members, ordered by id; empty before the commit.
    pub members: Vec<MemberView>,
    /// Members that have proved lately that they joined, and that the service's database doesn't
    /// know, because it was restored from an older backup.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<UnknownMember>,
}

/// A member that the service's database doesn't know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnknownMember {
    /// Id of the member in its Raft cluster, from its certificate.
    pub id: MemberId,
    /// Name in the record with which the member's host joined.
    pub name: String,
    /// Time of the member's last proof, in milliseconds since 1970.
    pub last_heard_ms: i64,
}

/// End of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndView {
    /// Time of the end, in milliseconds since 1970.
    pub at_ms: i64,
    /// Text that names the admin who ended the cluster, and the reason.
    pub by: String,
    /// Time until which an owner may undo the retirement, in milliseconds since 1970; none if it
    /// can't be undone.
    pub unretire_until_ms: Option<i64>,
    /// Time until which an owner may reopen the expired cluster, in milliseconds since 1970; none
    /// if it can't be reopened.
    #[serde(default)]
    pub reopen_until_ms: Option<i64>,
}

/// A host with a boot token of a cluster that has all its members already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AskingHost {
    /// Name that the host would have as a member.
    pub name: String,
    /// Id of the agent's key.
    pub agent: KeyId,
    /// Address from which the host came last, as the service saw it.
    pub source: String,
    /// Time of the host's first request, in milliseconds since 1970.
    pub first_ms: i64,
    /// Time of the host's last request, in milliseconds since 1970.
    pub last_ms: i64,
    /// Number of the host's requests.
    pub times: u64,
}

/// An event in a cluster's life, with its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Moment {
    /// Name of the event: `open`, `full`, `preparing`, `committed`, `formed`, ….
    pub event: String,
    /// Time of the event, in milliseconds since 1970.
    pub at_ms: i64,
    /// Milliseconds between the event and the arrival of the last missing agent. Negative for an
    /// event before that arrival; none until that agent has arrived.
    pub since_full_ms: Option<i64>,
}

/// One reason why a cluster waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Stable name of the reason, such as `seats_free`.
    pub code: String,
    /// Sentence that says what is missing.
    pub missing: String,
    /// Parties for which the cluster waits: names of members, or `admin`, `service`.
    pub held_by: Vec<String>,
    /// Last error that belongs to this reason.
    pub last_error: Option<String>,
    /// Time of the next try, in milliseconds since 1970.
    pub next_retry_ms: Option<i64>,
    /// Command that helps to end the wait.
    pub command: Option<String>,
}

impl std::fmt::Display for Explanation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.missing)?;
        if !self.held_by.is_empty() {
            write!(f, " (held by {})", self.held_by.join(", "))?;
        }
        // `missing` may already contain the error, which is then not repeated.
        if let Some(error) = self.last_error.as_ref().filter(|error| !self.missing.contains(*error))
        {
            write!(f, "; last error: {error}")?;
        }
        if let Some(command) = &self.command {
            write!(f, "; run: {command}")?;
        }
        Ok(())
    }
}

/// Answer of `GET /v1/clusters/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterView {
    /// Summary of the cluster, as in a list of clusters.
    #[serde(flatten)]
    pub summary: ClusterSummary,
    /// Hash of the newest statement; none for a draft.
    pub statement: Option<Digest>,
    /// Agents: those with seats in order, then the standbys, longest waiting first.
    pub seats: Vec<SeatView>,
    /// Events in the cluster's life so far.
    pub timeline: Vec<Moment>,
    /// Reasons why the cluster waits.
    pub explain: Vec<Explanation>,
    /// Hash `h` of the committed proposal; none before the commit.
    pub document: Option<Digest>,
    /// Raft cluster id that a majority reported, or that the last recovery made; 16 hexadecimal
    /// digits.
    pub raft_cluster_id: Option<String>,
    /// Alarms, such as a second commit document.
    pub alarms: Vec<String>,
    /// Members of the cluster at present.
    #[serde(default)]
    pub present: MembersView,
    /// Hosts that hold a boot token and get no seat.
    #[serde(default)]
    pub asking: Vec<AskingHost>,
    /// End of the cluster, if it has ended.
    #[serde(default)]
    pub ended: Option<EndView>,
}

/// Answer of `GET /v1/clusters/{id}/statements`: the whole chain. Also the answer of
/// `PUT /v1/clusters/{id}/service`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StatementList {
    /// Signed statements, in order.
    pub statements: Vec<Jws>,
    /// Newest service statement that the service holds: its URLs and TLS keys, signed by an owner.
    #[serde(default)]
    pub service: Option<Jws>,
}

/// Answer of `GET /v1/clusters/{id}/explain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainResponse {
    /// State of the cluster.
    pub state: ClusterState,
    /// Epoch of the present proposal (the frozen list of members), or of the next one.
    pub epoch: u64,
    /// Seats with their agents in order, then the standbys, longest waiting first: the same list as
    /// [`ClusterView::seats`].
    pub seats: Vec<SeatView>,
    /// Reasons why the cluster waits; empty if it doesn't.
    pub explain: Vec<Explanation>,
    /// Members of the cluster at present.
    #[serde(default)]
    pub present: MembersView,
    /// Hosts that hold a boot token and get no seat.
    #[serde(default)]
    pub asking: Vec<AskingHost>,
}

/// A committed list of members, with everything that is needed to verify it. In the answer to a
/// member, it also holds the member's certificates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommitDocument {
    /// Commit document, signed by the service.
    pub document: Jws,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
    /// Certificates of the asking member; none for an admin.
    pub leaves: Option<Leaves>,
}

/// Body of `POST /v1/clusters/{id}/abandon`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AbandonRequest {
    /// Reason, which refused agents receive.
    pub reason: String,
}

/// Body of `POST /v1/clusters/{id}/credentials`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CredentialsRequest {
    /// Signing request for the client's key.
    pub csr: Csr,
}

/// A client certificate for `etcdctl` and applications.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CredentialsResponse {
    /// The certificate, a PEM chain, leaf first.
    pub certificate: String,
    /// CA of the members' server certificates on the client port, PEM.
    pub client_ca: String,
    /// End of the certificate's validity, in milliseconds since 1970.
    pub expires_at_ms: i64,
    /// Client URLs of the cluster; empty before the commit.
    pub endpoints: Vec<NodeUrl>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explanation_shows_an_error_that_it_was_made_of_once() {
        let mut explanation = Explanation {
            code: "replacement_waits".into(),
            missing: "the agent of db-3 waits: no answer from db-2".into(),
            held_by: vec!["db-3".into()],
            last_error: Some("no answer from db-2".into()),
            next_retry_ms: None,
            command: None,
        };
        let text = "the agent of db-3 waits: no answer from db-2 (held by db-3)";
        assert_eq!(explanation.to_string(), text);
        explanation.last_error = Some("connection refused".into());
        assert_eq!(explanation.to_string(), format!("{text}; last error: connection refused"));
    }
}
