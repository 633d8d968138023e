//! Reads and writes bbolt files, the format in which etcd stores its data and hands out snapshots.
//!
//! A file is a sequence of pages of one size. The first two are *meta* pages: the valid one with
//! the higher transaction id is used. It gives the number of pages and the page of the root bucket.
//!
//! A *bucket* is a B+ tree of branch and leaf pages. The entries of the root bucket are buckets in
//! turn. A small bucket is stored inline, in the value of its entry. A node that is larger than a
//! page continues in the pages right after its own. All numbers are little-endian, since bbolt
//! writes the machine's byte order and etcd runs on little-endian machines. (Source:
//! `internal/common` and `node.go` of go.etcd.io/bbolt 1.3 to 1.5.)
//!
//! [`BboltReader`] reads files that come from an untrusted source. It checks each number before
//! using it, takes bounded memory, and panics on no input. It reads a bucket in key order and holds
//! one page of each level.
//!
//! [`measure`] and [`write`](write()) write a file from front to back. The caller passes the
//! entries in order, and does so twice. The first pass finds the size of the file, because the
//! first page has to contain it. The second pass writes the file. Neither pass holds more than one
//! page of each level.
//!
//! This crate can't change an existing file, and it writes no buckets within buckets. The files
//! that it writes have no free pages.
//!
//! No existing library fits. `bbolt-rs` and `nut` map the file into memory and cast its bytes to
//! structures, with `unsafe` at 64 places and more. They panic on unexpected bytes. `jammdb` has a
//! format of its own. None of these libraries was made for untrusted files, and none can write a
//! file without a database around it.

mod error;
mod meta;
mod page;
mod read;
mod write;

#[cfg(test)]
mod tests;

pub use error::{BboltReadError, BboltWriteError};
pub use read::{BboltReader, Bucket, BucketEntries, BucketEntry, EntryValue};
pub use write::{Builder, Layout, MAX_KEY_BYTES, measure, write};
