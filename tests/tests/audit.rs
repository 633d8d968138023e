//! `muster-discovery audit` must detect changes of the history in the service's own database.

use anyhow::{Context, Result, ensure};
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed};

/// Runs `audit verify` with a checkpoint. Returns its exit code and output.
fn verify(testbed: &Testbed) -> Result<(i32, String)> {
    let file = testbed.path("checkpoint");
    let output = testbed.admin_output(&["audit", "verify", "--checkpoint", path_text(&file)?])?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.code().context("an exit code")?, String::from_utf8_lossy(&text).into_owned()))
}

/// Changes events behind the service's back, as the owner of the database can.
fn tamper(testbed: &Testbed, sql: &str) -> Result<()> {
    let off = "ALTER TABLE events DISABLE TRIGGER USER";
    let on = "ALTER TABLE events ENABLE TRIGGER USER";
    testbed.psql(&format!("BEGIN; {off}; {sql}; {on}; COMMIT")).map(drop)
}

#[test]
fn a_changed_a_rewritten_and_a_shortened_history_are_noticed() -> Result<()> {
    let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
    testbed.create_cluster_with_token("demo", 3)?;
    let first = verify(&testbed)?;
    ensure!(
        first.0 == 0 && first.1.contains("demo") && first.1.contains("the service"),
        "{first:?}"
    );
    let shown = testbed.admin_command(&["audit", "tail", "--cluster", "demo"])?;
    ensure!(shown.contains("granted"), "{shown}");
    let export = testbed.path("events.jsonl");
    testbed.admin_command(&["audit", "export", "--out", path_text(&export)?])?;
    let lines = fs_err::read_to_string(&export)?;
    let events: Vec<serde_json::Value> =
        lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(events.iter().any(|event| event["cluster"] == "demo" && event["kind"] == "granted"));
    ensure!(!lines.contains("mst_") && !lines.contains("PRIVATE KEY"), "a secret: {lines}");

    let of_demo = "stream = (SELECT id FROM clusters WHERE name = 'demo')";
    let granted = format!("{of_demo} AND kind = 'granted'");
    tamper(&testbed, &format!("UPDATE events SET body = body || ' ' WHERE {granted}"))?;
    let changed = verify(&testbed)?;
    ensure!(changed.0 == 1 && changed.1.contains("somebody changed it"), "{changed:?}");

    // A recomputed hash hides the change from the hash chain, but not from the checkpoint.
    let anew = format!("UPDATE events e SET hash = event_hash(e) WHERE {granted}");
    tamper(&testbed, &anew)?;
    let alone = testbed.admin_output(&["audit", "verify", "--cluster", "demo"])?;
    ensure!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    let rewritten = verify(&testbed)?;
    ensure!(rewritten.0 == 1 && rewritten.1.contains("history was rewritten"), "{rewritten:?}");

    tamper(&testbed, &format!("DELETE FROM events WHERE {granted}"))?;
    let shortened = verify(&testbed)?;
    ensure!(shortened.0 == 1 && shortened.1.contains("history went backwards"), "{shortened:?}");
    Ok(())
}
