//! A prepared folder of a managed Postgres, from which test beds copy theirs.
//!
//! `initdb` takes half a second of processor time, and a run of all tests starts two hundred
//! services. `scripts/run-tests` names a folder that all of its test binaries share. There the
//! first test bed makes the prepared folder, with the service's own program. Copies have one system
//! identifier, so a test that needs a foreign server has to make it in another way.
//! [`Testbed::prepare`] copies nothing: the service then starts in a folder that doesn't exist yet,
//! as an operator's does.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use super::network::Network;
use super::testbed::{Testbed, TestbedOptions, path_text};

/// Environment variable with the folder that all test binaries of a run share.
const SHARED_FOLDER: &str = "MUSTER_TEST_SHARED";

/// Copies the prepared folder to `place`. Without a shared folder, does nothing.
pub(super) fn copy_to(place: &Path) -> Result<()> {
    let Some(shared) = std::env::var_os(SHARED_FOLDER) else { return Ok(()) };
    let template = template_in(Path::new(&shared))?;
    // `cp` keeps owners and modes: Postgres doesn't run as root.
    let status = Command::new("cp").arg("-a").arg(&template).arg(place).status()?;
    ensure!(status.success(), "cp -a {} {}: {status}", template.display(), place.display());
    Ok(())
}

/// Returns the prepared folder. The first caller makes it, and the others wait.
fn template_in(shared: &Path) -> Result<PathBuf> {
    let finished = shared.join("postgres-template");
    let lock = fs_err::File::create(shared.join("postgres-template.lock"))?;
    flock(&lock, FlockOperation::LockExclusive).context("locking the prepared Postgres")?;
    if !finished.exists() {
        make(&finished).context("preparing a Postgres for all test beds")?;
    }
    Ok(finished)
}

/// Starts a service once, drops its database, and keeps the folder of its Postgres.
fn make(finished: &Path) -> Result<()> {
    let mut testbed = Testbed::prepare(Network::loopback(0), TestbedOptions::default())?;
    testbed.start_discovery()?;
    let url = testbed.database_url()?.replace("///muster?", "///postgres?");
    let drop = "DROP DATABASE muster WITH (FORCE)";
    let output = Command::new("psql").args(["-X", "-c", drop]).arg(url).output()?;
    ensure!(output.status.success(), "psql: {}", String::from_utf8_lossy(&output.stderr));
    testbed.stop_discovery()?;
    let folder = testbed.postgres_dir();
    let pid_file = folder.join("data/postmaster.pid");
    ensure!(!pid_file.exists(), "{} is left: Postgres didn't stop", path_text(&pid_file)?);
    fs_err::remove_file(folder.join("postgres.log"))?;
    fs_err::rename(folder, finished)?;
    Ok(())
}
