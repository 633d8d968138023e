//! Debian's `etcdctl` on a formed cluster, with a client certificate issued by discovery.

use std::io::Read;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::testbed::TestbedOptions;
use muster_tests::harness::{Etcdctl, Network, TestHost, Testbed, poll_slowly, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn stock_etcdctl_works_unchanged() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(3), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let _agents = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let hosts: Vec<TestHost> = testbed.network.hosts.clone();
    let etcdctl = testbed.etcdctl("demo", &hosts.iter().collect::<Vec<_>>())?;
    poll_slowly("the cluster to take a write", LIMIT, || etcdctl.run(&["put", "k", "v"]).ok())?;

    reads_and_writes(&etcdctl)?;
    transactions(&etcdctl)?;
    watching(&etcdctl)?;
    compaction(&etcdctl)?;
    members_and_endpoints(&etcdctl)?;
    for host in &hosts {
        // Each member serves reads and writes. A follower forwards writes to the leader.
        let one = etcdctl.with_endpoint(host);
        ensure!(one.run(&["put", "via", &host.name])?.trim() == "OK", "put via {}", host.name);
        ensure!(value(&one, "via")? == host.name, "get via {}", host.name);
    }
    Ok(())
}

fn value(etcdctl: &Etcdctl, key: &str) -> Result<String> {
    Ok(etcdctl.run(&["get", key, "--print-value-only"])?.trim().to_owned())
}

fn reads_and_writes(etcdctl: &Etcdctl) -> Result<()> {
    for (key, word) in [("f/a", "3"), ("f/b", "1"), ("f/c", "2"), ("g", "other")] {
        ensure!(etcdctl.run(&["put", key, word])?.trim() == "OK");
    }
    let keys = |args: &[&str]| -> Result<String> {
        Ok(etcdctl
            .run(&[&["get"], args, &["--keys-only"]].concat())?
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" "))
    };
    ensure!(keys(&["f/", "--prefix"])? == "f/a f/b f/c", "prefix");
    ensure!(keys(&["f/a", "f/c"])? == "f/a f/b", "a range is half open");
    ensure!(keys(&["f/b", "--from-key", "--limit", "2"])? == "f/b f/c", "from key, limit");
    ensure!(
        keys(&["f/", "--prefix", "--sort-by=value", "--order=ASCEND"])? == "f/b f/c f/a",
        "by value"
    );
    ensure!(
        keys(&["f/", "--prefix", "--order=DESCEND", "--sort-by=key"])? == "f/c f/b f/a",
        "descending"
    );

    let before = etcdctl.json(&["put", "f/a", "new", "--prev-kv"])?;
    ensure!(before["prev_kv"]["value"] == "Mw==", "previous value: {before}");
    let revision = before["header"]["revision"].as_i64().context("a revision")? - 1;
    let rev = format!("--rev={revision}");
    ensure!(
        etcdctl.run(&["get", "f/a", "--print-value-only", &rev])?.trim() == "3",
        "old revision"
    );
    ensure!(value(etcdctl, "f/a")? == "new", "newest");

    ensure!(etcdctl.run(&["del", "f/", "--prefix"])?.trim() == "3", "three deleted");
    ensure!(etcdctl.run(&["del", "f/a"])?.trim() == "0", "none left");
    let future = etcdctl.output(&["get", "g", "--rev=1000000"])?;
    let printed = String::from_utf8_lossy(&future.stderr).into_owned();
    ensure!(printed.contains("required revision is a future revision"), "future: {printed}");
    let empty = etcdctl.output(&["put", "", "x"])?;
    let printed = String::from_utf8_lossy(&empty.stderr).into_owned();
    ensure!(printed.contains("etcdserver: key is not provided"), "empty key: {printed}");
    Ok(())
}

fn transactions(etcdctl: &Etcdctl) -> Result<()> {
    etcdctl.run(&["put", "t", "1"])?;
    let first = transaction(etcdctl, "value(\"t\") = \"1\"\n\nput t 2\nget t\n\nput t wrong\n\n")?;
    ensure!(first.starts_with("SUCCESS") && first.contains("\nOK\n"), "first: {first}");
    let second = transaction(etcdctl, "value(\"t\") = \"1\"\n\nput t wrong\n\nget t\n\n")?;
    ensure!(second.starts_with("FAILURE") && second.contains("\n2"), "second: {second}");
    ensure!(value(etcdctl, "t")? == "2");
    Ok(())
}

fn transaction(etcdctl: &Etcdctl, script: &str) -> Result<String> {
    use std::io::Write;
    let mut child = etcdctl
        .command(&["txn"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child.stdin.take().context("a pipe")?.write_all(script.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "txn: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn watching(etcdctl: &Etcdctl) -> Result<()> {
    let start =
        etcdctl.json(&["put", "w/0", "before"])?["header"]["revision"].as_i64().context("rev")?;
    let rev = format!("--rev={start}");
    let mut child = etcdctl
        .command(&["watch", "w/", "--prefix", &rev])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut pipe = child.stdout.take().context("a pipe")?;
    let reader = std::thread::spawn(move || {
        let mut seen = String::new();
        let mut buffer = [0; 4096];
        while !seen.contains("DELETE\nw/1") {
            match pipe.read(&mut buffer) {
                Ok(n) if n > 0 => seen.push_str(&String::from_utf8_lossy(&buffer[..n])),
                _ => break,
            }
        }
        seen
    });
    etcdctl.run(&["put", "w/1", "live"])?;
    etcdctl.run(&["del", "w/1"])?;
    let ended =
        wait_for("the watch to show the deletion", LIMIT, || reader.is_finished().then_some(()));
    child.kill()?;
    child.wait()?;
    ended?;
    let seen = reader.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
    // The reader stops as soon as it has seen the deletion. `etcdctl` prints an empty line after
    // it, which the reader may have missed.
    let events = "PUT\nw/0\nbefore\nPUT\nw/1\nlive\nDELETE\nw/1";
    ensure!(seen.trim_end() == events, "events: {seen:?}");
    Ok(())
}

fn compaction(etcdctl: &Etcdctl) -> Result<()> {
    etcdctl.run(&["put", "c", "1"])?;
    let now = etcdctl.json(&["put", "c", "2"])?["header"]["revision"].as_i64().context("rev")?;
    let printed = etcdctl.run(&["compaction", &now.to_string()])?;
    ensure!(printed.trim() == format!("compacted revision {now}"), "{printed}");
    let old = etcdctl.output(&["get", "c", &format!("--rev={}", now - 1)])?;
    let printed = String::from_utf8_lossy(&old.stderr).into_owned();
    ensure!(
        printed.contains("etcdserver: mvcc: required revision has been compacted"),
        "{printed}"
    );
    ensure!(value(etcdctl, "c")? == "2");
    let again = etcdctl.output(&["compaction", &now.to_string()])?;
    ensure!(!again.status.success(), "compacted twice");
    Ok(())
}

fn members_and_endpoints(etcdctl: &Etcdctl) -> Result<()> {
    let members = etcdctl.json(&["member", "list"])?;
    let members = members["members"].as_array().context("members")?;
    ensure!(members.len() == 3);
    for member in members {
        ensure!(member["name"].as_str().is_some_and(|n| !n.is_empty()), "unstarted: {member}");
        ensure!(member["clientURLs"][0].as_str().is_some_and(|u| u.starts_with("https://")));
    }
    let healthy = etcdctl.output(&["endpoint", "health"])?;
    let printed = format!(
        "{}{}",
        String::from_utf8_lossy(&healthy.stdout),
        String::from_utf8_lossy(&healthy.stderr)
    );
    ensure!(healthy.status.success() && printed.matches("is healthy").count() == 3, "{printed}");
    let status = etcdctl.json(&["endpoint", "status"])?;
    let status = status.as_array().context("statuses")?;
    ensure!(status.len() == 3);
    let leaders = status
        .iter()
        .filter(|s| s["Status"]["leader"] == s["Status"]["header"]["member_id"])
        .count();
    ensure!(leaders == 1, "{leaders} leaders");
    let alarms = etcdctl.run(&["alarm", "list"])?;
    ensure!(alarms.trim().is_empty(), "alarms: {alarms}");
    Ok(())
}
