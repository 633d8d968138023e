//! Metrics that `/metrics` shows, in the OpenMetrics text format. No metric contains a key, a token
//! or a cluster's name.

use std::sync::atomic::AtomicU64;
use std::time::{Instant, SystemTime};

use discovery_types::api::{ClusterState, IntentState};
use discovery_types::intent::Verb;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
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
    /// Kind of the event, such as "rate_limited".
    pub kind: String,
}

/// Label for the state of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StateLabels {
    /// Name of the state in the API, such as "open".
    pub state: &'static str,
}

/// Labels of an intent.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct IntentLabels {
    /// Name of the verb in the API, such as "join".
    pub verb: &'static str,
    /// Name of the state in the API, such as "promoted".
    pub state: &'static str,
}

/// Purpose for which a database connection was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DatabaseUse {
    /// SQL statements outside a transaction.
    Statements,
    /// A transaction from BEGIN to its end.
    Transaction,
}

impl DatabaseUse {
    const ALL: [DatabaseUse; 2] = [DatabaseUse::Statements, DatabaseUse::Transaction];

    fn as_str(self) -> &'static str {
        match self {
            DatabaseUse::Statements => "statements",
            DatabaseUse::Transaction => "transaction",
        }
    }
}

/// Label for a use of the database.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct DatabaseLabels {
    /// Kind of use: "statements" or "transaction".
    pub kind: &'static str,
}

/// Measures one use of the database, from the request for a connection to the drop of this value.
#[derive(Debug)]
pub(crate) struct DatabaseTimer {
    histogram: Histogram,
    started: Instant,
}

impl Drop for DatabaseTimer {
    fn drop(&mut self) {
        self.histogram.observe(self.started.elapsed().as_secs_f64());
    }
}

/// Gauge of a time, in seconds since 1970.
type TimestampGauge = Gauge<f64, AtomicU64>;

/// Makes a histogram of durations, with buckets from 1 ms to 8 s.
fn durations() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 14))
}

/// Returns this host's time, in seconds since 1970.
fn now_seconds() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// All metrics of the process.
#[derive(Debug)]
pub(crate) struct ServiceMetrics {
    /// Metrics whose names begin with `muster_discovery_`.
    registry: Registry,
    /// Prometheus' standard process metrics (`process_…`).
    process: Registry,
    /// Number of answered requests.
    pub requests: Family<RequestLabels, Counter>,
    /// Time to answer a request, in seconds, without long polls.
    pub duration: Histogram,
    /// Number of changes of clusters, by kind.
    pub changes: Family<KindLabels, Counter>,
    /// Number of alarms, by kind. Each is something that a person should look at.
    pub alarms: Family<KindLabels, Counter>,
    /// Number of intents that have reached a state, by verb and state.
    pub intents: Family<IntentLabels, Counter>,
    /// Number of members that replaced another one under a policy.
    pub policy_replacements: Counter,
    /// Number of clusters by state. A state is missing until clusters are first counted.
    pub clusters: Family<StateLabels, Gauge>,
    /// Age in seconds of the oldest cluster that is still forming. 0 without any.
    pub forming_oldest: Gauge,
    /// Number of silent members in all clusters. 0 until they are first counted.
    pub silent_members: Gauge,
    /// When the last complete sweep ended, in seconds since 1970. 0 before the first one.
    pub last_sweep: TimestampGauge,
    /// Number of long polls that wait at the moment.
    pub parked: Gauge,
    /// Maximum number of long polls that may wait.
    pub parked_limit: Gauge,
    /// When the listener's certificate expires, in seconds since 1970.
    pub tls_certificate_end: Gauge,
    /// Time from the request for a database connection to its return, in seconds.
    pub database: Family<DatabaseLabels, Histogram, fn() -> Histogram>,
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
        let mut metrics = ServiceMetrics {
            registry: Registry::with_prefix("muster_discovery"),
            process: Registry::default(),
            requests: Family::default(),
            duration: durations(),
            changes: Family::default(),
            alarms: Family::default(),
            intents: Family::default(),
            policy_replacements: Counter::default(),
            clusters: Family::default(),
            forming_oldest: Gauge::default(),
            silent_members: Gauge::default(),
            last_sweep: TimestampGauge::default(),
            parked: Gauge::default(),
            parked_limit: Gauge::default(),
            tls_certificate_end: Gauge::default(),
            database: Family::new_with_constructor(durations),
            settled: Gauge::default(),
            generation: Gauge::default(),
            ledger_entries: Gauge::default(),
            database_up: Gauge::default(),
        };
        metrics.register_counters();
        metrics.register_gauges();
        metrics.register_process();
        metrics.start_at_zero();
        metrics
    }
}

impl ServiceMetrics {
    fn register_counters(&mut self) {
        let registry = &mut self.registry;
        registry.register("http_requests", "Requests answered", self.requests.clone());
        registry.register(
            "http_request_duration_seconds",
            "Time to answer a request, long polls left out",
            self.duration.clone(),
        );
        registry.register("cluster_changes", "Changes of clusters", self.changes.clone());
        let help = "Findings that a person should look at";
        registry.register("alarms", help, self.alarms.clone());
        registry.register("intents", "Intents that reached a state here", self.intents.clone());
        let help = "Members that replaced another one under a policy";
        registry.register("policy_replacements", help, self.policy_replacements.clone());
        registry.register(
            "database_duration_seconds",
            "Time from the request for a database connection to its return",
            self.database.clone(),
        );
    }

    fn register_gauges(&mut self) {
        let registry = &mut self.registry;
        let help = "Clusters by state; from 500 on an estimate";
        registry.register("clusters", help, self.clusters.clone());
        let help = "Age of the oldest cluster that is still forming, 0 without any";
        registry.register("forming_oldest_seconds", help, self.forming_oldest.clone());
        let help =
            "Members of committed and formed clusters that have not reported for five minutes";
        registry.register("silent_members", help, self.silent_members.clone());
        let help = "When the last complete sweep ended, Unix time, 0 before the first one";
        registry.register("last_sweep_timestamp_seconds", help, self.last_sweep.clone());
        registry.register("parked_polls", "Long polls parked", self.parked.clone());
        let help = "Maximum number of parked long polls";
        registry.register("parked_polls_limit", help, self.parked_limit.clone());
        registry.register(
            "tls_certificate_end_timestamp_seconds",
            "When the listener's certificate expires, Unix time",
            self.tls_certificate_end.clone(),
        );
        registry.register("database_settled", "1 if lists may be committed", self.settled.clone());
        let help = "Which history of the database";
        registry.register("database_generation", help, self.generation.clone());
        registry.register("ledger_entries", "Commits in the ledger", self.ledger_entries.clone());
        let help = "1 if the database answers and takes writes";
        registry.register("database_up", help, self.database_up.clone());
    }

    fn register_process(&mut self) {
        let started = TimestampGauge::default();
        started.set(now_seconds());
        let help = "Start time of the process since unix epoch in seconds";
        self.process.register("process_start_time_seconds", help, started);
    }

    /// Creates the series of alarms, intents and database times at zero. Otherwise `rate()` would
    /// miss the first event of each.
    fn start_at_zero(&self) {
        for kind in ALARMS {
            let _ = self.alarms.get_or_create(&KindLabels { kind: kind.into() });
        }
        for verb in Verb::ALL {
            for state in IntentState::ALL {
                let _ = self.intents.get_or_create(&intent_labels(verb, state));
            }
        }
        for kind in DatabaseUse::ALL {
            let _ = self.database.get_or_create(&DatabaseLabels { kind: kind.as_str() });
        }
    }

    /// Returns the body of `/metrics`.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)
            .and_then(|()| encode_registry(&mut text, &self.process))
            .and_then(|()| encode_eof(&mut text))
            .expect("a String takes all that is written to it");
        text
    }

    /// Counts an alarm. `kind` must be one of `ALARMS`.
    pub(crate) fn count_alarm(&self, kind: &str) {
        debug_assert!(ALARMS.contains(&kind), "`{kind}` would not be there before the first one");
        self.alarms.get_or_create(&KindLabels { kind: kind.into() }).inc();
    }

    pub(crate) fn count_change(&self, kind: &str) {
        self.changes.get_or_create(&KindLabels { kind: kind.into() }).inc();
    }

    /// Counts an intent that has reached a state.
    pub(crate) fn count_intent(&self, verb: Verb, state: IntentState) {
        self.intents.get_or_create(&intent_labels(verb, state)).inc();
    }

    /// Sets the number of clusters in a state.
    pub(crate) fn set_clusters(&self, state: ClusterState, number: i64) {
        self.clusters.get_or_create(&StateLabels { state: state.as_str() }).set(number);
    }

    /// Sets the time at which the last complete sweep ended to now.
    pub(crate) fn note_sweep(&self) {
        self.last_sweep.set(now_seconds());
    }

    /// Measures a use of the database until the returned timer is dropped.
    pub(crate) fn time_database(&self, kind: DatabaseUse) -> DatabaseTimer {
        let histogram =
            self.database.get_or_create(&DatabaseLabels { kind: kind.as_str() }).clone();
        DatabaseTimer { histogram, started: Instant::now() }
    }
}

fn intent_labels(verb: Verb, state: IntentState) -> IntentLabels {
    IntentLabels { verb: verb.as_str(), state: state.as_str() }
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

    /// Returns the value of the sample with this name and these labels.
    fn value(text: &str, sample: &str) -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {sample} in {text}")).parse().unwrap()
    }

    #[test]
    fn the_start_of_the_process_has_prometheus_name_and_is_a_time() {
        let before = now_seconds();
        let metrics = ServiceMetrics::default();
        let text = metrics.text();
        let started = value(&text, "process_start_time_seconds");
        assert!((before..=now_seconds()).contains(&started), "{started}");
        assert_eq!(text.matches("# EOF").count(), 1);
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[test]
    fn a_sweep_shows_when_it_ended() {
        let metrics = ServiceMetrics::default();
        let name = "muster_discovery_last_sweep_timestamp_seconds";
        assert_eq!(value(&metrics.text(), name), 0.0);
        let before = now_seconds();
        metrics.note_sweep();
        let shown = value(&metrics.text(), name);
        assert!((before..=now_seconds()).contains(&shown), "{shown}");
    }

    #[test]
    fn the_database_is_timed_until_the_timer_is_dropped() {
        let metrics = ServiceMetrics::default();
        let timer = metrics.time_database(DatabaseUse::Transaction);
        std::thread::sleep(std::time::Duration::from_millis(20));
        let count = |kind: &str| {
            let name = "muster_discovery_database_duration_seconds_count";
            value(&metrics.text(), &format!("{name}{{kind=\"{kind}\"}}"))
        };
        assert_eq!(count("transaction"), 0.0);
        drop(timer);
        assert_eq!([count("transaction"), count("statements")], [1.0, 0.0]);
        let sum = "muster_discovery_database_duration_seconds_sum{kind=\"transaction\"}";
        assert!((0.02..10.0).contains(&value(&metrics.text(), sum)), "{}", metrics.text());
    }

    #[test]
    fn intents_are_counted_by_verb_and_state() {
        let metrics = ServiceMetrics::default();
        metrics.count_intent(Verb::Replace, IntentState::Promoted);
        let sample = |verb: &str, state: &str| {
            let labels = format!("{{verb=\"{verb}\",state=\"{state}\"}}");
            value(&metrics.text(), &format!("muster_discovery_intents_total{labels}"))
        };
        assert_eq!(sample("replace", "promoted"), 1.0);
        assert_eq!(sample("replace", "open"), 0.0);
        assert_eq!(sample("join", "promoted"), 0.0);
    }
}
