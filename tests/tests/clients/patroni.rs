//! Patroni with a real Postgres and `muster-node` as its store. Postgres and the store's leader are
//! killed; no row may be lost that was acknowledged to a client.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{ChildProcess, Network, poll_slowly, wait_for};
use serde_json::Value;

use super::members::ThreeMemberCluster;
use super::postgres::{PostgresServer, SCOPE};
use super::{script, tools};

/// Time limit of each wait. It is long, because a wait may begin with the rest of a lease of twenty
/// seconds.
const LIMIT: Duration = Duration::from_secs(180);
/// Number of newly acknowledged rows that show that the writer goes on.
const EXPECTED_NEW_ROWS: usize = 20;

struct PostgresCluster {
    servers: Vec<PostgresServer>,
}

/// Index of the leading Postgres server, and its timeline, which every failover increases.
#[derive(Clone, Debug, PartialEq)]
struct Leadership {
    leader: usize,
    timeline: u64,
}

impl PostgresCluster {
    /// Waits for a leader and a streaming synchronous standby. From then on, the loss of one server
    /// loses no acknowledged row.
    fn wait_healthy(&self) -> Result<Leadership> {
        self.wait_listed("a leader and its synchronous standby", |list| {
            let led = self.leadership(list)?;
            list.iter()
                .any(|each| each["Role"] == "Sync Standby" && each["State"] == "streaming")
                .then_some(led)
        })
    }

    /// Waits until the server at index `at` leads on a newer timeline than `before`.
    fn leads(&self, at: usize, before: &Leadership) -> Result<Leadership> {
        self.wait_listed("another server to lead", |list| {
            self.leadership(list).filter(|led| led.leader == at && led.timeline > before.timeline)
        })
    }

    fn leadership(&self, list: &[Value]) -> Option<Leadership> {
        let leader =
            list.iter().find(|each| each["Role"] == "Leader" && each["State"] == "running")?;
        let by = self.servers.iter().position(|each| leader["Member"] == each.host.name)?;
        Some(Leadership { leader: by, timeline: leader["TL"].as_u64()? })
    }

    fn wait_listed(
        &self,
        what: &str,
        look: impl Fn(&[Value]) -> Option<Leadership>,
    ) -> Result<Leadership> {
        let mut last = String::new();
        poll_slowly(what, LIMIT, || {
            last = match self.servers[0].patronictl(&["list", "-f", "json"]) {
                Ok(list) => list,
                Err(error) => format!("{error:#}"),
            };
            look(serde_json::from_str::<Value>(&last).ok()?.as_array()?)
        })
        .with_context(|| {
            let printed: Vec<String> = self.servers.iter().map(PostgresServer::log_tail).collect();
            format!("last seen: {last}\n{}", printed.join("\n"))
        })
    }

    fn switch(&self, led: &Leadership) -> Result<Leadership> {
        let (from, to) = (&self.servers[led.leader], &self.servers[1 - led.leader]);
        let [leader, candidate] = [from, to].map(|each| each.host.name.as_str());
        // Repeat the switchover, because the standby may have lagged too far behind at one attempt.
        poll_slowly("a switchover to be taken", LIMIT, || {
            let now = self.wait_healthy().ok()?;
            let asked =
                ["switchover", SCOPE, "--leader", leader, "--candidate", candidate, "--force"];
            (now.leader != led.leader || from.patronictl(&asked).is_ok()).then_some(())
        })?;
        self.leads(1 - led.leader, led)
    }
}

struct WriterProcess(ChildProcess);

impl WriterProcess {
    fn acknowledged(&self) -> usize {
        self.0.output().lines().filter(|line| line.starts_with("acknowledged ")).count()
    }

    fn wait_progress(&self) -> Result<()> {
        let before = self.acknowledged();
        let more = || (self.acknowledged() >= before + EXPECTED_NEW_ROWS).then_some(());
        wait_for("more rows to be acknowledged", LIMIT, more).with_context(|| self.0.output())
    }
}

#[test]
fn patroni_fails_over_and_loses_no_row_whoever_is_killed() -> Result<()> {
    let python = tools::python("patroni")?;
    let mut store = ThreeMemberCluster::start(&program_path("muster-node")?, true)?;
    let servers = Network::loopback(2).hosts.clone();
    let servers = servers.iter().map(|host| PostgresServer::new(&python, host, &store));
    let mut postgres = PostgresCluster { servers: servers.collect::<Result<_>>()? };
    for server in &mut postgres.servers {
        server.start()?;
    }
    let first = postgres.wait_healthy()?;

    let mut command = script(&python, "patroni/writer.py");
    command.arg(PostgresServer::connection(&postgres.servers));
    let log = store.folder.path().join("writer.log");
    let mut writer = WriterProcess(ChildProcess::spawn("the writer", command, &log)?);
    writer.wait_progress()?;

    let second = postgres.switch(&first)?;
    writer.wait_progress()?;

    let at_risk = postgres.wait_healthy()?;
    ensure!(at_risk == second, "{at_risk:?} is not {second:?}");
    postgres.servers[second.leader].kill()?;
    let third = postgres.leads(1 - second.leader, &second)?;
    writer.wait_progress()?;
    postgres.servers[second.leader].start()?;
    let whole = postgres.wait_healthy()?;
    ensure!(whole == third, "{whole:?} is not {third:?}");

    // After the kill of its leader, `muster-node`'s cluster soon elects a new one, so Postgres must
    // not fail over. Two of three members are enough for another switchover of Postgres.
    let killed = store.kill_leader()?;
    writer.wait_progress()?;
    let kept = postgres.wait_healthy()?;
    ensure!(kept == third, "a failover without need: {kept:?} instead of {third:?}");
    postgres.switch(&third)?;
    writer.wait_progress()?;
    store.nodes[killed].start()?;
    store.nodes[killed].wait_ready(LIMIT)?;
    postgres.wait_healthy()?;

    let status = writer.0.terminate(LIMIT)?;
    ensure!(status.success(), "{}", writer.0.output());
    Ok(())
}
