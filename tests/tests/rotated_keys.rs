//! `keys rotate`: the service's keys change while a cluster forms, without an effect on its agents.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed, poll_slowly};

const LIMIT: Duration = Duration::from_secs(60);

/// The signing key and the key-encryption key change while two of three hosts wait. They change
/// again before the members' certificates are issued to a later host.
#[test]
fn new_keys_in_the_middle_of_forming_and_of_joining_disturb_nobody() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(5), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents = testbed.start_agents(0..2, &bundle)?;
    poll_slowly("two seats", LIMIT, || {
        let shown = testbed.admin_json(&["cluster", "show", "demo"]).ok()?;
        (shown["seated"] == 2).then_some(())
    })?;
    let keys = path_text(&testbed.keys_dir())?.to_owned();
    let rotate = ["keys", "rotate", "--keys", &keys, "--signing", "--kek"];
    let made = testbed.admin_json(&rotate)?;
    ensure!(made["signing"] == 2 && made["kek"] == 2, "{made}");
    testbed.stop_discovery()?;
    testbed.start_discovery()?;
    agents.extend(testbed.start_agents(2..3, &bundle)?);
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;

    testbed.admin_json(&rotate)?;
    testbed.kill_discovery();
    testbed.start_discovery()?;
    let ticket = testbed.path("late.ticket");
    let create = ["token", "create", "--cluster", "demo", "--kind", "join", "--out"];
    testbed.admin_command(&[&create[..], &[path_text(&ticket)?]].concat())?;
    agents.extend(testbed.start_agents(3..4, &ticket)?);
    poll_slowly("the fourth member", LIMIT, || {
        let shown = testbed.admin_json(&["cluster", "show", "demo"]).ok()?;
        let members = shown["present"]["members"].as_array()?;
        let heard = members.iter().all(|member| member["last_heard_ms"].is_number());
        (members.len() == 4 && heard).then_some(())
    })?;
    // Form another cluster. Its CA keys are encrypted with the new key-encryption key.
    let bundle = testbed.create_cluster_with_token("other", 1)?;
    agents.extend(testbed.start_agents(4..5, &bundle)?);
    testbed.wait_cluster_state("other", "formed", LIMIT)?;
    Ok(())
}

/// A new TLS key is made in a copy of the key directory, and the old directory stays as it is.
#[test]
fn a_new_tls_key_is_made_in_a_copy() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let keys = path_text(&testbed.keys_dir())?.to_owned();
    let copy = testbed.path("keys-new");
    let rotate = ["keys", "rotate", "--keys", &keys, "--tls", "--out", path_text(&copy)?];
    let before = fs_err::read(testbed.keys_dir().join("tls.key"))?;
    let made = testbed.admin_json(&rotate)?;
    ensure!(made["pin"] != made["new_pin"] && made["new_pin"].is_string(), "{made}");
    ensure!(fs_err::read(testbed.keys_dir().join("tls.key"))? == before);
    ensure!(
        fs_err::read(copy.join("kek-1.key"))?
            == fs_err::read(testbed.keys_dir().join("kek-1.key"))?
    );
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &fs_err::metadata(copy.join("tls.key"))?.permissions(),
    );
    ensure!(mode & 0o077 == 0, "{mode:o}");
    let again = testbed.admin_output(&rotate)?;
    let text = String::from_utf8_lossy(&again.stderr).into_owned();
    ensure!(again.status.code() == Some(2) && text.contains("--out"), "{text}");
    for wrong in
        [&["keys", "rotate", "--keys", &keys][..], &["keys", "rotate", "--keys", &keys, "--tls"]]
    {
        ensure!(testbed.admin_output(wrong)?.status.code() == Some(2), "{wrong:?}");
    }
    let mut context = fs_err::read_to_string(testbed.path("context"))?;
    context = context
        .lines()
        .find(|line| line.starts_with("muster-context1"))
        .context("a context")?
        .to_owned();
    ensure!(context.contains(made["pin"].as_str().context("a pin")?), "{context} {made}");
    Ok(())
}

/// After `keys rewrap`, the database needs only the newest key-encryption key, even in the middle
/// of a replacement of CAs.
#[test]
fn ca_keys_that_were_wrapped_again_need_the_newest_key_alone() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    let bundle = testbed.create_cluster_with_token("demo", 1)?;
    let _agents = testbed.start_agents(0..1, &bundle)?;
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let keys = path_text(&testbed.keys_dir())?.to_owned();
    let rotate_ca = ["cluster", "rotate-ca", "demo", "--yes", "--step"];
    testbed.admin_command(&[&rotate_ca[..], &["1"]].concat())?;
    testbed.admin_json(&["keys", "rotate", "--keys", &keys, "--kek"])?;
    testbed.stop_discovery()?;
    let postgres = testbed.postgres_dir();
    let rewrap =
        ["keys", "rewrap", "--keys", &keys, "--managed-postgres", path_text(&postgres)?, "--yes"];
    let stopped = testbed.admin_output(&rewrap)?;
    let text = String::from_utf8_lossy(&stopped.stderr).into_owned();
    ensure!(stopped.status.code() == Some(2) && text.contains("start the service first"), "{text}");
    testbed.start_discovery()?;
    let unasked = testbed.admin_output(&rewrap[..6])?;
    ensure!(unasked.status.code() == Some(2), "{unasked:?}");
    let done = testbed.admin_json(&rewrap)?;
    ensure!(done["kek"] == 2 && done["keys"] == 4 && done["rewrapped"] == 4, "{done}");
    let again = testbed.admin_json(&rewrap)?;
    ensure!(again["keys"] == 4 && again["rewrapped"] == 0, "{again}");

    testbed.stop_discovery()?;
    let old = testbed.keys_dir().join("kek-1.key");
    fs_err::rename(&old, testbed.path("kek-1.key"))?;
    testbed.start_discovery()?;
    // Issuing a certificate needs the key of the issuing CA: first of the old CA, then of the new
    // one.
    for (folder, step) in [("credentials", "2"), ("credentials-of-the-new-ca", "3")] {
        let folder = testbed.path(folder);
        testbed.admin_command(&["cluster", "credentials", "demo", "--out", path_text(&folder)?])?;
        testbed.admin_command(&[&rotate_ca[..], &[step]].concat())?;
    }
    // Put the oldest key-encryption key back, and take the newest one away. Then no CA key can be
    // decrypted.
    fs_err::rename(testbed.path("kek-1.key"), &old)?;
    fs_err::rename(testbed.keys_dir().join("kek-2.key"), testbed.path("kek-2.key"))?;
    let refused = testbed.admin_output(&rewrap)?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(1) && text.contains("another key directory"), "{text}");
    Ok(())
}
