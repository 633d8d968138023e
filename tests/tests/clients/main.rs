//! Clients that others wrote, unmodified, against three members: `tests/clients` has a short programme for each,
//! which checks what it is told. The same programme runs against stock etcd, where that can be built: what it
//! expects is etcd's doing, and not ours.

mod members;
mod patroni;
mod postgres;
mod tools;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::Process;
use muster_tests::harness::process::tail;
use muster_tests::harness::programs::program;
use muster_tests::stock;

use self::members::Members;

/// They take seconds. Each of their own waits is shorter.
const LIMIT: Duration = Duration::from_secs(300);
/// Of what a programme printed, what is shown when it fails.
const SHOWN: usize = 40;

#[test]
fn etcd3_for_python_works_unchanged() -> Result<()> {
    let python = tools::python("python")?;
    everywhere(true, || script(&python, "python/over_grpc.py"))
}

#[test]
fn etcd3gw_for_python_works_unchanged_over_json() -> Result<()> {
    let python = tools::python("python")?;
    everywhere(true, || script(&python, "python/over_json.py"))
}

#[test]
fn etcd3_for_node_works_unchanged() -> Result<()> {
    let modules = tools::node_modules("node")?;
    everywhere(true, || {
        let mut command = script(Path::new("node"), "node/check.js");
        command.env("NODE_PATH", &modules);
        command
    })
}

#[test]
fn etcd_client_for_rust_works_unchanged() -> Result<()> {
    let built = tools::crate_of("rust", "etcd-client-check")?;
    everywhere(false, || bare(&built))
}

/// Of muster-node, then of stock etcd: each on members of its own.
fn everywhere(tls: bool, programme: impl Fn() -> Command) -> Result<()> {
    against(&program("muster-node")?, tls, programme()).context("on muster-node")?;
    let Some(etcd) = stock::newest(tools::work()) else { return Ok(()) };
    against(&etcd, tls, programme()).context("on stock etcd, so it is the check that is wrong")
}

fn against(server: &Path, tls: bool, mut programme: Command) -> Result<()> {
    let members = Members::start(server, tls)?;
    programme.env("ENDPOINTS", members.urls.join(","));
    if let Some(ca) = &members.ca {
        programme.env("CACERT", ca);
    }
    let log = members.folder.path().join("programme.log");
    let mut process = Process::spawn("the programme", programme, &log)?;
    let code = process.exit_code(LIMIT)?;
    ensure!(code == 0, "it ended with {code}:\n{}", tail(&process.output(), SHOWN));
    Ok(())
}

fn script(interpreter: &Path, name: &str) -> Command {
    let mut command = bare(interpreter);
    command.arg(tools::folder(name));
    command
}

/// Without what the surroundings say of proxies and certificates: it is all on this machine.
fn bare(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear();
    for kept in ["PATH", "HOME"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}
