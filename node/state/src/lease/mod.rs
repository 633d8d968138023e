//! Leases: keys that are deleted when no client keeps their lease alive.
//!
//! There are two parts. [`LeaseTable`] is replicated state: the leases, and the keys attached to
//! each. Only log entries change it, and it contains no times. [`Lessor`] is the leader's clock: it
//! knows when each lease expires, by monotonic time.
//!
//! The lessor ends a lease by proposing an entry, which is valid only in the leader's own term. So
//! replaying the log needs no clock. A leader that was deposed without knowing it can't end a
//! lease. The entry names the lease that the leader knew, so it never ends a later one with the
//! same id.
//!
//! A lease is never ended early. A new leader starts its clock once it has applied everything that
//! its predecessors proposed. It gives each lease the longest time that the lease can have left,
//! plus one election timeout.
//!
//! A change of leader does not give a lease its full TTL again. Entries of the log record the
//! remaining time at intervals (etcd's lease checkpoints; server/lease in etcd).
//!
//! A client gets the answer that its lease was kept alive only after a quorum has confirmed the
//! leader. This confirmation must begin after the lease's timer was reset. If the log says that
//! less than the full TTL is left, an entry that records the full TTL must be applied first.
//!
//! Both parts are free of I/O. The store contains the table, and the crate `node-api` drives the
//! clock.

mod lessor;
mod table;

pub use lessor::{Lessor, RaftStatus, Renewal, full_ttl_checkpoint};
pub use table::{Lease, LeaseCounters, LeaseTable, TTL_BUCKETS};

/// Maximum TTL in seconds that can be granted, which is etcd's.
pub const MAX_TTL: i64 = 9_000_000_000;

#[cfg(test)]
mod tests;
