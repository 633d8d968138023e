//! Runs the commands of the README and of the operator's manual in `docs/` as they are.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::{Network, poll_slowly};

/// Sections whose commands are run in turn on one cluster: page and heading.
const SECTIONS: [(&str, &str); 6] = [
    ("docs/members.md", "## By hand: look first"),
    ("docs/metrics.md", "## Look by hand"),
    ("docs/other-recovery.md", "## From a snapshot"),
    ("docs/etcd.md", "## By hand, from etcd"),
    ("docs/etcd.md", "## By hand, to etcd"),
    ("docs/space.md", "## Make room"),
];

/// Time limit of a script, as an argument of timeout(1).
const SCRIPT_LIMIT: &str = "300";

/// Returns the commands in the console blocks of a page's section, one per line.
fn commands(page: &str, heading: &str) -> Result<String> {
    let text = fs_err::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page))?;
    let after = text.split_once(&format!("\n{heading}\n")).map(|(_, after)| after);
    let after = after.with_context(|| format!("{page} has no {heading}"))?;
    let section = after.split("\n## ").next().unwrap_or_default();
    let blocks = section.split("```console\n").skip(1);
    let lines = blocks.flat_map(|block| block.split("```").next().unwrap_or_default().lines());
    let typed =
        lines.filter_map(|line| line.strip_prefix("$ ").or_else(|| line.strip_prefix("> ")));
    let typed: Vec<&str> = typed.collect();
    ensure!(!typed.is_empty(), "{page} has no commands below {heading}");
    Ok(typed.join("\n"))
}

/// Returns a shell that runs `script` in `folder`, and finds the built programs.
fn shell(script: &str, folder: &Path) -> Result<Command> {
    let programs = program_path("muster-agent")?;
    let programs = programs.parent().context("a program has a folder")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("timeout");
    command
        .args([SCRIPT_LIMIT, "bash", "-c", script])
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("ETCDCTL_API", "3")
        .current_dir(folder);
    Ok(command)
}

/// Runs the documented commands as they are printed. Only addresses and the folder of Postgres are
/// replaced, and the build is left out.
#[test]
fn the_first_ten_minutes_work_as_written() -> Result<()> {
    let network = Network::loopback(5);
    let hub = network.hub.address.to_string();
    let net = hub.strip_suffix('1').context("the hub's address ends in 1")?;
    // The folder is open to all, because an unprivileged Postgres must reach its socket there.
    let folder = tempfile::Builder::new().prefix("muster-").tempdir()?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs_err::set_permissions(folder.path(), mode)?;
    let typed = [
        commands("README.md", "## Five minutes by hand")?,
        commands("docs/members.md", "## The next five minutes")?,
    ];
    let typed = typed.join("\n");
    let typed: Vec<&str> = typed.lines().filter(|line| !line.starts_with("make ")).collect();
    let typed = typed.join("\n").replace("127.0.0.", net);
    let typed = typed.replace("/tmp/muster-pg", &folder.path().join("pg").display().to_string());
    // Agents and service are jobs of the shell, which kills them when it exits.
    let script =
        format!("exec > typed.log 2>&1\nset -m\ntrap 'kill $(jobs -p); wait' EXIT\n{typed}");
    let status = shell(&script, folder.path())?
        .env("MUSTER_ADMIN_HOME", folder.path().join("admin"))
        .status()?;
    let printed = fs_err::read_to_string(folder.path().join("typed.log"))?;
    let last = last_lines(&printed, 60);
    ensure!(status.success(), "{status}: {last}");
    // The output shows that the cluster formed, and that db-2 was removed and learned of that. It
    // also shows that the last write was acknowledged.
    for line in ["formed (epoch ", "removed from cluster ", "ended with 3"] {
        ensure!(printed.contains(line), "{line:?} is missing: {last}");
    }
    ensure!(printed.lines().any(|line| line == "OK"), "the write failed: {last}");
    Ok(())
}

/// Runs the manual's commands as they are printed there, except that `db-1` is replaced by the name
/// of a test member.
#[test]
fn the_manuals_commands_work_as_written() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let first = &running.agents[0];
    poll_slowly("all members", LIMIT, || running.run_member_json(first, &["wait"]).ok())?;
    let (etcdctl, name) = (running.etcdctl()?, running.name(first)?);
    let folder = running.testbed.path("typed");
    fs_err::create_dir(&folder)?;
    let credentials = etcdctl.credentials();
    for (page, heading) in SECTIONS {
        let typed = commands(page, heading)?.replace("db-1", &name);
        let output = shell(&format!("set -e -o pipefail\n{typed}"), &folder)?
            .env("MUSTER_DATA_DIR", &first.data_dir)
            .env("MUSTER_ADMIN_HOME", running.testbed.admin_home())
            .env("MUSTER_ADMIN_KEY", running.testbed.admin_key())
            .env("ETCDCTL_ENDPOINTS", &etcdctl.endpoints()[0])
            .env("ETCDCTL_CACERT", credentials.join("ca.crt"))
            .env("ETCDCTL_CERT", credentials.join("client.crt"))
            .env("ETCDCTL_KEY", credentials.join("client.key"))
            .output()?;
        let [printed, error] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        ensure!(output.status.success(), "{page}, {heading}:\n{typed}\n{printed}\n{error}");
    }
    Ok(())
}
