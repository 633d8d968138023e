//! Users and roles.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use node_proto::authpb::{self, Permission, permission};
use prost::Message as _;

use super::ranges::Ranges;

/// The user and the role that may do everything.
pub(super) const ROOT: &str = "root";

/// Users and roles take no more, in bytes of their rows: every member keeps them in memory. etcd has no
/// bound.
pub(super) const MAX_BYTES: usize = 64 << 20;

/// Why a request is refused, or a change of users and roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// There is no user `root`.
    #[error("root user does not exist")]
    NoRootUser,
    /// It does not have the role `root`.
    #[error("root user does not have root role")]
    NoRootRole,
    /// Nobody says who asks; or a user without a name.
    #[error("user name is empty")]
    UserEmpty,
    /// The name is taken.
    #[error("user name already exists")]
    UserExists,
    /// No such user.
    #[error("user name not found")]
    UserNotFound,
    /// A role without a name.
    #[error("role name is empty")]
    RoleEmpty,
    /// The name is taken.
    #[error("role name already exists")]
    RoleExists,
    /// No such role.
    #[error("role name not found")]
    RoleNotFound,
    /// A permission that isn't there.
    #[error("permission not given")]
    PermissionNotGiven,
    /// The user does not have this role.
    #[error("role is not granted to the user")]
    RoleNotGranted,
    /// The role does not have this permission.
    #[error("permission is not granted to the role")]
    PermissionNotGranted,
    /// It would take from `root` what it needs, or permit a range that can't be.
    #[error("invalid auth management")]
    InvalidManagement,
    /// Not allowed.
    #[error("permission denied")]
    Denied,
    /// Found out by users and roles that have changed since.
    #[error("revision of auth store is old")]
    OldRevision,
    /// Nobody has to say who they are.
    #[error("authentication is not enabled")]
    NotEnabled,
    /// Who it should be is not known, or known by another password.
    #[error("authentication failed, invalid user ID or password")]
    Failed,
    /// More users and roles than there is room for.
    #[error("users and roles take too much room")]
    NoRoom,
}

/// What a user's roles permit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Permitted {
    pub(super) is_root: bool,
    pub(super) read: Ranges,
    pub(super) write: Ranges,
}

/// A user.
#[derive(Clone, PartialEq, Eq)]
pub struct User {
    /// The bcrypt hash of the password; `None` of a user who has none and comes with a certificate.
    pub(super) hash: Option<Bytes>,
    /// In order.
    pub(super) roles: Vec<String>,
    /// Made of the roles.
    pub(super) permitted: Permitted,
}

impl User {
    /// The names of the roles, in order.
    #[must_use]
    pub fn roles(&self) -> &[String] {
        &self.roles
    }

    /// The bcrypt hash of the password, if the user may have one.
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

/// Without the hash.
impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("User").field("roles", &self.roles).finish_non_exhaustive()
    }
}

/// What a role permits, by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Role {
    pub(super) permissions: Vec<Permission>,
}

impl Role {
    fn row(&self, name: &str) -> authpb::Role {
        let name = Bytes::copy_from_slice(name.as_bytes());
        authpb::Role { name, key_permission: self.permissions.clone() }
    }
}

/// Users, roles, and whether they count. Cheap to clone, but for the maps.
#[derive(Clone, Debug, PartialEq)]
pub struct AuthState {
    pub(super) enabled: bool,
    /// Grows with each change.
    pub(super) revision: u64,
    pub(super) users: BTreeMap<String, Arc<User>>,
    pub(super) roles: BTreeMap<String, Arc<Role>>,
    /// Of all rows.
    pub(super) bytes: usize,
}

impl Default for AuthState {
    /// Nobody, and everybody may do everything.
    fn default() -> Self {
        let (users, roles) = (BTreeMap::new(), BTreeMap::new());
        Self { enabled: false, revision: 1, users, roles, bytes: 0 }
    }
}

impl AuthState {
    /// Whether requests have to say who makes them.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// How often users and roles have changed, from 1.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The user of this name.
    #[must_use]
    pub fn user(&self, name: &str) -> Option<&Arc<User>> {
        self.users.get(name)
    }

    /// The names of all users, in order.
    pub fn users(&self) -> impl Iterator<Item = &str> {
        self.users.keys().map(String::as_str)
    }

    /// The names of all roles, in order.
    pub fn roles(&self) -> impl Iterator<Item = &str> {
        self.roles.keys().map(String::as_str)
    }

    /// What a role permits, in the order of keys; `root` everything, whatever was granted to it.
    #[must_use]
    pub fn permissions(&self, role: &str) -> Option<Vec<Permission>> {
        let found = self.roles.get(role)?;
        if role != ROOT {
            return Some(found.permissions.clone());
        }
        let (key, range_end) = (Bytes::new(), Bytes::from_static(&[0]));
        let perm_type = permission::Type::Readwrite.into();
        Some(vec![Permission { perm_type, key, range_end }])
    }

    /// The rows of all users, in the order of their names.
    pub fn user_rows(&self) -> impl Iterator<Item = (&str, authpb::User)> {
        self.users.iter().map(|(name, user)| (name.as_str(), user.row(name)))
    }

    /// The rows of all roles, in the order of their names.
    pub fn role_rows(&self) -> impl Iterator<Item = (&str, authpb::Role)> {
        self.roles.iter().map(|(name, role)| (name.as_str(), role.row(name)))
    }

    /// What rows say. An error is one that can't be.
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
            state.put_role(name, Role { permissions });
        }
        for user in users {
            let has_none = user.options.is_some_and(|options| options.no_password);
            let (name, mut roles) = (text(user.name)?, user.roles);
            roles.sort_unstable();
            let hash = (!has_none).then_some(user.password);
            state.put_user(name, User { hash, roles, permitted: Permitted::default() });
        }
        Ok(state)
    }

    pub(super) fn put_user(&mut self, name: String, mut user: User) {
        user.permitted = self.permitted(&user.roles);
        self.remove_user(&name);
        self.bytes += user.row(&name).encoded_len();
        self.users.insert(name, Arc::new(user));
    }

    pub(super) fn remove_user(&mut self, name: &str) {
        if let Some(user) = self.users.remove(name) {
            self.bytes -= user.row(name).encoded_len();
        }
    }

    /// Also brings whoever has the role up to date.
    pub(super) fn put_role(&mut self, name: String, role: Role) {
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

    /// What these roles permit together. A kind of permission that isn't known permits nothing.
    fn permitted(&self, roles: &[String]) -> Permitted {
        use permission::Type::{Read, Readwrite, Write};
        let all = || {
            let found = roles.iter().filter_map(|name| self.roles.get(name));
            found.flat_map(|role| &role.permissions)
        };
        let of = |kinds: [permission::Type; 2]| {
            let some = all().filter(move |one| {
                permission::Type::try_from(one.perm_type).is_ok_and(|kind| kinds.contains(&kind))
            });
            Ranges::merged(some.map(|one| (&one.key, &one.range_end)))
        };
        let (read, write) = (of([Read, Readwrite]), of([Write, Readwrite]));
        Permitted { is_root: roles.iter().any(|name| name == ROOT), read, write }
    }
}
