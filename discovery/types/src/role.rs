//! Authorization: this module alone defines what admins and agents may do.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Role of an admin.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// May do everything. Only an owner may create or retire clusters and name admins.
    Owner,
    /// May mint boot tokens.
    Issuer,
    /// May abandon a cluster that forms, mint join tickets, order changes and fetch client
    /// certificates.
    Operator,
    /// May read, but may change nothing.
    Auditor,
}

impl Role {
    /// Every role, in the order of declaration.
    pub const ALL: [Role; 4] = [Role::Owner, Role::Issuer, Role::Operator, Role::Auditor];

    /// Returns the role's name in the API.
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

/// Error for a text that isn't the name of a role; holds the text.
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

/// Authenticated client of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Principal {
    /// An admin, with the roles of its key.
    Admin {
        /// All roles of the admin's key.
        roles: Vec<Role>,
    },
    /// An agent, which belongs to one cluster.
    Agent {
        /// Cluster of the agent.
        cluster: uuid::Uuid,
    },
}

/// Action for which the client needs an access token. A new route needs a new action here, and
/// lines for it in the tables below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Make a draft of a cluster, with its CAs.
    CreateDraft,
    /// Send a cluster's first or next statement.
    PutStatement,
    /// List the clusters of this service.
    ListClusters,
    /// Show a cluster: its state, seats, timeline, and the reasons why it waits.
    ShowCluster,
    /// Read a cluster's statement chain.
    ReadStatements,
    /// Read a cluster's commit document.
    ReadDocument,
    /// Abandon a cluster that has not committed.
    AbandonCluster,
    /// Retire a committed cluster, with an owner's signature.
    RetireCluster,
    /// Reopen a cluster that expired before it had committed.
    ReopenCluster,
    /// Say where the discovery service is, with an owner's signature.
    AnnounceService,
    /// Get a client certificate for access to a cluster's data.
    IssueCredentials,
    /// Store a grant for a boot token.
    PutBootGrant,
    /// Store a grant for a join ticket.
    PutJoinGrant,
    /// Approve a host that may found a cluster.
    ApproveHost,
    /// Read the grants of a cluster.
    ReadGrants,
    /// Revoke a boot token.
    RevokeBootGrant,
    /// Revoke a join ticket.
    RevokeJoinGrant,
    /// Store a replacement policy.
    PutPolicy,
    /// Revoke a replacement policy.
    RevokePolicy,
    /// Make a token by which stock etcd forms a cluster.
    PutEtcdToken,
    /// Read the etcd tokens, and the members that registered with them.
    ReadEtcdTokens,
    /// Revoke an etcd token.
    RevokeEtcdToken,
    /// Order the removal of a member, or a change of its peer URLs.
    PutOrder,
    /// Withdraw an intent that no agent has begun.
    WithdrawIntent,
    /// Read the intents of a cluster.
    ReadIntents,
    /// Export a cluster's CAs, with their keys encrypted.
    ExportCluster,
    /// Read the list of admins, and the chain of owner-signed changes that proves it.
    ReadAdmins,
    /// Add or revoke an admin.
    ChangeAdmins,
    /// Read the list of processes that share the database.
    ReadProcesses,
    /// Read the event chains of clusters and of the service.
    ReadEvents,
    /// Make a link by which a browser signs in to the console.
    OpenConsole,
    /// Accept a database that was restored or swapped.
    AcceptDatabase,
    /// Take part in forming a cluster, as an agent: poll, ack, nack, probes, release.
    TakePart,
    /// Report the state of a running node, as its agent.
    Report,
    /// Send the service a commit document that it may have lost.
    Adopt,
    /// Show a restored service how a member joined that its backup lacks.
    Readmit,
    /// Report the outcome of an intent.
    ReportOutcome,
    /// Get new certificates for a member.
    RenewLeaves,
    /// Send recovery statements to the service. Each one declares that another cluster continues a
    /// lost one.
    ShowRecoveries,
}

impl Action {
    /// Every action, in the order of declaration.
    pub const ALL: [Action; 39] = [
        Action::CreateDraft,
        Action::PutStatement,
        Action::ListClusters,
        Action::ShowCluster,
        Action::ReadStatements,
        Action::ReadDocument,
        Action::AbandonCluster,
        Action::RetireCluster,
        Action::ReopenCluster,
        Action::AnnounceService,
        Action::IssueCredentials,
        Action::PutBootGrant,
        Action::PutJoinGrant,
        Action::ApproveHost,
        Action::ReadGrants,
        Action::RevokeBootGrant,
        Action::RevokeJoinGrant,
        Action::PutPolicy,
        Action::RevokePolicy,
        Action::PutEtcdToken,
        Action::ReadEtcdTokens,
        Action::RevokeEtcdToken,
        Action::PutOrder,
        Action::WithdrawIntent,
        Action::ReadIntents,
        Action::ExportCluster,
        Action::ReadAdmins,
        Action::ChangeAdmins,
        Action::ReadProcesses,
        Action::ReadEvents,
        Action::OpenConsole,
        Action::AcceptDatabase,
        Action::TakePart,
        Action::Report,
        Action::Adopt,
        Action::Readmit,
        Action::ReportOutcome,
        Action::RenewLeaves,
        Action::ShowRecoveries,
    ];

    /// Returns the roles that may do the action in addition to [`Role::Owner`]. `None` if no admin
    /// may do it, not even an owner: such an action is for agents only.
    fn roles(self) -> Option<&'static [Role]> {
        use Role::{Auditor, Issuer, Operator};
        match self {
            Action::CreateDraft
            | Action::PutStatement
            | Action::RetireCluster
            | Action::ReopenCluster
            | Action::AnnounceService
            | Action::ExportCluster
            | Action::ChangeAdmins
            | Action::AcceptDatabase => Some(&[]),
            Action::AbandonCluster
            | Action::IssueCredentials
            | Action::PutJoinGrant
            | Action::PutPolicy
            | Action::RevokePolicy
            | Action::PutOrder
            | Action::WithdrawIntent
            | Action::RevokeJoinGrant => Some(&[Operator]),
            Action::ReadEvents => Some(&[Operator, Auditor]),
            Action::PutBootGrant | Action::PutEtcdToken | Action::ApproveHost => Some(&[Issuer]),
            Action::RevokeBootGrant | Action::RevokeEtcdToken => Some(&[Issuer, Operator]),
            Action::ListClusters
            | Action::ShowCluster
            | Action::ReadStatements
            | Action::ReadDocument
            | Action::ReadGrants
            | Action::ReadEtcdTokens
            | Action::ReadIntents
            | Action::ReadProcesses
            | Action::ReadAdmins
            | Action::OpenConsole => Some(&[Issuer, Operator, Auditor]),
            Action::TakePart
            | Action::Report
            | Action::Adopt
            | Action::Readmit
            | Action::ReportOutcome
            | Action::RenewLeaves
            | Action::ShowRecoveries => None,
        }
    }

    /// Whether an agent may do the action in its own cluster.
    fn allows_agents(self) -> bool {
        match self {
            Action::TakePart
            | Action::Report
            | Action::Adopt
            | Action::Readmit
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
            | Action::ReopenCluster
            | Action::AnnounceService
            | Action::IssueCredentials
            | Action::PutBootGrant
            | Action::PutJoinGrant
            | Action::ApproveHost
            | Action::ReadGrants
            | Action::RevokeBootGrant
            | Action::RevokeJoinGrant
            | Action::PutPolicy
            | Action::RevokePolicy
            | Action::PutEtcdToken
            | Action::ReadEtcdTokens
            | Action::RevokeEtcdToken
            | Action::PutOrder
            | Action::WithdrawIntent
            | Action::ExportCluster
            | Action::ReadAdmins
            | Action::ReadProcesses
            | Action::ReadEvents
            | Action::OpenConsole
            | Action::ChangeAdmins
            | Action::AcceptDatabase => false,
        }
    }

    /// Names the roles that may do the action, for the message of a refused request.
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

/// Whether an admin with these roles may do `action`. This also decides which admins of a statement
/// may sign: an admin who may store a grant may also sign it.
pub fn roles_allow(roles: &[Role], action: Action) -> bool {
    match action.roles() {
        None => false,
        Some(others) => {
            roles.contains(&Role::Owner) || roles.iter().any(|role| others.contains(role))
        }
    }
}

/// Whether `principal` may do `action` on `cluster`. `cluster` is `None` for an action that
/// concerns no single cluster.
pub fn is_allowed(principal: &Principal, action: Action, cluster: Option<uuid::Uuid>) -> bool {
    match principal {
        Principal::Admin { roles } => roles_allow(roles, action),
        Principal::Agent { cluster: own } => action.allows_agents() && cluster == Some(*own),
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
            let agent = column(is_allowed(&agent, action, Some(own)));
            let name = format!("{action:?}");
            let row = format!("{name:16} {} {agent}\n", cells.join(" "));
            table.push_str(&row);
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn an_agent_may_do_nothing_in_another_cluster() {
        let agent = Principal::Agent { cluster: uuid::Uuid::from_u128(1) };
        for action in Action::ALL {
            assert!(!is_allowed(&agent, action, Some(uuid::Uuid::from_u128(2))), "{action:?}");
            assert!(!is_allowed(&agent, action, None), "{action:?}");
        }
    }

    #[test]
    fn without_a_role_nothing_is_allowed() {
        let nobody = Principal::Admin { roles: Vec::new() };
        for action in Action::ALL {
            assert!(!is_allowed(&nobody, action, None), "{action:?}");
        }
    }
}
