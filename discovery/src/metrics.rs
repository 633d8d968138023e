//! Metrics that `/metrics` shows, in the OpenMetrics text format. No metric contains a key, a token
//! or a cluster's name.

use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Kinds of alarms: findings that a person should look at.
const ALARMS: [&str; 17] = [
    "admin_rows_contradict_the_ledger",
    "admin_rows_ignored",
    "agent_rows_ignored",
    "assertion_replayed",
    "connections_refused",
    "database_set_back",
    "identity_keys_unreadable",
    "key_elsewhere",
    "ledger_copied",
    "ledger_entry_refused",
    "ledger_set_back",
    "ledger_used_twice",
    "rate_limited",
    "split",
    "recovery_contested",
    "ticket_taken",
    "token_guessed",
];

/// Labels of an answered request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    /// The route's pattern, never the path: paths contain ids.
    pub route: String,
    /// Status code of the response.
    pub status: u16,
}

/// Label for a kind of event.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KindLabels {
    /// Name of the kind, such as "rate_limited".
    pub kind: String,
}

/// All metrics of the process.
#[derive(Debug)]
pub(crate) struct ServiceMetrics {
    registry: Registry,
    /// Number of answered requests.
    pub requests: Family<RequestLabels, Counter>,
    /// Time to answer a request, in seconds, without long polls.
    pub duration: Histogram,
    /// Number of changes of clusters, by kind.
    pub changes: Family<KindLabels, Counter>,
    /// Number of alarms, by kind. Each is something that a person should look at.
    pub alarms: Family<KindLabels, Counter>,
    /// Number of long polls that wait at the moment.
    pub parked: Gauge,
    /// 1 if lists may be frozen and committed in this database, otherwise 0.
    pub settled: Gauge,
    /// Generation of the database: the number of its current history.
    pub generation: Gauge,
    /// Number of commits in this process's ledger.
    pub ledger_entries: Gauge,
    /// 1 if the database answered the last query and took the last write, otherwise 0.
    pub database_up: Gauge,
}

impl Default for ServiceMetrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("muster_discovery");
        let metrics = ServiceMetrics {
            registry: Registry::default(),
            requests: Family::default(),
            // Buckets from 1 ms to 8 s.
            duration: Histogram::new(exponential_buckets(0.001, 2.0, 14)),
            changes: Family::default(),
            alarms: Family::default(),
            parked: Gauge::default(),
            settled: Gauge::default(),
            generation: Gauge::default(),
            ledger_entries: Gauge::default(),
            database_up: Gauge::default(),
        };
        let m = &metrics;
        registry.register("http_requests", "Requests answered", m.requests.clone());
        registry.register(
            "http_request_duration_seconds",
            "Time to answer a request, long polls left out",
            m.duration.clone(),
        );
        registry.register("cluster_changes", "Changes of clusters", m.changes.clone());
        registry.register("alarms", "Findings that a person should look at", m.alarms.clone());
        registry.register("parked_polls", "Long polls parked", m.parked.clone());
        registry.register("database_settled", "1 if lists may be committed", m.settled.clone());
        registry.register(
            "database_generation",
            "Which history of the database",
            m.generation.clone(),
        );
        registry.register("ledger_entries", "Commits in the ledger", m.ledger_entries.clone());
        registry.register(
            "database_up",
            "1 if the database answers and takes writes",
            m.database_up.clone(),
        );
        for kind in ALARMS {
            // Start at zero. Otherwise the first alarm would be a new series, and `rate()` would
            // not see it.
            let _ = m.alarms.get_or_create(&KindLabels { kind: kind.into() });
        }
        ServiceMetrics { registry, ..metrics }
    }
}

impl ServiceMetrics {
    /// Returns the body of `/metrics`.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a String takes all that is written to it");
        text
    }

    /// Counts an alarm. `kind` must be one of `ALARMS`.
    pub(crate) fn count_alarm(&self, kind: &str) {
        debug_assert!(ALARMS.contains(&kind), "`{kind}` would not be there before the first one");
        self.alarms.get_or_create(&KindLabels { kind: kind.into() }).inc();
    }

    /// Counts a change of a cluster.
    pub(crate) fn count_change(&self, kind: &str) {
        self.changes.get_or_create(&KindLabels { kind: kind.into() }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alarm_is_shown_as_zero_before_it_is_raised() {
        let text = ServiceMetrics::default().text();
        for kind in ALARMS {
            let sample = format!("muster_discovery_alarms_total{{kind=\"{kind}\"}} 0");
            assert!(text.contains(&sample), "{sample} in {text}");
        }
    }
}
