//! API bodies of changes of a running cluster, and of its members as the cluster lists them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::access::{Jwks, TokenResponse};
use super::clusters::{ClusterState, Explanation};
use crate::csr::Csr;
use crate::digest::{Digest, MemberId};
use crate::intent::Intent;
use crate::jws::Jws;
use crate::url::NodeUrl;

/// Longest name of a member that a report may hold.
pub const MAX_MEMBER_NAME: usize = 255;
/// Largest number of members that a report may hold.
pub const MAX_MEMBERS: usize = 64;

/// How far an intent has come.
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
    /// No agent began the change in time.
    Expired,
    /// An admin took the intent back before it was begun.
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

    /// Whether an agent of the cluster still has something to do.
    pub fn is_live(self) -> bool {
        matches!(self, IntentState::Open | IntentState::Added)
    }

    /// Whether a report may change this state to `next`. What an agent did in the cluster outranks
    /// what was stored here. The change may have begun just before the intent expired, was
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

/// A member of the list that a newcomer starts with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InitialMember {
    /// Its name; empty for one that has not started yet.
    pub name: String,
    /// One of its peer URLs: a member with two stands there twice, as in etcd's flag.
    pub peer_url: NodeUrl,
}

/// What became of an intent, as an agent of the cluster says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// The newcomer is a learner.
    Added {
        /// Its id.
        member: MemberId,
        /// What it starts with: the members, itself among them.
        initial_cluster: Vec<InitialMember>,
    },
    /// The newcomer is a voter, and whom it replaces is gone.
    Promoted {
        /// Its id.
        member: MemberId,
    },
    /// The member is gone.
    Removed {
        /// Its id.
        member: MemberId,
    },
    /// The member has its other peer URLs.
    Updated {
        /// Its id.
        member: MemberId,
    },
    /// It won't be done.
    Refused {
        /// Why, and what to do, in at most 300 characters.
        reason: String,
    },
    /// The newcomer was taken out again.
    Stalled {
        /// Its id.
        member: MemberId,
        /// Why, and what to do, in at most 300 characters.
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

/// `POST /v1/clusters/{id}/intents/{operation}/outcome`: what an agent of the cluster did, or why
/// it didn't. Not about the agent's own joining.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OutcomeRequest {
    /// What became of it.
    pub outcome: Outcome,
    /// Raft term of the agent's node, at or after the change.
    pub raft_term: u64,
    /// Raft index of the agent's node, at or after the change.
    pub raft_index: u64,
}

/// An intent and how far it has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IntentView {
    /// The change.
    pub intent: Intent,
    /// How far it has come.
    pub state: IntentState,
    /// Moves when anything here has changed; counts for all intents of the cluster.
    pub rev: u64,
    /// Whom it is about, for people: a newcomer's name, or a member's id.
    pub subject: String,
    /// Name of the admin who signed it.
    pub by: String,
    /// When the service got it, in milliseconds since 1970.
    pub made_at_ms: i64,
    /// What an agent said last.
    pub outcome: Option<Outcome>,
    /// Name of the member whose agent said it.
    pub reported_by: Option<String>,
    /// What it waits for; empty once it is over.
    pub explain: Vec<Explanation>,
    /// The member that leaves or moves by it; none where a newcomer replaces nobody.
    #[serde(default)]
    pub about: Option<MemberId>,
    /// That member's name, as far as the cluster has told it.
    #[serde(default)]
    pub about_name: Option<String>,
    /// Why the agent beside the leader waits.
    #[serde(default)]
    pub waits: Option<WaitView>,
}

/// Why an intent waits, as the agent beside the leader said last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitView {
    /// The agent's sentence.
    pub reason: String,
    /// Name of the member whose agent said it.
    pub by: String,
    /// When, in milliseconds since 1970.
    pub at_ms: i64,
}

/// `POST /v1/clusters/{id}/intents/{operation}/wait`: why the agent beside the leader waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WaitRequest {
    /// One sentence, of which 300 characters are kept.
    pub reason: String,
}

/// `GET /v1/clusters/{id}/intents[?after=&all=]`: with `after` the answer waits until `rev` is
/// another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IntentList {
    /// Moves when an intent has changed.
    pub rev: u64,
    /// The service's time, in milliseconds since 1970.
    pub now_ms: i64,
    /// Hash of the cluster's newest statement: who doesn't know it reads the chain first.
    pub statement: Digest,
    /// Those that somebody has to act on; with `all` the others of the last day too. Oldest first.
    pub intents: Vec<IntentView>,
}

/// Which program a host runs as its node. The two can't be members of one cluster: each refuses the
/// other's peer protocol.
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

/// `POST /v1/join`: the newcomer's part begins. What it needs to check the cluster, and its intent.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct JoinResponse {
    /// The first access token.
    pub token: TokenResponse,
    /// The service's name as audience of later assertions.
    pub issuer: String,
    /// The service's signing keys.
    pub jwks: Jwks,
    /// The service's time, in milliseconds since 1970.
    pub now_ms: i64,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
    /// The cluster's commit document: its identity.
    pub document: Jws,
    /// The intent.
    pub intent: IntentView,
}

/// `POST /v1/clusters/{id}/recoveries`: the recovery statements that lead from the founded Raft
/// cluster to the one that the agent's node is in. From the agent that the last one names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RecoveriesRequest {
    /// All of them, in order.
    pub recoveries: Vec<Jws>,
}

/// Answer to recovery statements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RecoveriesResponse {
    /// How many recoveries of the cluster the service follows.
    pub followed: u32,
    /// Raft cluster that they end with, 16 hexadecimal digits.
    pub raft_cluster_id: String,
}

/// `POST /v1/clusters/{id}/leaves`: a member's certificates anew, or a newcomer's first ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeavesRequest {
    /// Over the node's key that the member's record has.
    pub csr: Csr,
}

/// A member, as its cluster lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ListedMember {
    /// Its id.
    pub id: MemberId,
    /// Its name; empty for one that has not started yet.
    pub name: String,
    /// Where its peers reach it, as the cluster has it: text, since a cluster takes what it is told.
    pub peer_urls: Vec<String>,
    /// Where clients reach it.
    pub client_urls: Vec<String>,
    /// Whether it has no vote.
    pub is_learner: bool,
}

/// What a node says that its cluster is: a linearizable MemberList.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Membership {
    /// Raft index of the last change of members, which `muster-node` says; none with stock etcd.
    pub configuration: Option<u64>,
    /// The members, by id.
    pub members: Vec<ListedMember>,
}

/// What discovery believes that a cluster is. A hint for whoever looks for the cluster, never an
/// authority: that is the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DirectoryView {
    /// What a quorum of its voters said; until then what the first of them said.
    pub membership: Membership,
    /// Whether a quorum did, of the voters in the list that was confirmed before (at first the
    /// commit document's).
    pub confirmed: bool,
    /// Raft term of it.
    pub raft_term: u64,
    /// Raft index of it.
    pub raft_index: u64,
    /// The leader that was named with it last, if any.
    pub leader: Option<MemberId>,
    /// How many members say the same now.
    pub reporters: u32,
    /// When somebody last said so, in milliseconds since 1970.
    pub at_ms: i64,
}

/// `GET /v1/clusters/{id}/directory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DirectoryResponse {
    /// The cluster's state in discovery.
    pub state: ClusterState,
    /// What its members say; none before the first word.
    pub view: Option<DirectoryView>,
}

/// `GET /v1/clusters/{id}/export`: what `ca issue` needs where there is no service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterExport {
    /// 1.
    pub version: u32,
    /// The cluster.
    pub cluster: Uuid,
    /// Domain of the names in its certificates.
    pub trust_domain: String,
    /// The statement chain, in order.
    pub statements: Vec<Jws>,
    /// The commit document.
    pub document: Jws,
    /// Key of the peers' CA, encrypted under the service's key directory, base64.
    pub peer_ca_key: String,
    /// Key of the clients' CA, likewise.
    pub client_ca_key: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_table_of_what_a_report_may_bring() {
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
