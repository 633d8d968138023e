//! Memory of peers' promises. With it, a peer is refused if its disk lacks something that the peer
//! has promised.
//!
//! A promise is a vote or an acknowledgement of entries. A data directory may be wiped, restored
//! from an image, or run twice. It then lacks votes and entries that other members counted, and
//! must not be used as that member again. The process on it can't detect that. Its peers can, if
//! they remember the promises. This module is that memory, without clock, thread or file.
//! [`Witness`] makes the decisions; its owner writes it to a file.
//!
//! # What is remembered, and compared
//!
//! For each member the memory has:
//! - its incarnation and its highest boot counter;
//! - the process (*run*) with that boot counter, and what it found on its disk;
//! - two [`Promise`]s: `earlier_promises`, of all lower boots, and `current_promises`, of that
//!   boot.
//!
//! When a process connects, it states incarnation, boot and run, and what its disk held *when it
//! began* ([`DiskState`]). This never changes while it runs. The process is refused
//! - if the incarnation isn't the remembered one: the directory was wiped or replaced;
//! - if the boot counter is below the known one, or equal with another run: one of the two is a
//!   copy of the other;
//! - if its disk lacks something that earlier boots promised: the disk is an image of an earlier
//!   time.
//!
//! # Why no correct member is ever refused
//!
//! A process counts its boot durably, and then reads its disk. The disk's state is compared only
//! with promises of lower boots. The processes of those boots had ended by then, and ran on the
//! same disk. Whatever they promised was durable there before the message was sent. [`Promise`]
//! explains what follows for the disk at a later time.
//!
//! The result never depends on the time of a comparison. So messages that come late, twice, in
//! another order or through other members change nothing. A promise that is recorded late counts
//! for a higher boot than the one that made it. So fewer processes are compared with it, never
//! more.
//!
//! A member need not keep what it never sent. A crash may lose what was not synced, or was synced
//! and not yet sent. Installing a snapshot only moves the last entry forward, because a member
//! takes only snapshots that are ahead of it. Compaction moves the log's beginning, which is not
//! compared.
//!
//! # How members learn of promises
//!
//! The receiver of a promise records it. Members send each other everything that they know, and
//! their own promises. They do so when a stream begins and after changes, up to once a second. The
//! receiver merges this into its memory ([`Witness::merge_report`]). If it accepted a process
//! earlier only because it knew less, it now disconnects that process.
//!
//! # What must be durable when
//!
//! - A boot must be durable before its hello is answered, and a vote before it is counted
//!   ([`Witness::urgent`]).
//! - Everything else must be durable within a second. An fdatasync for each acknowledgement would
//!   double the cost of a write.
//!
//! # What remains possible
//!
//! An image is accepted if no connected member remembers a promise that the image lacks. Then one
//! of the following is true for each member of the quorum that the image's process joins:
//! - That member has received no promise made after the image was taken, neither directly nor
//!   through others.
//! - That member has received such a promise, and lost it in a crash within the second before it
//!   was durable.
//!
//! Two processes on copies of one directory can be told apart once one of them has promised
//! anything or has been restarted. Until then they are equal, and the one with the higher boot
//! counter is accepted as the member.

mod codec;
mod promise;

use std::{
    cmp::Ordering,
    collections::{BTreeMap, btree_map::Entry},
};

pub use codec::WitnessDecodeError;
pub use promise::{DiskState, Promise};

use node_state::identity::{Incarnation, MemberId};

/// Process that started with the boot counter of a record, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BootProcess {
    /// No process with this boot counter was recorded.
    Unknown,
    /// Run number of the only known process with this boot counter.
    One(u64),
    /// Several processes have used this boot counter. They run on copies of one directory, and none
    /// of them is trusted.
    Several,
}

/// Known facts about one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WitnessRecord {
    incarnation: Incarnation,
    boot: u64,
    run: BootProcess,
    /// State that the process found on its disk when it began. `None` if the record is from a file
    /// of the first version, which lacked it.
    disk: Option<DiskState>,
    /// Promises of all boots before `boot`, merged into one.
    earlier_promises: Promise,
    /// Promises of the boot `boot` so far, merged into one.
    current_promises: Promise,
}

impl WitnessRecord {
    /// Returns whether the disk of the process has everything that earlier boots promised.
    fn keeps_promises(&self) -> bool {
        self.disk.is_none_or(|disk| disk.keeps(&self.earlier_promises))
    }

    /// Merges the record that another member has of the same member and incarnation.
    fn add(&mut self, told: &Self) {
        match told.boot.cmp(&self.boot) {
            Ordering::Greater => *self = Self::merge_boots(self, told),
            Ordering::Less => *self = Self::merge_boots(told, self),
            Ordering::Equal => self.add_same_boot(told),
        }
    }

    /// Merges two records of one member, from two peers that have accepted different boots of it:
    /// `low` and `high`, by boot counter. Only one boot can be the member.
    ///
    /// The result is the record of the higher boot, unless its disk lacks something that the lower
    /// boot promised. In that case the higher boot runs on a copied disk, and the result is the
    /// record of the lower boot. The copy made its promises in the member's name, so the lower
    /// boot's disk must have them (`high.current_promises`). The copy's record also has promises of
    /// all boots below it (`high.earlier_promises`). The lower boot may have made some of these
    /// itself after it read its disk. So the lower boot's disk isn't compared with these, but the
    /// disk of the next boot will be.
    fn merge_boots(low: &Self, high: &Self) -> Self {
        let higher = Self {
            earlier_promises: low
                .earlier_promises
                .merge(low.current_promises)
                .merge(high.earlier_promises),
            ..*high
        };
        let lower = Self {
            earlier_promises: low.earlier_promises.merge(high.current_promises),
            current_promises: low.current_promises.merge(high.earlier_promises),
            ..*low
        };
        if higher.keeps_promises() { higher } else { lower }
    }

    fn add_same_boot(&mut self, told: &Self) {
        self.earlier_promises = self.earlier_promises.merge(told.earlier_promises);
        self.current_promises = self.current_promises.merge(told.current_promises);
        if self.run == told.run || told.run == BootProcess::Unknown {
            return;
        }
        let theirs = Self { run: told.run, disk: told.disk, ..*self };
        match (self.run == BootProcess::Unknown || !self.keeps_promises(), theirs.keeps_promises())
        {
            (false, false) => {}
            (true, true) => *self = theirs,
            _ => self.run = BootProcess::Several,
        }
    }
}

/// A process's claim to be a member, as stated in its hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessClaim {
    /// Incarnation of the process's data directory.
    pub incarnation: Incarnation,
    /// Number of times that the data directory was started.
    pub boot: u64,
    /// Random number that identifies the process.
    pub run: u64,
    /// Term, vote and last index on the disk when the process began.
    pub disk: DiskState,
}

/// Reason why a process isn't accepted as the member that it claims to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimRejection {
    /// The process's data directory is not the one that the member is known to use.
    Incarnation,
    /// The boot counter is lower than the known one, or equals that of another process.
    Boot,
    /// The disk lacks something that the member promised.
    Amnesia,
}

/// Once this many members are known, no member is recorded that isn't in this member's own member
/// table.
const MAX_KNOWN_MEMBERS: usize = 256;

/// Memory that this member has of its peers: their processes and promises.
#[derive(Clone, Debug, Default)]
pub struct Witness {
    known: BTreeMap<MemberId, WitnessRecord>,
    version: u64,
    urgent: u64,
}

impl Witness {
    /// Records `shown` as the current process of `member`, if it is acceptable.
    ///
    /// # Errors
    /// If the process contradicts what is known about the member. The error gives the reason.
    pub fn admit(&mut self, member: MemberId, shown: &ProcessClaim) -> Result<(), ClaimRejection> {
        let account = self.judge(member, shown)?;
        if self.known.insert(member, account) != Some(account) {
            self.version += 1;
            self.urgent = self.version;
        }
        Ok(())
    }

    /// Returns whether `shown` would be accepted and is another process than the one recorded.
    ///
    /// # Errors
    /// If the process contradicts what is known about the member. The error gives the reason.
    pub fn is_new(&self, member: MemberId, shown: &ProcessClaim) -> Result<bool, ClaimRejection> {
        let account = self.judge(member, shown)?;
        Ok(self.known.get(&member).is_none_or(|known| known.run != account.run))
    }

    fn judge(
        &self,
        member: MemberId,
        shown: &ProcessClaim,
    ) -> Result<WitnessRecord, ClaimRejection> {
        let ProcessClaim { incarnation, boot, run, disk } = *shown;
        let (before, now) = (Promise::default(), Promise::default());
        let new = WitnessRecord {
            incarnation,
            boot,
            run: BootProcess::One(run),
            disk: Some(disk),
            earlier_promises: before,
            current_promises: now,
        };
        let account = match self.known.get(&member) {
            None => new,
            Some(known) if known.incarnation != incarnation => {
                return Err(ClaimRejection::Incarnation);
            }
            Some(known) if known.boot > boot => return Err(ClaimRejection::Boot),
            Some(known) if known.boot < boot => WitnessRecord {
                earlier_promises: known.earlier_promises.merge(known.current_promises),
                ..new
            },
            Some(known) => match known.run {
                BootProcess::One(known) if known != run => return Err(ClaimRejection::Boot),
                BootProcess::Several => return Err(ClaimRejection::Boot),
                BootProcess::One(_) | BootProcess::Unknown => WitnessRecord {
                    earlier_promises: known.earlier_promises,
                    current_promises: known.current_promises,
                    ..new
                },
            },
        };
        if account.keeps_promises() { Ok(account) } else { Err(ClaimRejection::Amnesia) }
    }

    /// Records a promise of `member`, received from an accepted process.
    pub fn record_promise(&mut self, member: MemberId, promise: Promise) {
        let Some(known) = self.known.get_mut(&member) else { return };
        let now = known.current_promises.merge(promise);
        if now == known.current_promises {
            return;
        }
        let voted =
            (now.term, now.vote) != (known.current_promises.term, known.current_promises.vote);
        known.current_promises = now;
        self.version += 1;
        if voted && promise.vote != 0 {
            self.urgent = self.version;
        }
    }

    /// Returns whether `member` may be recorded although it isn't in this member's own member
    /// table.
    pub fn has_room(&self, member: MemberId) -> bool {
        self.known.contains_key(&member) || self.known.len() < MAX_KNOWN_MEMBERS
    }

    /// Merges the [`report`](Self::report) of another member, but only the records of members that
    /// `is_peer` accepts. The second argument of `is_peer` is the result of
    /// [`has_room`](Self::has_room).
    ///
    /// # Errors
    /// If the report can't be decoded. Nothing is merged then.
    pub fn merge_report(
        &mut self,
        report: &[u8],
        is_peer: impl Fn(MemberId, bool) -> bool,
    ) -> Result<(), WitnessDecodeError> {
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

    /// Returns the report for other members: everything that is known, and the promises of this
    /// member itself. `own`, `shown` and `promised` describe this member.
    pub fn report(&self, own: MemberId, shown: &ProcessClaim, promised: Promise) -> Vec<u8> {
        let ProcessClaim { incarnation, boot, run, disk } = *shown;
        let (run, before) = (BootProcess::One(run), Promise::default());
        let mine = WitnessRecord {
            incarnation,
            boot,
            run,
            disk: Some(disk),
            earlier_promises: before,
            current_promises: promised,
        };
        let all = self.known.iter().map(|(member, known)| (*member, *known));
        codec::to_wire(all.chain([(own, mine)]))
    }

    /// Returns whether the process `run` of `member` would no longer be accepted.
    pub fn is_refused_now(&self, member: MemberId, run: u64) -> bool {
        let known = self.known.get(&member);
        known.is_none_or(|known| known.run != BootProcess::One(run) || !known.keeps_promises())
    }

    /// Forgets the members for which `is_removed` is true. No process with such an id is ever
    /// accepted again.
    pub fn forget(&mut self, is_removed: impl Fn(MemberId) -> bool) {
        let before = self.known.len();
        self.known.retain(|member, _| !is_removed(*member));
        self.version += u64::from(self.known.len() != before);
    }

    /// Returns the version of this memory of promises, which rises with every change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the version of the last urgent change. Such a change must be durable before anything
    /// that depends on it is done.
    pub fn urgent(&self) -> u64 {
        self.urgent
    }

    /// Returns the content of this witness as the text of a file.
    pub fn encode(&self) -> String {
        codec::to_text(self.known.iter().map(|(member, known)| (*member, *known)))
    }

    /// Decodes the text that [`encode`](Self::encode) of this or an earlier version wrote.
    ///
    /// # Errors
    /// If the text is damaged. A damaged file doesn't count as an empty one.
    pub fn decode(text: &str) -> Result<Self, WitnessDecodeError> {
        Ok(Self { known: codec::from_text(text)?, ..Self::default() })
    }
}

#[cfg(test)]
mod tests;
