//! `--check` on set-ups that work, and on set-ups in which one part is broken. A check names the
//! broken part, and changes nothing.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed};
use serde_json::Value;

/// Outcome of a check: the exit code, the results of each part, and the whole output. A result is a
/// pair of its name, such as `fail`, and its text.
struct Checked {
    code: i32,
    parts: BTreeMap<String, Vec<(String, String)>>,
    output: String,
}

impl Checked {
    /// Runs a program with `--check --json`.
    fn run(program: &str, args: &[&str]) -> Result<Self> {
        let output = Command::new(program_path(program)?)
            .args(args)
            .args(["--check", "--json"])
            .env_remove("MUSTER_DATABASE_URL")
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let said = format!("{text}{}", String::from_utf8_lossy(&output.stderr));
        let code = output.status.code().context("no signal")?;
        let mut parts: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
        if code != 2 {
            let document: Value = serde_json::from_str(&text).with_context(|| said.clone())?;
            for check in document["checks"].as_array().context("checks")? {
                let name = check["check"].as_str().context("a name")?.to_owned();
                let result = check["result"].as_str().context("a result")?.to_owned();
                let next = check["next"].as_str().unwrap_or_default();
                let text = format!("{} {next}", check["text"].as_str().context("a text")?);
                parts.entry(name).or_default().push((result, text));
            }
        }
        Ok(Self { code, parts, output: said })
    }

    /// Fails unless the part has this result, with a text that contains `says`.
    fn expect(&self, part: &str, result: &str, says: &str) -> Result<()> {
        let found = self.parts.get(part).into_iter().flatten();
        let mut fitting = found.filter(|(is, text)| is == result && text.contains(says));
        ensure!(fitting.next().is_some(), "no {result} of {part} with {says:?}: {}", self.output);
        Ok(())
    }

    /// Fails unless `part` is the only broken part, for a reason that contains `says`.
    fn expect_broken(&self, part: &str, says: &str) -> Result<()> {
        ensure!(self.code == 1, "exit code {}: {}", self.code, self.output);
        self.expect(part, "fail", says)?;
        let failed = self
            .parts
            .iter()
            .filter(|(_, results)| results.iter().any(|(result, _)| result == "fail"));
        let failed: Vec<&String> = failed.map(|(name, _)| name).collect();
        ensure!(failed == [part], "{failed:?} are broken: {}", self.output);
        Ok(())
    }
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    Ok(fs_err::set_permissions(path, std::fs::Permissions::from_mode(mode))?)
}

/// Returns the paths below a folder, with the times of their last changes.
fn snapshot(folder: &Path) -> Result<BTreeMap<String, std::time::SystemTime>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(&folder)? {
            let path = entry?.path();
            found.insert(path_text(&path)?.to_owned(), fs_err::metadata(&path)?.modified()?);
            if path.is_dir() {
                folders.push(path);
            }
        }
    }
    Ok(found)
}

/// Arguments with which `--check` examines a service.
struct ServiceSetup {
    testbed: Testbed,
    listen: String,
}

impl ServiceSetup {
    fn new() -> Result<Self> {
        let testbed = Testbed::prepare(Network::loopback(1), TestbedOptions::default())?;
        let listen = format!("{}:8443", testbed.network.hub.address);
        Ok(Self { testbed, listen })
    }

    fn check_with(&self, listen: &str, database: [&str; 2], extra: &[&str]) -> Result<Checked> {
        let (keys, ledger) = (self.testbed.keys_dir(), self.testbed.path("ledger"));
        let mut args = vec!["serve", "--keys", path_text(&keys)?, "--ledger", path_text(&ledger)?];
        args.extend(["--listen", listen]);
        args.extend(database);
        args.extend(extra);
        Checked::run("muster-discovery", &args)
    }

    fn check(&self) -> Result<Checked> {
        let postgres = self.testbed.postgres_dir();
        self.check_with(&self.listen, ["--managed-postgres", path_text(&postgres)?], &[])
    }
}

#[test]
fn the_service_finds_nothing_wrong_with_a_new_set_up_and_leaves_no_trace() -> Result<()> {
    let setup = ServiceSetup::new()?;
    let root = setup.testbed.path(".");
    let before = snapshot(&root)?;
    let checked = setup.check()?;
    ensure!(checked.code == 0, "{}", checked.output);
    for (part, says) in [
        ("keys", "signing key 1"),
        ("tls", "pin"),
        ("ledger", "no ledger yet"),
        ("listen", "is free"),
        ("database", "can be started"),
    ] {
        checked.expect(part, "ok", says)?;
    }
    ensure!(snapshot(&root)? == before, "a check changed files");
    let lines = setup.testbed.admin_output(&[
        "serve",
        "--keys",
        path_text(&setup.testbed.path("none"))?,
        "--ledger",
        path_text(&setup.testbed.path("ledger"))?,
        "--managed-postgres",
        path_text(&setup.testbed.postgres_dir())?,
        "--listen",
        &setup.listen,
        "--check",
    ])?;
    let text = String::from_utf8_lossy(&lines.stdout).into_owned();
    ensure!(lines.status.code() == Some(1), "{text}");
    ensure!(text.starts_with("FAIL keys: ") && text.contains("\nok listen: "), "{text}");
    Ok(())
}

#[test]
fn the_service_names_a_broken_key_directory_and_certificate() -> Result<()> {
    let setup = ServiceSetup::new()?;
    let keys = setup.testbed.keys_dir();
    let kek = keys.join("kek-1.key");
    set_mode(&kek, 0o644)?;
    setup.check()?.expect_broken("keys", "chmod 600")?;
    set_mode(&kek, 0o600)?;
    let good = fs_err::read(&kek)?;
    fs_err::write(&kek, "junk")?;
    setup.check()?.expect_broken("keys", "is damaged")?;
    fs_err::write(&kek, good)?;

    let certificate = keys.join("tls.crt");
    let good = fs_err::read(&certificate)?;
    let key = rcgen::KeyPair::from_pem(&fs_err::read_to_string(keys.join("tls.key"))?)?;
    let other = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::new(Vec::new())?;
    fs_err::write(&certificate, params.self_signed(&other)?.pem())?;
    setup.check()?.expect_broken("tls", "TLS")?;
    params.not_after = rcgen::date_time_ymd(2024, 1, 1);
    fs_err::write(&certificate, params.self_signed(&key)?.pem())?;
    setup.check()?.expect_broken("tls", "ended at 2024-01-01")?;
    fs_err::write(&certificate, good)?;
    let checked = setup.check()?;
    ensure!(checked.code == 0, "{}", checked.output);
    Ok(())
}

#[test]
fn the_check_names_what_is_broken_the_ledger_the_address_or_the_identity_keys() -> Result<()> {
    let setup = ServiceSetup::new()?;
    let ledger = setup.testbed.path("ledger");
    fs_err::create_dir(&ledger)?;
    set_mode(&ledger, 0o777)?;
    setup.check()?.expect_broken("ledger", "chmod go-w")?;
    set_mode(&ledger, 0o700)?;
    fs_err::write(ledger.join("ledger.jsonl"), "junk\njunk\n")?;
    setup.check()?.expect_broken("ledger", "is damaged at byte 0")?;
    fs_err::remove_dir_all(&ledger)?;

    let taken = TcpListener::bind(&setup.listen)?;
    setup.check()?.expect_broken("listen", &setup.listen)?;
    drop(taken);
    let postgres = setup.testbed.postgres_dir();
    let managed = ["--managed-postgres", path_text(&postgres)?];
    setup.check_with("192.0.2.1:8443", managed, &[])?.expect_broken("listen", "192.0.2.1")?;
    let extra = ["--identity-keys", path_text(&setup.testbed.path("none"))?].map(str::to_owned);
    let extra = [extra[0].as_str(), extra[1].as_str()];
    setup.check_with(&setup.listen, managed, &extra)?.expect_broken("identity-keys", "none")?;
    let usage = setup.check_with(&setup.listen, managed, &["--poll", "10m"])?;
    ensure!(usage.code == 2 && usage.output.contains("--poll"), "{}", usage.output);
    Ok(())
}

#[test]
fn the_service_names_a_broken_console() -> Result<()> {
    let setup = ServiceSetup::new()?;
    let postgres = setup.testbed.postgres_dir();
    let database = ["--managed-postgres", path_text(&postgres)?];
    let listen = format!("{}:8444", setup.testbed.network.hub.address);
    let with = |extra: &[&str]| {
        let options = [&["--console-listen", listen.as_str()], extra].concat();
        setup.check_with(&setup.listen, database, &options)
    };
    let own = with(&[])?;
    ensure!(own.code == 0, "{}", own.output);
    own.expect("console", "warn", "--console-cert")?;
    own.expect("listen", "ok", &listen)?;

    let key = rcgen::KeyPair::generate()?;
    let certificate = rcgen::CertificateParams::new(vec!["console.example".into()])?;
    let (cert_file, key_file) =
        (setup.testbed.path("console.crt"), setup.testbed.path("console.key"));
    fs_err::write(&cert_file, certificate.self_signed(&key)?.pem())?;
    fs_err::write(&key_file, key.serialize_pem())?;
    set_mode(&key_file, 0o600)?;
    let files = ["--console-cert", path_text(&cert_file)?, "--console-key", path_text(&key_file)?];
    let named = with(&files)?;
    ensure!(named.code == 0, "{}", named.output);
    named.expect("console", "ok", &format!("https://{listen}"))?;
    set_mode(&key_file, 0o640)?;
    with(&files)?.expect_broken("console", "chmod 600")?;
    fs_err::write(&key_file, rcgen::KeyPair::generate()?.serialize_pem())?;
    set_mode(&key_file, 0o600)?;
    with(&files)?.expect_broken("console", "--console-cert and --console-key")?;
    let taken = TcpListener::bind(&listen)?;
    with(&[])?.expect_broken("listen", &listen)?;
    drop(taken);
    Ok(())
}

#[test]
fn the_service_names_a_broken_database() -> Result<()> {
    let mut setup = ServiceSetup::new()?;
    let check =
        |setup: &ServiceSetup, database: [&str; 2]| setup.check_with(&setup.listen, database, &[]);
    let none = setup.testbed.path("none");
    check(&setup, ["--database-url-file", path_text(&none)?])?.expect_broken("database", "none")?;
    let closed = ["--database-url", "postgres://muster@127.0.0.1:1/muster"];
    check(&setup, closed)?.expect_broken("database", "can't use the database")?;
    let foreign = setup.testbed.path("foreign");
    fs_err::create_dir(&foreign)?;
    fs_err::write(foreign.join("letter"), "x")?;
    let foreign = ["--managed-postgres", path_text(&foreign)?];
    check(&setup, foreign)?.expect_broken("database", "isn't empty")?;

    // Start the service. `--check` for another service finds the address in use. `--check` with the
    // running service's own ledger only warns.
    setup.testbed.start_discovery()?;
    let url = setup.testbed.database_url()?;
    let database = ["--database-url", url.as_str()];
    let running = check(&setup, database)?;
    ensure!(running.code == 1, "another service has the address: {}", running.output);
    running.expect("database", "ok", "up to date")?;
    let ledger = setup.testbed.path("discovery-ledger");

    let other = setup.testbed.path("other-keys");
    let public = fs_err::read_to_string(setup.testbed.admin_key().with_extension("pub"))?;
    let other = path_text(&other)?;
    let init = ["init", "--owner", public.trim(), "--url", "https://127.0.0.1:1", "--dir", other];
    setup.testbed.admin_command(&init)?;
    let service = |keys: &str, ledger: &Path| -> Result<Checked> {
        let args = ["serve", "--keys", keys, "--ledger", path_text(ledger)?];
        let listen = ["--listen", &setup.listen];
        Checked::run("muster-discovery", &[&args[..], &listen, &database].concat())
    };
    let keys = setup.testbed.keys_dir();
    let keys = path_text(&keys)?;
    let checked = service(keys, &ledger)?;
    ensure!(checked.code == 0, "{}", checked.output);
    checked.expect("ledger", "warn", "is in use")?;
    checked.expect("listen", "warn", &setup.listen)?;
    service(other, &ledger)?.expect_broken("database", "belongs to the service with the pin")?;

    let newest = "SELECT max(version) FROM _sqlx_migrations";
    setup.testbed.psql(&format!("DELETE FROM _sqlx_migrations WHERE version = ({newest})"))?;
    service(keys, &ledger)?.expect("database", "ok", "applies 1 migrations")?;
    setup.testbed.psql(&format!(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (({newest}) + 1000, 'later', true, '\\x00', 0)"
    ))?;
    service(keys, &ledger)?.expect_broken("database", "schema is newer")?;
    Ok(())
}

/// Arguments with which `--check` examines an agent that was never started.
struct AgentSetup {
    testbed: Testbed,
    address: String,
}

impl AgentSetup {
    fn new() -> Result<Self> {
        let testbed = Testbed::start(Network::loopback(1), TestbedOptions::default())?;
        testbed.create_cluster_with_token("demo", 3)?;
        let address = testbed.network.hosts[0].address.to_string();
        Ok(Self { testbed, address })
    }

    fn check_with(&self, bundle: &Path, address: &str, extra: &[&str]) -> Result<Checked> {
        let data = self.testbed.path("host");
        let mut args = vec!["run", "--data-dir", path_text(&data)?];
        args.extend(["--bundle-file", path_text(bundle)?, "--advertise-address", address]);
        args.extend(extra);
        Checked::run("muster-agent", &args)
    }

    fn check(&self, extra: &[&str]) -> Result<Checked> {
        self.check_with(&self.testbed.path("demo.bundle"), &self.address, extra)
    }
}

#[test]
fn the_agent_finds_nothing_wrong_with_a_new_host_and_leaves_no_trace() -> Result<()> {
    let setup = AgentSetup::new()?;
    let checked = setup.check(&["--metrics-listen", &format!("{}:2382", setup.address)])?;
    ensure!(checked.code == 0, "{}", checked.output);
    for (part, says) in [
        ("node", "muster-node"),
        ("data-dir", "doesn't exist yet"),
        ("state", "begins as a new one"),
        ("bundle", "is for the cluster"),
        ("addresses", &setup.address),
        ("peer-port", "2380 is free"),
        ("client-port", "2379 is free"),
        ("metrics-listen", "2382 is free"),
        ("discovery", "answers"),
        ("clock", "ahead"),
    ] {
        checked.expect(part, "ok", says)?;
    }
    ensure!(!setup.testbed.path("host").exists(), "the data directory was made");
    let shown = setup.testbed.admin_json(&["cluster", "show", "demo"])?;
    ensure!(shown["seats"].as_array().is_some_and(Vec::is_empty), "a check took a seat: {shown}");
    let usage = setup.check(&["--peer-port", "0"])?;
    ensure!(usage.code == 2, "{}", usage.output);
    Ok(())
}

#[test]
fn the_agent_names_a_broken_bundle_node_address_or_port() -> Result<()> {
    let setup = AgentSetup::new()?;
    let junk = setup.testbed.path("junk.bundle");
    fs_err::write(&junk, "junk")?;
    for bundle in [&junk, &setup.testbed.path("none")] {
        setup.check_with(bundle, &setup.address, &[])?.expect_broken("bundle", "bundle")?;
    }
    let waits =
        setup.check_with(&setup.testbed.path("none"), &setup.address, &["--wait-for-ticket"]);
    waits?.expect("bundle", "warn", "waits")?;
    setup.check(&["--node-binary", "/bin/true"])?.expect_broken("node", "neither")?;
    let missing = setup.check(&["--node-binary", "/no/such/node"])?;
    ensure!(missing.code == 2, "{}", missing.output);

    for (part, port) in [("peer-port", 2380), ("client-port", 2379)] {
        let _taken = TcpListener::bind((setup.address.as_str(), port))?;
        setup.check(&[])?.expect_broken(part, "can't listen on")?;
    }
    let metrics = format!("{}:2382", setup.address);
    let _taken = TcpListener::bind(&metrics)?;
    let checked = setup.check(&["--metrics-listen", &metrics])?;
    checked.expect_broken("metrics-listen", "can't listen on")?;
    let foreign = setup.check(&["--listen-address", "192.0.2.9"])?;
    foreign.expect("peer-port", "fail", "192.0.2.9")?;
    let bundle = setup.testbed.path("demo.bundle");
    let translated = setup.check_with(&bundle, "192.0.2.9", &[])?;
    translated.expect("addresses", "warn", "doesn't have the address")?;
    let no_id = setup.check(&["--machine-id-file", path_text(&setup.testbed.path("none"))?])?;
    no_id.expect_broken("machine-id", "--machine-id-file")?;
    Ok(())
}

#[test]
fn the_agent_names_a_broken_state_and_a_silent_or_foreign_service() -> Result<()> {
    let mut setup = AgentSetup::new()?;
    let data = setup.testbed.path("host");
    fs_err::write(&data, "")?;
    setup.check(&[])?.expect_broken("data-dir", "host")?;
    fs_err::remove_file(&data)?;
    for folder in [data.clone(), data.join("agent"), data.join("node")] {
        fs_err::create_dir(&folder)?;
        set_mode(&folder, 0o700)?;
    }
    let journal = data.join("agent/journal.json");
    fs_err::write(&journal, "junk")?;
    set_mode(&journal, 0o600)?;
    setup.check(&[])?.expect_broken("state", "is damaged")?;
    fs_err::remove_file(&journal)?;
    fs_err::write(data.join("node/muster-tombstone.json"), "{}")?;
    setup.check(&[])?.expect_broken("state", "was removed from its cluster")?;
    fs_err::remove_dir_all(&data)?;

    let good = fs_err::read_to_string(setup.testbed.path("demo.bundle"))?;
    let (before, pin) = good.split_once("pins=").context("a bundle has pins")?;
    let flipped = if pin.starts_with('a') { "b" } else { "a" };
    let wrong = setup.testbed.path("wrong.bundle");
    fs_err::write(&wrong, format!("{before}pins={flipped}{}", &pin[1..]))?;
    setup.check_with(&wrong, &setup.address, &[])?.expect_broken("discovery", "pin")?;
    setup.testbed.stop_discovery()?;
    setup.check(&[])?.expect_broken("discovery", "refused")?;
    Ok(())
}
