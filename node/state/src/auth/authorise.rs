//! The decision whether a caller has permission for a request.

use std::cell::Cell;
use std::sync::Arc;

use node_proto::command::{self, Operation};
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{
    DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest,
};

use super::state::{AuthError, AuthState, User};
use crate::lease::LeaseTable;

/// The originator of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A client that has not authenticated.
    Unauthenticated,
    /// A user who has authenticated.
    User {
        name: Arc<str>,
        /// Revision of users and roles at which the user was identified.
        revision: u64,
    },
    /// A member, acting on its own behalf.
    Member,
}

impl From<Caller> for Option<command::Caller> {
    fn from(caller: Caller) -> Self {
        match caller {
            Caller::Unauthenticated => None,
            Caller::Member => command::member_caller(),
            Caller::User { name, revision } => {
                Some(command::Caller { user: name.to_string(), revision, member: false })
            }
        }
    }
}

impl From<Option<command::Caller>> for Caller {
    fn from(said: Option<command::Caller>) -> Self {
        match said {
            None => Self::Unauthenticated,
            Some(command::Caller { member: true, .. }) => Self::Member,
            Some(command::Caller { user, revision, .. }) => {
                Self::User { name: user.into(), revision }
            }
        }
    }
}

/// The part of a request that decides which permission it needs. Every client request and every
/// operation of the log maps to one of these.
#[derive(Clone, Copy, Debug)]
pub enum RequestedAccess<'a> {
    /// Read a range of keys.
    Range(&'a RangeRequest),
    /// Write a key and attach it to a lease.
    Put(&'a PutRequest),
    /// Delete a range, and perhaps read the deleted values.
    DeleteRange(&'a DeleteRangeRequest),
    /// Carry out a transaction. All of its branches must be allowed.
    Txn(&'a TxnRequest),
    /// Watch a range of keys.
    Watch(&'a WatchCreateRequest),
    /// Revoke the lease with this id, which deletes its keys.
    LeaseRevoke(i64),
    /// Keep the lease with this id alive, and so its keys.
    LeaseKeepAlive(i64),
    /// List the keys that are attached to the lease with this id.
    LeaseKeys(i64),
    /// List the ids of all leases.
    ListLeases,
    /// Get the roles of the named user.
    UserGet(&'a str),
    /// Get the permissions of the named role.
    RoleGet(&'a str),
    /// Allowed for every user.
    AnyUser,
    /// Allowed only for users with the role `root`.
    RootRole,
    /// Allowed for every caller.
    AnyCaller,
    /// Authenticate. Any token that the caller presented before is ignored.
    Authenticate,
}

impl<'a> From<&'a Operation> for RequestedAccess<'a> {
    fn from(operation: &'a Operation) -> Self {
        match operation {
            Operation::Put(put) => Self::Put(put),
            Operation::DeleteRange(delete) => Self::DeleteRange(delete),
            Operation::Txn(txn) => Self::Txn(txn),
            Operation::LeaseGrant(_) => Self::AnyUser,
            Operation::LeaseRevoke(revoke) => Self::LeaseRevoke(revoke.id),
            Operation::Compact(_)
            | Operation::Alarm(_)
            | Operation::MarkCorrupt(_)
            | Operation::ChangeAuth(_) => Self::RootRole,
            // Members propose these operations on their own behalf. If a client's request led to
            // the operation, that request was authorised before.
            Operation::AssignToken(_)
            | Operation::LeaseExpire(_)
            | Operation::LeaseCheckpoint(_)
            | Operation::PublishMember(_)
            | Operation::ChangeMember(_) => Self::AnyCaller,
        }
    }
}

/// Checks whether `caller` may do what `access` describes. The errors and their precedence are
/// etcd's (server/auth/store.go, server/etcdserver/apply/auth.go, server/etcdserver/v3_server.go).
pub fn authorise(
    state: &AuthState,
    caller: &Caller,
    access: RequestedAccess<'_>,
    leases: &LeaseTable,
) -> Result<(), AuthError> {
    if !state.enabled || *caller == Caller::Member {
        return Ok(());
    }
    let check = AccessCheck { state, caller, leases, checked_lease: Cell::new(0) };
    match access {
        RequestedAccess::Range(range) => check.check_read(&range.key, &range.range_end),
        RequestedAccess::Put(put) => check.check_put(put),
        RequestedAccess::DeleteRange(delete) => check.check_delete(delete),
        RequestedAccess::Txn(txn) => check.check_txn(txn),
        RequestedAccess::Watch(watch) => check.check_read(&watch.key, &watch.range_end),
        RequestedAccess::LeaseRevoke(id) | RequestedAccess::LeaseKeepAlive(id) => {
            check.caller_name()?;
            check.check_lease_keys(id, AccessCheck::check_write)
        }
        RequestedAccess::LeaseKeys(id) => {
            check.caller_name()?;
            check.check_lease_keys(id, |check, key| check.check_read(key, b""))
        }
        RequestedAccess::ListLeases => {
            check.caller_name()?;
            if check.check_root().is_ok() {
                return Ok(());
            }
            leases.iter().try_for_each(|lease| {
                check.check_lease_keys(lease.id, |check, key| check.check_read(key, b""))
            })
        }
        RequestedAccess::UserGet(name) => {
            check.check_root().or_else(|why| check.is_user(name).ok_or(why))
        }
        RequestedAccess::RoleGet(name) => {
            check.check_root().or_else(|why| check.has_role(name).ok_or(why))
        }
        RequestedAccess::AnyUser => check.caller_name().map(|_| ()),
        RequestedAccess::RootRole => check.check_root(),
        RequestedAccess::AnyCaller | RequestedAccess::Authenticate => Ok(()),
    }
}

struct AccessCheck<'a> {
    state: &'a AuthState,
    caller: &'a Caller,
    leases: &'a LeaseTable,
    /// The last lease for which this caller may write all attached keys, or 0 if no lease was
    /// checked yet. Most puts of a transaction name the same lease, which can have many keys. So
    /// the keys of that lease are checked only once.
    checked_lease: Cell<i64>,
}

impl<'a> AccessCheck<'a> {
    fn caller_name(&self) -> Result<&'a str, AuthError> {
        match self.caller {
            Caller::User { name, .. } => Ok(name),
            Caller::Unauthenticated | Caller::Member => Err(AuthError::UserEmpty),
        }
    }

    /// Returns the calling user. Fails if users or roles have changed since the user was
    /// identified.
    fn current_user(&self) -> Result<&'a User, AuthError> {
        let name = self.caller_name()?;
        if let Caller::User { revision, .. } = self.caller
            && *revision < self.state.revision
        {
            return Err(AuthError::OldRevision);
        }
        self.state.users.get(name).map(AsRef::as_ref).ok_or(AuthError::Denied)
    }

    fn check_root(&self) -> Result<(), AuthError> {
        let name = self.caller_name()?;
        if name.is_empty() {
            return Err(AuthError::UserEmpty);
        }
        let user = self.state.users.get(name).ok_or(AuthError::UserNotFound)?;
        if user.permissions.is_root { Ok(()) } else { Err(AuthError::Denied) }
    }

    fn is_user(&self, name: &str) -> Option<()> {
        (self.caller_name() == Ok(name)).then_some(())
    }

    fn has_role(&self, role: &str) -> Option<()> {
        let user = self.state.users.get(self.caller_name().ok()?)?;
        user.has_role(role).then_some(())
    }

    fn check_read(&self, key: &[u8], range_end: &[u8]) -> Result<(), AuthError> {
        let may = &self.current_user()?.permissions;
        if may.is_root || may.read.covers(key, range_end) { Ok(()) } else { Err(AuthError::Denied) }
    }

    fn check_write_range(&self, key: &[u8], range_end: &[u8]) -> Result<(), AuthError> {
        let may = &self.current_user()?.permissions;
        if may.is_root || may.write.covers(key, range_end) {
            Ok(())
        } else {
            Err(AuthError::Denied)
        }
    }

    fn check_write(&self, key: &[u8]) -> Result<(), AuthError> {
        self.check_write_range(key, b"")
    }

    /// Checks a put, which may attach its key to a lease. Revoking a lease deletes its keys, so the
    /// caller must have write permission for all keys attached already. Returning the previous
    /// value needs read permission.
    fn check_put(&self, put: &PutRequest) -> Result<(), AuthError> {
        self.check_write(&put.key)?;
        if put.lease != self.checked_lease.get() {
            self.check_lease_keys(put.lease, Self::check_write)?;
            self.checked_lease.set(put.lease);
        }
        if put.prev_kv { self.check_read(&put.key, b"") } else { Ok(()) }
    }

    fn check_delete(&self, delete: &DeleteRangeRequest) -> Result<(), AuthError> {
        self.check_write_range(&delete.key, &delete.range_end)?;
        if delete.prev_kv { self.check_read(&delete.key, &delete.range_end) } else { Ok(()) }
    }

    /// Checks both branches, at any depth, because the choice of a branch also reveals something
    /// about the data.
    fn check_txn(&self, txn: &TxnRequest) -> Result<(), AuthError> {
        // Even an empty transaction needs a valid user.
        self.current_user()?;
        for compare in &txn.compare {
            self.check_read(&compare.key, &compare.range_end)?;
        }
        txn.success
            .iter()
            .chain(&txn.failure)
            .try_for_each(|operation| self.check_operation(operation))
    }

    fn check_operation(&self, operation: &RequestOp) -> Result<(), AuthError> {
        match &operation.request {
            Some(Request::RequestRange(range)) => self.check_read(&range.key, &range.range_end),
            Some(Request::RequestPut(put)) => self.check_put(put),
            Some(Request::RequestDeleteRange(delete)) => self.check_delete(delete),
            Some(Request::RequestTxn(nested)) => self.check_txn(nested),
            None => Ok(()),
        }
    }

    /// Checks that `may` succeeds for each key that is attached to the lease. For a user with the
    /// role `root`, nothing is checked.
    fn check_lease_keys(
        &self,
        id: i64,
        may: impl Fn(&Self, &[u8]) -> Result<(), AuthError>,
    ) -> Result<(), AuthError> {
        if self.check_root().is_ok() {
            return Ok(());
        }
        self.leases.keys(id).try_for_each(|key| may(self, key))
    }
}
