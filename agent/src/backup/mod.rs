//! Backups of the cluster: snapshots that are proved to be readable before they count.
//!
//! One round saves one backup. The agent streams a snapshot from its own node into a spool file,
//! checks etcd's SHA-256 at its end, opens it, and reads every row. Only then the snapshot is
//! stored, encrypted if there are recipients. Its manifest is stored last: files without a manifest
//! are no backup. Later rounds remove the files that interrupted rounds have left.
//!
//! The store alone determines whether a backup is due. So the agent of a new leader, or a restarted
//! agent, continues the schedule of its predecessor. Two agents that both believe to be responsible
//! save two backups at most, under different names. Old backups are deleted only right after a new
//! one was published, so a schedule that fails deletes nothing.
//!
//! Decisions are pure: `name`, `manifest`, `listing`, `schedule`, `retention`. `inspect` knows only
//! the file format. The rest does I/O, with a limit on each wait.
//!
//! | module | owns |
//! |---|---|
//! | `keeper` | the schedule beside a running node |
//! | `verification`, `verification_file` | the scheduled proof of stored backups; its last result on disk |
//! | `save`, `examine`, `drill` | one round; the proof of a stored backup; the trial of a restore |
//! | `chunks`, `encryption`, `spool` | a file on its way to or from a store; the age format; temporary files |
//! | `store/` | a directory or a bucket of an S3-compatible store |
//! | `signature` | who has signed a manifest, and by which CAs that is verified |
//! | `settings` | the backup flags, resolved and checked |
//!
//! The agent signs each manifest (`signature`). Whoever can only write to the store can delete
//! backups, but can't replace one by another.

mod chunks;
pub(crate) mod drill;
mod encryption;
pub(crate) mod examine;
mod inspect;
pub(crate) mod keeper;
pub(crate) mod listing;
pub(crate) mod manifest;
pub(crate) mod name;
pub(crate) mod progress;
mod retention;
pub(crate) mod save;
mod schedule;
pub(crate) mod settings;
pub(crate) mod signature;
mod spool;
pub(crate) mod store;
mod verification;
mod verification_file;

pub(crate) use self::encryption::read_identities;
pub(crate) use self::spool::Spool;
