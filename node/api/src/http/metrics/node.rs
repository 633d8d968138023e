//! Metrics of this member's identity, certificates and process.

use std::fmt::Result;
use std::sync::atomic::Ordering;

use node_state::CLUSTER_VERSION;
use node_state::identity::MemberId;
use prometheus_client::encoding::EncodeMetric as _;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{MetricWriter, MetricsCollector, load, signed};

/// Formats a member ID as etcd does: lower-case hexadecimal without leading zeros.
pub(super) fn hex(id: u64) -> String {
    format!("{id:x}")
}

/// Features of etcd 3.7 with their stage, and whether this program has them. They can't be switched
/// by flags.
const FEATURES: [(&str, &str, i64); 11] = [
    ("AllAlpha", "ALPHA", 0),
    ("AllBeta", "BETA", 0),
    // `CompactHashCheck` and `InitialCorruptCheck` are always on: members compare their data after
    // compactions, and before they serve.
    ("CompactHashCheck", "ALPHA", 1),
    ("FastLeaseKeepAlive", "BETA", 1),
    ("InitialCorruptCheck", "ALPHA", 1),
    // Both lease checkpoint features are always on: the log contains the remaining time of leases.
    ("LeaseCheckpoint", "ALPHA", 1),
    ("LeaseCheckpointPersist", "ALPHA", 1),
    ("PriorityRequest", "ALPHA", 0),
    ("SetMemberLocalAddr", "ALPHA", 0),
    ("StopGRPCServiceOnDefrag", "ALPHA", 0),
    ("TxnModeWriteWithSharedBuffer", "BETA", 0),
];

impl MetricsCollector {
    fn features(&self, out: &mut MetricWriter<'_>) -> Result {
        let name = "etcd_server_feature_enabled";
        let help = "Whether or not a feature is enabled. 1 is enabled, 0 is not";
        let mut family = out.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (name, stage, is_enabled) in FEATURES {
            let labels = [("name", name), ("stage", stage)];
            ConstGauge::new(is_enabled).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    pub(super) fn server(&self, out: &mut MetricWriter<'_>) -> Result {
        let identity = &self.0.identity;
        let me = identity.member_id;
        let help =
            "Server or member ID in hexadecimal format. 1 for 'server_id' label with current ID";
        out.fact("etcd_server_id", help, &[("server_id", &hex(me))])?;
        let help = "Which version is running. 1 for 'server_version' label with current version";
        out.fact("etcd_server_version", help, &[("server_version", identity.version)])?;
        let help =
            "Which version is running. 1 for 'cluster_version' label with current cluster version";
        let (version, _) = CLUSTER_VERSION.rsplit_once('.').expect("it has a patch");
        out.fact("etcd_cluster_version", help, &[("cluster_version", version)])?;
        self.features(out)?;
        let learner = self.0.store.view().members().is_learner(MemberId(me));
        out.gauge(
            "etcd_server_is_learner",
            "Whether or not this member is a learner. 1 if is, 0 otherwise",
            i64::from(learner),
        )?;
        out.gauge(
            "muster_disk_short_of_space",
            "Whether this member refuses what grows because its disk is almost full",
            i64::from(*self.0.disk_low.borrow()),
        )?;
        let metrics = &self.0.metrics;
        for (name, help, count) in [
            (
                "etcd_server_health_success",
                "The total number of successful health checks",
                &metrics.healthy,
            ),
            (
                "etcd_server_health_failures",
                "The total number of failed health checks",
                &metrics.unhealthy,
            ),
        ] {
            out.gauge(name, help, signed(load(count)))?;
        }
        self.alarms(out)?;
        let help = "Lines that were not logged because the log's reader was too slow";
        let dropped = self.0.telemetry.log_lines_dropped.map_or(0, |lines| lines());
        out.counter("muster_log_lines_dropped", help, dropped)?;
        self.certificates(out)
    }

    fn alarms(&self, out: &mut MetricWriter<'_>) -> Result {
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

    fn certificates(&self, out: &mut MetricWriter<'_>) -> Result {
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
}

/// Microseconds per clock tick, the unit of CPU time in `/proc`. It is the same on every Linux
/// system.
const MICROS_PER_TICK: u64 = 10_000;

/// Clock ticks per second, the unit of times in `/proc`.
const TICKS_PER_SECOND: i64 = 100;
/// Index in [`fields`] of the user time; the system time follows.
const CPU_TIMES: usize = 11;
/// Index in [`fields`] of `starttime`: clock ticks from the machine's boot to the process's start.
const START_TIME_FIELD: usize = 19;

/// Returns the fields of `/proc/self/stat` after the process name. The name is in brackets and may
/// contain spaces.
fn fields(stat: &str) -> std::str::Split<'_, char> {
    stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ')
}

/// Writes the kernel's data about this process (proc(5)).
pub(super) fn process(out: &mut MetricWriter<'_>) -> std::fmt::Result {
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
    let ticks: u64 =
        fields(&stat).skip(CPU_TIMES).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    let help = "Total user and system CPU time spent in seconds";
    out.seconds("process_cpu_seconds", help, ticks * MICROS_PER_TICK)?;
    let started = fields(&stat).nth(START_TIME_FIELD).and_then(|field| field.parse::<i64>().ok());
    let kernel = fs_err::read_to_string("/proc/stat").unwrap_or_default();
    let booted = kernel.lines().find_map(|line| line.strip_prefix("btime ")?.parse::<i64>().ok());
    if let Some((started, booted)) = started.zip(booted) {
        let help = "Start time of the process since unix epoch in seconds";
        out.gauge("process_start_time_seconds", help, booted + started / TICKS_PER_SECOND)?;
    }
    let help = "Maximum amount of virtual memory available in bytes";
    let most = resource_limit(rustix::process::Resource::As);
    out.gauge("process_virtual_memory_max_bytes", help, most)
}

fn resource_limit(of: rustix::process::Resource) -> i64 {
    signed(rustix::process::getrlimit(of).current.unwrap_or(u64::MAX))
}

/// Writes the numbers of file descriptors, under Prometheus' names and etcd's.
pub(super) fn descriptors(out: &mut MetricWriter<'_>) -> std::fmt::Result {
    let open = fs_err::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let open = i64::try_from(open).unwrap_or(i64::MAX);
    let most = resource_limit(rustix::process::Resource::Nofile);
    for (name, help, value) in [
        ("process_open_fds", "Number of open file descriptors", open),
        ("process_max_fds", "Maximum number of open file descriptors", most),
        ("os_fd_used", "The number of used file descriptors", open),
        ("os_fd_limit", "The file descriptor limit", most),
    ] {
        out.gauge(name, help, value)?;
    }
    Ok(())
}
