//! Who this is, its peers, its certificates, its process.

use std::fmt::Result;
use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeMetric as _;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{Out, Scrape, signed};
use crate::config::CLUSTER_VERSION;
use crate::identity::MemberId;
use crate::logging::lines_dropped;
use crate::transport::PeerTraffic;

/// etcd writes member ids as lower-case hex without zeros in front.
fn hex(id: u64) -> String {
    format!("{id:x}")
}

impl Scrape {
    pub(super) fn server(&self, out: &mut Out<'_>) -> Result {
        let identity = &self.0.identity;
        let me = identity.member_id;
        let help =
            "Server or member ID in hexadecimal format. 1 for 'server_id' label with current ID";
        out.fact("etcd_server_id", help, &[("server_id", &hex(me))])?;
        let help = "Which version is running. 1 for 'server_version' label with current version";
        out.fact("etcd_server_version", help, &[("server_version", identity.version)])?;
        let help =
            "Which version is running. 1 for 'cluster_version' label with current cluster version";
        out.fact("etcd_cluster_version", help, &[("cluster_version", CLUSTER_VERSION)])?;
        let learner = self.0.store.view().members().is_learner(MemberId(me));
        out.gauge(
            "etcd_server_is_learner",
            "Whether or not this member is a learner. 1 if is, 0 otherwise",
            i64::from(learner),
        )?;
        out.gauge(
            "muster_disk_short_of_space",
            "Whether this member refuses what grows because its disk is almost full",
            i64::from(*self.0.space.borrow()),
        )?;
        self.alarms(out)?;
        let help = "Lines that were not logged because the log's reader was too slow";
        out.counter("muster_log_lines_dropped", help, lines_dropped())?;
        self.certificates(out)
    }

    fn alarms(&self, out: &mut Out<'_>) -> Result {
        let metrics = &self.0.metrics;
        let name = "muster_alarm";
        let help = "1 for each alarm that is raised; member 0 is the cluster as a whole";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for alarm in self.0.store.view().alarms() {
            let kind = alarm.alarm().as_str_name().to_owned();
            let labels = [("alarm", kind), ("member_id", hex(alarm.member_id))];
            ConstGauge::new(1_i64).encode(family.encode_family(&labels)?)?;
        }
        let help = "Time that comparisons of all members' data took, on the leader";
        out.durations("muster_comparison_duration_seconds", help, &metrics.comparisons)?;
        let help = "Members whose data the leader could compare last time; 0 on the others";
        out.gauge("muster_members_compared", help, metrics.compared.load(Ordering::Relaxed))
    }

    fn certificates(&self, out: &mut Out<'_>) -> Result {
        let telemetry = &self.0.telemetry;
        let certificates = [
            ("client", telemetry.client_tls.as_ref().and_then(|tls| tls.expires_at())),
            ("peer", telemetry.peer_tls.as_ref().and_then(|tls| tls.expires_at())),
        ];
        let name = "muster_certificate_expires_in_seconds";
        let help = "Until this member's certificate on a listener expires; negative once it has";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (listener, expires) in certificates {
            if let Some(expires) = expires {
                let left = expires.saturating_sub(jiff::Timestamp::now().as_second());
                ConstGauge::new(left).encode(family.encode_family(&[("listener", listener)])?)?;
            }
        }
        Ok(())
    }

    /// Labels are members' ids: there are as many as the cluster has members.
    pub(super) fn network(&self, out: &mut Out<'_>) -> Result {
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
        for (name, help, of) in PER_LINK {
            let mut family = out.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for peer in &peers {
                let labels = [("Local", local.clone()), ("Remote", hex(peer.peer.0))];
                ConstGauge::new(of(peer)).encode(family.encode_family(&labels)?)?;
            }
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

type Of<T> = fn(&PeerTraffic) -> T;

/// Name, help, label and value.
const PER_PEER: &[(&str, &str, &str, Of<u64>)] = &[
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

const PER_LINK: &[(&str, &str, Of<i64>)] = &[
    ("etcd_network_known_peers", "The current number of known peers", |_| 1),
    ("etcd_network_active_peers", "The current number of active peer connections", |peer| {
        i64::from(peer.connected)
    }),
];

/// The unit of CPU time in `/proc`, the same on every Linux that programs can see.
const MICROS_PER_TICK: u64 = 10_000;

/// What the kernel says of this process (proc(5)).
pub(super) fn process(out: &mut Out<'_>) -> std::fmt::Result {
    let status = fs_err::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<i64>().ok());
        kib.unwrap_or(0) * 1024
    };
    let virtual_bytes = bytes("VmSize:");
    out.gauge("process_virtual_memory_bytes", "Virtual memory size in bytes", virtual_bytes)?;
    let resident = bytes("VmRSS:");
    out.gauge("process_resident_memory_bytes", "Resident memory size in bytes", resident)?;
    let stat = fs_err::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in brackets may have spaces; user and system time are fields 14 and 15.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ');
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    let help = "Total user and system CPU time spent in seconds";
    out.seconds("process_cpu_seconds", help, ticks * MICROS_PER_TICK)?;
    let open = fs_err::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let help = "Number of open file descriptors";
    out.gauge("process_open_fds", help, i64::try_from(open).unwrap_or(i64::MAX))?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let help = "Maximum number of open file descriptors";
    out.gauge("process_max_fds", help, signed(limit.unwrap_or(u64::MAX)))
}
