//! Counters of peer streams.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use node_state::{durations::Durations, identity::MemberId};

use super::{link::ONE_WAY_AFTER, wire::hello::StreamRefusal};

/// Counters since the start of the process, cheap enough to count each message.
#[derive(Debug, Default)]
pub struct Counters {
    pub(super) sent_messages: AtomicU64,
    pub(super) sent_bytes: AtomicU64,
    pub(super) received_messages: AtomicU64,
    pub(super) received_bytes: AtomicU64,
    pub(super) dropped_full: AtomicU64,
    pub(super) dropped_not_connected: AtomicU64,
    pub(super) dropped_inbound: AtomicU64,
    pub(super) handshakes_failed: AtomicU64,
    pub(super) handshakes_over_limit: AtomicU64,
    pub(super) expired_certificates: AtomicU64,
    refused: [AtomicU64; StreamRefusal::ALL.len()],
}

/// Values of the counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountersSnapshot {
    /// Number of messages written to peers.
    pub sent_messages: u64,
    /// Bytes written to peers, frame headers included.
    pub sent_bytes: u64,
    /// Number of messages read from peers.
    pub received_messages: u64,
    /// Payload bytes read from peers.
    pub received_bytes: u64,
    /// Number of messages dropped because a peer's queue was full.
    pub dropped_full: u64,
    /// Number of messages dropped because their peer wasn't connected.
    pub dropped_not_connected: u64,
    /// Number of received messages that the driver refused, for example because its queue was full.
    pub dropped_inbound: u64,
    /// Number of inbound TLS handshakes or hellos that failed or took too long.
    pub handshakes_failed: u64,
    /// Number of inbound connections closed because too many were waiting or in their handshake.
    pub handshakes_over_limit: u64,
    /// Number of handshakes accepted with a certificate outside its validity, because its key is
    /// bound to a member.
    pub expired_certificates: u64,
    /// Number of refused hellos, by the reason's label.
    pub refused: Vec<(&'static str, u64)>,
}

/// Counters of one peer. They begin anew when the peer is removed and added again.
#[derive(Debug)]
pub(super) struct Traffic {
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
    pub send_failures: AtomicU64,
    pub receive_failures: AtomicU64,
    /// Number of times that the peer was disconnected.
    pub disconnects: AtomicU64,
    /// Times from a ping to its answer.
    pub round_trips: Arc<Durations>,
    /// Transfers of the whole state to the peer.
    pub snapshots_out: Arc<Transfers>,
    /// Transfers of the whole state from the peer.
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
pub struct Transfers {
    /// Number of transfers that have begun and not ended.
    pub under_way: AtomicI64,
    /// Number of transfers received and installed.
    pub arrived: AtomicU64,
    /// Number of transfers that failed.
    pub failed: AtomicU64,
    /// Durations of the successful transfers.
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
    /// Counts a transfer as under way until the returned value is dropped. The transfer counts as
    /// failed unless [`Transfer::end`] reports success.
    pub(super) fn begin(&self) -> Transfer<'_> {
        self.under_way.fetch_add(1, Relaxed);
        Transfer { transfers: self, began: Instant::now(), arrived: false }
    }
}

/// A transfer under way.
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

/// Message streams of one peer at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connections {
    /// Start of the current period in which this member can send to the peer; `None` if it can't.
    pub since: Option<Instant>,
    /// Whether there is a stream that this member has opened.
    pub outbound: bool,
    /// Whether there is a stream that the peer has opened.
    pub inbound: bool,
    /// Start of the current period in which this member can send to the peer, but has opened no
    /// stream itself. `None` if there is no such period now.
    pub outbound_missing_since: Option<Instant>,
    /// Start of the current period in which this member can send to the peer, but the peer has
    /// opened no stream. `None` if there is no such period now.
    pub inbound_missing_since: Option<Instant>,
    /// Error of this member's last failed attempt to open a stream, if it has not opened one since.
    pub dial_failure: Option<String>,
}

impl Connections {
    /// Returns a warning for the operator if the peer is connected, but one side can't connect to
    /// the other.
    pub(crate) fn one_way_warning(&self, peer: MemberId, now: Instant) -> Option<String> {
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

/// Counters of one peer at one moment.
#[derive(Clone, Debug)]
pub struct PeerTraffic {
    pub peer: MemberId,
    pub connections: Connections,
    /// Bytes written to the peer, frame headers included.
    pub sent_bytes: u64,
    /// Payload bytes read from the peer.
    pub received_bytes: u64,
    /// Number of messages to the peer that were dropped.
    pub send_failures: u64,
    /// Number of messages from the peer that were dropped.
    pub receive_failures: u64,
    /// Number of times that the peer was disconnected.
    pub disconnects: u64,
    /// Times from a ping to its answer.
    pub round_trips: Arc<Durations>,
    /// Transfers of the whole state to the peer.
    pub snapshots_out: Arc<Transfers>,
    /// Transfers of the whole state from the peer.
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
    pub(super) fn refuse(&self, refusal: StreamRefusal) {
        self.refused[refusal as usize - 1].fetch_add(1, Relaxed);
    }

    pub(super) fn snapshot(&self) -> CountersSnapshot {
        CountersSnapshot {
            sent_messages: self.sent_messages.load(Relaxed),
            sent_bytes: self.sent_bytes.load(Relaxed),
            received_messages: self.received_messages.load(Relaxed),
            received_bytes: self.received_bytes.load(Relaxed),
            dropped_full: self.dropped_full.load(Relaxed),
            dropped_not_connected: self.dropped_not_connected.load(Relaxed),
            dropped_inbound: self.dropped_inbound.load(Relaxed),
            handshakes_failed: self.handshakes_failed.load(Relaxed),
            handshakes_over_limit: self.handshakes_over_limit.load(Relaxed),
            expired_certificates: self.expired_certificates.load(Relaxed),
            refused: StreamRefusal::ALL
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
    fn a_dropped_transfer_counts_as_failed() {
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
        assert_eq!(transfers.took.count(), 1);
    }

    #[test]
    fn each_reason_has_its_own_counter() {
        let counters = Counters::default();
        for refusal in StreamRefusal::ALL {
            counters.refuse(refusal);
        }
        counters.refuse(StreamRefusal::Cluster);
        for (label, count) in counters.snapshot().refused {
            assert_eq!(count, if label == "cluster_id" { 2 } else { 1 }, "{label}");
        }
    }
}
