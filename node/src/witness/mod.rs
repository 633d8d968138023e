//! What a member remembers of its peers, so that none of them comes back as less than it was.
//!
//! A data directory that was wiped, or put back from an image, or that runs twice, has forgotten
//! votes and entries that were counted on. It must not speak for its member again. It can't know that
//! of itself; its peers can, if they remember what it promised. That memory is here, without clock,
//! thread or file: [`Witness`] decides, who keeps it says what is durable when.
//!
//! # What is remembered, and compared
//!
//! Of each member: its incarnation, its highest boot counter, the process (*run*) that had it and what
//! that found on its disk, and two [`Promise`]s: `before`, of all boots below that one, and `now`, of that one. When a process
//! shows itself it says, beside incarnation, boot and run, what its disk held *when it began*
//! ([`OnDisk`]); that never changes while it runs. It is refused if
//! - the incarnation is another: the directory was wiped or replaced;
//! - the boot counter is below the known one, or the same from another run: a copy, or its original;
//! - its disk doesn't keep what boots before it promised: an image of an earlier time.
//!
//! # Why nobody who is well is ever refused
//!
//! A process counts its boot durably and then reads its disk. It is compared with promises of lower
//! boots only: of processes that had ended by then, on the same disk, and whatever they promised was
//! durable there before the message left (see [`Promise`] for what follows from that later). None of
//! it depends on when something is compared, so that messages which come late, twice, in another
//! order or by way of others change nothing. A promise that is noted too late counts for a higher
//! boot than it was made in: that compares it with fewer processes, never with more.
//!
//! What a member has not said, it is not held to: a crash may take whatever was not synced, or synced
//! and not yet told. A snapshot that was installed moves the last entry forward only, because a
//! member takes none that it is not behind of; the log's beginning, which compaction moves, is not
//! looked at.
//!
//! # Who knows
//!
//! Whom something is promised to notes it. Members tell each other all that they know, and what they
//! promised themselves, when a stream begins and then as often as it changes, up to once a second.
//! What is told is added to what is known ([`Witness::told`]); a process that was let in by somebody
//! who knew less is found out then, and cut off.
//!
//! # What must be durable when
//!
//! - A boot, before its hello is answered; a vote, before it is counted ([`Witness::urgent`]).
//! - All else within a second: an fdatasync for each acknowledgement would double the cost of a write.
//!
//! # What is left
//!
//! An image is taken back only where nobody who is there knows better: nobody of the quorum that it
//! then makes was connected, since the image was taken, to whom it promised something or to somebody
//! who heard of that; or all who heard have lost it since, within the second before it was on their
//! disks. Two processes on copies of one directory are told apart once one of them has promised
//! anything or has been started again; until then they are equal, and the one with the higher
//! boot counter is taken for the member.

mod codec;
mod promise;

use std::{
    cmp::Ordering,
    collections::{BTreeMap, btree_map::Entry},
};

pub use codec::DecodeError;
pub use promise::{OnDisk, Promise};

use crate::identity::{Incarnation, MemberId};

/// Which process had a boot counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// Nobody noted it.
    Unknown,
    /// This one.
    One(u64),
    /// More than one: they are copies of each other, and none of them is trusted.
    Several,
}

/// What is known of one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Account {
    incarnation: Incarnation,
    boot: u64,
    run: Run,
    /// What that process found on its disk; the first version didn't note it.
    disk: Option<OnDisk>,
    /// What boots before this one promised.
    before: Promise,
    /// What this one has promised so far.
    now: Promise,
}

impl Account {
    /// Whether its process would be let in.
    fn is_sound(&self) -> bool {
        self.disk.is_none_or(|disk| disk.keeps(&self.before))
    }

    /// Adds what somebody else knows of the same incarnation.
    fn add(&mut self, told: &Self) {
        match told.boot.cmp(&self.boot) {
            Ordering::Greater => *self = Self::of_two(self, told),
            Ordering::Less => *self = Self::of_two(told, self),
            Ordering::Equal => self.add_same_boot(told),
        }
    }

    /// What is known of a member by two who have let in different boots of it. The higher one counts,
    /// unless it has forgotten what the lower one promised: then it is a copy, and the lower one goes on,
    /// if it has kept what the copy promised in the member's name. What boots below the copy's promised
    /// may be the lower one's own; it counts for the next.
    fn of_two(low: &Self, high: &Self) -> Self {
        let higher = Self { before: low.before.and(low.now).and(high.before), ..*high };
        let lower =
            Self { before: low.before.and(high.now), now: low.now.and(high.before), ..*low };
        if higher.is_sound() { higher } else { lower }
    }

    fn add_same_boot(&mut self, told: &Self) {
        self.before = self.before.and(told.before);
        self.now = self.now.and(told.now);
        if self.run == told.run || told.run == Run::Unknown {
            return;
        }
        let theirs = Self { run: told.run, disk: told.disk, ..*self };
        match (self.run == Run::Unknown || !self.is_sound(), theirs.is_sound()) {
            (false, false) => {}
            (true, true) => *self = theirs,
            _ => self.run = Run::Several,
        }
    }
}

/// A process, as it shows itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appearance {
    /// Of its data directory.
    pub incarnation: Incarnation,
    /// How often that has been started.
    pub boot: u64,
    /// Random for each process.
    pub run: u64,
    /// What it held when this process began.
    pub disk: OnDisk,
}

/// Why a process is not the member that it says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objection {
    /// It has another data directory.
    Incarnation,
    /// Its boot counter went back, or two processes have the same.
    Boot,
    /// Its disk has forgotten what the member promised.
    Amnesia,
}

/// Once so many members are remembered, those that only others say are members find no room.
const MOST_KNOWN: usize = 256;

/// The memory of one member.
#[derive(Clone, Debug, Default)]
pub struct Witness {
    known: BTreeMap<MemberId, Account>,
    version: u64,
    urgent: u64,
}

impl Witness {
    /// Takes `member` to be the process that shows itself, or says why not.
    ///
    /// # Errors
    /// If it is less than the member was.
    pub fn admit(&mut self, member: MemberId, shown: &Appearance) -> Result<(), Objection> {
        let account = self.judge(member, shown)?;
        if self.known.insert(member, account) != Some(account) {
            self.version += 1;
            self.urgent = self.version;
        }
        Ok(())
    }

    /// Whether this process would be let in, and now for the first time.
    ///
    /// # Errors
    /// If it is less than the member was.
    pub fn is_new(&self, member: MemberId, shown: &Appearance) -> Result<bool, Objection> {
        let account = self.judge(member, shown)?;
        Ok(self.known.get(&member).is_none_or(|known| known.run != account.run))
    }

    fn judge(&self, member: MemberId, shown: &Appearance) -> Result<Account, Objection> {
        let Appearance { incarnation, boot, run, disk } = *shown;
        let (before, now) = (Promise::default(), Promise::default());
        let new = Account { incarnation, boot, run: Run::One(run), disk: Some(disk), before, now };
        let account = match self.known.get(&member) {
            None => new,
            Some(known) if known.incarnation != incarnation => return Err(Objection::Incarnation),
            Some(known) if known.boot > boot => return Err(Objection::Boot),
            Some(known) if known.boot < boot => {
                Account { before: known.before.and(known.now), ..new }
            }
            Some(known) => match known.run {
                Run::One(known) if known != run => return Err(Objection::Boot),
                Run::Several => return Err(Objection::Boot),
                Run::One(_) | Run::Unknown => {
                    Account { before: known.before, now: known.now, ..new }
                }
            },
        };
        if account.is_sound() { Ok(account) } else { Err(Objection::Amnesia) }
    }

    /// Notes what `member` has promised, on a stream of a process that was let in.
    pub fn heard(&mut self, member: MemberId, promise: Promise) {
        let Some(known) = self.known.get_mut(&member) else { return };
        let now = known.now.and(promise);
        if now == known.now {
            return;
        }
        let voted = (now.term, now.vote) != (known.now.term, known.now.vote);
        known.now = now;
        self.version += 1;
        if voted && promise.vote != 0 {
            self.urgent = self.version;
        }
    }

    /// Whether there is room for `member`, if that isn't in this member's own table.
    pub fn has_room(&self, member: MemberId) -> bool {
        self.known.contains_key(&member) || self.known.len() < MOST_KNOWN
    }

    /// Adds what another member knows, as its [`report`](Self::report) says, of those that `is_peer`
    /// says are peers; it is asked with whether there [is room](Self::has_room).
    ///
    /// # Errors
    /// If that can't be read. Nothing is added then.
    pub fn told(
        &mut self,
        report: &[u8],
        is_peer: impl Fn(MemberId, bool) -> bool,
    ) -> Result<(), DecodeError> {
        for (member, told) in codec::from_wire(report)? {
            if !is_peer(member, self.has_room(member)) {
                continue;
            }
            match self.known.entry(member) {
                Entry::Vacant(entry) => {
                    entry.insert(told);
                    self.version += 1;
                }
                Entry::Occupied(mut entry) => {
                    let account = entry.get_mut();
                    let before = *account;
                    if before.incarnation == told.incarnation {
                        account.add(&told);
                    }
                    self.version += u64::from(*account != before);
                }
            }
        }
        Ok(())
    }

    /// Everything that is known, for another member, and what this one, `own`, has promised itself.
    pub fn report(&self, own: MemberId, shown: &Appearance, promised: Promise) -> Vec<u8> {
        let Appearance { incarnation, boot, run, disk } = *shown;
        let (run, before) = (Run::One(run), Promise::default());
        let mine = Account { incarnation, boot, run, disk: Some(disk), before, now: promised };
        let all = self.known.iter().map(|(member, known)| (*member, *known));
        codec::to_wire(all.chain([(own, mine)]))
    }

    /// Whether this process of `member`, which was let in once, would be refused by now.
    pub fn is_found_out(&self, member: MemberId, run: u64) -> bool {
        let known = self.known.get(&member);
        known.is_none_or(|known| known.run != Run::One(run) || !known.is_sound())
    }

    /// Forgets who was removed: nothing of that id is ever taken again.
    pub fn forget(&mut self, is_removed: impl Fn(MemberId) -> bool) {
        let before = self.known.len();
        self.known.retain(|member, _| !is_removed(*member));
        self.version += u64::from(self.known.len() != before);
    }

    /// Rises with every change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The version of the last change that must be durable before anything follows from it.
    pub fn urgent(&self) -> u64 {
        self.urgent
    }

    /// The memory as a file.
    pub fn encode(&self) -> String {
        codec::to_text(self.known.iter().map(|(member, known)| (*member, *known)))
    }

    /// Reads what [`encode`](Self::encode) wrote, now or in an earlier version.
    ///
    /// # Errors
    /// If it is damaged: that is not an empty memory.
    pub fn decode(text: &str) -> Result<Self, DecodeError> {
        Ok(Self { known: codec::from_text(text)?, ..Self::default() })
    }
}

#[cfg(test)]
mod tests;
