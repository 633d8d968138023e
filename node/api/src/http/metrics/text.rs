//! Conversion of the library's OpenMetrics to Prometheus' text format.
//!
//! In Prometheus' format, the name of a counter's family ends in `_total`, as the names of its
//! samples do. In OpenMetrics, the family's name has no such suffix. The node always sends
//! Prometheus' format, as etcd does. Scrapers that ask for OpenMetrics accept it too.

use std::fmt::Write as _;

/// Content type of Prometheus' text format.
pub(super) const PROMETHEUS_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const HELP: &str = "# HELP ";
const TYPE: &str = "# TYPE ";

/// Counters of etcd whose names don't end with `_total`. The library can't write such counters, so
/// they are written as gauges and converted here.
const BARE_COUNTERS: [&str; 3] = [
    "etcd_server_health_failures",
    "etcd_server_health_success",
    "etcd_server_learner_promote_successes",
];

/// Converts OpenMetrics text to Prometheus' text format.
pub(super) fn to_prometheus(open_metrics: &str) -> String {
    let mut out = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(described) = line.strip_prefix(HELP).and_then(|rest| rest.split_once(' ')) {
            help = Some(described);
        } else if let Some((name, kind)) =
            line.strip_prefix(TYPE).and_then(|rest| rest.split_once(' '))
        {
            let total = if kind == "counter" { "_total" } else { "" };
            if let Some((_, text)) = help.take() {
                let _ = writeln!(out, "{HELP}{name}{total} {text}");
            }
            let kind = if BARE_COUNTERS.contains(&name) { "counter" } else { kind };
            let _ = writeln!(out, "{TYPE}{name}{total} {kind}");
        } else if line != "# EOF" {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_and_its_family_have_the_same_name() {
        let open_metrics = "# HELP a Of # HELP.\n# TYPE a counter\na_total{x=\"y\"} 1\n\
            # HELP b_total B.\n# TYPE b_total gauge\nb_total 2\n# EOF\n";
        let expected = "# HELP a_total Of # HELP.\n# TYPE a_total counter\na_total{x=\"y\"} 1\n\
            # HELP b_total B.\n# TYPE b_total gauge\nb_total 2\n";
        assert_eq!(to_prometheus(open_metrics), expected);
    }
}
