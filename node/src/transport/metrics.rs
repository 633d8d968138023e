//! What has happened on peer streams, counted.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use super::{hello::Refusal, link::ONE_WAY_AFTER};
use crate::{durations::Durations, identity::MemberId};

/// Counters since the start; cheap enough for the data path.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(super) sent_messages: AtomicU64,
    pub(super) sent_bytes: AtomicU64,
    pub(super) received_messages: AtomicU64,
    pub(super) received_bytes: AtomicU64,
    pub(super) dropped_full: AtomicU64,
    pub(super) dropped_away: AtomicU64,
    pub(super) dropped_inbound: AtomicU64,
    pub(super) handshakes_failed: AtomicU64,
    pub(super) handshakes_over_limit: AtomicU64,
    pub(super) expired_certificates: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
}

/// The counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CountersSnapshot {
    /// Messages written to peers.
    pub sent_messages: u64,
    /// Bytes written to peers, frames included.
    pub sent_bytes: u64,
    /// Messages read from peers.
    pub received_messages: u64,
    /// Payload bytes read from peers.
    pub received_bytes: u64,
    /// Messages dropped because a peer's queue was full.
    pub dropped_full: u64,
    /// Messages dropped because their peer wasn't connected.
    pub dropped_away: u64,
    /// Messages that arrived and could not be taken.
    pub dropped_inbound: u64,
    /// TLS or hello that failed or took too long, inbound.
    pub handshakes_failed: u64,
    /// Inbound connections closed because too many were in their handshake.
    pub handshakes_over_limit: u64,
    /// Streams of a bound key that were accepted although the certificate has expired.
    pub expired_certificates: u64,
    /// Hellos refused, by reason's label.
    pub refused: Vec<(&'static str, u64)>,
}

/// One peer's counters, since it was last added or its record changed.
#[derive(Debug)]
pub(super) struct Traffic {
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
    pub send_failures: AtomicU64,
    pub receive_failures: AtomicU64,
    /// Streams to it that ended.
    pub disconnects: AtomicU64,
    /// From each question whether it lives to its answer.
    pub round_trips: Arc<Durations>,
    /// Whole states sent to it.
    pub snapshots_out: Arc<Transfers>,
    /// Whole states received from it.
    pub snapshots_in: Arc<Transfers>,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            sent_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            send_failures: AtomicU64::new(0),
            receive_failures: AtomicU64::new(0),
            disconnects: AtomicU64::new(0),
            round_trips: Arc::new(Durations::of_round_trips()),
            snapshots_out: Arc::default(),
            snapshots_in: Arc::default(),
        }
    }
}

/// Transfers of the whole state in one direction.
#[derive(Debug)]
pub(crate) struct Transfers {
    /// On their way.
    pub under_way: AtomicI64,
    /// Arrived and installed.
    pub arrived: AtomicU64,
    /// Broken off.
    pub failed: AtomicU64,
    /// Of those that arrived.
    pub took: Durations,
}

impl Default for Transfers {
    fn default() -> Self {
        Self {
            under_way: AtomicI64::new(0),
            arrived: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            took: Durations::of_transfers(),
        }
    }
}

impl Transfers {
    /// Counts one for as long as the answer is kept; broken off unless it [ends](Transfer::end) well.
    pub(super) fn begin(&self) -> Transfer<'_> {
        self.under_way.fetch_add(1, Relaxed);
        Transfer { transfers: self, began: Instant::now(), arrived: false }
    }
}

/// A transfer that is under way.
pub(super) struct Transfer<'a> {
    transfers: &'a Transfers,
    began: Instant,
    arrived: bool,
}

impl Transfer<'_> {
    pub(super) fn end(mut self, result: &io::Result<()>) {
        self.arrived = result.is_ok();
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.transfers.under_way.fetch_sub(1, Relaxed);
        if self.arrived {
            self.transfers.arrived.fetch_add(1, Relaxed);
            self.transfers.took.record(self.began.elapsed());
        } else {
            self.transfers.failed.fetch_add(1, Relaxed);
        }
    }
}

/// Which message streams of a peer stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Connections {
    /// Since when it can be sent to.
    pub since: Option<Instant>,
    /// Whether one stands that this member has opened.
    pub outbound: bool,
    /// Whether one stands that the peer has opened.
    pub inbound: bool,
    /// Since when the peer can be sent to, but not over a stream that this member has opened.
    pub outbound_missing_since: Option<Instant>,
    /// Since when the peer can be sent to, but not over a stream that the peer has opened.
    pub inbound_missing_since: Option<Instant>,
    /// Why this member could not open one when it tried last.
    pub dial_failure: Option<String>,
}

impl Connections {
    /// What an operator has to know if the peer is connected and one of the two directions fails.
    pub(crate) fn complaint(&self, peer: MemberId, now: Instant) -> Option<String> {
        let lasts = |since: Option<Instant>| {
            since.is_some_and(|since| now.saturating_duration_since(since) >= ONE_WAY_AFTER)
        };
        if lasts(self.outbound_missing_since) {
            let why = self.dial_failure.as_deref().unwrap_or("no answer yet");
            Some(format!(
                "this member cannot connect to peer {peer} ({why}): only the connection that the peer has opened works"
            ))
        } else if lasts(self.inbound_missing_since) {
            Some(format!(
                "peer {peer} has not connected to this member: check that it reaches this member's peer URLs; only the connection that this member has opened works"
            ))
        } else {
            None
        }
    }
}

/// One peer's counters at one moment.
#[derive(Clone, Debug)]
pub(crate) struct PeerTraffic {
    /// Which.
    pub peer: MemberId,
    /// Which streams to it and from it stand.
    pub connections: Connections,
    /// Bytes written to it, frames included.
    pub sent_bytes: u64,
    /// Payload bytes read from it.
    pub received_bytes: u64,
    /// Messages to it that were dropped.
    pub send_failures: u64,
    /// Messages from it that were dropped.
    pub receive_failures: u64,
    /// Streams to it that ended.
    pub disconnects: u64,
    /// From each question whether it lives to its answer.
    pub round_trips: Arc<Durations>,
    /// Whole states sent to it.
    pub snapshots_out: Arc<Transfers>,
    /// Whole states received from it.
    pub snapshots_in: Arc<Transfers>,
}

impl Traffic {
    pub(super) fn snapshot(&self, peer: MemberId, connections: Connections) -> PeerTraffic {
        PeerTraffic {
            peer,
            connections,
            sent_bytes: self.sent_bytes.load(Relaxed),
            received_bytes: self.received_bytes.load(Relaxed),
            send_failures: self.send_failures.load(Relaxed),
            receive_failures: self.receive_failures.load(Relaxed),
            disconnects: self.disconnects.load(Relaxed),
            round_trips: Arc::clone(&self.round_trips),
            snapshots_out: Arc::clone(&self.snapshots_out),
            snapshots_in: Arc::clone(&self.snapshots_in),
        }
    }
}

impl Counters {
    pub(super) fn refuse(&self, refusal: Refusal) {
        self.refused[refusal as usize - 1].fetch_add(1, Relaxed);
    }

    pub(super) fn snapshot(&self) -> CountersSnapshot {
        CountersSnapshot {
            sent_messages: self.sent_messages.load(Relaxed),
            sent_bytes: self.sent_bytes.load(Relaxed),
            received_messages: self.received_messages.load(Relaxed),
            received_bytes: self.received_bytes.load(Relaxed),
            dropped_full: self.dropped_full.load(Relaxed),
            dropped_away: self.dropped_away.load(Relaxed),
            dropped_inbound: self.dropped_inbound.load(Relaxed),
            handshakes_failed: self.handshakes_failed.load(Relaxed),
            handshakes_over_limit: self.handshakes_over_limit.load(Relaxed),
            expired_certificates: self.expired_certificates.load(Relaxed),
            refused: Refusal::ALL
                .iter()
                .map(|r| (r.label(), self.refused[*r as usize - 1].load(Relaxed)))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_that_is_dropped_has_failed() {
        let transfers = Transfers::default();
        let counts = || {
            let counts = [&transfers.arrived, &transfers.failed].map(|count| count.load(Relaxed));
            (transfers.under_way.load(Relaxed), counts)
        };
        let (whole, refused) = (transfers.begin(), transfers.begin());
        drop(transfers.begin());
        assert_eq!(counts(), (2, [0, 1]));
        whole.end(&Ok(()));
        refused.end(&Err(io::ErrorKind::Other.into()));
        assert_eq!(counts(), (0, [1, 2]));
        assert_eq!(transfers.took.buckets().iter().map(|(_, count)| count).sum::<u64>(), 1);
    }

    #[test]
    fn each_reason_has_its_own_counter() {
        let counters = Counters::default();
        for refusal in Refusal::ALL {
            counters.refuse(refusal);
        }
        counters.refuse(Refusal::Cluster);
        for (label, count) in counters.snapshot().refused {
            assert_eq!(count, if label == "cluster_id" { 2 } else { 1 }, "{label}");
        }
    }
}
