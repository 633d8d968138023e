//! Invalid input of every kind must be refused with a clear message and the right exit code, and
//! must use nothing up.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use discovery_types::admin::{Admin, AdminChain, AdminChange, AdminOperation};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::{PublicKey, SigningKey};
use discovery_types::role::Role;
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::testbed::TestbedOptions;
use muster_tests::harness::{Network, Testbed, poll_slowly};

/// Time limit of each wait; a test that passes waits much less.
const LIMIT: Duration = Duration::from_secs(60);

fn testbed(hosts: u8) -> Result<Testbed> {
    Testbed::start(Network::loopback(hosts), TestbedOptions::default())
}

fn write_file(testbed: &Testbed, name: &str, text: &str) -> Result<PathBuf> {
    let file = testbed.path(name);
    fs_err::write(&file, text)?;
    Ok(file)
}

/// Runs an agent with `bundle` until it ends. Returns the exit code and all output.
fn refused(testbed: &Testbed, bundle: &str, name: &str) -> Result<(i32, String)> {
    let file = write_file(testbed, name, bundle)?;
    let mut agent = testbed.agent(0, &file);
    agent.data_dir = testbed.path(&format!("{name}-data"));
    agent.start()?;
    let code = agent
        .exit_code(LIMIT)
        .with_context(|| format!("{name}: the agent did not give up: {}", agent.output()))?;
    Ok((code, agent.output()))
}

/// Returns the number of seats that the service shows for a cluster.
fn seats(testbed: &Testbed, cluster: &str) -> Result<usize> {
    let shown = testbed.admin_json(&["cluster", "show", cluster])?;
    Ok(shown["seats"].as_array().context("seats are shown")?.len())
}

#[test]
fn junk_and_mangled_bundles_are_refused_offline() -> Result<()> {
    let testbed = testbed(1)?;
    testbed.create_cluster("demo", 3, &[])?;
    let good = fs_err::read_to_string(testbed.create_token("demo")?)?;
    let good = good.trim();
    let mut mangled = good.to_owned();
    let last = mangled.pop().context("a bundle has characters")?;
    mangled.push(if last == 'a' { 'b' } else { 'a' });
    let cases = [
        ("junk", "x".repeat(4096)),
        ("binary", "\u{1}\u{2}\u{fffd}".repeat(1000)),
        ("empty", String::new()),
        ("mangled", mangled),
        (
            "no-pins",
            good.split(' ').filter(|w| !w.starts_with("pins=")).collect::<Vec<_>>().join(" "),
        ),
    ];
    for (name, bundle) in cases {
        let (code, printed) = refused(&testbed, &bundle, name)?;
        ensure!(code == 2, "{name}: exit code {code}, printed {printed}");
        ensure!(printed.contains("bundle"), "{name}: says nothing of the bundle: {printed}");
    }
    ensure!(seats(&testbed, "demo")? == 0, "a refused bundle took a seat");
    Ok(())
}

#[test]
fn a_wrong_pin_stops_before_anything_is_sent() -> Result<()> {
    let testbed = testbed(1)?;
    testbed.create_cluster("demo", 3, &[])?;
    let good = fs_err::read_to_string(testbed.create_token("demo")?)?;
    let wrong = replace_field(&good, "pins=", |pin| {
        let flipped = if pin.starts_with('a') { "b" } else { "a" };
        format!("{flipped}{}", &pin[1..])
    });
    let (code, printed) = refused(&testbed, &wrong, "wrong-pin")?;
    // The exit code is 1, not 3: the network may have led the agent to a wrong service, so a later
    // attempt may succeed.
    ensure!(code == 1, "exit code {code}, printed {printed}");
    ensure!(printed.contains("pin"), "says nothing of the pin: {printed}");
    ensure!(seats(&testbed, "demo")? == 0, "a wrong pin took a seat");
    Ok(())
}

#[test]
fn expired_revoked_and_foreign_tokens_are_refused() -> Result<()> {
    let testbed = testbed(1)?;
    testbed.create_cluster("demo", 3, &[])?;
    testbed.create_cluster("other", 3, &[])?;

    let short = testbed.path("short.bundle");
    let out = short.to_str().context("a path")?;
    let create = ["token", "create", "--cluster", "demo", "--out", out, "--ttl"];
    // Try longer lifetimes: on a slow machine the shortest tokens expire before the service has
    // stored them.
    let made = [1, 4, 16].into_iter().find(|seconds| {
        testbed.admin_command(&[&create[..], &[&format!("{seconds}s")]].concat()).is_ok()
    });
    made.context("no token is taken")?;
    poll_slowly("the token to expire", LIMIT, || {
        let tokens = testbed.admin_json(&["token", "list", "--cluster", "demo"]).ok()?;
        (tokens["grants"][0]["state"] == "expired").then_some(())
    })?;
    let (code, printed) = refused(&testbed, &fs_err::read_to_string(&short)?, "expired")?;
    ensure!(code == 3 && printed.contains("expired"), "exit code {code}, printed {printed}");

    let bundle = fs_err::read_to_string(testbed.create_token("demo")?)?;
    let tokens = testbed.admin_json(&["token", "list", "--cluster", "demo"])?;
    let id =
        bundle.rsplit("mst_boot_").next().and_then(|t| t.split('_').next()).context("an id")?;
    ensure!(tokens.to_string().contains(id), "the list does not show {id}: {tokens}");
    let all = testbed.admin_json(&["token", "list"])?;
    ensure!(all.to_string().contains(id), "the list of all does not show {id}: {all}");
    testbed.admin_command(&["token", "revoke", id, "--yes"])?;
    let (code, printed) = refused(&testbed, &bundle, "revoked")?;
    ensure!(code == 3 && printed.contains("revoked"), "exit code {code}, printed {printed}");

    // Put the token of one cluster into the bundle of another one. The token's grant names its own
    // cluster, so the mixture is refused.
    let demo = fs_err::read_to_string(testbed.create_token("demo")?)?;
    let other = fs_err::read_to_string(testbed.create_token("other")?)?;
    let token = demo.trim().rsplit(' ').next().context("a token")?.to_owned();
    let foreign = format!("{} {token}", other.trim().rsplit_once(' ').context("a bundle")?.0);
    let (code, printed) = refused(&testbed, &foreign, "foreign")?;
    ensure!(code == 3, "exit code {code}, printed {printed}");
    ensure!(seats(&testbed, "demo")? == 0 && seats(&testbed, "other")? == 0, "a seat was taken");
    Ok(())
}

#[test]
fn loopback_is_refused_unless_the_statement_allows_it() -> Result<()> {
    let testbed = testbed(1)?;
    testbed.admin_command(&["cluster", "create", "strict", "--size", "1"])?;
    let bundle = fs_err::read_to_string(testbed.create_token("strict")?)?;
    let (code, printed) = refused(&testbed, &bundle, "loopback")?;
    ensure!(code == 3, "exit code {code}, printed {printed}");
    ensure!(printed.contains("loopback"), "says nothing of loopback: {printed}");
    ensure!(seats(&testbed, "strict")? == 0, "it took a seat");
    Ok(())
}

#[test]
fn two_hosts_with_one_name_do_not_form_a_cluster() -> Result<()> {
    let testbed = testbed(3)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let named = |name: &str| AgentOptions {
        args: vec!["--name".to_owned(), name.to_owned()],
        ..AgentOptions::default()
    };
    let mut agents = [(0, "same"), (1, "same"), (2, "third")]
        .map(|(i, n)| testbed.agent_with(i, &bundle, named(n)));
    for agent in &mut agents {
        agent.start()?;
    }
    poll_slowly("somebody to name the duplicate", LIMIT, || {
        let explained = testbed.admin_command(&["cluster", "explain", "demo"]).unwrap_or_default();
        let all: String = agents.iter().map(|a| a.output()).chain([explained]).collect();
        all.contains("the name same").then_some(all)
    })?;
    let shown = testbed.admin_json(&["cluster", "show", "demo"])?;
    ensure!(shown["state"] != "committed" && shown["state"] != "formed", "it formed: {shown}");
    Ok(())
}

#[test]
fn two_hosts_with_one_peer_url_do_not_form_a_cluster() -> Result<()> {
    let testbed = testbed(3)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let url = format!("https://{}:2380", testbed.network.hosts[0].address);
    let own = testbed.network.hosts[1].address.to_string();
    let args = ["--peer-url", &url, "--listen-address", &own].map(str::to_owned).to_vec();
    let same = AgentOptions { args, ..AgentOptions::default() };
    let mut agents = [
        testbed.agent(0, &bundle),
        testbed.agent_with(1, &bundle, same),
        testbed.agent(2, &bundle),
    ];
    agents[0].start()?;
    agents[0].wait_for_output("waiting", LIMIT)?;
    agents[1].start()?;
    agents[2].start()?;
    poll_slowly("the second agent to name the URL", LIMIT, || {
        agents[1].output().contains(&url).then_some(())
    })?;
    let shown = testbed.admin_json(&["cluster", "show", "demo"])?;
    ensure!(shown["state"] != "committed" && shown["state"] != "formed", "it formed: {shown}");
    Ok(())
}

#[test]
fn a_record_changed_in_the_database_is_signed_by_nobody() -> Result<()> {
    let testbed = testbed(3)?;
    let bundle = testbed.create_cluster_with_token("demo", 3)?;
    let mut agents = testbed.start_agents(0..2, &bundle)?;
    poll_slowly("two seats to be taken", LIMIT, || {
        (seats(&testbed, "demo").ok()? == 2).then_some(())
    })?;
    // Change a host's record in the database, and keep its signature. No agent may sign a list with
    // it.
    let changed = testbed.psql(
        "UPDATE agents SET record = split_part(record, '.', 1) || '.' || \
         replace(split_part(record, '.', 2), 'a', 'b') || '.' || split_part(record, '.', 3) \
         WHERE seat = 1",
    )?;
    ensure!(changed.contains("UPDATE 1"), "the row was not changed: {changed}");
    let mut third = testbed.agent(2, &bundle);
    third.start()?;
    agents.push(third);
    let printed = poll_slowly("a complaint about the changed record", LIMIT, || {
        let discovery = testbed.discovery.as_ref()?.output();
        let all: String = agents.iter().map(muster_tests::harness::AgentProcess::output).collect();
        let all = all + &discovery;
        (all.contains("signature") || all.contains("record of")).then_some(all)
    })?;
    let shown = testbed.admin_json(&["cluster", "show", "demo"]);
    let state = shown.map(|s| s["state"].as_str().unwrap_or_default().to_owned());
    ensure!(
        !state.is_ok_and(|s| s == "committed" || s == "formed"),
        "it formed all the same: {printed}"
    );
    Ok(())
}

#[test]
fn an_admin_planted_in_the_database_can_do_nothing() -> Result<()> {
    let testbed = testbed(1)?;
    testbed.create_cluster("demo", 3, &[])?;
    let key = testbed.path("mallory.pem");
    testbed.admin_command(&["key", "new", "--out", key.to_str().context("a path")?])?;
    let owner: PublicKey = public_key(&testbed.admin_key())?;
    let mallory = SigningKey::load(&key)?;
    let planted = AdminChange {
        version: 1,
        seq: 1,
        previous: AdminChain::root_hash(&owner),
        change: AdminOperation::Add(Admin {
            key: *mallory.public(),
            name: "mallory".parse()?,
            roles: vec![Role::Owner],
        }),
    };
    let jws = Jws::sign(JwsType::Admin, &mallory, &planted);
    testbed.psql(&format!(
        "INSERT INTO admin_elements (sequence, hash, jws, stored_us) \
         VALUES (1, sha256('{0}'), '{0}', 1)",
        jws.as_str()
    ))?;
    let output = testbed
        .network
        .hub
        .command(muster_tests::harness::programs::program_path("muster-discovery")?)
        .args(["cluster", "list"])
        .env("MUSTER_ADMIN_HOME", testbed.admin_home())
        .env("MUSTER_ADMIN_KEY", &key)
        .output()?;
    ensure!(!output.status.success(), "a planted admin was let in");
    // Only the planted admin is refused: the owner can still log in. Discovery's log reports the
    // planted row.
    testbed.admin_command(&["cluster", "list"])?;
    let printed = testbed.discovery.as_ref().context("discovery runs")?.output();
    ensure!(
        printed.contains("admin_elements"),
        "discovery says nothing of the row that it ignores: {printed}"
    );
    Ok(())
}

fn public_key(private: &Path) -> Result<PublicKey> {
    Ok(fs_err::read_to_string(private.with_extension("pub"))?.trim().parse()?)
}

fn replace_field(bundle: &str, field: &str, change: impl Fn(&str) -> String) -> String {
    bundle
        .trim()
        .split(' ')
        .map(|word| match word.strip_prefix(field) {
            Some(value) => format!("{field}{}", change(value)),
            None => word.to_owned(),
        })
        .collect::<Vec<_>>()
        .join(" ")
}
