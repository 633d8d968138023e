//! Log lines about clients over a limit: requests over the rate limit, and refused connections.
//!
//! One client can cause thousands of refusals in a second. So the first refusal is logged at once,
//! then at most one line a minute for each kind. A line has the number of refusals since the
//! previous line, and the address with the most of them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muster_shares::network_of;

use crate::metrics::ServiceMetrics;

/// Minimum time between two log lines of one kind.
pub(crate) const LINE_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of addresses with a count of their own between two log lines. Refusals of further
/// addresses are added only to the line's total.
const MAX_ADDRESSES: usize = 64;

/// Kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThrottleKind {
    /// A request over its address' rate limit.
    Request,
    /// A connection over a limit on connections.
    Connection,
}

impl ThrottleKind {
    const ALL: [ThrottleKind; 2] = [ThrottleKind::Request, ThrottleKind::Connection];

    /// Returns the name of the alarm in the metrics.
    fn alarm(self) -> &'static str {
        match self {
            ThrottleKind::Request => "rate_limited",
            ThrottleKind::Connection => "connections_refused",
        }
    }
}

/// Counts refusals, and logs them.
#[derive(Debug)]
pub(crate) struct ThrottleLog {
    metrics: Arc<ServiceMetrics>,
    /// Refusals of each kind that are not logged yet.
    unlogged: [Mutex<UnloggedRefusals>; 2],
}

impl ThrottleLog {
    pub(crate) fn new(metrics: Arc<ServiceMetrics>) -> Self {
        ThrottleLog { metrics, unlogged: Default::default() }
    }

    /// Counts the refusal of a client as an alarm. Logs it now, or later in one line with other
    /// refusals.
    pub(crate) fn note(&self, kind: ThrottleKind, address: IpAddr) {
        self.metrics.count_alarm(kind.alarm());
        let mut unlogged = self.lock(kind);
        unlogged.count(address);
        let line = unlogged.take_line(Instant::now());
        drop(unlogged);
        line.iter().for_each(|line| line.log(kind));
    }

    /// Logs the refusals that no log line contains yet, unless the last line is too recent.
    pub(crate) fn log_rest(&self) {
        for kind in ThrottleKind::ALL {
            let line = self.lock(kind).take_line(Instant::now());
            line.iter().for_each(|line| line.log(kind));
        }
    }

    fn lock(&self, kind: ThrottleKind) -> std::sync::MutexGuard<'_, UnloggedRefusals> {
        self.unlogged[kind as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refusals of one kind since the last log line.
#[derive(Debug, Default)]
struct UnloggedRefusals {
    last_line: Option<Instant>,
    count: u64,
    by_address: BTreeMap<IpAddr, u64>,
}

/// Content of a log line about refusals of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ThrottleLine {
    /// The address with the most refusals, or its /64 with IPv6.
    address: IpAddr,
    /// Number of refusals of this address since the last log line.
    of_address: u64,
    /// Number of all refusals since the last log line.
    count: u64,
}

impl UnloggedRefusals {
    fn count(&mut self, address: IpAddr) {
        self.count += 1;
        let address = network_of(address);
        let is_full = self.by_address.len() >= MAX_ADDRESSES;
        match self.by_address.get_mut(&address) {
            Some(count) => *count += 1,
            None if is_full => {}
            None => drop(self.by_address.insert(address, 1)),
        }
    }

    /// Returns the content of a log line about all refusals that are not logged yet, and forgets
    /// them. Returns `None` if there are none, or if the last line is too recent.
    fn take_line(&mut self, now: Instant) -> Option<ThrottleLine> {
        if self.last_line.is_some_and(|last| now.duration_since(last) < LINE_INTERVAL) {
            return None;
        }
        let by_address = std::mem::take(&mut self.by_address);
        let (address, of_address) = by_address.into_iter().max_by_key(|(_, count)| *count)?;
        self.last_line = Some(now);
        Some(ThrottleLine { address, of_address, count: std::mem::take(&mut self.count) })
    }
}

impl ThrottleLine {
    fn log(&self, kind: ThrottleKind) {
        let ThrottleLine { address, of_address, count } = self;
        match kind {
            ThrottleKind::Request => tracing::warn!(
                %address, of_address, count,
                "refused requests over a rate limit: find the client, or raise `serve --rate` and \
                 `--burst` (the limit on adopted documents and readmissions is fixed)"
            ),
            ThrottleKind::Connection => tracing::warn!(
                %address, of_address, count,
                "refused connections over a limit: find the client, or raise `serve --rate`, \
                 `--max-connections` or `--max-connections-per-address` (the limits of \
                 --etcd-listen's open connections are fixed)"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    #[test]
    fn the_first_refusal_is_logged_at_once_and_the_next_ones_together_a_minute_later() {
        let mut unlogged = UnloggedRefusals::default();
        let start = Instant::now();
        assert_eq!(unlogged.take_line(start), None, "nothing was refused");
        unlogged.count(address(1));
        let line = ThrottleLine { address: address(1), of_address: 1, count: 1 };
        assert_eq!(unlogged.take_line(start), Some(line));
        for n in [2, 3, 3, 3, 2] {
            unlogged.count(address(n));
            assert_eq!(unlogged.take_line(start + LINE_INTERVAL / 2), None);
        }
        let line = ThrottleLine { address: address(3), of_address: 3, count: 5 };
        assert_eq!(unlogged.take_line(start + LINE_INTERVAL), Some(line));
        assert_eq!(unlogged.take_line(start + 2 * LINE_INTERVAL), None, "all are logged");
    }

    #[test]
    fn a_flood_from_many_addresses_needs_no_more_memory() {
        let mut unlogged = UnloggedRefusals::default();
        for n in 0..=u8::MAX {
            unlogged.count(address(n));
        }
        unlogged.count(address(7));
        assert_eq!(unlogged.by_address.len(), MAX_ADDRESSES);
        let line = ThrottleLine { address: address(7), of_address: 2, count: 257 };
        assert_eq!(unlogged.take_line(Instant::now()), Some(line));
    }

    #[test]
    fn each_refusal_is_an_alarm_of_its_kind() {
        let metrics = Arc::new(ServiceMetrics::default());
        let log = ThrottleLog::new(metrics.clone());
        log.note(ThrottleKind::Request, address(1));
        log.note(ThrottleKind::Request, address(1));
        log.note(ThrottleKind::Connection, address(2));
        let text = metrics.text();
        assert!(text.contains("alarms_total{kind=\"rate_limited\"} 2\n"), "{text}");
        assert!(text.contains("alarms_total{kind=\"connections_refused\"} 1\n"), "{text}");
        let rest = log.lock(ThrottleKind::Request);
        assert_eq!((rest.count, rest.by_address.len()), (1, 1), "the second one waits");
    }
}
