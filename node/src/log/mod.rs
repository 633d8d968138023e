//! The replicated log on disk: what this member promised, and what it would be wrong to forget.
//!
//! One thread owns [`Log`] and does nothing else: it takes everything that is queued, gives it to
//! [`Log::write`] as one group, and reports what is durable. Others may read old entries through a
//! [`Reader`] meanwhile.
//!
//! # What is on disk
//!
//! A directory (`member/wal`) of segments of one size, named by their number. A segment is a chain
//! of *records*; each begins on a 4 KiB boundary and carries its length, a sequence number, the
//! checksum of the record before it, and its own checksum. The first record of a segment says whose
//! log this is and repeats everything that earlier segments may be the only ones to know (term,
//! vote, commit, base, boots), so that they can go. All other records are groups: hard state and
//! entries of any number of batches.
//!
//! # Why each rule
//!
//! * **One flush is one write of one record, then one `fdatasync`.** The next record is written only
//!   when this one is durable. So whatever comes after a damaged record proves that the record was
//!   once whole: that is corruption. If nothing valid comes after it, it is the tail of a write that
//!   the crash cut off, nobody was told of it, and it is cut.
//! * **Records are padded to 4 KiB**, so that no sector that holds acknowledged bytes is ever
//!   written again: a torn write can only harm its own record.
//! * **Checksums are seeded with cluster, member, incarnation and segment number**: what a recycled
//!   segment still holds of its former life, or a segment copied from another member or place, never
//!   validates.
//! * **Segments get their space before their name.** A segment is allocated whole, its first record
//!   is written and synced under a spare's name, and only then is it renamed and the directory
//!   synced. So a named segment that is short or has no first record is damage. The log as a whole
//!   comes to be in the same way: `wal.tmp` is renamed to `wal` when everything in it is durable.
//!   Whoever sees `member/wal` sees a log that works, and whose it is.
//! * **A full segment ends in a mark** that says so, written once the next one has its name: so the
//!   loss of the newest file isn't taken for a torn tail either.
//! * **Zeros are written ahead of the records** of a segment's first life, in large steps: a sync of
//!   blocks that were written before has no metadata to write. A recycled segment needs none.
//! * **The last record is sealed** by an empty one when there is nothing else to do
//!   ([`Log::prepare`]), before a clean end (an empty [`Batch`]), and by each opening; from then on
//!   damage to it is told from a torn tail.
//! * **A failed write or sync is final.** The kernel may have dropped the pages and call the next
//!   sync a success. The log refuses everything from then on, and the process has to abort; the
//!   restart reads what the medium holds, past the page cache ([`DiskFile::reread`]).
//!
//! # What the caller owes
//!
//! 1. Nothing that depends on a batch leaves before [`Log::write`] has returned `Ok` for it.
//! 2. After any error but [`LogError::NotThere`]: stop the process. [`LogError::is_final`] says
//!    that a restart won't help.
//! 3. Before the store is replaced by a snapshot, the log is told ([`Batch::installing`]), and
//!    again when the store holds it durably ([`Batch::snapshot`]). After a restart
//!    [`Log::check_store`] and [`Log::finish_install`] come before anything else is written.
//! 4. [`Log::compact`] only up to what the store holds durably.
//!
//! # What it can't know
//!
//! A last record that isn't sealed and doesn't match its checksum counts as torn, and is cut. It may
//! have been durable and damaged since: then this member has forgotten what it acknowledged. From
//! the bytes alone the two can't be told apart. A torn write leaves, sector by sector, either the new
//! content or the old one; in a recycled segment, which soon means in each, the old one is an
//! arbitrary piece of an earlier record, and nothing says what it was. Nor does anything written
//! earlier say that the last record was durable: only a later one can, and that is what a seal is.
//! So the time without one is kept short (20 ms without work, each opening, each clean end), and it
//! takes a crash and damage to just the record before it, both, to lose that. A disk that calls
//! durable what isn't does the same; against both, the others' copies are the defence.
//!
//! # What it does not do
//!
//! It keeps no recent entries in memory: consensus does. It doesn't know that its whole directory
//! was replaced by an older copy: store and peers do.

mod append;
mod codec;
mod error;
mod frame;
#[cfg(fuzzing)]
pub mod fuzz;
mod history;
mod open;
mod reader;
mod recover;
mod rotate;
mod segment;
mod store;
mod types;
mod writer;

#[cfg(doc)]
use crate::disk::DiskFile;
pub use error::{Damage, LogError};
pub use reader::Reader;
pub use store::Fit;
pub use types::{Batch, Identity, LogOptions, Recovered};
pub use writer::Log;

#[cfg(test)]
mod tests;
