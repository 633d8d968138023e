//! Reference model of the store, in plain maps: every change of every key, in order.
//!
//! The model applies each log entry once, in log order. It shares nothing with the store but the
//! types of requests and responses. It has no index, no table and no batches, and compaction
//! deletes nothing.
//!
//! Two kinds of tests compare the store with the model:
//! - The simulation applies committed entries to it. It then compares every outcome, every member's
//!   store and every watch. Each read is compared at the log index that the serving member had
//!   applied.
//! - `histories`, of the crate `muster-tests`, applies the requests of clients of the built
//!   programs.

pub mod leases;
pub mod members;
mod read;
mod txn;
pub mod users;

use std::collections::BTreeMap;

use bytes::Bytes;
use node_proto::command::{self, DecodedCommand, Operation};
use node_proto::etcdserverpb::{
    CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, PutRequest, PutResponse,
    ResponseHeader,
};
use node_proto::mvccpb::KeyValue;
use node_state::apply::{ApplyError, Outcome, Response};
use node_state::mvcc::{KeyRange, Revision};
use node_state::state_machine::{CommittedEntry, Position};

/// One change of one key, as watchers receive it. A delete has the key and its revision only.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyChange {
    /// Revision of the change.
    pub revision: Revision,
    /// Key-value record that this change has written.
    pub kv: KeyValue,
    /// True for a put, false for a delete.
    pub is_put: bool,
}

/// Revisions of a store after one log entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreRevisions {
    /// Newest revision of the store.
    pub revision: i64,
    /// Compaction revision: no earlier revision can be read.
    pub compacted: i64,
}

/// Result of one request in the log.
#[derive(Clone, Debug)]
pub struct ModelResult {
    /// Complete response or error.
    pub outcome: Outcome,
    /// Whether the request made a revision of its own.
    pub changed: bool,
}

/// State of the model after the entries applied so far.
#[derive(Debug)]
pub struct ReferenceModel {
    now: StoreRevisions,
    keys: BTreeMap<Bytes, Vec<KeyChange>>,
    changes: Vec<KeyChange>,
    /// Store state after each entry, by log index.
    states: BTreeMap<u64, StoreRevisions>,
    /// Results, by request id.
    results: BTreeMap<u64, ModelResult>,
    /// Number of changes that the request being applied has made so far.
    sub: u32,
    /// Members of the cluster, and their history.
    pub members: members::MembershipModel,
    /// Leases, and the changes made to them.
    pub leases: leases::Leases,
    /// Users and roles after the last entry.
    pub users: users::Users,
    /// Users and roles after each entry that changed them, by log index.
    users_at: BTreeMap<u64, users::Users>,
    /// Whether an expiry entry is refused in a later term than the term of its proposal. One test
    /// switches this off.
    pub refuses_outdated_expiry: bool,
}

impl Default for ReferenceModel {
    fn default() -> Self {
        let now = StoreRevisions { revision: 1, compacted: -1 };
        Self {
            now,
            keys: BTreeMap::new(),
            changes: Vec::new(),
            states: BTreeMap::from([(0, now)]),
            results: BTreeMap::new(),
            sub: 0,
            members: members::MembershipModel::default(),
            leases: leases::Leases::default(),
            users: users::Users::default(),
            users_at: BTreeMap::from([(0, users::Users::default())]),
            refuses_outdated_expiry: true,
        }
    }
}

fn header(revision: i64) -> Option<ResponseHeader> {
    Some(ResponseHeader { revision, ..ResponseHeader::default() })
}

impl ReferenceModel {
    /// Applies a committed entry, unless an entry with this index was applied before. Returns
    /// whether the entry changed the members.
    pub fn apply(&mut self, entry: &CommittedEntry) -> bool {
        let index = entry.position.index;
        if self.states.contains_key(&index) {
            return false;
        }
        let mut changed_members = false;
        match command::decode(entry.data.clone()) {
            Ok(DecodedCommand { operation: Operation::ChangeMember(change), .. }) => {
                changed_members = self.members.change(index, change);
            }
            Ok(DecodedCommand { operation: Operation::PublishMember(record), .. }) => {
                self.members.publish(&record);
            }
            Ok(DecodedCommand { request_id: request, caller, operation }) => {
                let changes_users =
                    matches!(operation, Operation::ChangeAuth(_) | Operation::AssignToken(_));
                let outcome = match self.permit(caller.as_ref(), &operation) {
                    Ok(()) => self.apply_operation(operation, entry.position),
                    Err(why) => Err(ApplyError::Auth(why)),
                };
                if changes_users && outcome.is_ok() {
                    self.users_at.insert(index, self.users.clone());
                }
                let changed = self.sub > 0;
                self.now.revision = self.revision();
                self.sub = 0;
                self.results.insert(request, ModelResult { outcome, changed });
            }
            Err(_) => {}
        }
        self.states.insert(index, self.now);
        changed_members
    }

    /// Returns the state of a store that has applied entries up to `index`, or `None` if that entry
    /// isn't committed yet.
    pub fn state(&self, index: u64) -> Option<StoreRevisions> {
        self.states.get(&index).copied()
    }

    /// Returns users and roles once entry `index` is applied.
    pub fn users_at(&self, index: u64) -> &users::Users {
        let last = self.users_at.range(..=index).next_back();
        last.map(|(_, users)| users).expect("there is one of the beginning")
    }

    /// Returns the result of a committed request.
    pub fn result_of(&self, request: u64) -> Option<&ModelResult> {
        self.results.get(&request)
    }

    /// Returns all changes after revision `after`, in order.
    pub fn changes_after(&self, after: Revision) -> &[KeyChange] {
        &self.changes[self.changes.partition_point(|change| change.revision <= after)..]
    }

    /// Returns the first change after revision `after` for which `matches` is true.
    pub fn next_change(
        &self,
        after: Revision,
        matches: impl Fn(&KeyChange) -> bool,
    ) -> Option<&KeyChange> {
        self.changes_after(after).iter().find(|change| matches(change))
    }

    /// Returns the newest revision.
    pub fn newest_revision(&self) -> i64 {
        self.now.revision
    }

    /// Returns the compaction revision: no earlier revision can be read.
    pub fn compacted(&self) -> i64 {
        self.now.compacted
    }

    /// Returns the newest revision, including the changes that the request being applied has made
    /// so far.
    fn revision(&self) -> i64 {
        self.now.revision + i64::from(self.sub > 0)
    }

    fn apply_operation(&mut self, operation: Operation, at: Position) -> Outcome {
        match operation {
            Operation::Put(put) => {
                self.check_put(&put)?;
                Ok(Response::Put(self.put(&put)))
            }
            Operation::DeleteRange(delete) => Ok(Response::DeleteRange(self.delete(&delete))),
            Operation::Txn(txn) => self.txn(&txn).map(Response::Txn),
            Operation::Compact(compact) => {
                if compact.revision <= self.now.compacted {
                    return Err(ApplyError::Compacted);
                }
                if compact.revision > self.now.revision {
                    return Err(ApplyError::FutureRevision);
                }
                self.now.compacted = compact.revision;
                Ok(Response::Compact(CompactionResponse { header: header(self.now.revision) }))
            }
            Operation::LeaseGrant(request) => self.grant(request, at),
            Operation::LeaseRevoke(request) => self.revoke(request.id),
            Operation::LeaseExpire(expiry) => self.expire(expiry, at),
            Operation::LeaseCheckpoint(checkpoint) => self.apply_checkpoint(&checkpoint, at),
            Operation::ChangeAuth(change) => self.change_users(change),
            Operation::AssignToken(assign) => self.assign_token(assign, at),
            Operation::Alarm(_)
            | Operation::MarkCorrupt(_)
            | Operation::PublishMember(_)
            | Operation::ChangeMember(_) => {
                unreachable!("no simulated client asks for it")
            }
        }
    }

    fn check_put(&self, put: &PutRequest) -> Result<(), ApplyError> {
        if put.lease != 0 && !self.leases.all.contains_key(&put.lease) {
            return Err(ApplyError::LeaseNotFound);
        }
        let needs_key = put.ignore_value || put.ignore_lease;
        if needs_key && self.live_record(&put.key, i64::MAX).is_none() {
            return Err(ApplyError::KeyNotFound);
        }
        Ok(())
    }

    fn change(&mut self, is_put: bool, kv: KeyValue) {
        let at = Revision { main: self.now.revision + 1, sub: self.sub };
        self.sub += 1;
        let change = KeyChange { revision: at, kv, is_put };
        self.keys.entry(change.kv.key.clone()).or_default().push(change.clone());
        self.changes.push(change);
    }

    fn put(&mut self, put: &PutRequest) -> PutResponse {
        let before = self.live_record(&put.key, i64::MAX).cloned();
        let now = self.now.revision + 1;
        let value = match &before {
            Some(before) if put.ignore_value => before.value.clone(),
            _ => put.value.clone(),
        };
        let lease = match &before {
            Some(before) if put.ignore_lease => before.lease,
            _ => put.lease,
        };
        self.change(
            true,
            KeyValue {
                key: put.key.clone(),
                create_revision: before.as_ref().map_or(now, |before| before.create_revision),
                mod_revision: now,
                version: before.as_ref().map_or(0, |before| before.version) + 1,
                value,
                lease,
            },
        );
        PutResponse { header: header(now), prev_kv: before.filter(|_| put.prev_kv) }
    }

    fn delete(&mut self, delete: &DeleteRangeRequest) -> DeleteRangeResponse {
        let range = KeyRange::new(delete.key.clone(), delete.range_end.clone());
        let before = self.records_in(&range, i64::MAX);
        let main = self.now.revision + 1;
        for kv in &before {
            let tombstone =
                KeyValue { key: kv.key.clone(), mod_revision: main, ..KeyValue::default() };
            self.change(false, tombstone);
        }
        let deleted = i64::try_from(before.len()).expect("few");
        let prev_kvs = if delete.prev_kv { before } else { Vec::new() };
        DeleteRangeResponse { header: header(self.revision()), deleted, prev_kvs }
    }
}
