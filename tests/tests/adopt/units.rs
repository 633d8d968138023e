//! An etcd that a unit of the service manager runs, with a replacement for `systemctl`.

use std::path::PathBuf;
use std::process::Output;

use anyhow::{Result, ensure};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::path_text;
use muster_tests::harness::{poll_slowly, write_script};
use muster_tests::stock_etcd::oldest;

use super::{AdoptionTestbed, LIMIT};

/// A replacement for `systemctl`, which starts and stops processes by simplified unit files. The
/// processes end when this value is dropped.
struct FakeSystemd(PathBuf);

const FAKE_SYSTEMCTL: &str = r#"#!/bin/sh
dir=$(dirname "$0")
for unit; do :; done
pid=$(cat "$dir/$unit.pid" 2>/dev/null || echo 0)
case $1 in
show) echo "$pid" ;;
enable)
    sh "$dir/$unit.start" >>"$dir/$unit.log" 2>&1 &
    echo $! >"$dir/$unit.pid" ;;
disable)
    [ "$pid" = 0 ] && exit 0
    kill "$pid" 2>/dev/null
    while [ -d "/proc/$pid" ] && ! grep -q '^State:.Z' "/proc/$pid/status"; do sleep 0.05; done
    rm "$dir/$unit.pid" ;;
esac
"#;

impl FakeSystemd {
    fn new(folder: PathBuf) -> Result<Self> {
        fs_err::create_dir(&folder)?;
        let script = folder.join("systemctl");
        write_script(&script, FAKE_SYSTEMCTL)?;
        Ok(Self(folder))
    }

    fn write_unit(&self, unit: &str, script: &str) -> Result<()> {
        Ok(fs_err::write(self.0.join(format!("{unit}.start")), script)?)
    }

    fn call(&self, verb: &str, unit: &str) -> Result<Output> {
        let words = [verb, "--now", "--", unit];
        Ok(std::process::Command::new(self.0.join("systemctl")).args(words).output()?)
    }

    fn log(&self, unit: &str) -> String {
        fs_err::read_to_string(self.0.join(format!("{unit}.log"))).unwrap_or_default()
    }

    fn search_path(&self) -> String {
        let path = std::env::var("PATH").unwrap_or_default();
        format!("{}:{path}", self.0.display())
    }
}

impl Drop for FakeSystemd {
    fn drop(&mut self) {
        for unit in ["agent.service", "etcd.service"] {
            // Ignore the error for a unit that doesn't exist.
            let _ = self.call("disable", unit);
        }
    }
}

/// Runs a command of host 0 with the test's `systemctl`.
fn run_with_units(
    adoption: &AdoptionTestbed,
    units: &FakeSystemd,
    words: &[&str],
) -> Result<(i32, String)> {
    let path = units.search_path();
    let mut command = adoption.spawn(0, words, &[("PATH", path.as_str())])?;
    let code = command.exit_code(LIMIT)?;
    Ok((code, command.output()))
}

/// An etcd that a unit runs is found by its unit, stopped, and given back if the agent's unit
/// fails.
#[test]
fn a_failed_take_over_restarts_the_etcd_unit() -> Result<()> {
    let Some(etcd) = oldest() else { return Ok(()) };
    let mut adoption = AdoptionTestbed::start(&etcd)?;
    let units = FakeSystemd::new(adoption.testbed.path("units"))?;
    let flags = adoption.etcds[0].flags.join(" ");
    units.write_unit(
        "etcd.service",
        &format!("export ETCD_NAME=Infra.1\nexec {} {flags}\n", path_text(&etcd)?),
    )?;
    adoption.etcds[0].stop(LIMIT)?;
    units.call("enable", "etcd.service")?;
    let healthy = adoption.etcdctl("old");
    poll_slowly("all members to answer", LIMIT, || healthy.run(&["endpoint", "health"]).ok())?;
    adoption.sign()?;

    let path = units.search_path();
    let bundle = adoption.bundle(1)?;
    let enrol = ["adopt", "enrol", "--unit", "etcd.service", "--bundle-file", path_text(&bundle)?];
    let (code, text) = run_with_units(&adoption, &units, &[&enrol[..], &["--check"]].concat())?;
    ensure!(code == 0 && text.contains("Nothing was changed"), "{code}: {text}");
    ensure!(!adoption.data_dir(0).exists(), "--check leaves nothing behind");
    let first = adoption.spawn(0, &enrol, &[("PATH", path.as_str())])?;
    let others: Result<Vec<_>> = (1..3).map(|i| adoption.enrol_command(i, i + 1)).collect();
    for mut command in others?.into_iter().chain([first]) {
        let code = command.exit_code(LIMIT)?;
        ensure!(code == 0, "{code}: {}", command.output());
    }
    let writer = adoption.writer()?;

    let take_over = ["adopt", "take-over", "--agent-unit", "agent.service", "--patience", "20"];
    units.write_unit("agent.service", "exit 1\n")?;
    let (code, text) = run_with_units(&adoption, &units, &take_over)?;
    ensure!(code == 1 && text.contains("The etcd runs as before"), "{code}: {text}");
    healthy.run(&["endpoint", "health"])?;
    let data_dir = adoption.data_dir(0);
    let run = format!(
        "exec {} run --data-dir {}\n",
        program_path("muster-agent")?.display(),
        data_dir.display()
    );
    units.write_unit("agent.service", &run)?;
    let (code, text) = run_with_units(&adoption, &units, &take_over)?;
    ensure!(code == 0, "{code}: {text}\n{}", units.log("agent.service"));
    writer.stop_and_check(&adoption.endpoints()[1])
}
