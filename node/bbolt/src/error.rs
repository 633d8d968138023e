//! What can be wrong with a file, or with what is to become one.

use std::io;

/// A file that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The source under it failed.
    #[error("the file could not be read")]
    Io(#[source] io::Error),
    /// Neither of its first pages says that it is one.
    #[error("it is no bbolt file, or damaged where it begins")]
    NoMeta,
    /// It is shorter than it says.
    #[error("it ends too early: {pages} pages of {page_bytes} bytes, and only {bytes} bytes")]
    CutOff {
        /// Pages that it says it has.
        pages: u64,
        /// Bytes of one of them.
        page_bytes: u64,
        /// Bytes that there are.
        bytes: u64,
    },
    /// A page says what no page of this file can say.
    #[error("page {page} is damaged: {what}")]
    Page {
        /// Its number.
        page: u64,
        /// What it says.
        what: &'static str,
    },
    /// The entry of a bucket is none.
    #[error("a bucket is damaged: {0}")]
    Bucket(&'static str),
}

/// A file that can't be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// What it is written to failed.
    #[error("the file could not be written")]
    Io(#[source] io::Error),
    /// A key does not come after the one before it, or a bucket after the bucket before it.
    #[error("keys and buckets have to come in order, each once")]
    Order,
    /// A key that bbolt would refuse: empty, or over 32 KiB.
    #[error("a key of {0} bytes; there may be 1 to 32768")]
    KeySize(usize),
    /// A value that bbolt would refuse: 2 GiB or more.
    #[error("a value of {0} bytes; there may be 2147483646")]
    ValueSize(usize),
    /// An entry before any bucket.
    #[error("an entry has to be in a bucket")]
    NoBucket,
    /// The entries were others when the file was measured.
    #[error("what was to be written has changed since it was measured")]
    Changed,
}
