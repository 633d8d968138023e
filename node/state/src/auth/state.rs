//! The replicated state of users and roles.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use node_proto::authpb::{self, Permission, permission};
use prost::Message as _;

use super::ranges::PermittedRanges;

/// Name of the user and of the role that may do everything.
pub(super) const ROOT: &str = "root";

/// Maximum size of all users and roles, in bytes of their encoded rows. Every member keeps them in
/// memory. etcd has no such limit.
pub(super) const MAX_BYTES: usize = 64 << 20;

/// Why a request, or a change of users and roles, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The user `root` does not exist.
    #[error("root user does not exist")]
    NoRootUser,
    /// The user `root` does not have the role `root`.
    #[error("root user does not have root role")]
    NoRootRole,
    /// The caller is not identified, or a user name is empty.
    #[error("user name is empty")]
    UserEmpty,
    /// A user with this name exists already.
    #[error("user name already exists")]
    UserExists,
    /// The user does not exist.
    #[error("user name not found")]
    UserNotFound,
    /// The role name is empty.
    #[error("role name is empty")]
    RoleEmpty,
    /// A role with this name exists already.
    #[error("role name already exists")]
    RoleExists,
    /// The role does not exist.
    #[error("role name not found")]
    RoleNotFound,
    /// The request to grant a permission contains no permission.
    #[error("permission not given")]
    PermissionNotGiven,
    /// The role to be revoked is not granted to the user.
    #[error("role is not granted to the user")]
    RoleNotGranted,
    /// The permission to be revoked is not granted to the role.
    #[error("permission is not granted to the role")]
    PermissionNotGranted,
    /// The change would lock out `root`, or grants an invalid range.
    #[error("invalid auth management")]
    InvalidManagement,
    /// The caller has no permission for the request.
    #[error("permission denied")]
    Denied,
    /// Users or roles have changed since the caller was identified.
    #[error("revision of auth store is old")]
    OldRevision,
    /// The request needs authentication to be enabled, and it is not.
    #[error("authentication is not enabled")]
    NotEnabled,
    /// The user does not exist or has no password, or the given password is wrong.
    #[error("authentication failed, invalid user ID or password")]
    Failed,
    /// The change would make users and roles larger than their limit.
    #[error("users and roles take too much room")]
    TooLarge,
}

/// Union of the permissions of a user's roles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UserPermissions {
    pub(super) is_root: bool,
    pub(super) read: PermittedRanges,
    pub(super) write: PermittedRanges,
}

/// A user's password hash, roles and permissions.
#[derive(Clone, PartialEq, Eq)]
pub struct User {
    /// Bcrypt hash of the password. `None` for a user without a password, who authenticates with a
    /// certificate.
    pub(super) hash: Option<Bytes>,
    /// Names of the user's roles, sorted.
    pub(super) roles: Vec<String>,
    /// Permissions, computed from the roles.
    pub(super) permissions: UserPermissions,
}

impl User {
    /// Returns the names of the user's roles, sorted.
    #[must_use]
    pub fn roles(&self) -> &[String] {
        &self.roles
    }

    /// Returns the bcrypt hash of the password, or `None` for a user without a password.
    #[must_use]
    pub fn hash(&self) -> Option<&Bytes> {
        self.hash.as_ref()
    }

    pub(super) fn has_role(&self, name: &str) -> bool {
        self.roles.iter().any(|role| role == name)
    }

    fn row(&self, name: &str) -> authpb::User {
        authpb::User {
            name: Bytes::copy_from_slice(name.as_bytes()),
            password: self.hash.clone().unwrap_or_default(),
            roles: self.roles.clone(),
            options: Some(authpb::UserAddOptions { no_password: self.hash.is_none() }),
        }
    }
}

/// Shows the roles, and leaves out the password hash.
impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("User").field("roles", &self.roles).finish_non_exhaustive()
    }
}

/// The permissions of a role, sorted by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AuthRole {
    pub(super) permissions: Vec<Permission>,
}

impl AuthRole {
    fn row(&self, name: &str) -> authpb::Role {
        let name = Bytes::copy_from_slice(name.as_bytes());
        authpb::Role { name, key_permission: self.permissions.clone() }
    }
}

/// Users, roles, and whether authentication is enabled. A clone copies the maps but shares their
/// values.
#[derive(Clone, Debug, PartialEq)]
pub struct AuthState {
    pub(super) enabled: bool,
    /// Revision of users and roles, which grows with each change.
    pub(super) revision: u64,
    pub(super) users: BTreeMap<String, Arc<User>>,
    pub(super) roles: BTreeMap<String, Arc<AuthRole>>,
    /// Total size of the encoded rows of all users and roles.
    pub(super) bytes: usize,
}

impl Default for AuthState {
    /// Returns a state without users or roles and with authentication disabled, so that everybody
    /// may do everything.
    fn default() -> Self {
        let (users, roles) = (BTreeMap::new(), BTreeMap::new());
        Self { enabled: false, revision: 1, users, roles, bytes: 0 }
    }
}

impl AuthState {
    /// Whether authentication is enabled, so that requests need an identified caller.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns the revision of users and roles: 1 at first, plus 1 for each change.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the user called `name`.
    #[must_use]
    pub fn user(&self, name: &str) -> Option<&Arc<User>> {
        self.users.get(name)
    }

    /// Returns the names of all users, sorted.
    pub fn users(&self) -> impl Iterator<Item = &str> {
        self.users.keys().map(String::as_str)
    }

    /// Returns the names of all roles, sorted.
    pub fn roles(&self) -> impl Iterator<Item = &str> {
        self.roles.keys().map(String::as_str)
    }

    /// Returns the permissions of a role, sorted by key. The role `root` has permission for all
    /// keys, whatever was granted to it.
    #[must_use]
    pub fn role_permissions(&self, role: &str) -> Option<Vec<Permission>> {
        let found = self.roles.get(role)?;
        if role != ROOT {
            return Some(found.permissions.clone());
        }
        let (key, range_end) = (Bytes::new(), Bytes::from_static(&[0]));
        let perm_type = permission::Type::Readwrite.into();
        Some(vec![Permission { perm_type, key, range_end }])
    }

    /// Returns the database rows of all users, sorted by name.
    pub fn user_rows(&self) -> impl Iterator<Item = (&str, authpb::User)> {
        self.users.iter().map(|(name, user)| (name.as_str(), user.row(name)))
    }

    /// Returns the database rows of all roles, sorted by name.
    pub fn role_rows(&self) -> impl Iterator<Item = (&str, authpb::Role)> {
        self.roles.iter().map(|(name, role)| (name.as_str(), role.row(name)))
    }

    /// Builds the state from database rows. Fails with a description if a name is empty or not
    /// UTF-8.
    pub fn from_rows(
        enabled: bool,
        revision: u64,
        users: Vec<authpb::User>,
        roles: Vec<authpb::Role>,
    ) -> Result<Self, String> {
        let text = |name: Bytes| match String::from_utf8(name.into()) {
            Ok(name) if !name.is_empty() => Ok(name),
            _ => Err("a name is empty or no text".to_owned()),
        };
        let mut state = Self { enabled, revision, ..Self::default() };
        for role in roles {
            let (name, permissions) = (text(role.name)?, role.key_permission);
            state.put_role(name, AuthRole { permissions });
        }
        for user in users {
            let has_none = user.options.is_some_and(|options| options.no_password);
            let (name, mut roles) = (text(user.name)?, user.roles);
            roles.sort_unstable();
            let hash = (!has_none).then_some(user.password);
            state.put_user(name, User { hash, roles, permissions: UserPermissions::default() });
        }
        Ok(state)
    }

    pub(super) fn put_user(&mut self, name: String, mut user: User) {
        user.permissions = self.permissions_of_roles(&user.roles);
        self.remove_user(&name);
        self.bytes += user.row(&name).encoded_len();
        self.users.insert(name, Arc::new(user));
    }

    pub(super) fn remove_user(&mut self, name: &str) {
        if let Some(user) = self.users.remove(name) {
            self.bytes -= user.row(name).encoded_len();
        }
    }

    /// Adds or replaces a role, and recomputes the permissions of the users who have it.
    pub(super) fn put_role(&mut self, name: String, role: AuthRole) {
        self.remove_role(&name);
        self.bytes += role.row(&name).encoded_len();
        self.roles.insert(name.clone(), Arc::new(role));
        let having = self.users.iter().filter(|(_, user)| user.has_role(&name));
        let having: Vec<_> = having.map(|(name, user)| (name.clone(), User::clone(user))).collect();
        for (name, user) in having {
            self.put_user(name, user);
        }
    }

    pub(super) fn remove_role(&mut self, name: &str) {
        if let Some(role) = self.roles.remove(name) {
            self.bytes -= role.row(name).encoded_len();
        }
    }

    /// Returns the union of the permissions of `roles`. A permission of unknown type permits
    /// nothing.
    fn permissions_of_roles(&self, roles: &[String]) -> UserPermissions {
        use permission::Type::{Read, Readwrite, Write};
        let all = || {
            let found = roles.iter().filter_map(|name| self.roles.get(name));
            found.flat_map(|role| &role.permissions)
        };
        let of = |kinds: [permission::Type; 2]| {
            let some = all().filter(move |one| {
                permission::Type::try_from(one.perm_type).is_ok_and(|kind| kinds.contains(&kind))
            });
            PermittedRanges::merged(some.map(|one| (&one.key, &one.range_end)))
        };
        let (read, write) = (of([Read, Readwrite]), of([Write, Readwrite]));
        UserPermissions { is_root: roles.iter().any(|name| name == ROOT), read, write }
    }
}
