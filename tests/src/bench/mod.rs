//! Compares `muster-node` with stock etcd on the same machine, with the same client, in one run.
//!
//! Both programs get the same flags and the same load, on three members each. A figure is the
//! median of the rounds. Rounds of the two programs alternate, so that a disturbance from outside
//! affects both. CPU time is what the kernel counted for the three servers together during a load.
//!
//! Two more modes measure one program after the other, so that the programs don't disturb each
//! other:
//!
//! - `--mode reconfigure`: the cost of membership changes.
//! - `--mode services`: the cost of watches, leases, keys and users.

pub(crate) mod cluster;
mod load;
mod outage;
pub(crate) mod process;
mod reconfigure;
mod replace;
mod report;
mod services;
mod writer;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

pub use self::load::Work;
pub use self::reconfigure::ReconfigureParameters;
pub use self::report::{BenchReport, ChangeFigures, LoadFigures, Outages, Replacement, Resize};
pub use self::services::{ServiceFigure, ServicesParameters};
use self::{
    cluster::{BenchCluster, MEMBERS, ServerProgram},
    load::Load,
};
use crate::harness::credentials::Credentials;

/// Parameters of a benchmark run.
#[derive(Clone, Debug)]
pub struct BenchPlan {
    /// Path of the `muster-node` to measure.
    pub muster: PathBuf,
    /// Path of the etcd to compare with. With `None`, a stock etcd is built, or the installed one
    /// is used if the build fails.
    pub etcd: Option<PathBuf>,
    /// Directory for builds, data and logs, on a real disk.
    pub work: PathBuf,
    /// Name of the only program to measure; `None` measures both.
    pub only: Option<String>,
    /// Requests that are measured, each with each number of clients.
    pub requests: Vec<Work>,
    /// Numbers of clients. The load is measured with each of these numbers in turn.
    pub clients: Vec<usize>,
    /// Number of rounds of each load.
    pub rounds: usize,
    /// Duration of one load.
    pub time: Duration,
    /// Maximum number of requests of one load.
    pub max_requests: u64,
    /// Size of each value in bytes.
    pub value_bytes: usize,
    /// Transport modes to measure: plain, mutual TLS, or both.
    pub modes: Vec<TransportMode>,
    /// Number of times that the leader is killed.
    pub outages: usize,
    /// Whether clients are spread over all members; otherwise all use the leader.
    pub spread: bool,
    /// Measures the cost of membership changes instead of loads and outages.
    pub reconfigure: Option<ReconfigureParameters>,
    /// Measures the cost of watches, leases, keys and users instead of loads and outages.
    pub services: Option<ServicesParameters>,
}

/// Transport of clients and peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportMode {
    /// Plain HTTP without TLS.
    Plain,
    /// TLS with certificates on both sides.
    MutualTls,
}

impl TransportMode {
    /// Returns the name of the mode in tables.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::MutualTls => "mTLS",
        }
    }
}

/// Runs the plan. Calls `say` with each progress message.
///
/// # Errors
/// If a program can't be built or started, or doesn't answer. Every started server is killed in any
/// case.
pub async fn run(plan: &BenchPlan, say: &dyn Fn(&str)) -> Result<BenchReport> {
    let programs = programs(plan, say).await?;
    let data = tempfile::Builder::new()
        .prefix("bench-")
        .tempdir_in(&plan.work)
        .context("make a directory for data")?;
    let mut report = BenchReport { programs: programs.clone(), ..BenchReport::default() };
    if let Some(parameters) = &plan.reconfigure {
        for program in &programs {
            reconfigure::run(parameters, program, data.path(), &mut report, say).await?;
        }
        return Ok(report);
    }
    if let Some(parameters) = &plan.services {
        for program in &programs {
            services::run(parameters, program, data.path(), &mut report, say).await?;
        }
        return Ok(report);
    }
    for mode in &plan.modes {
        let credentials = match mode {
            TransportMode::Plain => None,
            TransportMode::MutualTls => {
                let hosts = ["127.0.0.1", "localhost"].map(str::to_owned);
                Some(Credentials::make(&data.path().join("tls"), &hosts)?)
            }
        };
        let mut clusters = Vec::new();
        for program in &programs {
            say(&format!("starting three {} ({})", program.name, mode.label()));
            let dir = data.path().join(format!("{}-{}", program.name, mode.label()));
            let cluster =
                BenchCluster::start(program, &dir, MEMBERS, credentials.as_ref(), &[]).await?;
            clusters.push(cluster);
        }
        for &work in &plan.requests {
            for &clients in &plan.clients {
                measure(plan, *mode, (work, clients), &clusters, &mut report, say).await?;
            }
        }
        if *mode == TransportMode::Plain {
            for cluster in &mut clusters {
                say(&format!("killing the leader of {} {} times", cluster.name(), plan.outages));
                let name = cluster.name().to_owned();
                let times = outage::kill_leader(cluster, plan.outages).await?;
                report.outages.push(Outages::from_times(&name, "kill -9 of the leader", &times));
                say(&format!("restarting all members of {name} {} times", plan.outages));
                let times = outage::restart_all(cluster, plan.outages).await?;
                report.outages.push(Outages::from_times(&name, "all members start again", &times));
            }
        }
    }
    Ok(report)
}

async fn programs(plan: &BenchPlan, say: &dyn Fn(&str)) -> Result<Vec<ServerProgram>> {
    let is_wanted = |name: &str| plan.only.as_deref().is_none_or(|only| only == name);
    let mut programs = Vec::new();
    if is_wanted("muster-node") {
        programs.push(ServerProgram::find("muster-node", plan.muster.clone()).await?);
    }
    if is_wanted("etcd") {
        let path = match &plan.etcd {
            Some(path) => path.clone(),
            None => crate::stock_etcd::newest_or_installed(&plan.work, say).await?,
        };
        programs.push(ServerProgram::find("etcd", path).await?);
    }
    Ok(programs)
}

async fn measure(
    plan: &BenchPlan,
    mode: TransportMode,
    (work, clients): (Work, usize),
    clusters: &[BenchCluster],
    report: &mut BenchReport,
    say: &dyn Fn(&str),
) -> Result<()> {
    let mut rounds: Vec<Vec<load::LoadResult>> = clusters.iter().map(|_| Vec::new()).collect();
    for round in 0..plan.rounds {
        for (cluster, results) in clusters.iter().zip(&mut rounds) {
            let load = Load {
                work,
                clients,
                time: plan.time,
                requests: plan.max_requests,
                value_bytes: plan.value_bytes,
                spread: plan.spread,
                seed: (round as u64) << 32 | clients as u64,
            };
            let result = load::run(cluster, &load).await?;
            say(&format!(
                "{:>12} {:>5} {:<12} {clients:>4} clients, round {}: {:.0}/s",
                cluster.name(),
                mode.label(),
                work.name(),
                round + 1,
                result.per_second()
            ));
            results.push(result);
        }
    }
    for (cluster, rounds) in clusters.iter().zip(&rounds) {
        let rss = cluster.resident_bytes()?;
        report.figures.push(LoadFigures::from_rounds(
            cluster.name(),
            mode,
            work,
            clients,
            rounds,
            rss,
        ));
    }
    Ok(())
}
