//! The leader's clock: when each lease is over.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::RwLock;
use std::time::Duration;

use node_proto::command::{LeaseCheckpoint, LeaseExpire, LeaseLeft};

use super::table::{Lease, LeaseTable, News};

/// Leases that one look ends at most; the next look goes on.
const EXPIRED_PER_LOOK: usize = 500;
/// Leases whose time left one look notes at most, in one entry.
const NOTED_PER_LOOK: usize = 1_000;
/// What a lease has left is noted when half of it has passed, and after so long at the latest (etcd's
/// interval).
const NOTE_AFTER: Duration = Duration::from_secs(300);
/// Who has less than this left is not noted again: an election takes about as long.
const NOTED_FROM: Duration = Duration::from_secs(1);
/// A lease that was to be ended and is still there is tried again.
const EXPIRE_AGAIN: Duration = Duration::from_secs(1);

/// A member's place, as far as leases are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// It leads.
    pub leads: bool,
    /// In this term.
    pub term: u64,
    /// The term of the last entry that it has applied.
    pub applied_term: u64,
}

impl Seat {
    /// The term in which it may count time: the one that it leads in, once it has applied whatever was
    /// proposed before.
    fn counts_in(self) -> Option<u64> {
        (self.leads && self.applied_term == self.term).then_some(self.term)
    }
}

/// What became of a wish to keep a lease alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// It has all of its TTL again. `note`: the log says less, and has to hear of it first.
    Renewed {
        /// Which one.
        lease: Lease,
        /// Whether an entry has to say so before anybody is told.
        note: bool,
    },
    /// It is over, or about to be noted: what becomes of that has to be waited for.
    Busy,
    /// There is none.
    Unknown,
}

#[derive(Debug)]
struct Timer {
    lease: Lease,
    deadline: Duration,
    /// When what it has left is noted next.
    note_at: Option<Duration>,
    /// It was over, and is looked at again at this time.
    ended: Option<Duration>,
    /// Since when an entry may say that less than all of it is left.
    noted: Option<Duration>,
}

/// See the module. All times are of one monotonic clock, from any beginning.
#[derive(Debug)]
pub struct Lessor {
    /// How long nobody may have counted before a new leader does.
    election_timeout: Duration,
    /// The term that it counts in.
    term: Option<u64>,
    timers: BTreeMap<i64, Timer>,
    deadlines: BTreeSet<(Duration, i64)>,
    notes: BTreeSet<(Duration, i64)>,
    /// Those whose time left is in an entry on its way.
    noting: BTreeSet<i64>,
}

fn seconds(n: i64) -> Duration {
    Duration::from_secs(u64::try_from(n).unwrap_or(0))
}

/// Rounded up: a lease must not end early.
fn whole_seconds(left: Duration) -> i64 {
    let up = u64::from(left.subsec_nanos() > 0);
    i64::try_from(left.as_secs() + up).unwrap_or(i64::MAX)
}

impl Lessor {
    /// One that counts nothing yet.
    #[must_use]
    pub fn new(election_timeout: Duration) -> Self {
        Self {
            election_timeout,
            term: None,
            timers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            notes: BTreeSet::new(),
            noting: BTreeSet::new(),
        }
    }

    /// The term that it counts in, if it does.
    #[must_use]
    pub fn term(&self) -> Option<u64> {
        self.term
    }

    /// Follows this member's seat and what has happened to the leases. Before each use.
    pub fn follow(&mut self, seat: Seat, table: &RwLock<LeaseTable>, now: Duration) {
        let counts_in = seat.counts_in();
        if counts_in != self.term {
            self.forget();
            self.noting.clear();
            self.term = counts_in;
            match counts_in {
                Some(_) => self.begin(table, now, false),
                None => write(table).stop_listening(),
            }
        } else if self.term.is_some() && read(table).has_news() {
            let news = write(table).take_news();
            match news {
                Some(news) => news.into_iter().for_each(|one| self.hear(one, now)),
                None => {
                    self.forget();
                    self.begin(table, now, true);
                }
            }
        }
    }

    fn forget(&mut self) {
        self.timers.clear();
        self.deadlines.clear();
        self.notes.clear();
    }

    /// All that there are, each with what it may have left. `again`: in the same term, so that any of them
    /// may have been noted.
    fn begin(&mut self, table: &RwLock<LeaseTable>, now: Duration, again: bool) {
        let mut table = write(table);
        table.listen();
        for lease in table.iter() {
            let noted = (again || lease.left > 0).then_some(now);
            self.set(lease, now, seconds(lease.seconds()), noted);
            self.extend(lease.id);
        }
    }

    /// By as long as nobody may have counted.
    fn extend(&mut self, id: i64) {
        if let Some(timer) = self.timers.get_mut(&id) {
            self.deadlines.remove(&(timer.deadline, id));
            timer.deadline += self.election_timeout;
            self.deadlines.insert((timer.deadline, id));
        }
    }

    fn hear(&mut self, news: News, now: Duration) {
        match news {
            News::Granted(lease) => self.set(lease, now, seconds(lease.ttl), None),
            News::Revoked(id) => self.remove(id),
        }
    }

    fn remove(&mut self, id: i64) {
        if let Some(timer) = self.timers.remove(&id) {
            self.deadlines.remove(&(timer.ended.unwrap_or(timer.deadline), id));
            if let Some(at) = timer.note_at {
                self.notes.remove(&(at, id));
            }
        }
    }

    fn set(&mut self, lease: Lease, now: Duration, left: Duration, noted: Option<Duration>) {
        let id = lease.id;
        self.remove(id);
        let deadline = now + left;
        let note_at = note_after(left).map(|after| now + after);
        self.timers.insert(id, Timer { lease, deadline, note_at, ended: None, noted });
        self.deadlines.insert((deadline, id));
        self.notes.extend(note_at.map(|at| (at, id)));
    }

    /// Keeps a lease alive. Nobody may be told before a quorum has called this member its leader, in the
    /// same term, after this.
    pub fn renew(&mut self, id: i64, now: Duration) -> Renewal {
        let Some(timer) = self.timers.get(&id) else { return Renewal::Unknown };
        if timer.ended.is_some() || timer.deadline <= now || self.noting.contains(&id) {
            return Renewal::Busy;
        }
        let (lease, noted) = (timer.lease, timer.noted);
        self.set(lease, now, seconds(lease.ttl), noted);
        Renewal::Renewed { lease, note: noted.is_some() }
    }

    /// The log says since `at`, or later, that this lease has all of its TTL.
    pub fn renewal_noted(&mut self, id: i64, at: Duration) {
        if let Some(timer) = self.timers.get_mut(&id)
            && timer.noted.is_some_and(|noted| noted <= at)
        {
            timer.noted = None;
        }
    }

    /// What a lease has left; nothing, if it is over and still there.
    #[must_use]
    pub fn left(&self, id: i64, now: Duration) -> Option<Duration> {
        let timer = self.timers.get(&id)?;
        Some(timer.deadline.saturating_sub(now))
    }

    /// The entries that end what is over, as many as one look may.
    pub fn expire(&mut self, now: Duration) -> Vec<LeaseExpire> {
        let Some(term) = self.term else { return Vec::new() };
        let mut over = Vec::new();
        while over.len() < EXPIRED_PER_LOOK
            && let Some(&(at, id)) = self.deadlines.first()
            && at <= now
        {
            self.deadlines.remove(&(at, id));
            let again = now + EXPIRE_AGAIN;
            self.deadlines.insert((again, id));
            if let Some(timer) = self.timers.get_mut(&id) {
                timer.ended = Some(again);
                over.push(LeaseExpire { id, term, granted: timer.lease.granted });
            }
        }
        over
    }

    /// The entry that notes what leases have left, if that is due for any. Until
    /// [`notes_done`](Self::notes_done) they can't be kept alive.
    pub fn note(&mut self, now: Duration) -> Option<LeaseCheckpoint> {
        let term = self.term?;
        let mut leases = Vec::new();
        while leases.len() < NOTED_PER_LOOK
            && let Some(&(at, id)) = self.notes.first()
            && at <= now
        {
            self.notes.remove(&(at, id));
            let Some(timer) = self.timers.get_mut(&id) else { continue };
            timer.note_at = None;
            let left = timer.deadline.saturating_sub(now);
            if left.is_zero() || timer.ended.is_some() {
                continue;
            }
            timer.note_at = note_after(left).map(|after| now + after);
            self.notes.extend(timer.note_at.map(|at| (at, id)));
            let left = whole_seconds(left);
            if left < timer.lease.ttl {
                timer.noted = Some(now);
                self.noting.insert(id);
                leases.push(LeaseLeft { id, left, granted: timer.lease.granted });
            }
        }
        (!leases.is_empty()).then_some(LeaseCheckpoint { term, leases })
    }

    /// Whatever became of that entry, the next one comes after it in the log.
    pub fn notes_done(&mut self, noted: &LeaseCheckpoint) {
        if self.term != Some(noted.term) {
            return;
        }
        for LeaseLeft { id, .. } in &noted.leases {
            self.noting.remove(id);
        }
    }
}

/// The entry that says that leases have all of their TTL again.
#[must_use]
pub fn whole(term: u64, leases: impl IntoIterator<Item = Lease>) -> LeaseCheckpoint {
    let whole = |Lease { id, granted, .. }| LeaseLeft { id, left: 0, granted };
    LeaseCheckpoint { term, leases: leases.into_iter().map(whole).collect() }
}

/// When what is left is to be noted next.
fn note_after(left: Duration) -> Option<Duration> {
    (left > NOTED_FROM).then(|| (left / 2).min(NOTE_AFTER))
}

fn read(table: &RwLock<LeaseTable>) -> std::sync::RwLockReadGuard<'_, LeaseTable> {
    table.read().expect("nothing panics while it holds this lock")
}

fn write(table: &RwLock<LeaseTable>) -> std::sync::RwLockWriteGuard<'_, LeaseTable> {
    table.write().expect("nothing panics while it holds this lock")
}
