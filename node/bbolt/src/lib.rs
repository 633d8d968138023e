//! bbolt files, read and written: the format in which etcd keeps and hands out its store.
//!
//! A file is a row of pages of one size. The first two are *meta* pages, of which the valid one with
//! the higher transaction id counts; it says how many pages there are and which one is the root. The
//! root is a *bucket*: a B+ tree of branch and leaf pages, whose entries here are buckets again. A
//! small bucket lies inline, in its entry. A page that is too small for what it holds goes on in the
//! pages right behind it. All numbers are little-endian, as bbolt has them on the machines that etcd
//! runs on. (Source: `internal/common` and `node.go` of go.etcd.io/bbolt 1.3 to 1.5.)
//!
//! [`Reader`] takes a file that anybody may have made: what it says of itself is checked before it is
//! believed, in bounded memory, and there is no byte at which it panics. It walks a bucket in the
//! order of its keys, a page of each level at a time.
//!
//! [`measure`] and [`write`](write()) make a file from front to back, out of entries that come in
//! order, twice: first to learn how large it gets, which its first page has to say, then to write it.
//! Neither keeps more than a page of each level.
//!
//! What is not here: changing a file, free pages (a file that was written here has none), buckets
//! within buckets when writing.
//!
//! Why not a library: of those that know the format, `bbolt-rs` and `nut` map the file into memory, cast
//! its bytes to structures (`unsafe` at 64 places and more) and panic where one doesn't hold what they
//! expect; `jammdb` has a format of its own. None was made for a file that comes from somewhere else,
//! and none writes one without a database around it.

mod error;
mod meta;
mod page;
mod read;
mod write;

#[cfg(test)]
mod tests;

pub use error::{ReadError, WriteError};
pub use read::{Bucket, Entries, Entry, Reader, Value};
pub use write::{Builder, Layout, MAX_KEY_BYTES, measure, write};
