//! Counters of the driver, written by its threads and read by `/metrics`.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use node_state::durations::Durations;

/// Duration above which the metrics count an apply as slow: etcd's default of
/// `--warning-apply-duration`.
pub const SLOW_APPLY: Duration = Duration::from_millis(100);

/// Counters of the driver. They only rise, except for [`DriverMetrics::log_bytes_left`] and
/// [`DriverMetrics::installing`].
#[derive(Debug, Default)]
pub struct DriverMetrics {
    /// Number of proposals taken from the mailbox.
    pub proposals: AtomicU64,
    /// Number of refused proposals. Either a queue was full, or the leader's limit on uncommitted
    /// bytes was reached.
    pub proposals_refused: AtomicU64,
    /// Number of ReadIndex rounds started.
    pub read_rounds: AtomicU64,
    /// Number of reads that ended without an answer, whatever the reason.
    pub reads_failed: AtomicU64,
    /// Number of reads without an answer within the request time-out.
    pub reads_timed_out: AtomicU64,
    /// Number of heartbeats that this member sent at least a tick late, because it was busy.
    pub late_heartbeats: AtomicU64,
    /// Whether a snapshot of the whole state is being installed.
    pub installing: AtomicBool,
    /// Number of batches of entries whose application took longer than [`SLOW_APPLY`].
    pub slow_applies: AtomicU64,
    /// Number of reads answered.
    pub reads: AtomicU64,
    /// Number of messages received from peers.
    pub messages_received: AtomicU64,
    /// Number of peers' messages refused because no correct member sends them.
    pub messages_refused: AtomicU64,
    /// Number of messages handed to the transport.
    pub messages_sent: AtomicU64,
    /// Number of messages dropped because the transport's queue was full or no connection existed.
    pub messages_dropped: AtomicU64,
    /// Number of times that this member saw a new leader.
    pub leader_changes: AtomicU64,
    /// Number of groups of batches written to the log. Each group takes one sync.
    pub log_groups: AtomicU64,
    /// Number of entries written to the log.
    pub log_entries: AtomicU64,
    /// Number of bytes written to the log, padding included.
    pub log_bytes: AtomicU64,
    /// Time from the write of each group to the end of its sync.
    pub log_durations: Durations,
    /// Bytes that the log could still write before it would need a new segment file, as of the last
    /// check.
    pub log_bytes_left: AtomicU64,
    /// Number of entries applied.
    pub applied: AtomicU64,
    /// Microseconds spent applying entries.
    pub apply_micros: AtomicU64,
    /// Time that each checkpoint of the store took.
    pub checkpoint_durations: Durations,
    /// Number of snapshots whose transfer was started.
    pub snapshots_sent: AtomicU64,
    /// Number of snapshots installed.
    pub snapshots_installed: AtomicU64,
}
