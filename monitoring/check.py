"""Checks what promtool can't: that rules, tests, runbook, dashboard, documentation and sources fit together.

scripts/test-monitoring runs it in the repository's root, with a folder for temporary files as its argument. It prints each
finding on a line, and exits with 1 if there is one.
"""

import json
import pathlib
import re
import subprocess
import sys

import yaml

RUNBOOK = "docs/runbook.md"
SEVERITIES = {"critical", "warning"}
TARGET_LABELS = {"job", "instance"}

# Names of etcd, of gRPC and of processes that rules and dashboard may use, with their labels. Names of Muster's own are
# read from docs/metrics.md.
COMMON_METRICS = {
    "etcd_disk_wal_fsync_duration_seconds_bucket": {"le"},
    "etcd_mvcc_db_total_size_in_use_in_bytes": set(),
    "etcd_network_known_peers": {"Local", "Remote"},
    "etcd_server_has_leader": set(),
    "etcd_server_is_leader": set(),
    "etcd_server_leader_changes_seen_total": set(),
    "etcd_server_quota_backend_bytes": set(),
    "grpc_server_handled_total": {"grpc_code", "grpc_method", "grpc_service", "grpc_type"},
    "os_fd_limit": set(),
    "os_fd_used": set(),
    "process_start_time_seconds": set(),
}
# Metrics in the panels of etcd's own Grafana dashboard (contrib/mixin in etcd's repository).
ETCD_DASHBOARD = {
    "etcd_disk_backend_commit_duration_seconds_bucket",
    "etcd_disk_wal_fsync_duration_seconds_bucket",
    "etcd_mvcc_db_total_size_in_bytes",
    "etcd_network_client_grpc_received_bytes_total",
    "etcd_network_client_grpc_sent_bytes_total",
    "etcd_network_peer_received_bytes_total",
    "etcd_network_peer_round_trip_time_seconds_bucket",
    "etcd_network_peer_sent_bytes_total",
    "etcd_server_has_leader",
    "etcd_server_leader_changes_seen_total",
    "etcd_server_proposals_applied_total",
    "etcd_server_proposals_committed_total",
    "etcd_server_proposals_failed_total",
    "etcd_server_proposals_pending",
    "grpc_server_handled_total",
    "grpc_server_started_total",
    "process_resident_memory_bytes",
}
# What Prometheus itself makes for each target.
OWN_OF_PROMETHEUS = {"up": set()}

# Words that stand where a metric's name could. Functions are known by the parenthesis behind them.
PROMQL_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}
SERIES = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")

findings = []


def report(text):
    findings.append(text)


def selectors(expression):
    """Returns the series that a PromQL expression reads, as (name, matchers), and the labels that it groups by."""
    grouped = set()
    for _, labels in GROUPING.findall(expression):
        grouped |= set(re.findall(r"\w+", labels))
    rest = re.sub(r"\[[^\]]*\]", "", GROUPING.sub(" ", expression))
    found = []
    for match in SERIES.finditer(rest):
        name, matchers = match.groups()
        follows = rest[match.end() :].lstrip()
        before = rest[: match.start()]
        if before[-1:].isdigit() or name in PROMQL_WORDS or follows.startswith("(") and matchers is None:
            continue
        found.append((name, MATCHER.findall(matchers or "")))
    return found, grouped


def source(*paths):
    files = [file for path in paths for file in sorted(pathlib.Path().glob(path))]
    # Unit tests at the end of a file name metrics, too.
    return "".join(file.read_text().split("#[cfg(test)]")[0] for file in files)


def base_names(name):
    """Returns the names under which the sources may declare a series."""
    return {name} | {name.removesuffix(end) for end in ("_total", "_bucket", "_sum", "_count")}


class Metrics:
    """All metrics that may be used: name to labels."""

    def __init__(self):
        self.labels = dict(OWN_OF_PROMETHEUS)
        self.node = set(re.findall(r'"(\w+)"', source("node/api/src/http/metrics.rs", "node/api/src/http/metrics/*.rs")))
        # A registry with a prefix puts it in front of each name.
        agent = re.findall(r'"(\w+)"', source("agent/src/observe/metrics.rs"))
        discovery = re.findall(r'"(\w+)"', source("discovery/src/metrics.rs"))
        self.declared = self.node | {f"muster_agent_{name}" for name in agent} | {f"muster_discovery_{name}" for name in discovery}
        self.read_documentation()
        for name, labels in COMMON_METRICS.items():
            if not base_names(name) & self.node:
                report(f"monitoring/check.py: {name}: the node has no such metric")
            self.labels[name] = labels
        for name in sorted(ETCD_DASHBOARD):
            if not base_names(name) & self.node:
                report(f"etcd's dashboard shows {name}, and the node has no such metric")

    def read_documentation(self):
        text = pathlib.Path("docs/metrics.md").read_text()
        documented = set()
        for name, labels in re.findall(r"`(muster_\w+)(?:\{([\w,]*)\})?`", text):
            if re.search(rf"^\| [^|]*`{name}[`{{]", text, re.MULTILINE) is None:
                continue
            documented.add(name)
            self.labels.setdefault(name, set()).update(filter(None, labels.split(",")))
            if name.endswith("_seconds"):
                for end in ("_bucket", "_sum", "_count"):
                    self.labels[name + end] = self.labels[name] | {"le"}
        for name in sorted(documented):
            if not base_names(name) & self.declared:
                report(f"docs/metrics.md: {name}: no program has such a metric")
        for name in sorted(name for name in self.node if name.startswith("muster_")):
            if not {name, f"{name}_total"} & documented:
                report(f"docs/metrics.md: {name} of the node isn't documented")

    def check(self, where, expression):
        """Reports names and labels in the expression that don't exist. Returns the names."""
        series, grouped = selectors(expression)
        known = set(TARGET_LABELS)
        for name, matchers in series:
            if name not in self.labels:
                report(f"{where}: {name}: no such metric in docs/metrics.md or in monitoring/check.py")
                continue
            known |= self.labels[name]
            for label, _, _ in matchers:
                if label not in self.labels[name] | TARGET_LABELS:
                    report(f"{where}: {name} has no label {label}")
        for label in sorted(grouped - known):
            report(f"{where}: no metric of the expression has the label {label}")
        return {name for name, _ in series}


class AlertTests:
    """What the tests say: which alerts fire, with which labels, and which don't although their metrics are there."""

    def __init__(self, rules, metrics_of):
        self.fired = {}
        self.silent = set()
        for path in sorted(pathlib.Path("monitoring/alerts/tests").glob("*.yml")):
            for test in yaml.safe_load(path.read_text())["tests"]:
                self.read(test, rules, metrics_of)

    def read(self, test, rules, metrics_of):
        given = {name for series in test["input_series"] for name, _ in selectors(series["series"])[0]}
        fired, covers_all = {}, False
        for check in test["promql_expr_test"]:
            # Without another matcher, the expected samples are all alerts that fire.
            covers_all |= 'ALERTS{alertstate="firing"}' in check["expr"]
            for sample in check["exp_samples"]:
                labels = {label: value for label, _, value in MATCHER.findall(sample["labels"])}
                fired.setdefault(labels["alertname"], []).append(labels)
        for alert, labels in fired.items():
            self.fired.setdefault(alert, []).extend(labels)
        if covers_all:
            self.silent |= {alert for alert in rules if alert not in fired and metrics_of[alert] <= given}


def check_rule(path, rule):
    name, annotations = rule["alert"], rule.get("annotations", {})
    if rule.get("labels", {}).get("severity") not in SEVERITIES:
        report(f"{path}: {name}: the severity is none of {sorted(SEVERITIES)}")
    for annotation in ("summary", "description"):
        if not annotations.get(annotation, "").strip():
            report(f"{path}: {name}: no {annotation}")
    if annotations.get("runbook_url") != f"{RUNBOOK}#{name.lower()}":
        report(f"{path}: {name}: runbook_url isn't {RUNBOOK}#{name.lower()}")


def check_runbook(rules):
    sections = re.findall(r"^### (.+)$", pathlib.Path(RUNBOOK).read_text(), re.MULTILINE)
    for name in sorted(set(rules) - set(sections)):
        report(f"{RUNBOOK}: no section {name}")
    for section in sections:
        if section not in rules:
            report(f"{RUNBOOK}: section {section}: there is no such alert")
        if sections.count(section) > 1:
            report(f"{RUNBOOK}: section {section} is there more than once")
    if not pathlib.Path("docs/SUMMARY.md").read_text().count("(runbook.md)"):
        report("docs/SUMMARY.md doesn't name the runbook")


def check_links():
    """Checks links of the runbook into the book."""
    for file, anchor in re.findall(r"\]\((?:([\w-]+\.md))?(?:#([\w-]+))?\)", pathlib.Path(RUNBOOK).read_text()):
        page = pathlib.Path("docs") / (file or "runbook.md")
        if not page.exists():
            report(f"{RUNBOOK}: link to {page}, which doesn't exist")
            continue
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
        if anchor and anchor not in anchors:
            report(f"{RUNBOOK}: link to {page}#{anchor}: there is no such heading")


def check_alarm_kinds(rules, tests):
    """Each kind of the service's alarms belongs to one rule, and fires it in a test."""
    kinds = re.findall(r'"(\w+)"', source("discovery/src/metrics.rs").split("const ALARMS")[1].split("];")[0])
    for kind in kinds:
        by = set()
        for name, rule in rules.items():
            for series, matchers in selectors(rule["expr"])[0]:
                if series == "muster_discovery_alarms_total" and any(re.fullmatch(value, kind) for _, _, value in matchers):
                    by.add(name)
        if len(by) != 1:
            report(f"alarms of the kind {kind} belong to {len(by)} rules, and not to one")
        if not any(labels.get("kind") == kind for name in by for labels in tests.fired.get(name, [])):
            report(f"no test raises an alarm of the kind {kind}")


def check_alerts(metrics):
    rules = {}
    for path in sorted(pathlib.Path("monitoring/alerts").glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if rule["alert"] in rules:
                    report(f"{path}: {rule['alert']} is there more than once")
                rules[rule["alert"]] = rule
                check_rule(path, rule)
    metrics_of = {name: metrics.check(name, rule["expr"]) for name, rule in rules.items()}
    tests = AlertTests(rules, metrics_of)
    for name, rule in rules.items():
        if name not in tests.fired:
            report(f"{name}: no test fires it")
        if name not in tests.silent:
            report(f"{name}: no test has its metrics without firing it")
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        for labels in tests.fired.get(name, []):
            if used - set(labels):
                report(f"{name}: its texts use {sorted(used - set(labels))}, which the alert doesn't have")
                break
    for name in sorted(set(tests.fired) - set(rules)):
        report(f"monitoring/alerts/tests: there is no alert {name}")
    check_runbook(rules)
    check_links()
    check_alarm_kinds(rules, tests)
    return len(rules)


def panels_of(board):
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def check_dashboard(metrics, path, work):
    board = json.loads(path.read_text())
    variables = {variable["name"] for variable in board["templating"]["list"]}
    expressions, ids = [], []
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            query = re.fullmatch(r"label_values\((.*), *\w+\)", variable["definition"])
            metrics.check(f"{path}: variable {variable['name']}", query.group(1) if query else variable["definition"])
    for panel in panels_of(board):
        ids.append(panel["id"])
        if panel["type"] == "row":
            continue
        where = f"{path}: {panel.get('title') or panel['id']}"
        for key in ("title", "description"):
            if not panel.get(key):
                report(f"{where}: no {key}")
        if not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
            report(f"{where}: no unit")
        if not panel.get("targets"):
            report(f"{where}: no query")
        for target in panel.get("targets", []):
            for used in re.findall(r"\$\{?(\w+)", json.dumps(target)):
                if used not in variables | {"__rate_interval"}:
                    report(f"{where}: there is no variable {used}")
            if panel.get("datasource", {}).get("uid") != "${datasource}":
                report(f"{where}: the data source isn't the variable")
            expressions.append(target["expr"])
            metrics.check(where, re.sub(r"\$\w+", "5m", target["expr"]))
    if len(set(ids)) != len(ids):
        report(f"{path}: two panels have one id")
    check_syntax(path, expressions, work)


def check_syntax(path, expressions, work):
    """Lets promtool read the dashboard's queries, as recording rules."""
    rules = [
        {"record": f"panel:query{number}", "expr": re.sub(r"\$\w+", "5m", expression)}
        for number, expression in enumerate(expressions)
    ]
    file = work / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    ran = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        report(f"{path}: {ran.stdout}{ran.stderr}")


def main():
    metrics = Metrics()
    alerts = check_alerts(metrics)
    for path in sorted(pathlib.Path("monitoring/dashboards").glob("*.json")):
        check_dashboard(metrics, path, pathlib.Path(sys.argv[1]))
    for finding in findings:
        print(f"test-monitoring: {finding}", file=sys.stderr)
    if findings:
        sys.exit(1)
    print(f"test-monitoring: {alerts} alerts and the dashboard passed")


main()
