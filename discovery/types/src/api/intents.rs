//! API bodies of changes of a running cluster, and of its members as the cluster lists them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::access::{Jwks, TokenResponse};
use super::clusters::{ClusterState, Explanation};
use crate::csr::Csr;
use crate::digest::{Digest, MemberId};
use crate::grant::GrantId;
use crate::intent::Intent;
use crate::jws::Jws;
use crate::name::Name;
use crate::url::NodeUrl;

/// Longest name of a member in a report, in bytes.
pub const MAX_MEMBER_NAME: usize = 255;
/// Largest number of members in a report.
pub const MAX_MEMBERS: usize = 64;

/// State of an intent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IntentState {
    /// The intent waits for an agent of the cluster.
    Open,
    /// The newcomer is a learner and catches up.
    Added,
    /// The newcomer is a voter, and the member that it replaces was removed.
    Promoted,
    /// The member was removed from the cluster.
    Removed,
    /// The member has its new peer URLs.
    Updated,
    /// An agent of the cluster, or the cluster itself, refused the change.
    Refused,
    /// The newcomer didn't catch up and was removed again.
    Stalled,
    /// No agent began the change before its expiry.
    Expired,
    /// An admin withdrew the intent before an agent began the change.
    Withdrawn,
}

impl IntentState {
    /// Every state, in the order of declaration.
    pub const ALL: [IntentState; 9] = [
        IntentState::Open,
        IntentState::Added,
        IntentState::Promoted,
        IntentState::Removed,
        IntentState::Updated,
        IntentState::Refused,
        IntentState::Stalled,
        IntentState::Expired,
        IntentState::Withdrawn,
    ];

    /// Returns the state's name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            IntentState::Open => "open",
            IntentState::Added => "added",
            IntentState::Promoted => "promoted",
            IntentState::Removed => "removed",
            IntentState::Updated => "updated",
            IntentState::Refused => "refused",
            IntentState::Stalled => "stalled",
            IntentState::Expired => "expired",
            IntentState::Withdrawn => "withdrawn",
        }
    }

    /// Whether an agent of the cluster still has to act on the intent.
    pub fn is_live(self) -> bool {
        matches!(self, IntentState::Open | IntentState::Added)
    }

    /// Whether a report may change this state to `next`. What an agent did in the cluster outranks
    /// the stored state. The agent can have begun the change just before the intent expired, was
    /// withdrawn, or was refused by another agent.
    pub fn may_become(self, next: IntentState) -> bool {
        use IntentState::{
            Added, Expired, Open, Promoted, Refused, Removed, Stalled, Updated, Withdrawn,
        };
        match self {
            Open => next != Open,
            Refused | Expired | Withdrawn => {
                matches!(next, Added | Promoted | Removed | Updated | Stalled)
            }
            Added => matches!(next, Promoted | Stalled),
            Promoted | Removed | Updated | Stalled => false,
        }
    }
}

impl std::fmt::Display for IntentState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// A member in the list of members with which a newcomer starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InitialMember {
    /// Name of the member; empty if it has not started yet.
    pub name: String,
    /// One peer URL of the member. A member with two peer URLs has two entries, as in etcd's
    /// `--initial-cluster`.
    pub peer_url: NodeUrl,
}

/// Outcome of an intent, as an agent of the cluster reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// The newcomer is a learner of the cluster.
    Added {
        /// Id of the member.
        member: MemberId,
        /// Members that the newcomer starts with, itself among them.
        initial_cluster: Vec<InitialMember>,
        /// Member that the cluster's agents let the newcomer replace by a replacement policy. None
        /// if the join ticket names the member.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        replaces: Option<MemberId>,
    },
    /// The newcomer is a voter, and the member that it replaces was removed.
    Promoted {
        /// Id of the member.
        member: MemberId,
    },
    /// The member was removed from the cluster.
    Removed {
        /// Id of the member.
        member: MemberId,
    },
    /// The member has its new peer URLs.
    Updated {
        /// Id of the member.
        member: MemberId,
    },
    /// The change was refused.
    Refused {
        /// Reason, and what to do, in at most 300 characters.
        reason: String,
    },
    /// The newcomer didn't catch up and was removed again.
    Stalled {
        /// Id of the member.
        member: MemberId,
        /// Reason, and what to do, in at most 300 characters.
        reason: String,
    },
}

impl Outcome {
    /// Returns the state of an intent that had this outcome.
    pub fn state(&self) -> IntentState {
        match self {
            Outcome::Added { .. } => IntentState::Added,
            Outcome::Promoted { .. } => IntentState::Promoted,
            Outcome::Removed { .. } => IntentState::Removed,
            Outcome::Updated { .. } => IntentState::Updated,
            Outcome::Refused { .. } => IntentState::Refused,
            Outcome::Stalled { .. } => IntentState::Stalled,
        }
    }

    /// Returns the member that the outcome is about; `None` for a refusal.
    pub fn member(&self) -> Option<MemberId> {
        match self {
            Outcome::Added { member, .. }
            | Outcome::Promoted { member }
            | Outcome::Removed { member }
            | Outcome::Updated { member }
            | Outcome::Stalled { member, .. } => Some(*member),
            Outcome::Refused { .. } => None,
        }
    }
}

/// Body of `POST /v1/clusters/{id}/intents/{operation}/outcome`. With it, an agent reports what it
/// did in the cluster, or why it refused. A newcomer's agent can't report its own addition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OutcomeRequest {
    /// Outcome of the intent.
    pub outcome: Outcome,
    /// Raft term of the agent's node, at or after the change.
    pub raft_term: u64,
    /// Raft index of the agent's node, at or after the change.
    pub raft_index: u64,
}

/// An intent and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IntentView {
    /// The intent as it is handed to agents.
    pub intent: Intent,
    /// State of the intent.
    pub state: IntentState,
    /// Value of the cluster's change counter at this intent's last change.
    pub rev: u64,
    /// Subject of the change as a text for people: a newcomer's name, or a member's id.
    pub subject: String,
    /// Name of the admin who signed the change.
    pub by: String,
    /// Time at which the service got the intent, in milliseconds since 1970.
    pub made_at_ms: i64,
    /// Last outcome that an agent reported.
    pub outcome: Option<Outcome>,
    /// Name of the member whose agent reported the outcome.
    pub reported_by: Option<String>,
    /// Reasons why the intent waits; empty once it has ended.
    pub explain: Vec<Explanation>,
    /// Member that the change removes or moves; none if a newcomer replaces no member.
    #[serde(default)]
    pub about: Option<MemberId>,
    /// Name of the member in `about`, if the cluster has reported one.
    #[serde(default)]
    pub about_name: Option<String>,
    /// Reason why the agent on the leader's host waits.
    #[serde(default)]
    pub waits: Option<WaitView>,
    /// Replacement policy by which the newcomer waits for a place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<GrantId>,
}

/// Reason why an intent waits, as the agent on the leader's host reported it last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitView {
    /// Reason in one sentence, as the agent wrote it.
    pub reason: String,
    /// Name of the member whose agent reported the reason.
    pub by: String,
    /// Time of the report, in milliseconds since 1970.
    pub at_ms: i64,
}

/// Body of `POST /v1/clusters/{id}/intents/{operation}/wait`. With it, the agent on the leader's
/// host reports why it waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WaitRequest {
    /// Reason in one sentence. The service keeps 300 characters of it.
    pub reason: String,
}

/// Answer of `GET /v1/clusters/{id}/intents[?after=&all=]`. With `after`, the service delays the
/// answer until `rev` differs from `after`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IntentList {
    /// Value of the cluster's change counter. A change of any intent increments it.
    pub rev: u64,
    /// Time of the service, in milliseconds since 1970.
    pub now_ms: i64,
    /// Hash of the cluster's newest statement. An agent that doesn't know this statement must first
    /// read the statement chain.
    pub statement: Digest,
    /// Newest service statement that the service holds: its URLs and TLS keys, signed by an owner.
    #[serde(default)]
    pub service: Option<Jws>,
    /// Intents on which an agent must act, oldest first. With `all`, the list also holds the other
    /// intents of the last day.
    pub intents: Vec<IntentView>,
    /// Replacement policies that the service holds, as far as they have not expired.
    #[serde(default)]
    pub policies: Vec<PolicyView>,
    /// Zones of the present members, as their agents said. Given only if the members are spread
    /// over zones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zones: Option<BTreeMap<MemberId, Name>>,
}

/// A replacement policy, as the service hands it to the cluster's agents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyView {
    /// Grant that an operator signed.
    pub grant: Jws,
    /// Whether an admin has revoked the policy. The agents then end it in the cluster's own store.
    pub is_revoked: bool,
}

/// Program that a host runs as its node. `muster-node` and etcd can't be members of one cluster,
/// because each refuses the other's peer protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NodeProgram {
    /// Muster's own node program, `muster-node`.
    MusterNode,
    /// The stock etcd server.
    Etcd,
}

impl std::fmt::Display for NodeProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            NodeProgram::MusterNode => "muster-node",
            NodeProgram::Etcd => "etcd",
        })
    }
}

/// Answer of `POST /v1/join`: the newcomer's intent, and what it needs to verify the cluster.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct JoinResponse {
    /// First access token of the newcomer.
    pub token: TokenResponse,
    /// Name of the service, the audience of later assertions.
    pub issuer: String,
    /// Signing keys of the service.
    pub jwks: Jwks,
    /// Time of the service, in milliseconds since 1970.
    pub now_ms: i64,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
    /// Commit document of the cluster, which proves the cluster's identity.
    pub document: Jws,
    /// Intent that adds the newcomer.
    pub intent: IntentView,
}

/// Body of `POST /v1/clusters/{id}/recoveries`. The recovery statements lead from the founded Raft
/// cluster to that of the agent's node. Only the agent that the last statement names may send them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RecoveriesRequest {
    /// All recovery statements, in order.
    pub recoveries: Vec<Jws>,
}

/// Answer of `POST /v1/clusters/{id}/recoveries`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RecoveriesResponse {
    /// Number of the cluster's recoveries that the service follows.
    pub followed: u32,
    /// Raft cluster id after the last followed recovery, 16 hexadecimal digits.
    pub raft_cluster_id: String,
}

/// Body of `POST /v1/clusters/{id}/leaves`: a member gets new certificates, or a newcomer its first
/// ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeavesRequest {
    /// Signing request for the node key in the member's record.
    pub csr: Csr,
}

/// A member, as its cluster lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ListedMember {
    /// Id of the member.
    pub id: MemberId,
    /// Name of the member; empty if it has not started yet.
    pub name: String,
    /// URLs at which peers reach the member. They are plain text, because an etcd cluster accepts
    /// any text.
    pub peer_urls: Vec<String>,
    /// URLs at which clients reach the member.
    pub client_urls: Vec<String>,
    /// Whether the member is a learner, without a vote.
    pub is_learner: bool,
}

/// Members of a cluster as a node lists them, from a linearizable MemberList.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Membership {
    /// Raft index of the last change of members. Only `muster-node` reports it; none with stock
    /// etcd.
    pub configuration: Option<u64>,
    /// Members, ordered by id.
    pub members: Vec<ListedMember>,
}

/// Members of a cluster, as discovery knows them from reports. Use it only as a hint to find the
/// cluster. Only the cluster itself knows its members for certain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DirectoryView {
    /// Member list that a quorum of the voters reported. Until a quorum has reported the same list,
    /// this is the list that most members report. On a tie, it is the newest of these lists.
    pub membership: Membership,
    /// Whether a quorum reported these members. The quorum counts the voters of the previously
    /// confirmed list; at first, that is the list in the commit document.
    pub confirmed: bool,
    /// Raft term of the log position at which the members were reported.
    pub raft_term: u64,
    /// Raft index of the log position at which the members were reported.
    pub raft_index: u64,
    /// Leader that the latest of these reports names, if any.
    pub leader: Option<MemberId>,
    /// Number of members whose latest report has this list.
    pub reporters: u32,
    /// Time of the latest report of this list, in milliseconds since 1970.
    pub at_ms: i64,
}

/// Answer of `GET /v1/clusters/{id}/directory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DirectoryResponse {
    /// State of the cluster in discovery.
    pub state: ClusterState,
    /// Members as the agents report them; none before the first report.
    pub view: Option<DirectoryView>,
}

/// Answer of `GET /v1/clusters/{id}/export`: the data with which `ca issue` works without the
/// service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterExport {
    /// Version of the format, always 1.
    pub version: u32,
    /// Id of the cluster.
    pub cluster: Uuid,
    /// Domain of the names in the cluster's certificates.
    pub trust_domain: String,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
    /// Commit document of the cluster.
    pub document: Jws,
    /// Key of the peers' CA, encrypted under the service's key directory, base64.
    pub peer_ca_key: String,
    /// Key of the clients' CA, encrypted under the service's key directory, base64.
    pub client_ca_key: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_may_change_each_state_to_the_listed_states_only() {
        let mut table = String::new();
        for from in IntentState::ALL {
            let to = IntentState::ALL.into_iter().filter(|to| from.may_become(*to));
            let to: Vec<_> = to.map(|to| format!(" {to}")).collect();
            table.push_str(&format!("{from} to{}\n", to.join("")));
        }
        insta::assert_snapshot!(table, @r"
        open to added promoted removed updated refused stalled expired withdrawn
        added to promoted stalled
        promoted to
        removed to
        updated to
        refused to added promoted removed updated stalled
        stalled to
        expired to added promoted removed updated stalled
        withdrawn to added promoted removed updated stalled
        ");
    }
}
