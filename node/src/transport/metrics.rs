//! What has happened on peer streams, counted.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::hello::Refusal;
use crate::identity::MemberId;

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
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
    pub send_failures: AtomicU64,
    pub receive_failures: AtomicU64,
}

/// One peer's counters at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerTraffic {
    /// Which.
    pub peer: MemberId,
    /// Whether it can be sent to now.
    pub connected: bool,
    /// Bytes written to it, frames included.
    pub sent_bytes: u64,
    /// Payload bytes read from it.
    pub received_bytes: u64,
    /// Messages to it that were dropped.
    pub send_failures: u64,
    /// Messages from it that were dropped.
    pub receive_failures: u64,
}

impl Traffic {
    pub(super) fn snapshot(&self, peer: MemberId, connected: bool) -> PeerTraffic {
        PeerTraffic {
            peer,
            connected,
            sent_bytes: self.sent_bytes.load(Relaxed),
            received_bytes: self.received_bytes.load(Relaxed),
            send_failures: self.send_failures.load(Relaxed),
            receive_failures: self.receive_failures.load(Relaxed),
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
