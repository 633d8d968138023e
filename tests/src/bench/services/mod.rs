//! Measures what watches, leases, keys and users cost: memory, CPU time, and the latency of other
//! requests.
//!
//! The clusters use plain HTTP and have three members, unless `--members` gives another number. All
//! requests go to the leader. Each measurement starts a new cluster, so that no figure includes the
//! memory of an earlier one. Figures are listed in the order in which they were measured.

mod auth;
mod keys;
mod leases;
mod watches;

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::cluster::{BenchCluster, ServerProgram};
use super::report::BenchReport;

/// Time limit of each call.
const CALL_TIME: Duration = Duration::from_secs(60);
/// Space quota of 8 GiB, so that all data fits.
const QUOTA: &str = "--quota-backend-bytes=8589934592";
/// Minimum cost of password hashes, whose CPU time is not part of the measurement.
const BCRYPT_COST: &str = "--bcrypt-cost=4";

/// Parameters of the measurements. A parameter of 0 leaves its measurement out.
#[derive(Clone, Copy, Debug)]
pub struct ServicesParameters {
    /// Number of members of each cluster.
    pub members: usize,
    /// Number of rounds of puts with users and without.
    pub auth_rounds: usize,
    /// Number of watchers of one prefix.
    pub watchers: usize,
    /// Number of puts that each of the `watchers` receives.
    pub events: usize,
    /// Number of watches, each of a key of its own.
    pub watches: usize,
    /// Number of leases to grant. This is also the number of keys attached to the lease that is
    /// revoked.
    pub leases: usize,
    /// Number of keys with values of 256 bytes.
    pub keys: usize,
}

/// A measured figure of one program.
#[derive(Clone, Debug, Serialize)]
pub struct ServiceFigure {
    /// Name of the program.
    pub program: String,
    /// Description of what was measured.
    pub what: String,
    /// Unit of `value`; empty for a ratio.
    pub unit: &'static str,
    /// Measured value, in `unit`.
    pub value: f64,
}

/// Adds the figures of one program to the report.
struct FigureRecorder<'a> {
    program: &'a str,
    report: &'a mut BenchReport,
    say: &'a dyn Fn(&str),
}

impl FigureRecorder<'_> {
    fn record(&mut self, what: impl Into<String>, value: f64, unit: &'static str) {
        let (program, what) = (self.program.to_owned(), what.into());
        (self.say)(&format!("{program:>12}: {what}: {value:.1} {unit}"));
        self.report.services.push(ServiceFigure { program, what, unit, value });
    }
}

pub(super) async fn run(
    parameters: &ServicesParameters,
    program: &ServerProgram,
    dir: &Path,
    report: &mut BenchReport,
    say: &dyn Fn(&str),
) -> Result<()> {
    let dir = dir.join(format!("{}-services", program.name));
    let mut recorder = FigureRecorder { program: &program.name, report, say };
    let new = async || {
        BenchCluster::start(program, &dir, parameters.members, None, &[QUOTA, BCRYPT_COST]).await
    };
    let remove_data = || fs_err::remove_dir_all(&dir);
    if parameters.auth_rounds > 0 {
        auth::run(new().await?, parameters.auth_rounds, &mut recorder).await?;
        remove_data()?;
    }
    if parameters.watchers > 0 {
        watches::one_prefix(new().await?, parameters.watchers, parameters.events, &mut recorder)
            .await?;
        remove_data()?;
    }
    if parameters.watches > 0 {
        watches::many_keys(new().await?, parameters.watches, &mut recorder).await?;
        remove_data()?;
    }
    if parameters.leases > 0 {
        leases::run(new().await?, parameters.leases, &mut recorder).await?;
        remove_data()?;
    }
    if parameters.keys > 0 {
        keys::run(new().await?, parameters.keys, &mut recorder).await?;
        remove_data()?;
    }
    Ok(())
}

/// Converts bytes to MiB.
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
