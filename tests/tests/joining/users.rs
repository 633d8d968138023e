//! A cluster with auth enabled: an agent acts as the user that its member's certificate names.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::formed_cluster::{FormedCluster, LIMIT};
use muster_tests::harness::{AgentProcess, Etcdctl, Network};

/// Returns the common name of the certificate in `file`.
fn name_in(file: &std::path::Path) -> Result<String> {
    let args = ["x509", "-noout", "-subject", "-nameopt", "multiline,utf8", "-in"];
    let output = Command::new("openssl").args(args).arg(file).output().context("openssl")?;
    let text = String::from_utf8(output.stdout)?;
    let name = text.lines().find_map(|line| line.trim().strip_prefix("commonName"));
    let name = name.with_context(|| format!("a name in {}: {text}", file.display()))?;
    Ok(name.trim_start_matches([' ', '=']).to_owned())
}

/// Creates the agent's user with all permissions, and returns its name.
fn make_user(etcdctl: &Etcdctl, agent: &AgentProcess) -> Result<String> {
    let name = name_in(&agent.data_dir.join("agent/tls/client.crt"))?;
    etcdctl.run(&["user", "add", &name, "--no-password"])?;
    etcdctl.run(&["user", "grant-role", &name, "root"])?;
    Ok(name)
}

/// Returns the commands of the first console block below a heading of the text.
fn commands_of(readme: &str, heading: &str) -> Option<String> {
    let chapter = readme.split(&format!("\n{heading}\n")).nth(1)?;
    let block = chapter.split("```console\n").nth(1)?.split("```").next()?;
    let typed = |line: &str| {
        let command = line.strip_prefix("$ ").or_else(|| line.strip_prefix("> "))?;
        Some(command.to_owned())
    };
    let lines: Vec<String> = block.lines().filter_map(typed).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// Runs the manual's own commands in one shell. Only the paths of two folders are replaced.
#[test]
fn the_readmes_commands_for_users_lock_nobody_out() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(3), 3, None)?;
    let etcdctl = running.etcdctl()?;
    let readme = fs_err::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/users.md"))?;
    let commands =
        commands_of(&readme, "## Enable authentication").context("the manual's commands")?;
    let place = |path: &std::path::Path| path.display().to_string();
    let script = commands
        .replace("demo-credentials", &place(etcdctl.credentials()))
        .replace("/var/lib/muster", &place(&running.agents[0].data_dir));
    let credentials = etcdctl.credentials();
    let output = Command::new("bash")
        .args(["-e", "-o", "pipefail", "-c", &script])
        .env("ETCDCTL_API", "3")
        .env("ETCDCTL_CACERT", credentials.join("ca.crt"))
        .env("ETCDCTL_CERT", credentials.join("client.crt"))
        .env("ETCDCTL_KEY", credentials.join("client.key"))
        .env("ETCDCTL_ENDPOINTS", etcdctl.endpoints().join(","))
        .output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{script}\n{printed}\n{error}");
    // After the manual's commands have enabled auth, the admin must still be able to write.
    etcdctl.run(&["put", "after", "users"])?;
    // The output contains answers that the manual shows, and the users that its commands create.
    for line in ["subject=CN=muster:", "owner", "Authentication Enabled", "muster:3", "root"] {
        ensure!(printed.contains(line), "{line} is missing in: {printed}");
    }
    // The agents must still be able to list and to remove members.
    running.run_member_json(&running.agents[1], &["list"])?;
    running.run_member_json(&running.agents[0], &["remove", &running.name(&running.agents[2])?])?;
    Ok(())
}

#[test]
fn agents_change_members_as_the_users_whom_their_certificates_name() -> Result<()> {
    let running = FormedCluster::start(Network::loopback(4), 3, None)?;
    let etcdctl = running.etcdctl()?;
    let admin = name_in(&etcdctl.credentials().join("client.crt"))?;
    for user in ["root", admin.as_str()] {
        etcdctl.run(&["user", "add", user, "--no-password"])?;
        etcdctl.run(&["user", "grant-role", user, "root"])?;
    }
    etcdctl.run(&["auth", "enable"])?;
    // An agent without a user can read the member list, but not change it.
    let first = &running.agents[0];
    running.run_member_json(first, &["list"])?;
    let printed = running.run_member(first, &["remove", &running.name(&running.agents[2])?])?;
    let text = String::from_utf8_lossy(&printed.stderr).into_owned();
    ensure!(!printed.status.success() && text.contains("user name not found"), "{text}");
    running.wait_members(3)?;
    let users: Result<BTreeSet<String>> =
        running.agents.iter().map(|agent| make_user(&etcdctl, agent)).collect();
    let users = users?;
    ensure!(users.iter().eq(["muster:1", "muster:2", "muster:3"]), "{users:?}");
    // Remove a founder whose address the newcomer knows. The newcomer will ask there, too. It must
    // nevertheless show the answer of a present member.
    running.run_member_json(first, &["remove", &running.name(&running.agents[2])?])?;
    // The leader's agent carries out the join. The newcomer's agent needs a user, too: before it
    // starts its node, it reads one of Muster's own keys.
    let mut newcomer = running.newcomer(3, &[])?;
    newcomer.wait_for_output("permission denied", LIMIT)?;
    let user = make_user(&etcdctl, &newcomer)?;
    newcomer.wait_for_output(&format!("etcdctl user add {user} --no-password"), LIMIT)?;
    running.wait_voter(&newcomer, 3)?;
    // A command that a person runs on a member's host uses the certificate of the agent on that
    // host.
    running.run_member_json(&running.agents[1], &["remove", &running.name(&newcomer)?])?;
    running.wait_members(2)?;
    Ok(())
}
