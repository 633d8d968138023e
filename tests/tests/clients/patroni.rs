//! Patroni with a real Postgres and `muster-node` as its store. Postgres and the store's leader are
//! killed; no row may be lost that was acknowledged to a client.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::programs::program;
use muster_tests::harness::{Network, Process, until, until_told};
use serde_json::Value;

use super::members::Members;
use super::postgres::{SCOPE, Server};
use super::{script, tools};

/// Time limit of each wait. It includes the end of a lease of twenty seconds.
const LIMIT: Duration = Duration::from_secs(180);
/// Number of newly acknowledged rows that show that the writer goes on.
const MORE: usize = 20;

struct Postgres {
    servers: Vec<Server>,
}

/// Index of the leading Postgres server, and its timeline, which every failover increases.
#[derive(Clone, Debug, PartialEq)]
struct Led {
    by: usize,
    timeline: u64,
}

impl Postgres {
    /// Waits for a leader and a streaming synchronous standby. Only then may one of them be lost.
    fn whole(&self) -> Result<Led> {
        self.seen("a leader and its synchronous standby", |list| {
            let led = self.led(list)?;
            list.iter()
                .any(|each| each["Role"] == "Sync Standby" && each["State"] == "streaming")
                .then_some(led)
        })
    }

    /// Waits until the server at index `at` leads on a newer timeline than `before`.
    fn leads(&self, at: usize, before: &Led) -> Result<Led> {
        self.seen("another server to lead", |list| {
            self.led(list).filter(|led| led.by == at && led.timeline > before.timeline)
        })
    }

    fn led(&self, list: &[Value]) -> Option<Led> {
        let leader =
            list.iter().find(|each| each["Role"] == "Leader" && each["State"] == "running")?;
        let by = self.servers.iter().position(|each| leader["Member"] == each.host.name)?;
        Some(Led { by, timeline: leader["TL"].as_u64()? })
    }

    fn seen(&self, what: &str, look: impl Fn(&[Value]) -> Option<Led>) -> Result<Led> {
        let mut last = String::new();
        until_told(what, LIMIT, || {
            last = match self.servers[0].patronictl(&["list", "-f", "json"]) {
                Ok(list) => list,
                Err(error) => format!("{error:#}"),
            };
            look(serde_json::from_str::<Value>(&last).ok()?.as_array()?)
        })
        .with_context(|| {
            let said: Vec<String> = self.servers.iter().map(Server::said).collect();
            format!("last seen: {last}\n{}", said.join("\n"))
        })
    }

    fn switch(&self, led: &Led) -> Result<Led> {
        let (from, to) = (&self.servers[led.by], &self.servers[1 - led.by]);
        let [leader, candidate] = [from, to].map(|each| each.host.name.as_str());
        // Repeated, because the standby may have lagged too far behind at one attempt.
        until_told("a switchover to be taken", LIMIT, || {
            let now = self.whole().ok()?;
            let asked =
                ["switchover", SCOPE, "--leader", leader, "--candidate", candidate, "--force"];
            (now.by != led.by || from.patronictl(&asked).is_ok()).then_some(())
        })?;
        self.leads(1 - led.by, led)
    }
}

struct Writer(Process);

impl Writer {
    fn acknowledged(&self) -> usize {
        self.0.output().lines().filter(|line| line.starts_with("acknowledged ")).count()
    }

    fn goes_on(&self) -> Result<()> {
        let before = self.acknowledged();
        let more = || (self.acknowledged() >= before + MORE).then_some(());
        until("more rows to be acknowledged", LIMIT, more).with_context(|| self.0.output())
    }
}

#[test]
fn patroni_fails_over_and_loses_no_row_whoever_is_killed() -> Result<()> {
    let python = tools::python("patroni")?;
    let mut store = Members::start(&program("muster-node")?, true)?;
    let servers = Network::loopback(2).hosts.clone();
    let servers = servers.iter().map(|host| Server::new(&python, host, &store));
    let mut postgres = Postgres { servers: servers.collect::<Result<_>>()? };
    for server in &mut postgres.servers {
        server.start()?;
    }
    let first = postgres.whole()?;

    let mut command = script(&python, "patroni/writer.py");
    command.arg(Server::connection(&postgres.servers));
    let log = store.folder.path().join("writer.log");
    let mut writer = Writer(Process::spawn("the writer", command, &log)?);
    writer.goes_on()?;

    let second = postgres.switch(&first)?;
    writer.goes_on()?;

    let at_risk = postgres.whole()?;
    ensure!(at_risk == second, "{at_risk:?} is not {second:?}");
    postgres.servers[second.by].kill()?;
    let third = postgres.leads(1 - second.by, &second)?;
    writer.goes_on()?;
    postgres.servers[second.by].start()?;
    let whole = postgres.whole()?;
    ensure!(whole == third, "{whole:?} is not {third:?}");

    // The store soon elects a new leader, so Postgres must not fail over. Two of three members are
    // enough for another switchover.
    let killed = store.kill_leader()?;
    writer.goes_on()?;
    let kept = postgres.whole()?;
    ensure!(kept == third, "a failover without need: {kept:?} instead of {third:?}");
    postgres.switch(&third)?;
    writer.goes_on()?;
    store.nodes[killed].start()?;
    store.nodes[killed].ready(LIMIT)?;
    postgres.whole()?;

    let status = writer.0.terminate(LIMIT)?;
    ensure!(status.success(), "{}", writer.0.output());
    Ok(())
}
