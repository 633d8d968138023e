//! Prometheus' text format, out of the OpenMetrics that the library writes.
//!
//! The two differ in how a counter's family is named. Scrapers that ask for OpenMetrics take this one, too,
//! and it is what etcd answers.

use std::fmt::Write as _;

/// The format's name.
pub(super) const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

const HELP: &str = "# HELP ";
const TYPE: &str = "# TYPE ";

/// Counters of etcd whose names don't end with `_total`. The library knows none such, so that they are
/// written as gauges.
const BARE_COUNTERS: [&str; 3] = [
    "etcd_server_health_failures",
    "etcd_server_health_success",
    "etcd_server_learner_promote_successes",
];

/// The same metrics in Prometheus' words.
pub(super) fn plain(open_metrics: &str) -> String {
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
    fn a_counter_has_one_name_for_its_family_and_its_value() {
        let open_metrics = "# HELP a Of # HELP.\n# TYPE a counter\na_total{x=\"y\"} 1\n\
            # HELP b_total B.\n# TYPE b_total gauge\nb_total 2\n# EOF\n";
        let expected = "# HELP a_total Of # HELP.\n# TYPE a_total counter\na_total{x=\"y\"} 1\n\
            # HELP b_total B.\n# TYPE b_total gauge\nb_total 2\n";
        assert_eq!(plain(open_metrics), expected);
    }
}
