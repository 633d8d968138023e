//! Plans a new single-member cluster, and makes the one commit after which the directory belongs to
//! that cluster.

use std::path::Path;

use node_engine::{
    driver::{self, StartError},
    log::{Log, LogError},
};
use node_proto::{
    command::{self, Operation},
    musterpb::member_change::Change,
};
use node_state::{
    apply::KvStateMachine,
    disk::SharedDisk,
    identity::{
        ClusterId, DataDir, DataDirError, DroppedMember, ForcedCluster, Incarnation, MemberId,
        MemberIdentity,
    },
    membership::{Member, MemberTable},
    mvcc::StoreError,
    state_machine::{CommittedEntry, EntryKind, Position, StateMachine as _},
};

use super::finish::finish;
use crate::config::ForceNewCluster;

/// Amount by which the new cluster's first revision exceeds the last known one, as etcd recommends
/// for a restore. The bump assumes that the lost members wrote fewer than this many revisions that
/// this member never received.
pub const REVISION_BUMP: i64 = 1_000_000_000;
/// Number of entries that are applied in one batch.
const MAX_BATCH_ENTRIES: usize = 1_000;

/// Why no cluster was made from a directory. The directory is unchanged, unless the disk failed
/// after the commit.
#[derive(Debug, thiserror::Error)]
pub enum ForceError {
    /// The directory has no member's log.
    #[error(
        "{} holds no member's log to make a cluster of",
        .0.display()
    )]
    NoLog(std::path::PathBuf),
    /// Log and store do not fit each other.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The store failed while entries were applied or the commit was made.
    #[error("the store cannot become another cluster's")]
    Store(#[from] StoreError),
    /// A small file of the directory can't be read or written: the plan, the record of the new
    /// cluster, or the incarnation marker.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// The new cluster's log can't be created.
    #[error("the new cluster's log cannot be made")]
    Log(#[from] LogError),
    /// An operation on the disk failed.
    #[error("cannot {action}")]
    Disk {
        /// Operation that was attempted.
        action: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// The cluster has removed this member.
    #[error("the cluster has removed this member: entry {0} of its log says so, and was committed")]
    Removed(u64),
    /// The store does not contain the member to which the log belongs.
    #[error("the store knows no member {0}: store and log belong to different members")]
    NoMember(MemberId),
}

/// A member's directory, opened as for a start.
pub(crate) struct SurvivingMember<'a> {
    pub dir: &'a DataDir,
    pub disk: &'a SharedDisk,
    pub member_dir: &'a Path,
    /// Ids and incarnation of the member in the lost cluster.
    pub old_identity: MemberIdentity,
    pub machine: KvStateMachine,
    pub log: Log,
}

/// Makes a new single-member cluster from the directory, and returns a record of what was kept and
/// dropped.
///
/// # Errors
/// After an error, the directory still belongs to the old member, with one exception. If the disk
/// failed after the commit, the next start finishes the new cluster.
pub(crate) fn force_new_cluster(
    survivor: SurvivingMember<'_>,
    force: &ForceNewCluster,
) -> Result<ForcedCluster, ForceError> {
    let SurvivingMember { dir, disk, member_dir, old_identity: was, mut machine, mut log } =
        survivor;
    let committed = log.hard_state_with(machine.applied()).commit;
    let before = machine.store().view();
    let initial = driver::recover_initial_state(&mut log, machine.applied(), machine.members())?;
    let entries: Vec<CommittedEntry> = initial.entries.into_iter().map(to_committed).collect();
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
    machine.set_answer_filter(|_| false);
    let founded = (|| {
        let known_before = before.members().member(was.member_id).cloned();
        apply_entries(&mut machine, &entries)?;
        let table = machine.store().members().borrow().clone();
        // The entries may have changed this member's URLs, so its record in the member table is
        // read after they are applied. If an uncommitted entry has removed this member, the record
        // is taken from the table as it was before the entries.
        let own = table.member(was.member_id).cloned().or(known_before);
        let own = own.ok_or(ForceError::NoMember(was.member_id))?;
        let incarnation = Incarnation::random();
        let founder = founder(own, incarnation, force);
        let cluster_id = ClusterId::of(&[founder.id]);
        let is = MemberIdentity { cluster_id, member_id: founder.id, incarnation };
        let mut plan = ForcedCluster::new(now(), was, is, dir.forced_cluster()?.as_ref());
        (plan.committed, plan.last_index, plan.last_term) = (committed, last.index, last.term);
        (plan.base_index, plan.base_term) = (base.index, base.term);
        plan.dropped = dropped_members(&table, was.member_id);
        dir.write_forced_plan(&plan)?;
        machine.become_new_cluster(base, was.member_id, founder, REVISION_BUMP)?;
        Ok(plan)
    })();
    let plan: ForcedCluster = match founded {
        Ok(plan) => plan,
        Err(error) => {
            // Dropping the state machine would make the applied entries durable. But the directory
            // still belongs to the old member, which does not know whether these entries were
            // committed.
            std::mem::forget(machine);
            return Err(error);
        }
    };
    log_forced_cluster(&plan, before.revision(), machine.store().view().revision());
    drop((machine, log));
    finish(dir, disk, member_dir, &plan)?;
    Ok(plan)
}

pub(super) fn to_committed(entry: node_consensus::Entry) -> CommittedEntry {
    let position = Position { index: entry.index, term: entry.term };
    CommittedEntry { position, kind: entry.kind, data: entry.data }
}

pub(super) fn apply_entries(
    machine: &mut KvStateMachine,
    entries: &[CommittedEntry],
) -> Result<(), StoreError> {
    entries.chunks(MAX_BATCH_ENTRIES).try_for_each(|some| machine.apply(some).map(|_| ()))
}

/// Returns the index of the entry that removes this member, if there is one.
fn own_removal(entries: &[CommittedEntry], own: MemberId) -> Option<u64> {
    let removes = |entry: &&CommittedEntry| {
        let operation = command::decode(entry.data.clone()).map(|said| said.operation);
        entry.kind == EntryKind::ConfChange
            && matches!(operation, Ok(Operation::ChangeMember(change))
                if change.change == Some(Change::Remove(own.0)))
    };
    entries.iter().find(removes).map(|entry| entry.position.index)
}

/// Returns the new cluster's only member. It has the old member's name and key, but a new id and
/// incarnation.
fn founder(own: Member, incarnation: Incarnation, force: &ForceNewCluster) -> Member {
    let peer_urls =
        if force.peer_urls.is_empty() { own.peer_urls.clone() } else { force.peer_urls.clone() };
    Member {
        id: MemberId::at_bootstrap(&peer_urls, &incarnation.to_string()),
        peer_urls,
        is_learner: false,
        vote_when_ready: false,
        operations: Vec::new(),
        // If the old cluster bound its members to incarnations, the new one does too.
        incarnation: own.incarnation.map(|_| incarnation),
        ..own
    }
}

fn dropped_members(table: &MemberTable, own: MemberId) -> Vec<DroppedMember> {
    let others = table.members().filter(|member| member.id != own);
    let dropped = others.map(|member| DroppedMember {
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

fn log_forced_cluster(plan: &ForcedCluster, revision_was: i64, revision: i64) {
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
        kept_unknown = plan.kept_uncommitted(), stored_revision = revision_was, revision,
        "forcing restart member: made a new cluster of one out of its data; every entry of its log is kept, those not known to be committed too"
    );
}
