//! Deciding what the new cluster is, and the one commit that makes it so.

use std::path::Path;

use node_proto::{
    command::{self, Operation},
    musterpb::member_change::Change,
};

use super::finish::finish;
use crate::{
    apply::Machine,
    config::Force,
    disk::SharedDisk,
    driver::{self, StartError},
    identity::{Bearer, ClusterId, DataDir, DataDirError, Dropped, Forced, Incarnation, MemberId},
    log::{Log, LogError},
    machine::{Committed, EntryKind, Position, StateMachine as _},
    membership::{Member, MemberTable},
    mvcc::StoreError,
};

/// How much higher than the last known one the new cluster's first revision is: what etcd advises
/// for a restore. Whatever the lost members wrote that this one never saw, it was less than this.
pub const REVISION_BUMP: i64 = 1_000_000_000;
/// Entries that are applied at once.
const ENTRIES_AT_ONCE: usize = 1_000;

/// Why no cluster is made of a directory; but for `Unfinished`, it is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ForceError {
    /// Nobody ever ran there.
    #[error(
        "{} holds no member's log to make a cluster of",
        .0.display()
    )]
    Nothing(std::path::PathBuf),
    /// Log and store don't fit each other.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The store failed.
    #[error("the store cannot become another cluster's")]
    Store(#[from] StoreError),
    /// The directory's small files.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// The new cluster's log.
    #[error("the new cluster's log cannot be made")]
    Log(#[from] LogError),
    /// The disk.
    #[error("cannot {action}")]
    Disk {
        /// What was tried.
        action: &'static str,
        /// What it said.
        #[source]
        source: std::io::Error,
    },
    /// Its cluster removed it.
    #[error("the cluster has removed this member: entry {0} of its log says so, and was committed")]
    Removed(u64),
    /// The store doesn't know the member that the log belongs to.
    #[error("the store knows no member {0}: store and log belong to different members")]
    NoMember(MemberId),
}

/// A member's directory, open as for a start.
pub(crate) struct Survivor<'a> {
    pub dir: &'a DataDir,
    pub disk: &'a SharedDisk,
    pub member_dir: &'a Path,
    /// Who it is.
    pub was: Bearer,
    pub machine: Machine,
    pub log: Log,
}

/// Makes a cluster of one of it, and says what that keeps and drops.
///
/// # Errors
/// The directory is the old member, or, where the disk failed after the commit, one that the next
/// start makes the new one.
pub(crate) fn force(survivor: Survivor<'_>, force: &Force) -> Result<Forced, ForceError> {
    let Survivor { dir, disk, member_dir, was, mut machine, mut log } = survivor;
    let committed = log.hard_state_with(machine.applied()).commit;
    let before = machine.store().view();
    let initial = driver::recover(&mut log, machine.applied(), machine.members())?;
    let entries: Vec<Committed> = initial.entries.into_iter().map(as_committed).collect();
    if let Some(index) = own_removal(&entries, was.member_id) {
        if index <= committed {
            return Err(ForceError::Removed(index));
        }
        tracing::warn!(
            index,
            "an entry that was not known to be committed removes this very member; it begins a new cluster all the same"
        );
    }
    let last = log.last();
    let term = log.hard_state().term.max(last.term) + 1;
    let base = Position { index: last.index + 1, term };
    machine.answer_only(|_| false);
    let founded = (|| {
        let own = before.members().member(was.member_id).cloned();
        apply(&mut machine, &entries)?;
        let table = machine.store().members().borrow().clone();
        let own = own.or_else(|| table.member(was.member_id).cloned());
        let own = own.ok_or(ForceError::NoMember(was.member_id))?;
        let incarnation = Incarnation::random();
        let founder = founder(own, incarnation, force);
        let cluster_id = ClusterId::of(&[founder.id]);
        let is = Bearer { cluster_id, member_id: founder.id, incarnation };
        let mut plan = Forced::new(now(), was, is, dir.forced()?.as_ref());
        (plan.committed, plan.last_index, plan.last_term) = (committed, last.index, last.term);
        (plan.base_index, plan.base_term) = (base.index, base.term);
        plan.dropped = dropped(&table, was.member_id);
        dir.plan(&plan)?;
        machine.found_cluster(base, was.member_id, founder, REVISION_BUMP)?;
        Ok(plan)
    })();
    let plan: Forced = match founded {
        Ok(plan) => plan,
        Err(error) => {
            // Dropping it would make durable what it has applied, and the directory is the old
            // member's, which doesn't know whether that was committed.
            std::mem::forget(machine);
            return Err(error);
        }
    };
    say(&plan, before.revision(), machine.store().view().revision());
    drop((machine, log));
    finish(dir, disk, member_dir, &plan)?;
    Ok(plan)
}

pub(super) fn as_committed(entry: node_consensus::Entry) -> Committed {
    let position = Position { index: entry.index, term: entry.term };
    Committed { position, kind: entry.kind, data: entry.data }
}

pub(super) fn apply(machine: &mut Machine, entries: &[Committed]) -> Result<(), StoreError> {
    entries.chunks(ENTRIES_AT_ONCE).try_for_each(|some| machine.apply(some).map(|_| ()))
}

/// The entry that removes this member, if one does.
fn own_removal(entries: &[Committed], own: MemberId) -> Option<u64> {
    let removes = |entry: &&Committed| {
        let operation = command::decode(entry.data.clone()).map(|said| said.operation);
        entry.kind == EntryKind::ConfChange
            && matches!(operation, Ok(Operation::ChangeMember(change))
                if change.change == Some(Change::Remove(own.0)))
    };
    entries.iter().find(removes).map(|entry| entry.position.index)
}

/// The new cluster's one member: the old one's name and key, and nothing else that anybody knows it by.
fn founder(own: Member, incarnation: Incarnation, force: &Force) -> Member {
    let peer_urls =
        if force.peer_urls.is_empty() { own.peer_urls.clone() } else { force.peer_urls.clone() };
    Member {
        id: MemberId::at_bootstrap(&peer_urls, &incarnation.to_string()),
        peer_urls,
        is_learner: false,
        vote_when_ready: false,
        operations: Vec::new(),
        // Where the old cluster bound its members, the new one does.
        incarnation: own.incarnation.map(|_| incarnation),
        ..own
    }
}

fn dropped(table: &MemberTable, own: MemberId) -> Vec<Dropped> {
    let others = table.members().filter(|member| member.id != own);
    let dropped = others.map(|member| Dropped {
        member_id: member.id,
        name: member.name.clone(),
        peer_urls: member.peer_urls.clone(),
        is_learner: member.is_learner,
    });
    dropped.collect()
}

fn now() -> String {
    jiff::Timestamp::now().to_string()
}

fn say(plan: &Forced, revision_was: i64, revision: i64) {
    for gone in &plan.dropped {
        tracing::warn!(
            member.id = %gone.member_id, name = gone.name, learner = gone.is_learner,
            peer_urls = gone.peer_urls.join(","), "this member of the old cluster is none of the new one"
        );
    }
    tracing::warn!(
        old.cluster.id = %plan.was.cluster_id, old.member.id = %plan.was.member_id,
        cluster.id = %plan.is.cluster_id, member.id = %plan.is.member_id,
        last_index = plan.last_index, known_committed = plan.committed,
        kept_unknown = plan.kept_unknown(), stored_revision = revision_was, revision,
        "forcing restart member: made a new cluster of one out of its data; every entry of its log is kept, those not known to be committed too"
    );
}
