//! Durable files: after a crash each file is complete, and it lies in a folder that only our user
//! may write to.
//!
//! A file is written under a temporary name that nobody can guess, synced and renamed; then its
//! folder is synced. A reader finds the old or the new content, and only the new one after
//! [`replace`] returned. [`sweep`] removes temporary files that a crash left.
//!
//! A user who owns a folder, or may write to it or to one above it, controls its content. Such a
//! user can link to a file that only we may overwrite, or create our key file with a mode that
//! others can read. So [`open_own_folder`] refuses such a folder, and [`open()`] refuses links,
//! pipes, and files with more than one hard link.
//!
//! There are two exceptions:
//!
//! - Data may lie on a volume that others may write to: see [`open_data_folder`] and [`data`].
//! - A file that a person named ([`open_named`]) may lie anywhere, and only has to be a regular
//!   file.

pub mod data;
mod error;
mod folder;
mod location;
mod named_file;
mod open;
mod write;

pub use error::Error;
pub use folder::{
    DataFolder, Exposure, existing_ancestor, inspect_data_folder, inspect_own_folder,
    open_data_folder, open_folder, open_own_folder,
};
pub use named_file::{open_named, read_named};
pub use open::{open, read};
pub use write::{create, is_temporary_name, rename, replace, replace_by, sweep, sync, sync_folder};
