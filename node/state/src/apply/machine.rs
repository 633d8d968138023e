//! The node's state machine: applies entries to the store, and takes and installs snapshots.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Instant;

use node_proto::command::{self, Operation, PublishMember};
use node_proto::etcdserverpb::alarm_request::AlarmAction;
use node_proto::etcdserverpb::{
    AlarmMember, AlarmRequest, AlarmResponse, AlarmType, CompactionResponse,
};
use redb::StorageBackend;

use super::outcome::{ApplyError, ApplyFailure, MemberChangeAnswer, Outcome, Response};
use super::txn::{apply_delete, apply_put, apply_txn, check_put, has_puts, response_header};
use super::{auth, lease};
use crate::auth::{Caller, RequestedAccess, authorise};
use crate::identity::MemberId;
use crate::membership::{ChangeError, ChangeRequest, Member};
use crate::mvcc::watch::{Publisher, WatchHub};
use crate::mvcc::{AnswerBudget, Batch, Store, StoreError, StoreOptions, StoreWriter, View};
use crate::state_machine::{
    AppliedChange, ApplyResult, CheckpointWork, CommittedEntry, EntryKind, Members, Position,
    RequestId, Snapshot, StateMachine,
};

/// State machine that applies the log to the store and publishes its events to watchers.
pub struct KvStateMachine {
    writer: StoreWriter,
    events: Publisher,
    is_answered: Box<dyn Fn(RequestId) -> bool + Send>,
}

/// Maximum number of bytes that the answers to one batch of entries may read together. A request
/// whose answer would exceed the limit is carried out, but its answer is dropped. Without a limit,
/// one answer could fill the memory before its client has received any of it.
const BATCH_ANSWER_BYTES: usize = 128 << 20;

impl KvStateMachine {
    /// Opens the store on `backend`. Watchers receive events through the hub that [`Self::hub`]
    /// returns.
    pub fn open(backend: impl StorageBackend, options: StoreOptions) -> Result<Self, StoreError> {
        let watch = options.watch;
        let writer = StoreWriter::open(backend, options)?;
        let events = Publisher::new(writer.store(), watch);
        Ok(Self { writer, events, is_answered: Box::new(|_| true) })
    }

    /// Sets which requests get a complete answer: those for which `own` returns true. It must
    /// return true for each request whose caller waits on this member. For all other requests,
    /// nothing is read that only their answer needs: the ranges of a transaction, and previous
    /// values.
    ///
    /// An answer can be many times as large as the store. Without this limit, every member would
    /// read each answer, and read it again when it replays the log after a restart.
    pub fn set_answer_filter(&mut self, own: impl Fn(RequestId) -> bool + Send + 'static) {
        self.is_answered = Box::new(own);
    }

    /// Turns the state at position `at` into that of a new cluster, whose only member is `founder`.
    /// `was` is the founder's id in the old cluster. The newest revision rises by `bump`. On
    /// return, this change and everything applied before it are durable.
    pub fn become_new_cluster(
        &mut self,
        at: Position,
        was: MemberId,
        founder: Member,
        bump: i64,
    ) -> Result<(), StoreError> {
        let id = founder.id;
        self.writer.batch(at, |batch| {
            // Of the alarms, keep only those about the data in this store. These are the alarms of
            // the whole cluster, and those of the founder, which get its new id.
            let alarms = batch.alarms().to_vec();
            for alarm in &alarms {
                batch.disarm_alarm(alarm);
                if alarm.member_id == 0 {
                    batch.raise_alarm(*alarm);
                } else if alarm.member_id == was.0 {
                    batch.raise_alarm(AlarmMember { member_id: id.0, ..*alarm });
                }
            }
            let table = batch.members().with_only_founder(founder, at.index);
            *batch.members_mut() = table;
            batch.bump_revision(bump);
            Ok(())
        })?;
        self.writer.checkpoint()?;
        Ok(())
    }

    /// Returns a handle for reading the store.
    #[must_use]
    pub fn store(&self) -> Store {
        self.writer.store()
    }

    /// Returns the hub through which clients watch keys.
    #[must_use]
    pub fn hub(&self) -> WatchHub {
        self.events.watch_hub()
    }
}

impl StateMachine for KvStateMachine {
    type Outcome = Outcome;
    type Error = StoreError;
    type Snapshot = Arc<View>;

    fn is_final(error: &StoreError) -> bool {
        error.is_final()
    }

    fn applied(&self) -> Position {
        self.writer.applied()
    }

    fn durable(&self) -> Position {
        self.writer.durable()
    }

    fn members(&self) -> Members {
        View::members(&self.writer.store().view()).voters_and_learners()
    }

    fn apply(&mut self, entries: &[CommittedEntry]) -> Result<ApplyResult<Outcome>, StoreError> {
        let before = self.writer.applied();
        let mut applied =
            ApplyResult { position: before, outcomes: Vec::new(), changes: Vec::new() };
        let new = entries.partition_point(|entry| entry.position.index <= before.index);
        let entries = &entries[new..];
        let Some(last) = entries.last() else { return Ok(applied) };
        applied.position = last.position;
        applied.outcomes.reserve(entries.len());
        let is_answered = &self.is_answered;
        let (applied, events) = self.writer.batch(last.position, |batch| {
            let mut read = 0;
            for entry in entries {
                apply_entry(batch, entry, is_answered, &mut read, &mut applied)?;
            }
            Ok(applied)
        })?;
        self.events.publish(events);
        Ok(applied)
    }

    fn unflushed_bytes(&self) -> usize {
        self.writer.store().unflushed_bytes()
    }

    fn checkpoint(&self) -> CheckpointWork<StoreError> {
        let store = self.writer.store();
        Box::new(move || store.flush())
    }

    fn snapshot(&self) -> Arc<View> {
        self.writer.store().view()
    }

    fn install_snapshot(&mut self, input: &mut dyn Read) -> Result<Position, StoreError> {
        let position = self.writer.install_snapshot(input)?;
        self.events.publish_replacement(self.writer.store().view().revision());
        Ok(position)
    }
}

impl Snapshot for Arc<View> {
    type Error = StoreError;

    fn position(&self) -> Position {
        self.applied()
    }

    fn members(&self) -> Members {
        View::members(self).voters_and_learners()
    }

    fn write(&self, out: &mut dyn Write) -> Result<(), StoreError> {
        self.write_snapshot(out)
    }
}

fn apply_entry(
    batch: &mut Batch<'_>,
    entry: &CommittedEntry,
    is_answered: &dyn Fn(RequestId) -> bool,
    read: &mut usize,
    applied: &mut ApplyResult<Outcome>,
) -> Result<(), StoreError> {
    if entry.kind == EntryKind::NoOp {
        return Ok(());
    }
    let at = entry.position;
    let index = at.index;
    let said = command::decode(entry.data.clone());
    let said = said.map_err(|source| StoreError::UndecodableCommand { index, source })?;
    let (id, operation, caller) = (said.request_id, said.operation, Caller::from(said.caller));
    if entry_kind(&operation) != entry.kind {
        return Err(StoreError::EntryKindMismatch { index, kind: entry.kind });
    }
    let (kind, began) = (applied_kind_index(&operation), Instant::now());
    let mut fits = |bytes| bytes <= BATCH_ANSWER_BYTES;
    let mut room = AnswerBudget::new(*read, &mut fits);
    let answered = is_answered(RequestId(id)).then_some(&mut room);
    let changes = &mut applied.changes;
    let outcome = match apply_operation(batch, &caller, operation, answered, at, changes) {
        Ok(_) if room.is_overdrawn() => Ok(Response::AnswerTooLarge),
        Ok(response) => {
            *read = room.used_bytes();
            Ok(response)
        }
        Err(ApplyFailure::Refused(why)) => Err(why),
        Err(ApplyFailure::Fatal(error)) => return Err(error),
    };
    batch.end_request();
    batch.record_apply_time(kind, outcome.is_ok(), began.elapsed());
    applied.outcomes.push((RequestId(id), outcome));
    Ok(())
}

fn apply_operation(
    batch: &mut Batch<'_>,
    caller: &Caller,
    operation: Operation,
    answered: Option<&mut AnswerBudget<'_>>,
    at: Position,
    changes: &mut Vec<AppliedChange>,
) -> Result<Response, ApplyFailure> {
    if let Some(why) = alarm_error(batch.alarms(), &operation) {
        return Err(why.into());
    }
    if batch.auth().is_enabled() {
        authorise(batch.auth(), caller, RequestedAccess::from(&operation), &batch.lease_table())
            .map_err(ApplyError::Auth)?;
    }
    match operation {
        Operation::Put(put) => {
            check_put(batch, &put)?;
            apply_put(batch, &put, answered).map(Response::Put)
        }
        Operation::DeleteRange(delete) => {
            apply_delete(batch, &delete, answered).map(Response::DeleteRange)
        }
        Operation::Txn(txn) => apply_txn(batch, &txn, answered).map(Response::Txn),
        Operation::Compact(compact) => {
            batch.compact(compact.revision)?;
            Ok(Response::Compact(CompactionResponse { header: response_header(batch.revision()) }))
        }
        Operation::Alarm(alarm) => apply_alarm(batch, &alarm).map(Response::Alarm),
        Operation::MarkCorrupt(member_id) => {
            let alarm = AlarmType::Corrupt.into();
            let raise = AlarmRequest { action: AlarmAction::Activate.into(), member_id, alarm };
            apply_alarm(batch, &raise).map(Response::Alarm)
        }
        Operation::LeaseGrant(request) => lease::grant(batch, &request, at),
        Operation::LeaseRevoke(request) => lease::revoke(batch, &request),
        Operation::LeaseExpire(over) => lease::expire(batch, &over, at),
        Operation::LeaseCheckpoint(noted) => lease::checkpoint(batch, &noted, at),
        Operation::ChangeAuth(change) => auth::change(batch, change),
        Operation::AssignToken(assign) => auth::assign_token(batch, &assign, at),
        Operation::PublishMember(member) => publish(batch, member),
        Operation::ChangeMember(change) => {
            let (done, response) = change_members(batch, change, at.index);
            changes.push(done);
            Ok(Response::MembersChanged(response.map_err(ApplyError::from)?))
        }
    }
}

/// Returns the operation's index in [`mvcc::APPLIED_KINDS`](crate::mvcc::APPLIED_KINDS).
fn applied_kind_index(operation: &Operation) -> usize {
    match operation {
        Operation::Put(_) => 0,
        Operation::DeleteRange(_) => 1,
        Operation::Txn(_) => 2,
        Operation::Compact(_) => 3,
        Operation::Alarm(_) | Operation::MarkCorrupt(_) => 4,
        Operation::LeaseGrant(_) => 5,
        Operation::LeaseRevoke(_) | Operation::LeaseExpire(_) => 6,
        Operation::LeaseCheckpoint(_) => 7,
        Operation::ChangeAuth(_) | Operation::AssignToken(_) => 8,
        Operation::PublishMember(_) => 9,
        Operation::ChangeMember(_) => 10,
    }
}

/// Returns the kind of log entry that carries the operation.
pub fn entry_kind(operation: &Operation) -> EntryKind {
    match operation {
        Operation::Put(_)
        | Operation::DeleteRange(_)
        | Operation::Txn(_)
        | Operation::Compact(_)
        | Operation::Alarm(_)
        | Operation::MarkCorrupt(_)
        | Operation::LeaseGrant(_)
        | Operation::LeaseRevoke(_)
        | Operation::LeaseExpire(_)
        | Operation::LeaseCheckpoint(_)
        | Operation::ChangeAuth(_)
        | Operation::AssignToken(_)
        | Operation::PublishMember(_) => EntryKind::Normal,
        Operation::ChangeMember(_) => EntryKind::ConfChange,
    }
}

/// Whether the operation can make the data grow. Such operations are refused when space runs short.
pub fn may_grow_data(operation: &Operation) -> bool {
    match operation {
        Operation::Put(_) | Operation::LeaseGrant(_) => true,
        Operation::Txn(txn) => has_puts(txn),
        Operation::DeleteRange(_)
        | Operation::Compact(_)
        | Operation::Alarm(_)
        | Operation::MarkCorrupt(_)
        | Operation::LeaseRevoke(_)
        | Operation::LeaseExpire(_)
        | Operation::LeaseCheckpoint(_)
        | Operation::ChangeAuth(_)
        | Operation::AssignToken(_)
        | Operation::PublishMember(_)
        | Operation::ChangeMember(_) => false,
    }
}

/// Returns the error for an operation that a raised alarm forbids on all members.
///
/// A CORRUPT alarm of one member concerns only that member's data: this member stops serving
/// clients, and the other members go on. In etcd such an alarm stops all writes of the cluster.
fn alarm_error(alarms: &[AlarmMember], operation: &Operation) -> Option<ApplyError> {
    if alarms.is_empty() {
        return None;
    }
    let raised = |alarm: AlarmType| alarms.iter().any(|a| a.alarm() == alarm);
    // The CORRUPT alarm doesn't forbid changes of members, users or roles, because a repair may
    // need them. Nor does it forbid a lease checkpoint, which does not touch the data.
    let writes = !matches!(
        operation,
        Operation::Alarm(_)
            | Operation::MarkCorrupt(_)
            | Operation::LeaseCheckpoint(_)
            | Operation::ChangeAuth(_)
            | Operation::AssignToken(_)
            | Operation::PublishMember(_)
            | Operation::ChangeMember(_)
    );
    let all_are_corrupt =
        || alarms.iter().any(|a| a.member_id == 0 && a.alarm() == AlarmType::Corrupt);
    if writes && all_are_corrupt() {
        Some(ApplyError::Corrupt)
    } else if may_grow_data(operation) && raised(AlarmType::Nospace) {
        Some(ApplyError::NoSpace)
    } else {
        None
    }
}

/// Applies an alarm request. Only members and the cluster as a whole have alarms. So the number of
/// alarms is at most (members + 1) times the number of kinds. A request for an alarm of unknown
/// kind gets an empty answer, as in etcd (server/etcdserver/apply, `Alarm`).
fn apply_alarm(
    batch: &mut Batch<'_>,
    request: &AlarmRequest,
) -> Result<AlarmResponse, ApplyFailure> {
    let alarm = AlarmMember { member_id: request.member_id, alarm: request.alarm };
    let all = |a: &AlarmMember| request.alarm() == AlarmType::None || a.alarm == request.alarm;
    let alarms = match request.action() {
        AlarmAction::Get => batch.alarms().iter().filter(|a| all(a)).copied().collect(),
        AlarmAction::Activate if request.alarm() == AlarmType::None => Vec::new(),
        AlarmAction::Activate => {
            // Member id 0 means the cluster as a whole.
            let id = MemberId(request.member_id);
            if id.0 != 0 && batch.members().member(id).is_none() {
                return Err(ApplyError::MemberNotFound.into());
            }
            batch.raise_alarm(alarm);
            vec![alarm]
        }
        AlarmAction::Deactivate => {
            if batch.disarm_alarm(&alarm) {
                vec![alarm]
            } else {
                Vec::new()
            }
        }
    };
    Ok(AlarmResponse { header: response_header(batch.revision()), alarms })
}

/// Changes the member table. Returns the change that consensus has to make, and the answer: all
/// members after the change.
fn change_members(
    batch: &mut Batch<'_>,
    change: command::MemberChange,
    index: u64,
) -> (AppliedChange, Result<MemberChangeAnswer, ChangeError>) {
    let (guards, asked) = (batch.guards(), ChangeRequest::try_from(change));
    let changed =
        asked.and_then(|asked| batch.members_mut().apply_change_with_guards(guards, asked, index));
    let table = batch.members();
    let change = changed.ok().flatten();
    let done = AppliedChange { index, change, members: table.voters_and_learners() };
    let members = || table.members().map(Into::into).collect();
    (done, changed.map(|_| MemberChangeAnswer { members: members(), configuration_index: index }))
}

fn publish(batch: &mut Batch<'_>, published: PublishMember) -> Result<Response, ApplyFailure> {
    let id = MemberId(published.member_id);
    let said = published.try_into().map_err(ApplyError::from)?;
    batch.members_mut().publish(id, said).map_err(ApplyError::from)?;
    Ok(Response::MemberPublished)
}
