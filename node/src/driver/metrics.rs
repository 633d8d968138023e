//! Counters of the driver, written by its threads and read by `/metrics`.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use crate::durations::Durations;

/// What etcd calls slow by default (`--warning-apply-duration`).
pub const SLOW_APPLY: Duration = Duration::from_millis(100);

/// All but [`Metrics::log_bytes_left`] and [`Metrics::installing`] only ever rise.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Proposals taken from the mailbox.
    pub proposals: AtomicU64,
    /// Proposals refused because the leader's bound on uncommitted bytes was reached.
    pub proposals_refused: AtomicU64,
    /// ReadIndex rounds asked for.
    pub read_rounds: AtomicU64,
    /// Reads that ended without an answer.
    pub reads_failed: AtomicU64,
    /// Reads that got none within the request time-out.
    pub reads_timed_out: AtomicU64,
    /// Heartbeats that left a beat late, because this member was busy with something else.
    pub late_heartbeats: AtomicU64,
    /// Whether a snapshot of the whole state is being installed.
    pub installing: AtomicBool,
    /// Turns of the state machine that took longer than [`SLOW_APPLY`].
    pub slow_applies: AtomicU64,
    /// Reads answered.
    pub reads: AtomicU64,
    /// Messages taken from peers.
    pub messages_received: AtomicU64,
    /// Messages from peers that were refused as impossible.
    pub messages_refused: AtomicU64,
    /// Messages handed to the transport.
    pub messages_sent: AtomicU64,
    /// Messages that the transport had no room or connection for.
    pub messages_dropped: AtomicU64,
    /// Times this member saw a leader come up.
    pub leader_changes: AtomicU64,
    /// Groups written to the log, each with one sync.
    pub log_groups: AtomicU64,
    /// Entries written to the log.
    pub log_entries: AtomicU64,
    /// Bytes written to the log, padding included.
    pub log_bytes: AtomicU64,
    /// From the write of each group to the end of its sync.
    pub log_durations: Durations,
    /// Bytes that the log can take before it has to make another segment, as last looked at.
    pub log_bytes_left: AtomicU64,
    /// Entries applied.
    pub applied: AtomicU64,
    /// Microseconds spent applying.
    pub apply_micros: AtomicU64,
    /// Of each checkpoint of the store.
    pub checkpoint_durations: Durations,
    /// Snapshots sent.
    pub snapshots_sent: AtomicU64,
    /// Snapshots installed.
    pub snapshots_installed: AtomicU64,
}
