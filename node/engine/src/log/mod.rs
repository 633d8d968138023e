//! The replicated log on disk: the entries, term and vote that this member must not lose.
//!
//! One thread owns [`Log`] and does nothing else. It passes all queued batches to [`Log::write`] as
//! one group, and reports what is durable. At the same time, other threads may read old entries
//! through a [`LogReader`].
//!
//! # What is on disk
//!
//! The directory `member/wal` holds segments of one size, named by their number. A segment is a
//! chain of *records*. Each record begins on a 4 KiB boundary. It carries its length, a sequence
//! number, the checksum of the previous record, and its own checksum.
//!
//! The first record of a segment states the owner of the log. It also repeats what earlier segments
//! hold besides entries (term, vote, commit, base, boots), so that those segments can be removed.
//! All other records are groups. A group holds hard state and entries of any number of batches.
//!
//! # Why each rule
//!
//! * **One flush is one write of one record, then one `fdatasync`.** The next record is written
//!   only when this one is durable. So a later record proves that a damaged record was once whole:
//!   that is corruption. If no valid record follows the damaged one, a crash interrupted its write.
//!   It was never reported as durable, so it is truncated.
//! * **Records are padded to 4 KiB**, so that no sector with acknowledged bytes is ever written
//!   again. A torn write can only damage its own record.
//! * **Checksums are seeded with cluster, member, incarnation and segment number.** So neither old
//!   records in a recycled segment nor a segment copied from elsewhere ever validate.
//! * **Segments get their space before their name.** A segment is allocated as a whole, and its
//!   first record is written and synced under the name of a spare segment. Only then is the file
//!   renamed, and the directory synced. So a named segment that is short or has no first record is
//!   damaged. The log as a whole is created in the same way: `wal.tmp` is renamed to `wal` when
//!   everything in it is durable. So if `member/wal` exists, it is a working log with an owner.
//! * **A full segment ends in a mark**, written once the next segment has its name. So if the
//!   newest file is lost, the end of the file before is not mistaken for a torn tail.
//! * **Zeros are written ahead of the records** when a segment is used for the first time, in large
//!   steps. A sync of blocks that were written before has no metadata to write. A recycled segment
//!   needs no zeros.
//! * **The last record is sealed** by an empty one. This happens when there is nothing else to do
//!   ([`Log::prepare`]), before a clean end (an empty [`Batch`]), and at each opening. From then
//!   on, damage to the sealed record can be told from a torn tail.
//! * **A failed write or sync is final.** The kernel may have dropped the pages, and report success
//!   for the next sync. The log refuses everything from then on, and the process must abort. The
//!   restart reads what the medium holds, past the page cache ([`DiskFile::sync_and_drop_cache`]).
//!
//! # Duties of the caller
//!
//! 1. Send nothing that depends on a batch before [`Log::write`] has returned `Ok` for it.
//! 2. Stop the process after any error but [`LogError::Compacted`]. [`LogError::is_final`] returns
//!    true if a restart can't help.
//! 3. Announce that a snapshot will replace the store ([`Batch::installing`]), and report when the
//!    store holds the snapshot durably ([`Batch::snapshot`]). After a restart, call
//!    [`Log::check_store`] and [`Log::finish_install`] before anything else is written.
//! 4. Call [`Log::compact`] only up to the index that the store holds durably.
//!
//! # What recovery can't detect
//!
//! A last record that isn't sealed and doesn't match its checksum counts as torn, and is truncated.
//! But it may have been durable, and damaged later. Then this member has forgotten what it
//! acknowledged.
//!
//! The bytes alone can't distinguish a torn write from later damage. A torn write leaves, sector by
//! sector, either the new content or the old one. In a recycled segment, the old content is an
//! arbitrary piece of an earlier record, and soon all segments are recycled. No earlier record can
//! prove that the last record was durable. Only a later record can; the seal is such a record.
//!
//! So the last record is sealed soon: after 20 ms without work, at each opening and at each clean
//! end. Data is lost only if the member crashes and the last record before the crash is damaged as
//! well. A disk that reports data as durable too early has the same effect. The copies on the other
//! members protect against data loss in either case.
//!
//! # What it does not do
//!
//! The log keeps no recent entries in memory: consensus does. It can't detect that its whole
//! directory was replaced by an older copy: store and peers do.

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

pub use error::{Damage, LogError};
#[cfg(doc)]
use node_state::disk::DiskFile;
pub use reader::LogReader;
pub use store::StoreConsistency;
pub use types::{Batch, LogIdentity, LogOptions, RecoveredState};
pub use writer::Log;

#[cfg(test)]
mod tests;
