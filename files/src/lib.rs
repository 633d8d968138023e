//! Files that are there, whole, after a crash, in folders that are ours alone.
//!
//! A file is written beside its place under a name that nobody can guess or prepare, synced, given
//! its name, and then its folder is synced: whoever reads it finds the old content or the new one,
//! and after [`replace`] returned, the new one. What a crash leaves beside it, [`sweep`] removes.
//!
//! Whoever owns a folder, or may write to it or to one above it, decides what lies in it: a link
//! to a file that only we may overwrite, a file for our keys that others can read. So [`own_folder`]
//! refuses such a folder, and [`open`] takes no link, pipe, or file that has another name.
//! Data may lie on a volume that others may write to: [`data_folder`] and [`data`] are for that.
//! A file that a person named ([`open_named`]) may lie anywhere, and only has to be a file.

pub mod data;
mod error;
mod folder;
mod named;
mod open;
mod place;
mod write;

pub use error::Error;
pub use folder::{DataFolder, Exposure, data_folder, open_folder, own_folder};
pub use named::{open_named, read_named};
pub use open::{open, read};
pub use write::{create, is_aside, rename, replace, replace_by, sweep, sync, sync_folder};
