//! An owner's key on paper, for the day when the only other owner's key is lost.

use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed};
use serde_json::Value;

/// Runs `muster-discovery` with this admin's key and this text on stdin.
fn run(testbed: &Testbed, key: &Path, args: &[&str], typed: &str) -> Result<Output> {
    let mut command = testbed.network.hub.command(program_path("muster-discovery")?);
    let mut child = command
        .args(args)
        .env("MUSTER_ADMIN_HOME", testbed.admin_home())
        .env("MUSTER_ADMIN_KEY", key)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child.stdin.take().context("a pipe")?.write_all(typed.as_bytes())?;
    Ok(child.wait_with_output()?)
}

#[test]
fn a_key_on_paper_replaces_the_lost_key_of_the_only_owner() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    testbed.create_cluster("demo", 1, &[])?;
    let made = testbed.admin_json(&["admin", "add", "safe", "--recovery"])?;
    let paper = made["paper"].as_str().context("a key")?.to_owned();
    testbed.admin_command(&["cluster", "restate", "--all"])?;
    let lost = testbed.admin_key();
    fs_err::remove_file(&lost)?;

    // Restore the key from a text with a mistake, which must be refused. Then restore it from a
    // text in capitals with line breaks.
    let restored = testbed.path("restored.pem");
    let restore = ["key", "restore", "--out", path_text(&restored)?];
    let mistaken = paper.replace("muster-key1 ", "muster-key1 0");
    let refused = run(&testbed, &lost, &restore, &mistaken)?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(2) && text.contains("made of a-z and 2-7"), "{text}");
    ensure!(!restored.exists());
    let typed = format!("{}\n\n", paper.to_uppercase().replace(' ', "\n"));
    let output = run(&testbed, &lost, &restore, &typed)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let public = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(made["admin"]["key"] == public.as_str(), "{public}: {made}");

    // The restored key has all rights of an owner. It ends a cluster, makes another one, and
    // replaces the lost key.
    for args in [
        &["cluster", "abandon", "demo", "--yes"][..],
        &["cluster", "create", "next", "--size", "1"],
        &["admin", "revoke", "owner", "--yes"],
        &["cluster", "restate", "--all"],
    ] {
        let output = run(&testbed, &restored, args, "")?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{args:?}: {text}");
    }
    let listed = run(&testbed, &restored, &["admin", "list", "--json"], "")?;
    let listed: Value = serde_json::from_slice(&listed.stdout)?;
    let admins = listed["admins"].as_array().context("admins")?;
    ensure!(admins.len() == 1 && admins[0]["name"] == "safe", "{listed}");

    // Somebody passes the text on paper as an argument. The command refuses it, because it is a
    // secret.
    let argument = run(&testbed, &restored, &["admin", "add", "x", &paper, "--role", "owner"], "")?;
    let text = String::from_utf8_lossy(&argument.stderr).into_owned();
    ensure!(argument.status.code() == Some(2) && text.contains("a secret"), "{text}");
    ensure!(!text.contains(&paper[12..30]), "the secret is repeated");
    Ok(())
}
