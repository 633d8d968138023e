//! What watches, leases, keys, and users cost: memory, CPU time, and how long others wait.
//!
//! Plain HTTP, three members unless said otherwise, everything at the leader; a new cluster for each, so
//! that no figure has another's memory in it. Figures come in the order in which they are taken.

mod auth;
mod keys;
mod leases;
mod watches;

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::cluster::{Cluster, Program};
use super::report::Report;

/// No single call may take this long.
const CALL_TIME: Duration = Duration::from_secs(60);
/// The quota that everything fits in.
const QUOTA: &str = "--quota-backend-bytes=8589934592";
/// Users' passwords cost nothing that is measured here.
const BCRYPT_COST: &str = "--bcrypt-cost=4";

/// What to measure; 0 leaves it out.
#[derive(Clone, Copy, Debug)]
pub struct Services {
    /// Members of each cluster.
    pub members: usize,
    /// Rounds of puts with users and without.
    pub auth_rounds: usize,
    /// Watchers of one prefix.
    pub watchers: usize,
    /// Puts that each of them hears of.
    pub events: usize,
    /// Watches of as many keys.
    pub watches: usize,
    /// Leases; and keys of the one that is revoked.
    pub leases: usize,
    /// Keys of 256 bytes each.
    pub keys: usize,
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Service {
    /// The program.
    pub program: String,
    /// What was measured.
    pub what: String,
    /// In which unit.
    pub unit: &'static str,
    /// How much.
    pub value: f64,
}

/// Takes figures of one program.
struct Scribe<'a> {
    program: &'a str,
    report: &'a mut Report,
    say: &'a dyn Fn(&str),
}

impl Scribe<'_> {
    fn note(&mut self, what: impl Into<String>, value: f64, unit: &'static str) {
        let (program, what) = (self.program.to_owned(), what.into());
        (self.say)(&format!("{program:>12}: {what}: {value:.1} {unit}"));
        self.report.services.push(Service { program, what, unit, value });
    }
}

pub(super) async fn run(
    wanted: &Services,
    program: &Program,
    dir: &Path,
    report: &mut Report,
    say: &dyn Fn(&str),
) -> Result<()> {
    let dir = dir.join(format!("{}-services", program.name));
    let mut scribe = Scribe { program: &program.name, report, say };
    let new =
        async || Cluster::start(program, &dir, wanted.members, None, &[QUOTA, BCRYPT_COST]).await;
    let gone = || fs_err::remove_dir_all(&dir);
    if wanted.auth_rounds > 0 {
        auth::run(new().await?, wanted.auth_rounds, &mut scribe).await?;
        gone()?;
    }
    if wanted.watchers > 0 {
        watches::one_prefix(new().await?, wanted.watchers, wanted.events, &mut scribe).await?;
        gone()?;
    }
    if wanted.watches > 0 {
        watches::many_keys(new().await?, wanted.watches, &mut scribe).await?;
        gone()?;
    }
    if wanted.leases > 0 {
        leases::run(new().await?, wanted.leases, &mut scribe).await?;
        gone()?;
    }
    if wanted.keys > 0 {
        keys::run(new().await?, wanted.keys, &mut scribe).await?;
        gone()?;
    }
    Ok(())
}

/// Bytes, in the unit that figures have.
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
