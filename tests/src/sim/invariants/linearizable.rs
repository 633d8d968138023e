//! Clients see one copy: every put has its place (its revision) in one order, which agrees with
//! real time, and a read sees the last put before it.
//!
//! Revisions make this cheap (the order needn't be searched): whoever begins after a revision was
//! known to anybody must end at that revision or above. A read goes through the key, so that its
//! floor is the highest revision *of that key* known when it began.

use std::collections::BTreeMap;

use crate::sim::Violation;

/// See the module.
#[derive(Debug, Default)]
pub struct Linearizable {
    /// Highest revision known to a client, by key.
    known: BTreeMap<u64, i64>,
    /// Highest revision of any acknowledged put.
    highest_put: i64,
    /// Revision of each put that anybody has seen.
    puts: BTreeMap<u64, i64>,
    /// The other way round.
    revisions: BTreeMap<i64, u64>,
}

fn violated(what: String) -> Violation {
    Violation::new("linearizable", what)
}

impl Linearizable {
    /// What an operation on `key` that begins now must reach.
    pub fn read_floor(&self, key: u64) -> i64 {
        self.known.get(&key).copied().unwrap_or(0)
    }

    /// What a put that begins now must exceed.
    pub fn put_floor(&self) -> i64 {
        self.highest_put
    }

    fn place(&mut self, put: u64, revision: i64) -> Result<(), Violation> {
        let by_put = *self.puts.entry(put).or_insert(revision);
        let by_revision = *self.revisions.entry(revision).or_insert(put);
        if by_put == revision && by_revision == put {
            return Ok(());
        }
        Err(violated(format!(
            "put {put} has revisions {by_put} and {revision}, revision {revision} has puts {by_revision} and {put}"
        )))
    }

    /// A put was acknowledged.
    pub fn put(&mut self, put: u64, key: u64, floor: i64, revision: i64) -> Result<(), Violation> {
        if revision <= floor {
            return Err(violated(format!(
                "put {put} got revision {revision} although {floor} was acknowledged before it began"
            )));
        }
        self.place(put, revision)?;
        self.highest_put = self.highest_put.max(revision);
        let known = self.known.entry(key).or_default();
        *known = revision.max(*known);
        Ok(())
    }

    /// A read has ended.
    pub fn read(
        &mut self,
        key: u64,
        floor: i64,
        found: Option<(u64, i64)>,
    ) -> Result<(), Violation> {
        let revision = found.map_or(0, |(_, revision)| revision);
        if revision < floor {
            return Err(violated(format!(
                "a read of key {key} saw revision {revision} although {floor} was known before it began"
            )));
        }
        if let Some((put, revision)) = found {
            self.place(put, revision)?;
        }
        let known = self.known.entry(key).or_default();
        *known = revision.max(*known);
        Ok(())
    }
}
