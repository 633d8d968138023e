//! Users, roles and tokens of the model: which user may do what, and which tokens are valid.
//!
//! The model shares only the error types with the production code. It keeps permissions as they
//! were granted, and walks along a range to find out whether they cover the range.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use node_proto::authpb::{Permission, permission};
use node_proto::command::{AssignToken, AuthChange, Caller, Operation};
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{DeleteRangeRequest, PutRequest, RequestOp, TxnRequest};
use node_state::apply::{ApplyError, Outcome, Response};
use node_state::auth::{AuthError, AuthOperation, AuthState, Password};
use node_state::mvcc::KeyRange;
use node_state::state_machine::Position;

use super::{ReferenceModel, header};

const ROOT: &str = "root";
/// End of a range that has no last key (etcd's `\0`).
const OPEN_END: &[u8] = &[0];

#[derive(Clone, Debug, Default, PartialEq)]
struct User {
    hash: Option<Bytes>,
    roles: BTreeSet<String>,
}

/// Permission kind of each granted range.
type Role = BTreeMap<(Bytes, Bytes), i32>;

/// Users, roles and tokens after the entries applied so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Users {
    /// Whether authentication is enabled.
    pub enabled: bool,
    /// Auth revision: begins at 1 and grows by one with each change.
    pub revision: u64,
    users: BTreeMap<String, User>,
    roles: BTreeMap<String, Role>,
    /// User of each valid token, by the index of the entry that assigned the token.
    tokens: BTreeMap<u64, String>,
}

impl Default for Users {
    fn default() -> Self {
        let (users, roles, tokens) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { enabled: false, revision: 1, users, roles, tokens }
    }
}

/// Kind of permission that a request needs: to read or to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AccessKind {
    Read,
    Write,
}

impl Users {
    /// Returns the user of the token that entry `entry` assigned, if the token is still valid.
    pub fn token(&self, entry: u64) -> Option<&str> {
        self.tokens.get(&entry).map(String::as_str)
    }

    /// Compares the model with a member's users and roles. Returns a description of both if they
    /// differ.
    pub fn differs(&self, found: &AuthState) -> Option<String> {
        let mut found_users = Self { enabled: found.is_enabled(), ..Self::default() };
        found_users.revision = found.revision();
        found_users.tokens.clone_from(&self.tokens);
        for (name, row) in found.user_rows() {
            let has_none = row.options.is_some_and(|options| options.no_password);
            let hash = (!has_none).then_some(row.password);
            let user = User { hash, roles: row.roles.into_iter().collect() };
            found_users.users.insert(name.to_owned(), user);
        }
        for (name, row) in found.role_rows() {
            let permissions = row.key_permission.into_iter();
            let permissions = permissions.map(|one| ((one.key, one.range_end), one.perm_type));
            found_users.roles.insert(name.to_owned(), permissions.collect());
        }
        (found_users != *self).then(|| format!("{found_users:?}, not {self:?}"))
    }

    /// Checks whether `caller` may read the range.
    pub fn may_read(
        &self,
        caller: Option<&Caller>,
        key: &[u8],
        range_end: &[u8],
    ) -> Result<(), AuthError> {
        if self.enabled {
            self.check_access(caller, AccessKind::Read, key, range_end)
        } else {
            Ok(())
        }
    }

    fn is_root(&self, caller: Option<&Caller>) -> Result<(), AuthError> {
        let name = &caller.ok_or(AuthError::UserEmpty)?.user;
        let user = self.users.get(name).ok_or(AuthError::UserNotFound)?;
        if user.roles.contains(ROOT) { Ok(()) } else { Err(AuthError::Denied) }
    }

    fn user(&self, caller: Option<&Caller>) -> Result<&User, AuthError> {
        let caller = caller.ok_or(AuthError::UserEmpty)?;
        if caller.revision < self.revision {
            return Err(AuthError::OldRevision);
        }
        self.users.get(&caller.user).ok_or(AuthError::Denied)
    }

    fn check_access(
        &self,
        caller: Option<&Caller>,
        to: AccessKind,
        key: &[u8],
        range_end: &[u8],
    ) -> Result<(), AuthError> {
        let user = self.user(caller)?;
        if user.roles.contains(ROOT) {
            return Ok(());
        }
        let granted = user.roles.iter().filter_map(|name| self.roles.get(name)).flatten();
        let other = match to {
            AccessKind::Read => permission::Type::Write,
            AccessKind::Write => permission::Type::Read,
        };
        let granted = granted.filter(|(_, kind)| **kind != i32::from(other));
        let spans: Vec<_> = granted.map(|((key, end), _)| (&key[..], end_of(key, end))).collect();
        if is_covered(&spans, key, range_end) { Ok(()) } else { Err(AuthError::Denied) }
    }

    fn change(&mut self, change: AuthOperation) -> Result<(), AuthError> {
        match change {
            AuthOperation::Enable(_) => {
                let root = self.users.get(ROOT);
                if !self.enabled && !root.ok_or(AuthError::NoRootUser)?.roles.contains(ROOT) {
                    return Err(AuthError::NoRootRole);
                }
                self.enabled = true;
                return Ok(());
            }
            AuthOperation::Disable(_) if !self.enabled => return Ok(()),
            AuthOperation::Disable(_) => {
                self.enabled = false;
                self.tokens.clear();
            }
            AuthOperation::UserGrantRole(grant) => {
                let user = self.users.get_mut(&grant.user).ok_or(AuthError::UserNotFound)?;
                if grant.role != ROOT && !self.roles.contains_key(&grant.role) {
                    return Err(AuthError::RoleNotFound);
                }
                if !user.roles.insert(grant.role) {
                    return Ok(());
                }
            }
            AuthOperation::UserRevokeRole(revoke) => {
                if self.enabled && (&revoke.name[..], &revoke.role[..]) == (ROOT, ROOT) {
                    return Err(AuthError::InvalidManagement);
                }
                let user = self.users.get_mut(&revoke.name).ok_or(AuthError::UserNotFound)?;
                if !user.roles.remove(&revoke.role) {
                    return Err(AuthError::RoleNotGranted);
                }
            }
            AuthOperation::UserAdd(_)
            | AuthOperation::UserDelete(_)
            | AuthOperation::UserChangePassword(_) => {
                self.change_user(change)?;
            }
            AuthOperation::RoleAdd(_)
            | AuthOperation::RoleDelete(_)
            | AuthOperation::RoleGrantPermission(_)
            | AuthOperation::RoleRevokePermission(_) => self.change_role(change)?,
        }
        self.revision += 1;
        Ok(())
    }

    fn change_user(&mut self, change: AuthOperation) -> Result<(), AuthError> {
        match change {
            AuthOperation::UserAdd(Password { name, .. }) if name.is_empty() => {
                Err(AuthError::UserEmpty)
            }
            AuthOperation::UserAdd(Password { name, hash, no_password }) => {
                if self.users.contains_key(&name) {
                    return Err(AuthError::UserExists);
                }
                let hash = (!no_password).then_some(hash);
                self.users.insert(name, User { hash, ..User::default() });
                Ok(())
            }
            AuthOperation::UserDelete(delete) => {
                if self.enabled && delete.name == ROOT {
                    return Err(AuthError::InvalidManagement);
                }
                self.users.remove(&delete.name).ok_or(AuthError::UserNotFound)?;
                self.tokens.retain(|_, user| *user != delete.name);
                Ok(())
            }
            AuthOperation::UserChangePassword(Password { name, hash, .. }) => {
                let user = self.users.get_mut(&name).ok_or(AuthError::UserNotFound)?;
                user.hash = user.hash.is_some().then_some(hash);
                self.tokens.retain(|_, user| *user != name);
                Ok(())
            }
            _ => unreachable!("others are not about one user alone"),
        }
    }

    fn change_role(&mut self, change: AuthOperation) -> Result<(), AuthError> {
        match change {
            AuthOperation::RoleAdd(add) if add.name.is_empty() => Err(AuthError::RoleEmpty),
            AuthOperation::RoleAdd(add) => {
                if self.roles.contains_key(&add.name) {
                    return Err(AuthError::RoleExists);
                }
                self.roles.insert(add.name, Role::new());
                Ok(())
            }
            AuthOperation::RoleDelete(delete) => {
                if self.enabled && delete.role == ROOT {
                    return Err(AuthError::InvalidManagement);
                }
                self.roles.remove(&delete.role).ok_or(AuthError::RoleNotFound)?;
                self.users.values_mut().for_each(|user| _ = user.roles.remove(&delete.role));
                Ok(())
            }
            AuthOperation::RoleGrantPermission(grant) => {
                let role = self.roles.get_mut(&grant.name);
                let Permission { perm_type, key, range_end } =
                    grant.perm.ok_or(AuthError::PermissionNotGiven)?;
                let is_empty = end_of(&key, &range_end).is_some_and(|end| end[..] <= key[..]);
                if key.is_empty() || is_empty {
                    return Err(AuthError::InvalidManagement);
                }
                role.ok_or(AuthError::RoleNotFound)?.insert((key, range_end), perm_type);
                Ok(())
            }
            AuthOperation::RoleRevokePermission(revoke) => {
                let role = self.roles.get_mut(&revoke.role).ok_or(AuthError::RoleNotFound)?;
                let removed = role.remove(&(revoke.key, revoke.range_end));
                removed.map(|_| ()).ok_or(AuthError::PermissionNotGranted)
            }
            _ => unreachable!("others are not about a role alone"),
        }
    }
}

/// Returns the exclusive end of a range, or `None` if the range has no end.
fn end_of(key: &[u8], range_end: &[u8]) -> Option<Bytes> {
    match range_end {
        [] => Some([key, &[0]].concat().into()),
        OPEN_END => None,
        _ => Some(Bytes::copy_from_slice(range_end)),
    }
}

/// Returns whether `spans` cover the whole range of a request. A range whose end isn't after its
/// key is treated as that single key.
fn is_covered(spans: &[(&[u8], Option<Bytes>)], key: &[u8], range_end: &[u8]) -> bool {
    let is_empty_range = range_end != OPEN_END && range_end <= key;
    is_path_covered(spans, key, end_of(key, if is_empty_range { b"" } else { range_end }))
}

/// Walks from `key` to `to`. Each step goes to the end of the span that reaches furthest. Returns
/// false at the first gap between spans.
fn is_path_covered(spans: &[(&[u8], Option<Bytes>)], key: &[u8], to: Option<Bytes>) -> bool {
    let mut at = Bytes::copy_from_slice(key);
    loop {
        let here = spans.iter().filter(|(from, _)| *from <= &at[..]);
        let mut ends =
            here.map(|(_, end)| end).filter(|end| end.as_ref().is_none_or(|end| *end > at));
        let Some(first) = ends.next() else { return false };
        let furthest = ends.fold(first, |a, b| match (a, b) {
            (None, _) | (_, None) => &None,
            (Some(one), Some(other)) => {
                if one < other {
                    b
                } else {
                    a
                }
            }
        });
        match (furthest, &to) {
            (None, _) => return true,
            (Some(end), Some(to)) if end >= to => return true,
            (Some(end), _) => at = end.clone(),
        }
    }
}

impl ReferenceModel {
    /// Checks whether `caller` may perform `operation`.
    pub fn permit(&self, caller: Option<&Caller>, operation: &Operation) -> Result<(), AuthError> {
        let users = &self.users;
        if !users.enabled || caller.is_some_and(|caller| caller.member) {
            return Ok(());
        }
        match operation {
            Operation::Put(put) => self.permit_put(caller, put),
            Operation::DeleteRange(delete) => self.permit_delete(caller, delete),
            Operation::Txn(txn) => self.permit_txn(caller, txn),
            Operation::LeaseGrant(_) => caller.map(|_| ()).ok_or(AuthError::UserEmpty),
            Operation::LeaseRevoke(revoke) => {
                caller.ok_or(AuthError::UserEmpty)?;
                self.permit_lease(caller, revoke.id)
            }
            Operation::Compact(_) | Operation::ChangeAuth(_) => users.is_root(caller),
            _ => Ok(()),
        }
    }

    /// Checks permission to revoke a lease or to attach a key to it. The caller needs write
    /// permission for every key that is already attached, because these keys are deleted when the
    /// lease ends.
    fn permit_lease(&self, caller: Option<&Caller>, lease: i64) -> Result<(), AuthError> {
        if lease == 0 || self.users.is_root(caller).is_ok() {
            return Ok(());
        }
        let everything = KeyRange::From(Bytes::from_static(OPEN_END));
        let mut attached =
            self.records_in(&everything, i64::MAX).into_iter().filter(|kv| kv.lease == lease);
        attached.try_for_each(|kv| self.users.check_access(caller, AccessKind::Write, &kv.key, b""))
    }

    fn permit_put(&self, caller: Option<&Caller>, put: &PutRequest) -> Result<(), AuthError> {
        self.users.check_access(caller, AccessKind::Write, &put.key, b"")?;
        self.permit_lease(caller, put.lease)?;
        if put.prev_kv {
            self.users.check_access(caller, AccessKind::Read, &put.key, b"")
        } else {
            Ok(())
        }
    }

    fn permit_delete(
        &self,
        caller: Option<&Caller>,
        delete: &DeleteRangeRequest,
    ) -> Result<(), AuthError> {
        let (key, range_end) = (&delete.key, &delete.range_end);
        self.users.check_access(caller, AccessKind::Write, key, range_end)?;
        if delete.prev_kv {
            self.users.check_access(caller, AccessKind::Read, key, range_end)
        } else {
            Ok(())
        }
    }

    /// Checks whether `caller` may make all comparisons of a transaction, and all operations of
    /// both branches.
    fn permit_txn(&self, caller: Option<&Caller>, txn: &TxnRequest) -> Result<(), AuthError> {
        self.users.user(caller)?;
        for compare in &txn.compare {
            self.users.check_access(caller, AccessKind::Read, &compare.key, &compare.range_end)?;
        }
        for RequestOp { request } in txn.success.iter().chain(&txn.failure) {
            match request.as_ref().expect("simulated clients ask for something") {
                Request::RequestPut(put) => self.permit_put(caller, put)?,
                Request::RequestDeleteRange(delete) => self.permit_delete(caller, delete)?,
                Request::RequestRange(range) => {
                    self.users.check_access(
                        caller,
                        AccessKind::Read,
                        &range.key,
                        &range.range_end,
                    )?;
                }
                Request::RequestTxn(_) => unreachable!("no simulated client nests them"),
            }
        }
        Ok(())
    }

    pub(super) fn change_users(&mut self, change: AuthChange) -> Outcome {
        let change = change.change.expect("simulated clients ask for something");
        self.users.change(change).map_err(ApplyError::Auth)?;
        Ok(Response::AuthChanged(header(self.now.revision)))
    }

    pub(super) fn assign_token(&mut self, assign: AssignToken, at: Position) -> Outcome {
        let users = &mut self.users;
        let has_password =
            |users: &Users| users.users.get(&assign.user).is_some_and(|user| user.hash.is_some());
        let refusal = match users {
            _ if !users.enabled => Some(AuthError::NotEnabled),
            _ if users.revision != assign.revision => Some(AuthError::OldRevision),
            _ if !has_password(users) => Some(AuthError::Failed),
            _ => None,
        };
        if let Some(why) = refusal {
            return Err(ApplyError::Auth(why));
        }
        users.tokens.insert(at.index, assign.user);
        Ok(Response::TokenAssigned { header: header(self.now.revision), index: at.index })
    }
}
