//! Invariant: if two logs contain an entry with the same index and term, they are identical in all
//! entries up to it (Raft paper, figure 3).
//! Each entry is checked when it becomes durable or is sent to a peer. Entries with the same
//! (index, term) must have the same kind, the same bytes and the same preceding term. An earlier
//! check would be wrong. A single voter that loses power may lead again in a term that no disk has,
//! not even its own.

use std::collections::BTreeMap;

use node_consensus::Entry;

use crate::sim::InvariantViolation;

/// Entries seen so far: hash and preceding term, by index and term.
#[derive(Debug, Default)]
pub struct LogMatching {
    entries: BTreeMap<(u64, u64), (u64, Option<u64>)>,
}

/// Returns the FNV-1a hash of `bytes`.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl LogMatching {
    /// Checks entries that a member has in its log or sends. `before` is the term of the entry
    /// before them, if it is known.
    pub fn observe(
        &mut self,
        member: u64,
        entries: &[Entry],
        mut before: Option<u64>,
    ) -> Result<(), InvariantViolation> {
        for entry in entries {
            self.observe_one(member, entry, before)?;
            before = Some(entry.term);
        }
        Ok(())
    }

    fn observe_one(
        &mut self,
        member: u64,
        entry: &Entry,
        before: Option<u64>,
    ) -> Result<(), InvariantViolation> {
        let at = (entry.index, entry.term);
        let data = hash(&entry.data) ^ u64::from(entry.kind.number());
        let known = self.entries.entry(at).or_insert((data, before));
        let terms_differ = matches!((known.1, before), (Some(a), Some(b)) if a != b);
        if known.0 == data && !terms_differ {
            known.1 = known.1.or(before);
            return Ok(());
        }
        let what = format!(
            "entry {} of term {} differs at {member}: terms before {:?} and {before:?}",
            entry.index, entry.term, known.1
        );
        Err(InvariantViolation::new("log matching", what))
    }
}
