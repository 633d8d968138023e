//! The sorted map from a cluster to the place of its entry in the ledger's file.
//!
//! A ledger can have a million entries, and a list's hash alone has 32 bytes. So memory holds only
//! where the file has each hash: 24 bytes for a cluster, with its id. The map is a list of sorted
//! blocks, like the leaves of a B-tree. New ids of clusters nearly ascend, so most blocks become
//! full, and none is moved as a whole.

use discovery_formation::Hash;
use discovery_formation::service::EndCause;
use uuid::Uuid;

/// Place of a cluster's entry in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The ledger's file has the commit.
    Commit(CommitPlace),
    /// The cluster ended without a commit. The file needn't be read.
    End(EndCause),
}

/// Place of a commit in the ledger's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommitPlace {
    /// Whether the file has the document, too. Otherwise it has only the hash.
    pub(super) has_document: bool,
    /// Offset in bytes of the commit's line, if the file has the document. Otherwise, offset of the
    /// text in which `pack_commit` has encoded the commit.
    pub(super) offset: u64,
    pub(super) check: HashCheck,
}

/// Parity bits of a list's hash. They are computed anew whenever the hash is read from the file. If
/// they differ, the disk has changed the hash. Only a start verifies the checksums of all lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HashCheck(u32);

impl HashCheck {
    /// Folds the hash to [`CHECK_BITS`] bits with XOR. Each bit of the hash counts in exactly one
    /// bit of the result.
    pub(super) fn of(h: &Hash) -> Self {
        let words = h.0.as_chunks().0.iter().map(|word| u32::from_be_bytes(*word));
        let sum = words.fold(0, |sum, word| sum ^ word);
        HashCheck((sum ^ sum >> CHECK_BITS) & CHECK_MASK)
    }
}

const WITHOUT_DOCUMENT: u64 = 0;
const WITH_DOCUMENT: u64 = 1;
const ENDED: u64 = 2;

const KIND_BITS: u32 = 2;
const CHECK_BITS: u32 = 22;
const CHECK_MASK: u32 = (1 << CHECK_BITS) - 1;
const OFFSET_BITS: u32 = u64::BITS - KIND_BITS - CHECK_BITS;

/// Maximum size of the ledger's file in bytes (1 TiB), because a place has 40 bits for an offset.
/// An append that would make the file larger fails.
pub(super) const MAX_FILE_BYTES: u64 = 1 << OFFSET_BITS;

/// Maximum number of clusters in one block. A full block takes 12 KiB.
const BLOCK_LEN: usize = 512;
/// Number of clusters by which a block's space grows. It bounds the unused space of a block.
const BLOCK_GROWTH: usize = 16;

/// A cluster and the place of its entry, in 24 bytes.
#[derive(Clone, Copy, Debug)]
struct PlaceRecord {
    cluster: Uuid,
    /// The place as [`pack`] encodes it.
    packed: u64,
}

/// Encodes a place: the kind in the lowest bits, then a commit's hash check or an end's cause, then
/// the offset.
fn pack(place: Place) -> u64 {
    let (kind, detail, offset) = match place {
        Place::Commit(CommitPlace { has_document, offset, check }) => {
            (if has_document { WITH_DOCUMENT } else { WITHOUT_DOCUMENT }, check.0, offset)
        }
        Place::End(cause) => (ENDED, cause_number(cause), 0),
    };
    assert!(offset < MAX_FILE_BYTES, "offset {offset} is beyond the ledger's maximum size");
    kind | u64::from(detail) << KIND_BITS | offset << (KIND_BITS + CHECK_BITS)
}

fn unpack(packed: u64) -> Place {
    let kind = packed & ((1 << KIND_BITS) - 1);
    let detail = (packed >> KIND_BITS) as u32 & CHECK_MASK;
    if kind == ENDED {
        return Place::End(CAUSES[detail as usize]);
    }
    let offset = packed >> (KIND_BITS + CHECK_BITS);
    let has_document = kind == WITH_DOCUMENT;
    Place::Commit(CommitPlace { has_document, offset, check: HashCheck(detail) })
}

/// Causes by their number in a packed place. The numbers are never stored on disk.
const CAUSES: [EndCause; 4] =
    [EndCause::Abandon, EndCause::DatabaseAccepted, EndCause::Deadline, EndCause::Retire];

fn cause_number(cause: EndCause) -> u32 {
    match cause {
        EndCause::Abandon => 0,
        EndCause::DatabaseAccepted => 1,
        EndCause::Deadline => 2,
        EndCause::Retire => 3,
    }
}

/// Map from clusters to the places of their entries, in the order of the clusters' ids.
#[derive(Debug, Default)]
pub(super) struct PlaceMap {
    /// Records in order. No block is empty, and none has more than [`BLOCK_LEN`] records.
    blocks: Vec<Vec<PlaceRecord>>,
}

impl PlaceMap {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn get(&self, cluster: Uuid) -> Option<Place> {
        let block = &self.blocks.get(self.block_of(cluster))?;
        let at = position(block, cluster).ok()?;
        Some(unpack(block[at].packed))
    }

    /// Inserts the place of a cluster, or replaces it.
    pub(super) fn insert(&mut self, cluster: Uuid, place: Place) {
        let record = PlaceRecord { cluster, packed: pack(place) };
        let number = self.block_of(cluster);
        let Some(block) = self.blocks.get_mut(number) else {
            self.blocks.push(block_with(record));
            return;
        };
        let at = match position(block, cluster) {
            Ok(at) => {
                block[at] = record;
                return;
            }
            Err(at) => at,
        };
        if block.len() < BLOCK_LEN {
            insert_at(block, at, record);
        } else if at == BLOCK_LEN {
            // Don't split a full block for an id after its last one. The following ids are likely
            // to be even greater, so the new block will fill up, too.
            self.insert_after_block(number, record);
        } else {
            // Copy both halves: an allocator may keep the whole block's memory for a shrunk half.
            let mut upper = block[BLOCK_LEN / 2..].to_vec();
            *block = block[..BLOCK_LEN / 2].to_vec();
            match at.checked_sub(BLOCK_LEN / 2) {
                Some(at) => insert_at(&mut upper, at, record),
                None => insert_at(block, at, record),
            }
            self.blocks.insert(number + 1, upper);
        }
    }

    /// Inserts a record that is greater than all of the full block `number` and less than all of
    /// the next block.
    fn insert_after_block(&mut self, number: usize, record: PlaceRecord) {
        match self.blocks.get_mut(number + 1) {
            Some(next) if next.len() < BLOCK_LEN => insert_at(next, 0, record),
            _ => self.blocks.insert(number + 1, block_with(record)),
        }
    }

    /// Iterates over the clusters after `after` (all if `None`), in the order of their ids.
    pub(super) fn after(&self, after: Option<Uuid>) -> impl Iterator<Item = (Uuid, Place)> {
        let number = after.map_or(0, |after| self.block_of(after));
        let first = self.blocks.get(number).map_or(&[][..], Vec::as_slice);
        let start =
            after.map_or(0, |after| first.partition_point(|record| record.cluster <= after));
        let rest = self.blocks.iter().skip(number + 1).flatten();
        first[start..].iter().chain(rest).map(|record| (record.cluster, unpack(record.packed)))
    }

    /// Returns the number of the block that holds the cluster, or would hold it.
    fn block_of(&self, cluster: Uuid) -> usize {
        let is_at_or_before = |block: &Vec<PlaceRecord>| block[0].cluster <= cluster;
        self.blocks.partition_point(is_at_or_before).saturating_sub(1)
    }
}

fn position(block: &[PlaceRecord], cluster: Uuid) -> Result<usize, usize> {
    block.binary_search_by_key(&cluster, |record| record.cluster)
}

fn block_with(record: PlaceRecord) -> Vec<PlaceRecord> {
    let mut block = Vec::with_capacity(BLOCK_GROWTH);
    block.push(record);
    block
}

fn insert_at(block: &mut Vec<PlaceRecord>, at: usize, record: PlaceRecord) {
    if block.len() == block.capacity() {
        block.reserve_exact(BLOCK_GROWTH);
    }
    block.insert(at, record);
}

#[cfg(test)]
mod tests;
