//! Reads single entries from the ledger's file. The index in memory has only their places.
//!
//! The bytes to which a place points never change: the writer only appends, and publishes a place
//! after the bytes are durable. So an entry is read without a lock. The start has verified each
//! line's checksum, but the disk can have changed bytes since. An entry that was read must
//! therefore have the cluster's id, and a hash with the expected parity bits (`HashCheck`).
//! Otherwise the file is damaged.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use discovery_formation::Hash;
use discovery_formation::memory::LedgerEntry;
use uuid::Uuid;

use super::LedgerError;
use super::file::{JSON_START, io, parse_line};
use super::index::{Commit, LedgerLine, PACKED_LEN, parse_hash, unpack_commit};
use super::places::{CommitPlace, HashCheck, Place};

/// Number of bytes that are read at a time until a line is complete. Most lines with a document are
/// shorter.
const LINE_READ: usize = 16 << 10;
/// Number of hex digits of a hash.
const HASH_HEX_LEN: usize = 64;

/// The ledger's file, from which any part can be read. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct LedgerReader {
    file: Arc<File>,
    path: PathBuf,
}

impl LedgerReader {
    pub(super) fn new(file: Arc<File>, path: PathBuf) -> Self {
        LedgerReader { file, path }
    }

    /// Reads a cluster's entry at `place`.
    pub(super) fn entry(&self, cluster: Uuid, place: Place) -> Result<LedgerEntry, LedgerError> {
        Ok(match place {
            Place::Commit(at) => {
                LedgerEntry::Commit { h: self.hash(cluster, at)?, document: at.has_document }
            }
            Place::End(cause) => LedgerEntry::End(cause),
        })
    }

    /// Reads the hash of a cluster's commit at `place`.
    pub(super) fn hash(&self, cluster: Uuid, place: CommitPlace) -> Result<Hash, LedgerError> {
        let found = match place.has_document {
            true => {
                let start = line_start(cluster);
                let mut bytes = vec![0; JSON_START + start.len() + HASH_HEX_LEN];
                self.read_exact(&mut bytes, place.offset)?;
                let hex = bytes[JSON_START..].strip_prefix(start.as_bytes());
                hex.and_then(|hex| parse_hash(str::from_utf8(hex).ok()?))
            }
            false => {
                let mut bytes = [0; PACKED_LEN];
                self.read_exact(&mut bytes, place.offset)?;
                let found = str::from_utf8(&bytes).ok().and_then(unpack_commit);
                found.filter(|(id, _)| *id == cluster).map(|(_, h)| h)
            }
        };
        found.filter(|h| HashCheck::of(h) == place.check).ok_or_else(|| self.damaged(place.offset))
    }

    /// Reads a cluster's commit, whose line begins at `offset`.
    pub(super) fn commit(&self, cluster: Uuid, offset: u64) -> Result<Commit, LedgerError> {
        match parse_line(&self.line(offset)?) {
            Some(LedgerLine::Commit(commit)) if commit.cluster_id == cluster => Ok(*commit),
            _ => Err(self.damaged(offset)),
        }
    }

    /// Reads a line, without its line break.
    fn line(&self, offset: u64) -> Result<Vec<u8>, LedgerError> {
        let mut bytes = Vec::new();
        loop {
            let old = bytes.len();
            bytes.resize(old + LINE_READ, 0);
            let read = self.file.read_at(&mut bytes[old..], offset + old as u64);
            let read = read.map_err(io("can't read the ledger"))?;
            bytes.truncate(old + read);
            if let Some(end) = bytes[old..].iter().position(|byte| *byte == b'\n') {
                bytes.truncate(old + end);
                return Ok(bytes);
            }
            if read == 0 {
                return Err(self.damaged(offset));
            }
        }
    }

    fn read_exact(&self, bytes: &mut [u8], offset: u64) -> Result<(), LedgerError> {
        self.file.read_exact_at(bytes, offset).map_err(io("can't read the ledger"))
    }

    pub(super) fn damaged(&self, offset: u64) -> LedgerError {
        LedgerError::Damaged { path: self.path.clone(), offset }
    }
}

/// Returns the start of the JSON of a cluster's commit, up to the hash. [`LedgerLine`] is always
/// encoded in the order of its fields.
pub(super) fn line_start(cluster: Uuid) -> String {
    format!(r#"{{"kind":"commit","cluster_id":"{cluster}","h":""#)
}
