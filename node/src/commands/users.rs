//! Comparison of two clusters' users, roles and permissions, and of whether authentication is
//! enabled. Passwords are not compared, because no member shows them. The permissions of the role
//! `root` are not compared either, because that role may do everything anyway.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use node_proto::authpb::{Permission, permission::Type};
use node_proto::etcdserverpb::{
    AuthRoleGetRequest, AuthRoleListRequest, AuthStatusRequest, AuthUserGetRequest,
    AuthUserListRequest, AuthenticateRequest, auth_client::AuthClient,
};
use serde::Serialize;
use tonic::Code;
use tonic::transport::Channel;

use super::cluster::{ClusterReadError, ClusterReader};
use super::compare::CompareError;
use super::comparison::shown_key;

/// Maximum number of differences that are kept to be shown. All are counted.
const MAX_SHOWN: usize = 20;
/// End of a permission's range that has no upper bound.
const NO_UPPER_BOUND: &[u8] = &[0];
/// Role that may do everything. etcd 3.4 and 3.5 show it without permissions, later releases and
/// `muster-node` with the permission for all keys.
const ROOT_ROLE: &str = "root";

/// Permission of a role for one key, or for a range of keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RolePermission {
    kind: Type,
    key: Bytes,
    /// End of the range, as etcd's API gives it. Empty for one key.
    range_end: Bytes,
}

impl RolePermission {
    fn to_text(&self) -> String {
        let kind = match self.kind {
            Type::Read => "read",
            Type::Write => "write",
            Type::Readwrite => "readwrite",
        };
        let (key, end) = (shown_key(&self.key), shown_key(&self.range_end));
        match &self.range_end[..] {
            [] => format!("{kind} of {key}"),
            NO_UPPER_BOUND => format!("{kind} of all keys from {key} on"),
            _ => format!("{kind} of keys from {key} to before {end}"),
        }
    }
}

/// Users and roles of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct AuthTables {
    /// Whether authentication is enabled.
    enabled: bool,
    /// Names of all users, each with the names of the user's roles.
    users: BTreeMap<String, BTreeSet<String>>,
    /// Names of all roles, each with the role's permissions. Those of [`ROOT_ROLE`] are left out.
    roles: BTreeMap<String, BTreeSet<RolePermission>>,
}

impl AuthTables {
    async fn read(cluster: &ClusterReader) -> Result<Self, ClusterReadError> {
        let mut client = AuthClient::new(cluster.channel());
        let enabled = is_enabled(cluster, &mut client).await?;
        let listed = client.user_list(AuthUserListRequest::default());
        let names = cluster.answer("users", listed).await?.users;
        let mut users = BTreeMap::new();
        for name in names {
            let user = client.user_get(AuthUserGetRequest { name: name.clone() });
            let roles = cluster.answer("a user", user).await?.roles;
            users.insert(name, roles.into_iter().collect());
        }
        let listed = client.role_list(AuthRoleListRequest::default());
        let names = cluster.answer("roles", listed).await?.roles;
        let mut roles = BTreeMap::new();
        for name in names {
            let role = client.role_get(AuthRoleGetRequest { role: name.clone() });
            let permissions = cluster.answer("a role", role).await?.perm;
            let permissions = compared_permissions(&name, permissions);
            roles.insert(name, permissions);
        }
        Ok(Self { enabled, users, roles })
    }
}

/// Returns the permissions of the role `name` that are compared. Those of [`ROOT_ROLE`] are not.
fn compared_permissions(name: &str, permissions: Vec<Permission>) -> BTreeSet<RolePermission> {
    if name == ROOT_ROLE {
        return BTreeSet::new();
    }
    let permissions = permissions.into_iter().map(|found| RolePermission {
        kind: found.perm_type(),
        key: found.key,
        range_end: found.range_end,
    });
    permissions.collect()
}

/// Whether authentication is enabled. etcd 3.4 has no request for this. Its refusal of an attempt
/// to authenticate without a user name shows the state.
async fn is_enabled(
    cluster: &ClusterReader,
    client: &mut AuthClient<Channel>,
) -> Result<bool, ClusterReadError> {
    const STATE: &str = "the state of authentication";
    match cluster.answer(STATE, client.auth_status(AuthStatusRequest::default())).await {
        Ok(status) => return Ok(status.enabled),
        Err(ClusterReadError::Refused { code: Code::Unimplemented, .. }) => {}
        Err(error) => return Err(error),
    }
    match cluster.answer(STATE, client.authenticate(AuthenticateRequest::default())).await {
        Ok(_) | Err(ClusterReadError::Refused { code: Code::InvalidArgument, .. }) => Ok(true),
        Err(ClusterReadError::Refused { code: Code::FailedPrecondition, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Result of a comparison of two clusters' users and roles, as they are now. An earlier revision of
/// them can't be read.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct AuthComparison {
    /// Whether authentication is enabled at the source.
    enabled: bool,
    /// Number of the source's users.
    users: u64,
    /// Number of the source's roles.
    roles: u64,
    /// Number of differences: names, roles and permissions that only one of the clusters has, and
    /// whether authentication is enabled.
    differences: u64,
    first_differences: Vec<String>,
    /// Reason why users and roles could not be compared.
    not_compared: Option<String>,
}

impl AuthComparison {
    fn new(source: &AuthTables, target: &AuthTables) -> Self {
        let mut found = Vec::new();
        if source.enabled != target.enabled {
            let (with, without) =
                if source.enabled { ("source", "target") } else { ("target", "source") };
            found
                .push(format!("authentication is enabled at the {with}, but not at the {without}"));
        }
        let show_role = |role: &String| format!("role {}", shown_key(role.as_bytes()));
        add_differences("user", [&source.users, &target.users], show_role, &mut found);
        let roles = [&source.roles, &target.roles];
        add_differences("role", roles, RolePermission::to_text, &mut found);
        let differences = found.len() as u64;
        found.truncate(MAX_SHOWN);
        Self {
            enabled: source.enabled,
            users: source.users.len() as u64,
            roles: source.roles.len() as u64,
            differences,
            first_differences: found,
            not_compared: None,
        }
    }

    /// Returns the result for users and roles that could not be compared.
    pub(super) fn not_compared(reason: String) -> Self {
        Self { not_compared: Some(reason), ..Self::default() }
    }

    /// Whether users and roles were compared, and none differs.
    pub(super) fn is_equal(&self) -> bool {
        self.not_compared.is_none() && self.differences == 0
    }

    /// Returns `equal`, `different` or `not compared`, as the end of a sentence about users and
    /// roles.
    pub(super) fn outcome(&self) -> &'static str {
        match (&self.not_compared, self.differences) {
            (Some(_), _) => "not compared",
            (None, 0) => "equal",
            (None, _) => "different",
        }
    }

    /// Returns the first [`MAX_SHOWN`] differences as text.
    pub(super) fn first_differences(&self) -> &[String] {
        &self.first_differences
    }

    /// Returns the result as one line for a person.
    pub(super) fn to_text(&self) -> String {
        if let Some(reason) = &self.not_compared {
            return format!("not compared: {reason}");
        }
        let Self { users, roles, differences, .. } = self;
        let state = if self.enabled { "enabled" } else { "not enabled" };
        match (*differences, self.first_differences.len()) {
            (0, _) => format!(
                "{users} users and {roles} roles are equal, without passwords; \
                 authentication is {state}"
            ),
            (all, shown) => format!("{all} differences, {shown} are shown"),
        }
    }
}

/// Adds the differences between two maps, whose keys are names and whose values are sets. A
/// difference is a name that only one map has, or an element that only one of a name's two sets
/// has.
fn add_differences<T: Ord>(
    kind: &str,
    [source, target]: [&BTreeMap<String, BTreeSet<T>>; 2],
    show: impl Fn(&T) -> String,
    found: &mut Vec<String>,
) {
    let names: BTreeSet<&String> = source.keys().chain(target.keys()).collect();
    for name in names {
        let shown = shown_key(name.as_bytes());
        let (of_source, of_target) = match (source.get(name), target.get(name)) {
            (Some(of_source), Some(of_target)) => (of_source, of_target),
            (None, _) => {
                found.push(format!("{kind} {shown}: only the target has it"));
                continue;
            }
            (_, None) => {
                found.push(format!("{kind} {shown}: only the source has it"));
                continue;
            }
        };
        for (owner, only) in [
            ("source", of_source.difference(of_target)),
            ("target", of_target.difference(of_source)),
        ] {
            let lines =
                only.map(|one| format!("{kind} {shown}: {} only in the {owner}", show(one)));
            found.extend(lines);
        }
    }
}

/// Compares the users and roles of two clusters. A cluster that refuses to show them is no error:
/// the result gives the reason.
pub(super) async fn compare_auth(
    source: &ClusterReader,
    target: &ClusterReader,
) -> Result<AuthComparison, CompareError> {
    let (source, target) = tokio::join!(AuthTables::read(source), AuthTables::read(target));
    let source = explain_refusal(source).map_err(CompareError::Source)?;
    let target = explain_refusal(target).map_err(CompareError::Target)?;
    Ok(match (source, target) {
        (Ok(source), Ok(target)) => AuthComparison::new(&source, &target),
        (Err(reason), _) | (_, Err(reason)) => AuthComparison::not_compared(reason),
    })
}

/// Reads the users and roles of a cluster, as [`compare_auth`] does.
pub(super) async fn read_auth(cluster: &ClusterReader) -> Result<(), ClusterReadError> {
    AuthTables::read(cluster).await.map(drop)
}

/// Whether a member refused to show users and roles for lack of permissions. etcd gives a request
/// without a user the code `InvalidArgument`.
pub(super) fn needs_root_role(error: &ClusterReadError) -> bool {
    matches!(
        error,
        ClusterReadError::Refused {
            code: Code::PermissionDenied | Code::Unauthenticated | Code::InvalidArgument,
            ..
        }
    )
}

/// Turns a refusal for lack of permissions into text that says what to do.
fn explain_refusal<T>(
    read: Result<T, ClusterReadError>,
) -> Result<Result<T, String>, ClusterReadError> {
    match read {
        Ok(found) => Ok(Ok(found)),
        Err(error) if needs_root_role(&error) => {
            Ok(Err(format!("{error}; use the certificate of a user with the role root")))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permission(kind: Type, key: &'static str, range_end: &'static str) -> RolePermission {
        RolePermission { kind, key: key.into(), range_end: range_end.into() }
    }

    fn tables() -> AuthTables {
        let permissions = [permission(Type::Read, "a", "b")];
        AuthTables {
            enabled: true,
            users: [("alice".to_owned(), ["reader".to_owned()].into())].into(),
            roles: [("reader".to_owned(), permissions.into())].into(),
        }
    }

    fn differences(change: impl FnOnce(&mut AuthTables)) -> Vec<String> {
        let mut target = tables();
        change(&mut target);
        let compared = AuthComparison::new(&tables(), &target);
        let is_equal = compared.first_differences.is_empty();
        assert_eq!(compared.is_equal(), is_equal);
        assert_eq!(compared.outcome(), if is_equal { "equal" } else { "different" });
        compared.first_differences
    }

    #[test]
    fn users_roles_permissions_and_authentication_are_compared() {
        assert_eq!(differences(|_| ()), [""; 0]);
        assert_eq!(
            differences(|target| target.enabled = false),
            ["authentication is enabled at the source, but not at the target"]
        );
        assert_eq!(
            differences(|target| {
                target.users.clear();
                target.users.insert("bob".to_owned(), BTreeSet::new());
            }),
            ["user alice: only the source has it", "user bob: only the target has it"]
        );
        assert_eq!(
            differences(|target| {
                target.users.insert("alice".to_owned(), ["writer".to_owned()].into());
            }),
            [
                "user alice: role reader only in the source",
                "user alice: role writer only in the target"
            ]
        );
        assert_eq!(
            differences(|target| {
                let other = permission(Type::Readwrite, "", "\0");
                target.roles.insert("reader".to_owned(), [other].into());
            }),
            [
                "role reader: read of keys from a to before b only in the source",
                "role reader: readwrite of all keys from \"\" on only in the target"
            ]
        );
    }

    #[test]
    fn the_permissions_of_the_role_root_are_not_compared() {
        let all_keys = || Permission {
            perm_type: Type::Readwrite.into(),
            key: Bytes::new(),
            range_end: NO_UPPER_BOUND.into(),
        };
        let expected = permission(Type::Readwrite, "", "\0");
        assert_eq!(compared_permissions("rooted", vec![all_keys()]), BTreeSet::from([expected]));
        assert_eq!(compared_permissions("root", vec![all_keys()]), BTreeSet::new());
        assert_eq!(
            differences(|target| {
                target.roles.insert("root".to_owned(), BTreeSet::new());
            }),
            ["role root: only the target has it"]
        );
    }

    #[test]
    fn all_differences_are_counted_and_the_first_ones_kept() {
        let mut target = tables();
        for number in 0..100 {
            target.users.insert(format!("user{number}"), BTreeSet::new());
        }
        let compared = AuthComparison::new(&tables(), &target);
        assert_eq!((compared.differences, compared.first_differences.len()), (100, MAX_SHOWN));
        assert_eq!(compared.to_text(), "100 differences, 20 are shown");
    }

    #[test]
    fn a_refusal_makes_the_result_unequal_and_says_which_certificate_to_use() {
        let refused = |code, text: &str| {
            let (url, text) = ("a:1".to_owned(), text.to_owned());
            explain_refusal::<AuthTables>(Err(ClusterReadError::Refused {
                url,
                what: "users",
                code,
                text,
            }))
        };
        let reason = refused(Code::PermissionDenied, "etcdserver: permission denied");
        let reason = reason.unwrap().unwrap_err();
        assert!(reason.starts_with("a:1 refused the request for users"), "{reason}");
        let ending = "permission denied; use the certificate of a user with the role root";
        assert!(reason.ends_with(ending), "{reason}");
        let result = AuthComparison::not_compared(reason);
        assert_eq!(result.outcome(), "not compared");
        assert!(!result.is_equal() && result.to_text().starts_with("not compared: a:1 refused"));
        assert!(refused(Code::Unavailable, "etcdserver: no leader").is_err());
        let late = ClusterReadError::Late { url: "a:1".to_owned(), what: "users" };
        assert!(explain_refusal::<AuthTables>(Err(late)).is_err());
    }
}
