//! Runs unmodified third-party clients against three members. `tests/clients` has a short program
//! for each client, which checks the answers. Where stock etcd can be built, the program also runs
//! against it, to show that its expectations are etcd's behaviour.

mod members;
mod patroni;
mod postgres;
mod tools;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::ChildProcess;
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::stock_etcd;

use self::members::ThreeMemberCluster;

/// Time limit of one program. A program takes seconds, and its own time limits are shorter.
const LIMIT: Duration = Duration::from_secs(300);
/// Number of output lines shown when a program fails.
const SHOWN_LINES: usize = 40;

#[test]
fn etcd3_for_python_works_unchanged() -> Result<()> {
    let python = tools::python("python")?;
    check_on_both(true, || script(&python, "python/over_grpc.py"))
}

#[test]
fn etcd3gw_for_python_works_unchanged_over_json() -> Result<()> {
    let python = tools::python("python")?;
    check_on_both(true, || script(&python, "python/over_json.py"))
}

#[test]
fn etcd3_for_node_works_unchanged() -> Result<()> {
    let modules = tools::node_modules("node")?;
    check_on_both(true, || {
        let mut command = script(Path::new("node"), "node/check.js");
        command.env("NODE_PATH", &modules);
        command
    })
}

#[test]
fn etcd_client_for_rust_works_unchanged() -> Result<()> {
    let built = tools::build_crate("rust", "etcd-client-check")?;
    check_on_both(false, || bare_command(&built))
}

/// Runs a program against `muster-node` and against stock etcd, each with a new cluster.
fn check_on_both(tls: bool, programme: impl Fn() -> Command) -> Result<()> {
    check_on(&program_path("muster-node")?, tls, programme()).context("on muster-node")?;
    let Some(etcd) = stock_etcd::newest(tools::work()) else { return Ok(()) };
    check_on(&etcd, tls, programme()).context("on stock etcd, so it is the check that is wrong")
}

fn check_on(server: &Path, tls: bool, mut programme: Command) -> Result<()> {
    let members = ThreeMemberCluster::start(server, tls)?;
    programme.env("ENDPOINTS", members.urls.join(","));
    if let Some(ca) = &members.ca {
        programme.env("CACERT", ca);
    }
    let log = members.folder.path().join("programme.log");
    let mut process = ChildProcess::spawn("the programme", programme, &log)?;
    let code = process.exit_code(LIMIT)?;
    ensure!(code == 0, "it ended with {code}:\n{}", last_lines(&process.output(), SHOWN_LINES));
    Ok(())
}

fn script(interpreter: &Path, name: &str) -> Command {
    let mut command = bare_command(interpreter);
    command.arg(tools::folder(name));
    command
}

/// Returns a command in an environment without proxy and certificate settings, since everything is
/// on this machine.
fn bare_command(program: &Path) -> Command {
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
