//! Metrics of the traffic with other members.

use std::fmt::Result;
use std::sync::atomic::Ordering::Relaxed;

use node_engine::transport::{Connections, PeerTraffic};
use node_state::durations::Durations;
use prometheus_client::encoding::EncodeMetric as _;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::node::hex;
use super::{MetricWriter, MetricsCollector, load, signed};

impl MetricsCollector {
    /// Writes the metrics of each peer. Labels are member IDs, so their number is bounded by the
    /// cluster's size.
    pub(super) fn network(&self, out: &mut MetricWriter<'_>) -> Result {
        let Some(transport) = &self.0.peers else { return Ok(()) };
        let peers = transport.traffic();
        let local = hex(self.0.identity.member_id);
        for (name, help, label, of) in PER_PEER {
            let mut family = out.0.encode_descriptor(name, help, None, MetricType::Counter)?;
            for peer in &peers {
                let labels = [(*label, hex(peer.peer.0))];
                ConstCounter::new(of(peer)).encode(family.encode_family(&labels)?)?;
            }
        }
        for (name, help, label, of) in PER_TRANSFER {
            let mut family = out.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for peer in &peers {
                let labels = [(*label, hex(peer.peer.0))];
                ConstGauge::new(of(peer)).encode(family.encode_family(&labels)?)?;
            }
        }
        for (name, help, label, of) in PER_PEER_DURATIONS {
            let mut family = out.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
            for peer in &peers {
                let labels = [(*label, hex(peer.peer.0))];
                of(peer).encode(family.encode_family(&labels)?)?;
            }
        }
        let name = "etcd_network_disconnected_peers";
        let help = "The total number of disconnected peers";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for peer in &peers {
            let labels = [("Local", local.clone()), ("Remote", hex(peer.peer.0))];
            ConstCounter::new(peer.disconnects).encode(family.encode_family(&labels)?)?;
        }
        for (name, help, of) in PER_LINK {
            let mut family = out.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for peer in &peers {
                let labels = [("Local", local.clone()), ("Remote", hex(peer.peer.0))];
                ConstGauge::new(of(peer)).encode(family.encode_family(&labels)?)?;
            }
        }
        connections(out, &peers)?;
        // As in etcd, a member counts itself as a known peer.
        let (name, help) = ("etcd_network_known_peers", "The current number of known peers");
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for remote in peers.iter().map(|peer| hex(peer.peer.0)).chain([local.clone()]) {
            let labels = [("Local", local.clone()), ("Remote", remote)];
            ConstGauge::new(1_i64).encode(family.encode_family(&labels)?)?;
        }
        let counters = transport.counters();
        let name = "muster_peer_streams_refused";
        let help = "Streams from or to peers that were refused at their hello, by reason";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (reason, count) in counters.refused {
            ConstCounter::new(count).encode(family.encode_family(&[("reason", reason)])?)?;
        }
        let help = "Inbound handshakes of peers that failed, took too long or were too many";
        let failed = counters.handshakes_failed + counters.handshakes_over_limit;
        out.counter("muster_peer_handshakes_failed", help, failed)?;
        let help = "Streams of a known key that were accepted although its certificate has expired";
        out.counter("muster_peer_certificates_expired", help, counters.expired_certificates)
    }
}

/// Writes which directions of the connections to each peer work, so that an operator knows which
/// one to repair.
fn connections(out: &mut MetricWriter<'_>, peers: &[PeerTraffic]) -> Result {
    let name = "muster_peer_connections";
    let help = "Whether a message stream to a peer stands that this member has opened (outbound), or the peer (inbound)";
    let mut family = out.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for peer in peers {
        let Connections { outbound, inbound, .. } = peer.connections;
        for (direction, stands) in [("outbound", outbound), ("inbound", inbound)] {
            let labels = [("Remote", hex(peer.peer.0)), ("direction", direction.to_owned())];
            ConstGauge::new(i64::from(stands)).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

type PeerValue<T> = fn(&PeerTraffic) -> T;
type PeerDurations = fn(&PeerTraffic) -> &Durations;

/// Name, help, label and value of the metrics of snapshots sent between members.
const PER_TRANSFER: &[(&str, &str, &str, PeerValue<i64>)] = &[
    (
        "etcd_network_snapshot_send_success",
        "Total number of successful snapshot sends",
        "To",
        |peer| signed(load(&peer.snapshots_out.arrived)),
    ),
    (
        "etcd_network_snapshot_send_failures",
        "Total number of snapshot send failures",
        "To",
        |peer| signed(load(&peer.snapshots_out.failed)),
    ),
    (
        "etcd_network_snapshot_send_inflights_total",
        "Total number of inflight snapshot sends",
        "To",
        |peer| peer.snapshots_out.under_way.load(Relaxed),
    ),
    (
        "etcd_network_snapshot_receive_success",
        "Total number of successful snapshot receives",
        "From",
        |peer| signed(load(&peer.snapshots_in.arrived)),
    ),
    (
        "etcd_network_snapshot_receive_failures",
        "Total number of snapshot receive failures",
        "From",
        |peer| signed(load(&peer.snapshots_in.failed)),
    ),
    (
        "etcd_network_snapshot_receive_inflights_total",
        "Total number of inflight snapshot receives",
        "From",
        |peer| peer.snapshots_in.under_way.load(Relaxed),
    ),
];

/// Name, help, label and value of each histogram per peer.
const PER_PEER_DURATIONS: &[(&str, &str, &str, PeerDurations)] = &[
    (
        "etcd_network_peer_round_trip_time_seconds",
        "Round-Trip-Time histogram between peers",
        "To",
        |peer| &peer.round_trips,
    ),
    (
        "etcd_network_snapshot_send_total_duration_seconds",
        "Total latency distributions of snapshot sends",
        "To",
        |peer| &peer.snapshots_out.took,
    ),
    (
        "etcd_network_snapshot_receive_total_duration_seconds",
        "Total latency distributions of snapshot receives",
        "From",
        |peer| &peer.snapshots_in.took,
    ),
];

/// Name, help, label and value of each counter per peer.
const PER_PEER: &[(&str, &str, &str, PeerValue<u64>)] = &[
    ("etcd_network_peer_sent_bytes", "The total number of bytes sent to peers", "To", |peer| {
        peer.sent_bytes
    }),
    (
        "etcd_network_peer_received_bytes",
        "The total number of bytes received from peers",
        "From",
        |peer| peer.received_bytes,
    ),
    (
        "etcd_network_peer_sent_failures",
        "The total number of send failures to peers",
        "To",
        |peer| peer.send_failures,
    ),
    (
        "etcd_network_peer_received_failures",
        "The total number of receive failures from peers",
        "From",
        |peer| peer.receive_failures,
    ),
];

const PER_LINK: &[(&str, &str, PeerValue<i64>)] =
    &[("etcd_network_active_peers", "The current number of active peer connections", |peer| {
        i64::from(peer.connections.since.is_some())
    })];
