//! The leader's lease clock, which knows when each lease expires.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::RwLock;
use std::time::Duration;

use node_proto::command::{LeaseCheckpoint, LeaseExpire, LeaseLeft};

use super::table::{Lease, LeaseChange, LeaseTable};

/// Maximum number of leases that one call of `expire` ends; the next call continues.
const MAX_EXPIRED_PER_CALL: usize = 500;
/// Maximum number of leases in one checkpoint, which records their remaining time in one log entry.
const MAX_CHECKPOINTED_PER_CALL: usize = 1_000;
/// Maximum time until the remaining time of a lease is recorded again by a checkpoint (etcd's
/// interval). The checkpoint is made earlier if half of the remaining time has passed.
const MAX_CHECKPOINT_DELAY: Duration = Duration::from_secs(300);
/// Remaining time up to which a lease needs no further checkpoint, because an election takes about
/// as long.
const MIN_CHECKPOINTED_TIME: Duration = Duration::from_secs(1);
/// Time after which the expiry of a lease is proposed again if the lease still exists.
const EXPIRY_RETRY_DELAY: Duration = Duration::from_secs(1);

/// A member's Raft role, and its progress as far as leases need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaftStatus {
    /// Whether this member is the leader.
    pub is_leader: bool,
    /// Current term of the member.
    pub term: u64,
    /// Term of the last entry that the member has applied.
    pub applied_term: u64,
}

impl RaftStatus {
    /// Returns the term in which the member counts lease times, or `None` if it must not count
    /// them. To count, it must be the leader and must have applied all entries that were proposed
    /// in earlier terms.
    fn counting_term(self) -> Option<u64> {
        (self.is_leader && self.applied_term == self.term).then_some(self.term)
    }
}

/// Result of a request to keep a lease alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The lease has its full TTL again.
    Renewed {
        lease: Lease,
        /// Whether an entry must record the full TTL before the client gets its answer. That is
        /// necessary if an earlier entry possibly says that less time is left.
        needs_checkpoint: bool,
    },
    /// The lease can't be renewed now: it has expired, or a checkpoint with its remaining time was
    /// proposed. The caller has to wait until the entry with the expiry or the checkpoint is
    /// applied.
    Busy,
    /// There is no such lease.
    Unknown,
}

#[derive(Debug)]
struct LeaseTimer {
    lease: Lease,
    deadline: Duration,
    /// Time of the next checkpoint of the remaining time; `None` if there will be none.
    checkpoint_at: Option<Duration>,
    /// Time at which the expiry is proposed again; `None` if the lease has not expired.
    expiry_retry_at: Option<Duration>,
    /// Latest time at which an entry may have recorded less than the full TTL; `None` if no such
    /// record is in force.
    checkpointed_since: Option<Duration>,
}

/// The leader's lease clock, described in the module's documentation. All times are of one
/// monotonic clock, from any origin.
#[derive(Debug)]
pub struct Lessor {
    /// Time by which each lease is extended when this member begins to count lease times. An
    /// election may have taken this long, and no client could renew a lease during the election.
    election_timeout: Duration,
    /// Term in which this member counts lease times; `None` if it doesn't count them.
    term: Option<u64>,
    timers: BTreeMap<i64, LeaseTimer>,
    deadlines: BTreeSet<(Duration, i64)>,
    checkpoints: BTreeSet<(Duration, i64)>,
    /// Ids of leases whose remaining time is in a proposed entry that is not applied yet.
    checkpointing: BTreeSet<i64>,
}

fn seconds(n: i64) -> Duration {
    Duration::from_secs(u64::try_from(n).unwrap_or(0))
}

/// Converts to whole seconds, rounded up, because a lease must not end early.
fn round_up_to_seconds(left: Duration) -> i64 {
    let up = u64::from(left.subsec_nanos() > 0);
    i64::try_from(left.as_secs() + up).unwrap_or(i64::MAX)
}

impl Lessor {
    /// Creates a clock that counts no lease yet.
    #[must_use]
    pub fn new(election_timeout: Duration) -> Self {
        Self {
            election_timeout,
            term: None,
            timers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            checkpoints: BTreeSet::new(),
            checkpointing: BTreeSet::new(),
        }
    }

    /// Returns the term in which this member counts lease times, or `None` if it doesn't count
    /// them.
    #[must_use]
    pub fn term(&self) -> Option<u64> {
        self.term
    }

    /// Updates the clock to the member's role and to changes of the lease table. To be called
    /// before each use.
    pub fn update(&mut self, status: RaftStatus, table: &RwLock<LeaseTable>, now: Duration) {
        let counts_in = status.counting_term();
        if counts_in != self.term {
            self.clear_timers();
            self.checkpointing.clear();
            self.term = counts_in;
            match counts_in {
                Some(_) => self.set_all_timers(table, now, false),
                None => write(table).stop_recording(),
            }
        } else if self.term.is_some() && read(table).has_changes() {
            let news = write(table).take_changes();
            match news {
                Some(news) => news.into_iter().for_each(|one| self.apply_change(one, now)),
                None => {
                    self.clear_timers();
                    self.set_all_timers(table, now, true);
                }
            }
        }
    }

    fn clear_timers(&mut self) {
        self.timers.clear();
        self.deadlines.clear();
        self.checkpoints.clear();
    }

    /// Sets the timers of all leases, each to the longest time that the lease can have left.
    /// `again` means that the clock has already counted in this term. Then each lease counts as
    /// checkpointed, because the clock may have proposed checkpoints before.
    fn set_all_timers(&mut self, table: &RwLock<LeaseTable>, now: Duration, again: bool) {
        // The table stays locked while all leases are read. So each change is either in what is
        // read here, or recorded as a change after it, but never both.
        let mut table = write(table);
        table.start_recording();
        for lease in table.iter() {
            let noted = (again || lease.remaining_ttl > 0).then_some(now);
            self.set_timer(lease, now, seconds(lease.seconds()), noted);
            self.extend(lease.id);
        }
    }

    /// Extends a lease by one election timeout, because no client could renew it during the
    /// election.
    fn extend(&mut self, id: i64) {
        if let Some(timer) = self.timers.get_mut(&id) {
            self.deadlines.remove(&(timer.deadline, id));
            timer.deadline += self.election_timeout;
            self.deadlines.insert((timer.deadline, id));
        }
    }

    fn apply_change(&mut self, news: LeaseChange, now: Duration) {
        match news {
            LeaseChange::Granted(lease) => self.set_timer(lease, now, seconds(lease.ttl), None),
            LeaseChange::Revoked(id) => self.remove_timer(id),
        }
    }

    fn remove_timer(&mut self, id: i64) {
        if let Some(timer) = self.timers.remove(&id) {
            self.deadlines.remove(&(timer.expiry_retry_at.unwrap_or(timer.deadline), id));
            if let Some(at) = timer.checkpoint_at {
                self.checkpoints.remove(&(at, id));
            }
        }
    }

    fn set_timer(&mut self, lease: Lease, now: Duration, left: Duration, noted: Option<Duration>) {
        let id = lease.id;
        self.remove_timer(id);
        let deadline = now + left;
        let note_at = checkpoint_delay(left).map(|after| now + after);
        self.timers.insert(
            id,
            LeaseTimer {
                lease,
                deadline,
                checkpoint_at: note_at,
                expiry_retry_at: None,
                checkpointed_since: noted,
            },
        );
        self.deadlines.insert((deadline, id));
        self.checkpoints.extend(note_at.map(|at| (at, id)));
    }

    /// Keeps a lease alive. Before the client gets its answer, a later quorum round must confirm
    /// that this member is the leader in the same term.
    pub fn renew(&mut self, id: i64, now: Duration) -> Renewal {
        let Some(timer) = self.timers.get(&id) else { return Renewal::Unknown };
        if timer.expiry_retry_at.is_some()
            || timer.deadline <= now
            || self.checkpointing.contains(&id)
        {
            return Renewal::Busy;
        }
        let (lease, noted) = (timer.lease, timer.checkpointed_since);
        self.set_timer(lease, now, seconds(lease.ttl), noted);
        Renewal::Renewed { lease, needs_checkpoint: noted.is_some() }
    }

    /// Records that an entry has given this lease its full TTL again. The entry cancels the
    /// checkpoints that were made up to the time `at`, and no later ones.
    pub fn record_full_ttl(&mut self, id: i64, at: Duration) {
        if let Some(timer) = self.timers.get_mut(&id)
            && timer.checkpointed_since.is_some_and(|noted| noted <= at)
        {
            timer.checkpointed_since = None;
        }
    }

    /// Returns the remaining time of a lease; zero if it has expired but still exists.
    #[must_use]
    pub fn left(&self, id: i64, now: Duration) -> Option<Duration> {
        let timer = self.timers.get(&id)?;
        Some(timer.deadline.saturating_sub(now))
    }

    /// Returns the commands that end expired leases, up to the limit of one call.
    pub fn expire(&mut self, now: Duration) -> Vec<LeaseExpire> {
        let Some(term) = self.term else { return Vec::new() };
        let mut over = Vec::new();
        while over.len() < MAX_EXPIRED_PER_CALL
            && let Some(&(at, id)) = self.deadlines.first()
            && at <= now
        {
            self.deadlines.remove(&(at, id));
            let again = now + EXPIRY_RETRY_DELAY;
            self.deadlines.insert((again, id));
            if let Some(timer) = self.timers.get_mut(&id) {
                timer.expiry_retry_at = Some(again);
                over.push(LeaseExpire { id, term, granted: timer.lease.grant_index });
            }
        }
        over
    }

    /// Returns a checkpoint of the remaining time of all leases for which one is due, up to the
    /// limit of one call. The leases in it can't be kept alive until
    /// [`finish_checkpoint`](Self::finish_checkpoint) is called. Returns `None` if no checkpoint is
    /// due.
    pub fn due_checkpoint(&mut self, now: Duration) -> Option<LeaseCheckpoint> {
        let term = self.term?;
        let mut leases = Vec::new();
        while leases.len() < MAX_CHECKPOINTED_PER_CALL
            && let Some(&(at, id)) = self.checkpoints.first()
            && at <= now
        {
            self.checkpoints.remove(&(at, id));
            let Some(timer) = self.timers.get_mut(&id) else { continue };
            timer.checkpoint_at = None;
            let left = timer.deadline.saturating_sub(now);
            if left.is_zero() || timer.expiry_retry_at.is_some() {
                continue;
            }
            timer.checkpoint_at = checkpoint_delay(left).map(|after| now + after);
            self.checkpoints.extend(timer.checkpoint_at.map(|at| (at, id)));
            let left = round_up_to_seconds(left);
            if left < timer.lease.ttl {
                timer.checkpointed_since = Some(now);
                self.checkpointing.insert(id);
                leases.push(LeaseLeft { id, left, granted: timer.lease.grant_index });
            }
        }
        (!leases.is_empty()).then_some(LeaseCheckpoint { term, leases })
    }

    /// Records that the entry with the checkpoint `noted` was applied or has failed. Its leases can
    /// be kept alive again: any entry proposed from now on comes after the checkpoint in the log.
    pub fn finish_checkpoint(&mut self, noted: &LeaseCheckpoint) {
        if self.term != Some(noted.term) {
            return;
        }
        for LeaseLeft { id, .. } in &noted.leases {
            self.checkpointing.remove(id);
        }
    }
}

/// Returns the checkpoint that gives leases their full TTL again.
#[must_use]
pub fn full_ttl_checkpoint(term: u64, leases: impl IntoIterator<Item = Lease>) -> LeaseCheckpoint {
    let whole = |Lease { id, grant_index: granted, .. }| LeaseLeft { id, left: 0, granted };
    LeaseCheckpoint { term, leases: leases.into_iter().map(whole).collect() }
}

/// Returns the time until the next checkpoint of a lease that has `left` to live. Returns `None` if
/// `left` is too short for another checkpoint.
fn checkpoint_delay(left: Duration) -> Option<Duration> {
    (left > MIN_CHECKPOINTED_TIME).then(|| (left / 2).min(MAX_CHECKPOINT_DELAY))
}

fn read(table: &RwLock<LeaseTable>) -> std::sync::RwLockReadGuard<'_, LeaseTable> {
    table.read().expect("nothing panics while it holds this lock")
}

fn write(table: &RwLock<LeaseTable>) -> std::sync::RwLockWriteGuard<'_, LeaseTable> {
    table.write().expect("nothing panics while it holds this lock")
}
