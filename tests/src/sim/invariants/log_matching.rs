//! Raft paper, figure 3: if two logs contain an entry with the same index and term, they are
//! identical in all entries up through it. Checked entry by entry as it becomes durable or is shown
//! to a peer: the same (index, term) means the same kind and bytes, and the same term before it. (A single
//! voter that loses power may lead again in a term that nobody, its disk included, has heard of.)

use std::collections::BTreeMap;

use node_consensus::Entry;

use crate::sim::Violation;

/// See the module.
#[derive(Debug, Default)]
pub struct LogMatching {
    entries: BTreeMap<(u64, u64), (u64, Option<u64>)>,
}

/// FNV-1a.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl LogMatching {
    /// A member has these entries in its log, or shows them, after an entry of term `before` if
    /// that is known.
    pub fn observe(
        &mut self,
        member: u64,
        entries: &[Entry],
        mut before: Option<u64>,
    ) -> Result<(), Violation> {
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
    ) -> Result<(), Violation> {
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
        Err(Violation::new("log matching", what))
    }
}
