//! Invariant: if a member has applied an entry at an index, no other member ever applies a
//! different one there (Raft paper, figure 3).

use std::collections::{BTreeMap, BTreeSet};

use node_proto::command::{self, DecodedCommand};
use node_state::state_machine::CommittedEntry;

use super::log_matching::hash;
use crate::sim::InvariantViolation;

/// Entries and requests applied so far.
#[derive(Debug, Default)]
pub struct StateMachineSafety {
    /// Term and hash of each applied entry, by index.
    committed: BTreeMap<u64, (u64, u64)>,
    /// Ids of all requests in the applied entries.
    requests: BTreeSet<u64>,
}

impl StateMachineSafety {
    /// Checks an entry that a member applies.
    pub fn observe(
        &mut self,
        member: u64,
        entry: &CommittedEntry,
    ) -> Result<(), InvariantViolation> {
        let position = entry.position;
        let found = (position.term, hash(&entry.data) ^ u64::from(entry.kind.number()));
        if let Ok(DecodedCommand { request_id: request, .. }) = command::decode(entry.data.clone())
            && !self.committed.contains_key(&position.index)
            && !self.requests.insert(request)
        {
            let what = format!("request {request} is committed twice, again at {}", position.index);
            return Err(InvariantViolation::new("a request is applied once", what));
        }
        let known = *self.committed.entry(position.index).or_insert(found);
        if known == found {
            return Ok(());
        }
        let what = format!(
            "{member} applies entry {} of term {}, another one of term {} was committed there",
            position.index, position.term, known.0
        );
        Err(InvariantViolation::new("state machine safety", what))
    }

    /// Returns (index, term) of all committed entries from index `first` on.
    pub fn committed_from(&self, first: u64) -> impl Iterator<Item = (u64, u64)> {
        self.committed.range(first..).map(|(index, (term, _))| (*index, *term))
    }

    /// Returns whether a request has been committed.
    pub fn has_request(&self, request: u64) -> bool {
        self.requests.contains(&request)
    }

    /// Returns the highest committed index.
    pub fn last(&self) -> u64 {
        self.committed.last_key_value().map_or(0, |(index, _)| *index)
    }
}
