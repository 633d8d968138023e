//! Errors of reading a bbolt file, and of writing one.

use std::io;

/// Why a bbolt file can't be read.
#[derive(Debug, thiserror::Error)]
pub enum BboltReadError {
    /// Reading from the underlying source failed.
    #[error("the file could not be read")]
    Io(#[source] io::Error),
    /// Neither of the first two pages is a valid meta page.
    #[error("it is no bbolt file, or damaged where it begins")]
    NoMeta,
    /// The file is shorter than the number of pages that its meta page gives.
    #[error("it ends too early: {pages} pages of {page_bytes} bytes, and only {bytes} bytes")]
    CutOff {
        /// Number of pages, according to the meta page.
        pages: u64,
        /// Size of a page in bytes.
        page_bytes: u64,
        /// Size of the file in bytes.
        bytes: u64,
    },
    /// A page has contents that are not valid in this file.
    #[error("page {page} is damaged: {what}")]
    Page {
        page: u64,
        /// Description of the damage.
        what: &'static str,
    },
    /// The value of a bucket's entry in its parent bucket is malformed.
    #[error("a bucket is damaged: {0}")]
    Bucket(&'static str),
}

/// Why a bbolt file can't be written.
#[derive(Debug, thiserror::Error)]
pub enum BboltWriteError {
    /// Writing to the output failed.
    #[error("the file could not be written")]
    Io(#[source] io::Error),
    /// A key or bucket name is not greater than the one before it.
    #[error("keys and buckets have to come in order, each once")]
    KeysOutOfOrder,
    /// A key that bbolt would refuse: empty, or over 32 KiB.
    #[error("a key of {0} bytes; there may be 1 to 32768")]
    KeySize(usize),
    /// A value that bbolt would refuse: 2 GiB or more.
    #[error("a value of {0} bytes; there may be 2147483646")]
    ValueSize(usize),
    /// An entry was added before any bucket was begun.
    #[error("an entry has to be in a bucket")]
    NoBucket,
    /// The second pass, which writes the file, got other entries than the first pass, which
    /// computed the file's layout.
    #[error("what was to be written has changed since it was measured")]
    LayoutMismatch,
}
