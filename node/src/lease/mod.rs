//! Leases: keys that go when nobody keeps them alive.
//!
//! There are two halves. [`LeaseTable`] is replicated state: which leases there are, and which keys are
//! attached to each; it changes by log entries alone and knows no time. [`Lessor`] is the leader's clock:
//! when each lease is over, by monotonic time. What it finds goes through consensus as an entry that
//! counts in the leader's own term only, so that replaying the log needs no clock, and a leader that has
//! been deposed without knowing it ends nothing.
//!
//! A lease is never ended early: a new leader begins to count once it has applied whatever its predecessors
//! proposed, and gives each lease all that it may have left, and an election time-out more. Nor does each
//! change of leader begin it anew: what it has left is noted in the log as it gets less (etcd's lease
//! checkpoints; server/lease in etcd). Whoever is told that a lease was kept alive was told by a member that
//! a quorum called its leader after it had begun to count anew.
//!
//! Both are pure; the store holds the table, and `rpc` drives the clock.

mod lessor;
mod table;

pub use lessor::{Lessor, Renewal, Seat, whole};
pub use table::{Lease, LeaseCounters, LeaseTable, TTL_BUCKETS};

/// The longest TTL that can be granted, in seconds; etcd's.
pub const MAX_TTL: i64 = 9_000_000_000;

#[cfg(test)]
mod tests;
