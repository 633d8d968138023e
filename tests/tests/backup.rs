//! Backs up the running discovery service and its keys, and restores them after they were lost.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed, poll_slowly};

const LIMIT: Duration = Duration::from_secs(60);

fn raft_cluster(testbed: &Testbed) -> Result<u64> {
    let etcdctl = testbed.etcdctl("demo", &testbed.network.hosts.iter().collect::<Vec<_>>())?;
    let answer = poll_slowly("the cluster to take a write", LIMIT, || {
        etcdctl.json(&["put", "k", "v"]).ok()
    })?;
    answer["header"]["cluster_id"].as_u64().context("a cluster id")
}

fn mode(path: &Path) -> Result<u32> {
    Ok(fs_err::metadata(path)?.permissions().mode() & 0o777)
}

#[test]
fn a_service_that_lost_all_but_its_keys_is_restored_and_touches_no_cluster() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(3), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut members = testbed.start_agents(0..3, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let identity = raft_cluster(&testbed)?;
    // The cluster `later` is still forming when the backup is made.
    testbed.create_cluster("later", 1, &[])?;

    let (postgres, ledger) = (testbed.postgres_dir(), testbed.path("discovery-ledger"));
    let backup = testbed.path("backup");
    let back_up = ["backup", "--managed-postgres", path_text(&postgres)?, "--ledger"];
    let back_up = [&back_up[..], &[path_text(&ledger)?, "--out", path_text(&backup)?]].concat();
    let listed = testbed.admin_json(&back_up)?;
    ensure!(mode(&backup)? == 0o700, "others may enter {}", backup.display());
    for name in ["database.dump", "ledger.jsonl", "ledger.position", "backup.json"] {
        let found = mode(&backup.join(name))?;
        ensure!(found == 0o600, "{name} has mode {found:o}");
    }
    ensure!(listed["files"]["database.dump"]["bytes"].as_u64() > Some(0), "{listed}");
    let again = testbed.admin_output(&back_up)?;
    ensure!(again.status.code() == Some(2), "a second backup into one folder: {again:?}");

    // The service is stopped. Then everything but its keys is deleted.
    testbed.stop_discovery()?;
    let stopped = testbed.path("backup-2");
    let without = [&back_up[..6], &[path_text(&stopped)?]].concat();
    let refused = testbed.admin_output(&without)?;
    ensure!(refused.status.code() == Some(2), "a backup of a stopped service: {refused:?}");
    fs_err::remove_dir_all(&ledger)?;
    fs_err::rename(&postgres, testbed.path("postgres-of-today"))?;

    let restore = ["restore", "--from", path_text(&backup)?, "--managed-postgres"];
    let restore =
        [&restore[..], &[path_text(&postgres)?, "--ledger", path_text(&ledger)?]].concat();
    testbed.admin_command(&restore)?;
    let again = testbed.admin_output(&restore)?;
    ensure!(again.status.code() == Some(2), "a second restore into one folder: {again:?}");
    testbed.start_discovery()?;

    // The service detects the restored database, and decides nothing until an owner has accepted
    // it.
    let explained = poll_slowly("discovery to say why it waits", LIMIT, || {
        let text = testbed.admin_command(&["cluster", "explain", "later"]).ok()?;
        text.contains("db accept").then_some(text)
    })?;
    ensure!(explained.contains("the database changed"), "{explained}");
    let shown = testbed.admin_json(&["cluster", "show", "demo"])?;
    ensure!(shown["state"] == "formed", "{shown}");
    testbed.admin_command(&["db", "accept", "--yes"])?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let now = raft_cluster(&testbed)?;
    ensure!(now == identity, "the Raft cluster was {identity:x} and is {now:x}");
    for agent in &mut members {
        ensure!(agent.is_running(), "{} has ended:\n{}", agent.host.name, agent.output());
    }
    Ok(())
}

/// Runs a program that makes or prints keys, and returns what it prints.
fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Makes an age identity, and returns its recipient.
fn age_recipient(identity: &Path) -> Result<String> {
    run(Command::new("age-keygen").args(["-o", path_text(identity)?]))?;
    Ok(run(Command::new("age-keygen").args(["-y", path_text(identity)?]))?.trim().to_owned())
}

fn names_and_contents(folder: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs_err::read_dir(folder)? {
        let entry = entry?;
        files.push((entry.file_name().to_string_lossy().into_owned(), fs_err::read(entry.path())?));
    }
    files.sort();
    Ok(files)
}

#[test]
fn a_key_directory_is_restored_by_each_recipient_and_never_lies_open() -> Result<()> {
    let testbed = Testbed::prepare(Network::loopback(0), TestbedOptions::default())?;
    let keys = testbed.keys_dir();
    let identities = [testbed.path("first.txt"), testbed.path("second.txt")];
    let recipients = [age_recipient(&identities[0])?, age_recipient(&identities[1])?];
    let file = testbed.path("keys.age");
    let back_up = ["backup-keys", "--keys", path_text(&keys)?, "--out", path_text(&file)?];
    let to = ["--recipient", &recipients[0], "--recipient", &recipients[1]];
    let made = testbed.admin_json(&[&back_up[..], &to].concat())?;
    ensure!(made["files"].as_array().is_some_and(|files| files.len() == 6), "{made}");
    ensure!(mode(&file)? == 0o600, "others may read the backup");
    let encrypted = fs_err::read(&file)?;
    for (name, content) in names_and_contents(&keys)? {
        let lies_open =
            encrypted.windows(24).any(|window| content.windows(24).any(|c| c == window));
        ensure!(!lies_open, "a part of {name} stands in the backup");
    }
    let again = testbed.admin_output(&[&back_up[..], &to].concat())?;
    ensure!(again.status.code() == Some(2), "the backup was overwritten: {again:?}");

    for (identity, number) in identities.iter().zip(1..) {
        let restored = testbed.path(&format!("keys-{number}"));
        let (from, into) = (path_text(&file)?, path_text(&restored)?);
        let restore = ["restore-keys", "--from", from, "--keys", into];
        let without = testbed.admin_output(&restore)?;
        let error = String::from_utf8_lossy(&without.stderr);
        ensure!(without.status.code() == Some(2) && error.contains("--identity"), "{error}");
        let identity = ["--identity", path_text(identity)?];
        let shown = testbed.admin_json(&[&restore[..], &identity].concat())?;
        ensure!(shown["pin"] == made["pin"], "{shown} instead of {made}");
        ensure!(names_and_contents(&restored)? == names_and_contents(&keys)?);
        ensure!(mode(&restored)? == 0o700, "others may enter the key directory");
        let again = testbed.admin_output(&[&restore[..], &identity].concat())?;
        ensure!(again.status.code() == Some(2), "the keys were overwritten: {again:?}");
    }
    Ok(())
}

#[test]
fn a_key_backup_that_is_damaged_or_for_others_restores_nothing() -> Result<()> {
    let testbed = Testbed::prepare(Network::loopback(0), TestbedOptions::default())?;
    let (own, other) = (testbed.path("own.txt"), testbed.path("other.txt"));
    let (recipient, _) = (age_recipient(&own)?, age_recipient(&other)?);
    let (keys, file) = (testbed.keys_dir(), testbed.path("keys.age"));
    let back_up = ["backup-keys", "--keys", path_text(&keys)?, "--out", path_text(&file)?];
    testbed.admin_command(&[&back_up[..], &["--recipient", &recipient]].concat())?;

    let (restored, damaged) = (testbed.path("restored"), testbed.path("damaged.age"));
    let refused = |from: &Path, identity: &Path, code: i32, why: &str| -> Result<()> {
        let (from, into) = (path_text(from)?, path_text(&restored)?);
        let restore = ["restore-keys", "--from", from, "--keys", into, "--identity"];
        let output = testbed.admin_output(&[&restore[..], &[path_text(identity)?]].concat())?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(code) && error.contains(why), "{why}: {error}");
        ensure!(!restored.exists(), "{why}: something was restored");
        Ok(())
    };
    refused(&file, &other, 1, "`age` failed")?;
    let whole = fs_err::read(&file)?;
    for cut in [whole.len() - 1, whole.len() / 2, 30] {
        fs_err::write(&damaged, &whole[..cut])?;
        refused(&damaged, &own, 1, "`age` failed")?;
    }
    for place in [whole.len() - 1, whole.len() / 2, 40] {
        let mut changed = whole.clone();
        changed[place] ^= 1;
        fs_err::write(&damaged, changed)?;
        refused(&damaged, &own, 1, "`age` failed")?;
    }
    fs_err::remove_file(&damaged)?;
    let (plain, encrypt) = (testbed.path("plain"), ["--encrypt", "--recipient", &recipient]);
    for (text, why) in [
        ("{}", "it holds no backup of a key directory"),
        (r#"{"version":2,"files":{}}"#, "made by a newer version"),
        (r#"{"version":1,"files":{"kek-1.key":"?"}}"#, "kek-1.key"),
        (r#"{"version":1,"files":{"../kek-1.key":"AAAA"}}"#, "is no file of a key directory"),
    ] {
        fs_err::write(&plain, text)?;
        let mut age = Command::new("age");
        run(age.args(encrypt).args(["--output", path_text(&damaged)?, path_text(&plain)?]))?;
        refused(&damaged, &own, 2, why)?;
    }
    refused(&testbed.path("nowhere"), &own, 2, "No such file")
}

#[test]
fn a_key_directory_is_encrypted_to_a_gpg_key() -> Result<()> {
    let testbed = Testbed::prepare(Network::loopback(0), TestbedOptions::default())?;
    let home = testbed.path("gnupg");
    fs_err::create_dir(&home)?;
    fs_err::set_permissions(&home, std::fs::Permissions::from_mode(0o700))?;
    let gpg =
        |args: &[&str]| run(Command::new("gpg").env("GNUPGHOME", &home).arg("--batch").args(args));
    gpg(&["--passphrase", "", "--quick-generate-key", "owner", "default", "default", "never"])?;
    let listed = gpg(&["--with-colons", "--list-keys", "owner"])?;
    let fingerprint = listed.lines().find_map(|line| line.strip_prefix("fpr:"));
    let fingerprint = fingerprint.context("a fingerprint")?.trim_matches(':');

    let (keys, file) = (testbed.keys_dir(), testbed.path("keys.gpg"));
    let restored = testbed.path("restored");
    let command = |args: &[&str]| {
        let mut command = Command::new(program_path("muster-discovery")?);
        run(command.env("GNUPGHOME", &home).args(args))
    };
    let out = ["--recipient", fingerprint, "--out", path_text(&file)?];
    command(&[&["backup-keys", "--keys", path_text(&keys)?], &out[..]].concat())?;
    let from = ["restore-keys", "--from", path_text(&file)?];
    command(&[&from[..], &["--keys", path_text(&restored)?]].concat())?;
    ensure!(names_and_contents(&restored)? == names_and_contents(&keys)?);
    // Stop the agent process that GPG has started. It would keep the folder open.
    run(Command::new("gpgconf").env("GNUPGHOME", &home).args(["--kill", "gpg-agent"])).map(drop)
}
