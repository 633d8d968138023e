//! `muster-node` beside stock etcd: same machine, same client, same run, in turns.
//!
//! Both programs get the same flags and the same load, on three members each. A figure is the median
//! of the rounds; the rounds of the two programs alternate, so that a disturbance from outside hits
//! both. CPU time is what the kernel charged the three servers, read before and after each load.
//!
//! What changes of members cost is another mode (`--mode reconfigure`), and so is what watches, leases,
//! keys and users do (`--mode services`): one program after the other, so that neither has the other's
//! load beside it.

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

pub use self::reconfigure::Reconfigure;
pub use self::report::{Changes, Figures, Outages, Replacement, Report, Resize};
pub use self::services::{Service, Services};
use self::{
    cluster::{Cluster, MEMBERS, Program},
    load::Load,
};
use crate::harness::credentials::Credentials;

/// What to run, and for how long.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The `muster-node` to measure.
    pub muster: PathBuf,
    /// The etcd beside it; `None` builds a stock one, or falls back to the installed one.
    pub etcd: Option<PathBuf>,
    /// Where builds, data and logs go: a real disk.
    pub work: PathBuf,
    /// Only this program, if one is named.
    pub only: Option<String>,
    /// Numbers of clients.
    pub clients: Vec<usize>,
    /// Rounds of each load.
    pub rounds: usize,
    /// How long one load runs.
    pub time: Duration,
    /// How many puts one load makes at most.
    pub puts: u64,
    /// Bytes of each value.
    pub value_bytes: usize,
    /// Plain, mutual TLS, or both.
    pub modes: Vec<Mode>,
    /// How often the leader is killed.
    pub outages: usize,
    /// Spread clients over all members, instead of all at the leader.
    pub spread: bool,
    /// Instead of loads and outages: what changes of members cost.
    pub reconfigure: Option<Reconfigure>,
    /// Instead of loads and outages: what watches, leases, keys and users cost.
    pub services: Option<Services>,
}

/// How clients and peers speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Without TLS.
    Plain,
    /// With certificates on both sides.
    MutualTls,
}

impl Mode {
    /// For tables.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::MutualTls => "mTLS",
        }
    }
}

/// Runs the plan; `say` hears what is going on.
///
/// # Errors
/// If a program can't be built, started, or doesn't answer. Every server that was started is ended.
pub async fn run(plan: &Plan, say: &dyn Fn(&str)) -> Result<Report> {
    let programs = programs(plan, say).await?;
    let data = tempfile::Builder::new()
        .prefix("bench-")
        .tempdir_in(&plan.work)
        .context("make a directory for data")?;
    let mut report = Report { programs: programs.clone(), ..Report::default() };
    if let Some(wanted) = &plan.reconfigure {
        for program in &programs {
            reconfigure::run(wanted, program, data.path(), &mut report, say).await?;
        }
        return Ok(report);
    }
    if let Some(wanted) = &plan.services {
        for program in &programs {
            services::run(wanted, program, data.path(), &mut report, say).await?;
        }
        return Ok(report);
    }
    for mode in &plan.modes {
        let credentials = match mode {
            Mode::Plain => None,
            Mode::MutualTls => {
                let hosts = ["127.0.0.1", "localhost"].map(str::to_owned);
                Some(Credentials::make(&data.path().join("tls"), &hosts)?)
            }
        };
        let mut clusters = Vec::new();
        for program in &programs {
            say(&format!("starting three {} ({})", program.name, mode.label()));
            let dir = data.path().join(format!("{}-{}", program.name, mode.label()));
            let cluster = Cluster::start(program, &dir, MEMBERS, credentials.as_ref(), &[]).await?;
            clusters.push(cluster);
        }
        for &clients in &plan.clients {
            measure(plan, *mode, clients, &clusters, &mut report, say).await?;
        }
        if *mode == Mode::Plain {
            for cluster in &mut clusters {
                say(&format!("killing the leader of {} {} times", cluster.name(), plan.outages));
                let times = outage::run(cluster, plan.outages).await?;
                report.outages.push(Outages::of(cluster.name(), &times));
            }
        }
    }
    Ok(report)
}

async fn programs(plan: &Plan, say: &dyn Fn(&str)) -> Result<Vec<Program>> {
    let wanted = |name: &str| plan.only.as_deref().is_none_or(|only| only == name);
    let mut programs = Vec::new();
    if wanted("muster-node") {
        programs.push(Program::find("muster-node", plan.muster.clone()).await?);
    }
    if wanted("etcd") {
        let path = match &plan.etcd {
            Some(path) => path.clone(),
            None => crate::stock::etcd(&plan.work, say).await?,
        };
        programs.push(Program::find("etcd", path).await?);
    }
    Ok(programs)
}

async fn measure(
    plan: &Plan,
    mode: Mode,
    clients: usize,
    clusters: &[Cluster],
    report: &mut Report,
    say: &dyn Fn(&str),
) -> Result<()> {
    let mut rounds: Vec<Vec<load::Round>> = clusters.iter().map(|_| Vec::new()).collect();
    for round in 0..plan.rounds {
        for (cluster, results) in clusters.iter().zip(&mut rounds) {
            let load = Load {
                clients,
                time: plan.time,
                puts: plan.puts,
                value_bytes: plan.value_bytes,
                spread: plan.spread,
                seed: (round as u64) << 32 | clients as u64,
            };
            let result = load::run(cluster, &load).await?;
            say(&format!(
                "{:>12} {:>5} {clients:>4} clients, round {}: {:.0} puts/s",
                cluster.name(),
                mode.label(),
                round + 1,
                result.puts_per_second()
            ));
            results.push(result);
        }
    }
    for (cluster, rounds) in clusters.iter().zip(&rounds) {
        let rss = cluster.resident_bytes()?;
        report.figures.push(Figures::of(cluster.name(), mode, clients, rounds, rss));
    }
    Ok(())
}
