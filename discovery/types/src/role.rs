//! Who may do what: the one place that says so.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What an admin may be.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Creates and retires clusters, names admins; may do everything else too.
    Owner,
    /// Mints boot tokens.
    Issuer,
    /// Abandons what forms, mints join tickets, orders changes, fetches client certificates.
    Operator,
    /// Reads.
    Auditor,
}

impl Role {
    /// Every role.
    pub const ALL: [Role; 4] = [Role::Owner, Role::Issuer, Role::Operator, Role::Auditor];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Owner => "owner",
            Role::Issuer => "issuer",
            Role::Operator => "operator",
            Role::Auditor => "auditor",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A text that names no role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no role: use owner, issuer, operator or auditor")]
pub struct UnknownRole(pub String);

impl FromStr for Role {
    type Err = UnknownRole;

    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        let found = Role::ALL.into_iter().find(|role| role.as_str() == text);
        found.ok_or_else(|| UnknownRole(text.chars().take(40).collect()))
    }
}

/// Who asks, once it is known who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Principal {
    /// An admin with these roles.
    Admin {
        /// All roles of its key.
        roles: Vec<Role>,
    },
    /// An agent, which belongs to one cluster.
    Agent {
        /// Its cluster.
        cluster: uuid::Uuid,
    },
}

/// Everything that needs an access token. A new route is a new line here and in [`allowed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Make a draft of a cluster, with its CAs.
    CreateDraft,
    /// Put a cluster's first or next statement.
    PutStatement,
    /// List clusters.
    ListClusters,
    /// Show a cluster: state, seats, timeline, what it waits for.
    ShowCluster,
    /// Read a cluster's statement chain.
    ReadStatements,
    /// Read a cluster's commit document.
    ReadDocument,
    /// Give up a cluster that has not committed.
    AbandonCluster,
    /// End a committed cluster.
    RetireCluster,
    /// Get a client certificate for a cluster's data.
    IssueCredentials,
    /// Store a grant for a boot token.
    PutBootGrant,
    /// Store a grant for a join ticket.
    PutJoinGrant,
    /// Read grants.
    ReadGrants,
    /// Revoke a boot token.
    RevokeBootGrant,
    /// Revoke a join ticket.
    RevokeJoinGrant,
    /// Order that a member goes or moves.
    PutOrder,
    /// Take an intent back.
    WithdrawIntent,
    /// Read intents.
    ReadIntents,
    /// Take a cluster's CAs away, their keys encrypted.
    ExportCluster,
    /// Read who the admins are.
    ReadAdmins,
    /// Add or revoke an admin.
    ChangeAdmins,
    /// Read which processes share the database.
    ReadProcesses,
    /// Accept a database that was restored or swapped.
    AcceptDatabase,
    /// An agent's part in forming: poll, ack, nack, probes, release.
    TakePart,
    /// An agent's report about its running node.
    Report,
    /// Show the service a commit document that it may have lost.
    Adopt,
    /// Say what became of an intent.
    ReportOutcome,
    /// Get a member's certificates anew.
    RenewLeaves,
    /// Show the service the recovery statements by which a lost cluster goes on as another one.
    ShowRecoveries,
}

impl Action {
    /// Every action.
    pub const ALL: [Action; 28] = [
        Action::CreateDraft,
        Action::PutStatement,
        Action::ListClusters,
        Action::ShowCluster,
        Action::ReadStatements,
        Action::ReadDocument,
        Action::AbandonCluster,
        Action::RetireCluster,
        Action::IssueCredentials,
        Action::PutBootGrant,
        Action::PutJoinGrant,
        Action::ReadGrants,
        Action::RevokeBootGrant,
        Action::RevokeJoinGrant,
        Action::PutOrder,
        Action::WithdrawIntent,
        Action::ReadIntents,
        Action::ExportCluster,
        Action::ReadAdmins,
        Action::ChangeAdmins,
        Action::ReadProcesses,
        Action::AcceptDatabase,
        Action::TakePart,
        Action::Report,
        Action::Adopt,
        Action::ReportOutcome,
        Action::RenewLeaves,
        Action::ShowRecoveries,
    ];

    /// Roles beside [`Role::Owner`] that may do it; `None` where no admin may.
    fn roles(self) -> Option<&'static [Role]> {
        use Role::{Auditor, Issuer, Operator};
        match self {
            Action::CreateDraft
            | Action::PutStatement
            | Action::RetireCluster
            | Action::ExportCluster
            | Action::ChangeAdmins
            | Action::AcceptDatabase => Some(&[]),
            Action::AbandonCluster
            | Action::IssueCredentials
            | Action::PutJoinGrant
            | Action::PutOrder
            | Action::WithdrawIntent
            | Action::RevokeJoinGrant => Some(&[Operator]),
            Action::PutBootGrant => Some(&[Issuer]),
            Action::RevokeBootGrant => Some(&[Issuer, Operator]),
            Action::ListClusters
            | Action::ShowCluster
            | Action::ReadStatements
            | Action::ReadDocument
            | Action::ReadGrants
            | Action::ReadIntents
            | Action::ReadProcesses
            | Action::ReadAdmins => Some(&[Issuer, Operator, Auditor]),
            Action::TakePart
            | Action::Report
            | Action::Adopt
            | Action::ReportOutcome
            | Action::RenewLeaves
            | Action::ShowRecoveries => None,
        }
    }

    /// Whether an agent may do it, in its own cluster.
    fn agents(self) -> bool {
        match self {
            Action::TakePart
            | Action::Report
            | Action::Adopt
            | Action::ReportOutcome
            | Action::RenewLeaves
            | Action::ShowRecoveries
            | Action::ReadIntents
            | Action::ShowCluster
            | Action::ReadStatements
            | Action::ReadDocument => true,
            Action::CreateDraft
            | Action::PutStatement
            | Action::ListClusters
            | Action::AbandonCluster
            | Action::RetireCluster
            | Action::IssueCredentials
            | Action::PutBootGrant
            | Action::PutJoinGrant
            | Action::ReadGrants
            | Action::RevokeBootGrant
            | Action::RevokeJoinGrant
            | Action::PutOrder
            | Action::WithdrawIntent
            | Action::ExportCluster
            | Action::ReadAdmins
            | Action::ReadProcesses
            | Action::ChangeAdmins
            | Action::AcceptDatabase => false,
        }
    }

    /// Names of the roles that may do it, for the sentence that refuses somebody else.
    pub fn needs(self) -> String {
        match self.roles() {
            None => "an agent of this cluster".into(),
            Some(roles) => {
                let mut names = vec![Role::Owner.as_str()];
                names.extend(roles.iter().map(|role| role.as_str()));
                names.join(" or ")
            }
        }
    }
}

/// Whether a key with these roles may do `action` as an admin. Also what a statement's admins are
/// held against: who may sign a grant is who may put it.
pub fn roles_allow(roles: &[Role], action: Action) -> bool {
    match action.roles() {
        None => false,
        Some(others) => {
            roles.contains(&Role::Owner) || roles.iter().any(|role| others.contains(role))
        }
    }
}

/// Whether `principal` may do `action` on `cluster` (`None` for what concerns no one cluster).
pub fn allowed(principal: &Principal, action: Action, cluster: Option<uuid::Uuid>) -> bool {
    match principal {
        Principal::Admin { roles } => roles_allow(roles, action),
        Principal::Agent { cluster: own } => action.agents() && cluster == Some(*own),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_table() {
        let column = |allow: bool| if allow { "yes" } else { " - " };
        let own = uuid::Uuid::from_u128(1);
        let agent = Principal::Agent { cluster: own };
        let mut table = format!("{:16} own iss ope aud agent\n", "");
        for action in Action::ALL {
            let cells: Vec<_> =
                Role::ALL.iter().map(|role| column(roles_allow(&[*role], action))).collect();
            let agent = column(allowed(&agent, action, Some(own)));
            let name = format!("{action:?}");
            let row = format!("{name:16} {} {agent}\n", cells.join(" "));
            table.push_str(&row);
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn an_agent_may_nothing_in_another_cluster() {
        let agent = Principal::Agent { cluster: uuid::Uuid::from_u128(1) };
        for action in Action::ALL {
            assert!(!allowed(&agent, action, Some(uuid::Uuid::from_u128(2))), "{action:?}");
            assert!(!allowed(&agent, action, None), "{action:?}");
        }
    }

    #[test]
    fn without_a_role_nothing_is_allowed() {
        let nobody = Principal::Admin { roles: Vec::new() };
        for action in Action::ALL {
            assert!(!allowed(&nobody, action, None), "{action:?}");
        }
    }
}
