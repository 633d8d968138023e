//! The decision.

use std::cell::Cell;
use std::sync::Arc;

use node_proto::command::{self, Operation};
use node_proto::etcdserverpb::request_op::Request;
use node_proto::etcdserverpb::{
    DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest,
};

use super::state::{AuthError, AuthState, User};
use crate::lease::LeaseTable;

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Somebody who has not said.
    Nobody,
    /// A user, and the revision of users and roles by which that was found out.
    User {
        /// The name.
        name: Arc<str>,
        /// The revision.
        revision: u64,
    },
    /// A member, on its own behalf.
    Member,
}

impl From<Option<command::Caller>> for Caller {
    fn from(said: Option<command::Caller>) -> Self {
        match said {
            None => Self::Nobody,
            Some(command::Caller { member: true, .. }) => Self::Member,
            Some(command::Caller { user, revision, .. }) => {
                Self::User { name: user.into(), revision }
            }
        }
    }
}

/// What is asked for, as far as it matters for who may.
///
/// Everything that a client can ask has a place here, and so has each operation of the log.
#[derive(Clone, Copy, Debug)]
pub enum Access<'a> {
    /// To read a range.
    Range(&'a RangeRequest),
    /// To write a key.
    Put(&'a PutRequest),
    /// To delete a range.
    DeleteRange(&'a DeleteRangeRequest),
    /// A transaction: all of it, whichever branch it takes.
    Txn(&'a TxnRequest),
    /// To watch a range.
    Watch(&'a WatchCreateRequest),
    /// To end this lease, and with it its keys.
    LeaseRevoke(i64),
    /// To keep this lease alive, and with it its keys.
    LeaseKeepAlive(i64),
    /// To see which keys are attached to this lease.
    LeaseKeys(i64),
    /// To see all leases.
    Leases,
    /// To see a user's roles.
    UserGet(&'a str),
    /// To see what a role permits.
    RoleGet(&'a str),
    /// What every user may.
    Known,
    /// What is for `root` alone.
    Root,
    /// What everybody may.
    Anybody,
    /// To say who one is: whatever one showed before counts for nothing.
    Authenticate,
}

impl<'a> From<&'a Operation> for Access<'a> {
    fn from(operation: &'a Operation) -> Self {
        match operation {
            Operation::Put(put) => Self::Put(put),
            Operation::DeleteRange(delete) => Self::DeleteRange(delete),
            Operation::Txn(txn) => Self::Txn(txn),
            Operation::LeaseGrant(_) => Self::Known,
            Operation::LeaseRevoke(revoke) => Self::LeaseRevoke(revoke.id),
            Operation::Compact(_)
            | Operation::Alarm(_)
            | Operation::MarkCorrupt(_)
            | Operation::ChangeAuth(_) => Self::Root,
            // Members say these on their own behalf: what a client's wish has to do with them was judged
            // before.
            Operation::AssignToken(_)
            | Operation::LeaseExpire(_)
            | Operation::LeaseCheckpoint(_)
            | Operation::PublishMember(_)
            | Operation::ChangeMember(_) => Self::Anybody,
        }
    }
}

/// Whether `caller` may do what `access` says. The errors, and which comes first, are etcd's
/// (server/auth/store.go, server/etcdserver/apply/auth.go, server/etcdserver/v3_server.go).
pub fn authorise(
    state: &AuthState,
    caller: &Caller,
    access: Access<'_>,
    leases: &LeaseTable,
) -> Result<(), AuthError> {
    if !state.enabled || *caller == Caller::Member {
        return Ok(());
    }
    let check = Check { state, caller, leases, may_attach_to: Cell::new(0) };
    match access {
        Access::Range(range) => check.read(&range.key, &range.range_end),
        Access::Put(put) => check.put(put),
        Access::DeleteRange(delete) => check.delete(delete),
        Access::Txn(txn) => check.txn(txn),
        Access::Watch(watch) => check.read(&watch.key, &watch.range_end),
        Access::LeaseRevoke(id) | Access::LeaseKeepAlive(id) => {
            check.known()?;
            check.lease(id, Check::write)
        }
        Access::LeaseKeys(id) => {
            check.known()?;
            check.lease(id, |check, key| check.read(key, b""))
        }
        Access::Leases => {
            check.known()?;
            if check.root().is_ok() {
                return Ok(());
            }
            leases
                .iter()
                .try_for_each(|lease| check.lease(lease.id, |check, key| check.read(key, b"")))
        }
        Access::UserGet(name) => check.root().or_else(|why| check.is_user(name).ok_or(why)),
        Access::RoleGet(name) => check.root().or_else(|why| check.has_role(name).ok_or(why)),
        Access::Known => check.known().map(|_| ()),
        Access::Root => check.root(),
        Access::Anybody | Access::Authenticate => Ok(()),
    }
}

struct Check<'a> {
    state: &'a AuthState,
    caller: &'a Caller,
    leases: &'a LeaseTable,
    /// A lease whose keys it may write, all of them, as was found out; 0: none. A transaction's puts are mostly
    /// of one lease, which may have many.
    may_attach_to: Cell<i64>,
}

impl<'a> Check<'a> {
    fn known(&self) -> Result<&'a str, AuthError> {
        match self.caller {
            Caller::User { name, .. } => Ok(name),
            Caller::Nobody | Caller::Member => Err(AuthError::UserEmpty),
        }
    }

    /// The user, by users and roles that have not changed since it was found out who asks.
    fn user(&self) -> Result<&'a User, AuthError> {
        let name = self.known()?;
        if let Caller::User { revision, .. } = self.caller
            && *revision < self.state.revision
        {
            return Err(AuthError::OldRevision);
        }
        self.state.users.get(name).map(AsRef::as_ref).ok_or(AuthError::Denied)
    }

    fn root(&self) -> Result<(), AuthError> {
        let name = self.known()?;
        if name.is_empty() {
            return Err(AuthError::UserEmpty);
        }
        let user = self.state.users.get(name).ok_or(AuthError::UserNotFound)?;
        if user.permitted.is_root { Ok(()) } else { Err(AuthError::Denied) }
    }

    fn is_user(&self, name: &str) -> Option<()> {
        (self.known() == Ok(name)).then_some(())
    }

    fn has_role(&self, role: &str) -> Option<()> {
        let user = self.state.users.get(self.known().ok()?)?;
        user.has_role(role).then_some(())
    }

    fn read(&self, key: &[u8], range_end: &[u8]) -> Result<(), AuthError> {
        let may = &self.user()?.permitted;
        if may.is_root || may.read.covers(key, range_end) { Ok(()) } else { Err(AuthError::Denied) }
    }

    fn write_range(&self, key: &[u8], range_end: &[u8]) -> Result<(), AuthError> {
        let may = &self.user()?.permitted;
        if may.is_root || may.write.covers(key, range_end) {
            Ok(())
        } else {
            Err(AuthError::Denied)
        }
    }

    fn write(&self, key: &[u8]) -> Result<(), AuthError> {
        self.write_range(key, b"")
    }

    /// A key that is attached to a lease ends with it. So who may not write all that is attached to it
    /// may neither end it nor add a key, and whoever sees the old value may read it.
    fn put(&self, put: &PutRequest) -> Result<(), AuthError> {
        self.write(&put.key)?;
        if put.lease != self.may_attach_to.get() {
            self.lease(put.lease, Self::write)?;
            self.may_attach_to.set(put.lease);
        }
        if put.prev_kv { self.read(&put.key, b"") } else { Ok(()) }
    }

    fn delete(&self, delete: &DeleteRangeRequest) -> Result<(), AuthError> {
        self.write_range(&delete.key, &delete.range_end)?;
        if delete.prev_kv { self.read(&delete.key, &delete.range_end) } else { Ok(()) }
    }

    /// Both branches, at any depth: which one is taken tells something, too.
    fn txn(&self, txn: &TxnRequest) -> Result<(), AuthError> {
        // Also of one that does nothing.
        self.user()?;
        for compare in &txn.compare {
            self.read(&compare.key, &compare.range_end)?;
        }
        txn.success.iter().chain(&txn.failure).try_for_each(|operation| self.operation(operation))
    }

    fn operation(&self, operation: &RequestOp) -> Result<(), AuthError> {
        match &operation.request {
            Some(Request::RequestRange(range)) => self.read(&range.key, &range.range_end),
            Some(Request::RequestPut(put)) => self.put(put),
            Some(Request::RequestDeleteRange(delete)) => self.delete(delete),
            Some(Request::RequestTxn(nested)) => self.txn(nested),
            None => Ok(()),
        }
    }

    /// Whether `may` holds for each key that is attached to a lease.
    fn lease(
        &self,
        id: i64,
        may: impl Fn(&Self, &[u8]) -> Result<(), AuthError>,
    ) -> Result<(), AuthError> {
        if self.root().is_ok() {
            return Ok(());
        }
        self.leases.keys(id).try_for_each(|key| may(self, key))
    }
}
