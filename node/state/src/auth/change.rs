//! Changes of users and roles, with etcd's rules (server/auth/store.go).

use bytes::Bytes;
use node_proto::authpb::Permission;
use node_proto::command::AuthChange;
use node_proto::musterpb::auth_change;

use super::state::{AuthError, AuthRole, AuthState, MAX_BYTES, ROOT, User, UserPermissions};

/// A change of users or roles, as a log entry contains it.
pub type AuthOperation = auth_change::Change;

/// A user's password hash, as a log entry contains it.
pub use node_proto::musterpb::UserPassword as Password;

/// The users whose simple tokens become invalid through a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevokedTokens {
    /// No tokens become invalid.
    NoUser,
    /// This user's tokens become invalid.
    User(String),
    /// All tokens become invalid.
    AllUsers,
}

impl AuthState {
    /// Makes a change. On an error, nothing has changed.
    pub fn change(&mut self, change: AuthChange) -> Result<RevokedTokens, AuthError> {
        let change = change.change.ok_or(AuthError::InvalidManagement)?;
        let before = self.bytes;
        let room = match &change {
            AuthOperation::UserAdd(add) => add.name.len() + add.hash.len(),
            AuthOperation::UserGrantRole(grant) => grant.role.len(),
            AuthOperation::RoleAdd(add) => add.name.len(),
            AuthOperation::RoleGrantPermission(grant) => {
                grant.perm.as_ref().map_or(0, |perm| perm.key.len() + perm.range_end.len())
            }
            // Changes of these kinds add no bytes: they remove something, set a flag, or replace a
            // hash by another.
            AuthOperation::Enable(_)
            | AuthOperation::Disable(_)
            | AuthOperation::UserDelete(_)
            | AuthOperation::UserChangePassword(_)
            | AuthOperation::UserRevokeRole(_)
            | AuthOperation::RoleDelete(_)
            | AuthOperation::RoleRevokePermission(_) => 0,
        };
        if room > 0 && before + room > MAX_BYTES {
            return Err(AuthError::TooLarge);
        }
        match change {
            AuthOperation::Enable(_) => self.enable(),
            AuthOperation::Disable(_) => Ok(self.disable()),
            AuthOperation::UserAdd(add) => self.add_user(add),
            AuthOperation::UserDelete(delete) => self.delete_user(delete.name),
            AuthOperation::UserChangePassword(password) => self.change_password(password),
            AuthOperation::UserGrantRole(grant) => self.grant_role(&grant.user, grant.role),
            AuthOperation::UserRevokeRole(revoke) => self.revoke_role(&revoke.name, &revoke.role),
            AuthOperation::RoleAdd(add) => self.add_role(add.name),
            AuthOperation::RoleDelete(delete) => self.delete_role(&delete.role),
            AuthOperation::RoleGrantPermission(grant) => {
                self.grant_permission(grant.name, grant.perm)
            }
            AuthOperation::RoleRevokePermission(revoke) => {
                self.revoke_permission(revoke.role, &revoke.key, &revoke.range_end)
            }
        }
    }

    fn finish_change(&mut self, revoked: RevokedTokens) -> Result<RevokedTokens, AuthError> {
        self.revision += 1;
        Ok(revoked)
    }

    /// Enables authentication. If it is enabled already, nothing changes and the revision stays.
    fn enable(&mut self) -> Result<RevokedTokens, AuthError> {
        if !self.enabled {
            let root = self.users.get(ROOT).ok_or(AuthError::NoRootUser)?;
            if !root.permissions.is_root {
                return Err(AuthError::NoRootRole);
            }
            self.enabled = true;
        }
        Ok(RevokedTokens::NoUser)
    }

    fn disable(&mut self) -> RevokedTokens {
        if !self.enabled {
            return RevokedTokens::NoUser;
        }
        self.enabled = false;
        self.revision += 1;
        RevokedTokens::AllUsers
    }

    fn add_user(&mut self, add: Password) -> Result<RevokedTokens, AuthError> {
        if add.name.is_empty() {
            return Err(AuthError::UserEmpty);
        }
        if self.users.contains_key(&add.name) {
            return Err(AuthError::UserExists);
        }
        let hash = (!add.no_password).then_some(add.hash);
        let user = User { hash, roles: Vec::new(), permissions: UserPermissions::default() };
        self.put_user(add.name, user);
        self.finish_change(RevokedTokens::NoUser)
    }

    fn delete_user(&mut self, name: String) -> Result<RevokedTokens, AuthError> {
        if self.enabled && name == ROOT {
            return Err(AuthError::InvalidManagement);
        }
        self.users.get(&name).ok_or(AuthError::UserNotFound)?;
        self.remove_user(&name);
        self.finish_change(RevokedTokens::User(name))
    }

    /// Changes a user's password hash. A user who was added without a password keeps none.
    fn change_password(&mut self, password: Password) -> Result<RevokedTokens, AuthError> {
        let user = self.users.get(&password.name).ok_or(AuthError::UserNotFound)?;
        let hash = user.hash.is_some().then_some(password.hash);
        let user = User { hash, ..User::clone(user) };
        self.put_user(password.name.clone(), user);
        self.finish_change(RevokedTokens::User(password.name))
    }

    /// Grants a role to a user. The role `root` may be granted before it exists.
    fn grant_role(&mut self, name: &str, role: String) -> Result<RevokedTokens, AuthError> {
        let user = self.users.get(name).ok_or(AuthError::UserNotFound)?;
        if role != ROOT && !self.roles.contains_key(&role) {
            return Err(AuthError::RoleNotFound);
        }
        let Err(at) = user.roles.binary_search(&role) else { return Ok(RevokedTokens::NoUser) };
        let mut user = User::clone(user);
        user.roles.insert(at, role);
        self.put_user(name.to_owned(), user);
        self.finish_change(RevokedTokens::NoUser)
    }

    fn revoke_role(&mut self, name: &str, role: &str) -> Result<RevokedTokens, AuthError> {
        if self.enabled && name == ROOT && role == ROOT {
            return Err(AuthError::InvalidManagement);
        }
        let user = self.users.get(name).ok_or(AuthError::UserNotFound)?;
        if !user.has_role(role) {
            return Err(AuthError::RoleNotGranted);
        }
        self.put_user(name.to_owned(), without_role(user, role));
        self.finish_change(RevokedTokens::NoUser)
    }

    fn add_role(&mut self, name: String) -> Result<RevokedTokens, AuthError> {
        if name.is_empty() {
            return Err(AuthError::RoleEmpty);
        }
        if self.roles.contains_key(&name) {
            return Err(AuthError::RoleExists);
        }
        self.put_role(name, AuthRole::default());
        self.finish_change(RevokedTokens::NoUser)
    }

    fn delete_role(&mut self, name: &str) -> Result<RevokedTokens, AuthError> {
        if self.enabled && name == ROOT {
            return Err(AuthError::InvalidManagement);
        }
        self.roles.get(name).ok_or(AuthError::RoleNotFound)?;
        self.remove_role(name);
        let having = self.users.iter().filter(|(_, user)| user.has_role(name));
        let having: Vec<_> =
            having.map(|(had, user)| (had.clone(), without_role(user, name))).collect();
        for (had, user) in having {
            self.put_user(had, user);
        }
        self.finish_change(RevokedTokens::NoUser)
    }

    fn grant_permission(
        &mut self,
        role: String,
        granted: Option<Permission>,
    ) -> Result<RevokedTokens, AuthError> {
        let granted = granted.ok_or(AuthError::PermissionNotGiven)?;
        if !is_valid_range(&granted.key, &granted.range_end) {
            return Err(AuthError::InvalidManagement);
        }
        let found = self.roles.get(&role).ok_or(AuthError::RoleNotFound)?;
        let mut permissions = found.permissions.clone();
        let same = |one: &&mut Permission| {
            (&one.key, &one.range_end) == (&granted.key, &granted.range_end)
        };
        // The permission with exactly this range is searched for. etcd looks at only one permission
        // with the same key. If the role has several, etcd can overlook the one with this range,
        // and then adds the range twice.
        if let Some(one) = permissions.iter_mut().find(same) {
            one.perm_type = granted.perm_type;
        } else {
            permissions.push(granted);
            permissions.sort_by(|a, b| a.key.cmp(&b.key));
        }
        self.put_role(role, AuthRole { permissions });
        self.finish_change(RevokedTokens::NoUser)
    }

    fn revoke_permission(
        &mut self,
        role: String,
        key: &Bytes,
        range_end: &Bytes,
    ) -> Result<RevokedTokens, AuthError> {
        let found = self.roles.get(&role).ok_or(AuthError::RoleNotFound)?;
        let others = |one: &&Permission| (&one.key, &one.range_end) != (key, range_end);
        let permissions: Vec<_> = found.permissions.iter().filter(others).cloned().collect();
        if permissions.len() == found.permissions.len() {
            return Err(AuthError::PermissionNotGranted);
        }
        self.put_role(role, AuthRole { permissions });
        self.finish_change(RevokedTokens::NoUser)
    }
}

fn without_role(user: &User, role: &str) -> User {
    let mut user = User::clone(user);
    user.roles.retain(|one| one != role);
    user
}

/// Whether the pair is a valid range: a single key, a range that is not empty, or all keys from
/// `key` on.
fn is_valid_range(key: &Bytes, range_end: &Bytes) -> bool {
    !key.is_empty() && (range_end.is_empty() || &range_end[..] == b"\0" || key < range_end)
}
