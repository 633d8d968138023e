//! Stock etcd forms clusters through the discovery service, by its own discovery protocols: 3.4 and
//! 3.6 by v2, 3.6 and 3.7 by v3. No agent takes part.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::process::ChildProcess;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{Network, Testbed, poll_slowly, skip};
use muster_tests::stock_etcd;
use serde_json::Value;

/// Time limit for three members to form a cluster. After a failed request etcd waits for 2 s, then
/// longer.
const FORMATION_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for an etcd to end by itself.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Port of the service's listener for the protocol v3.
const V3_PORT: u16 = 8445;

/// An etcd release, and the protocol by which it meets its peers.
#[derive(Clone)]
struct EtcdRelease {
    etcd: PathBuf,
    protocol: &'static str,
}

fn work() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

fn release(etcd: Option<PathBuf>, protocol: &'static str) -> Option<EtcdRelease> {
    Some(EtcdRelease { etcd: etcd?, protocol })
}

fn network(hosts: u8) -> Option<Network> {
    match Network::namespaces(hosts) {
        Ok(network) => Some(network),
        Err(error) => {
            skip::report_skip(format_args!("no network namespaces here: {error:#}"));
            None
        }
    }
}

/// A discovery service, and hosts with stock etcd.
struct EtcdTestbed {
    testbed: Testbed,
    release: EtcdRelease,
}

/// An etcd on a host, with a data directory of its own.
struct StockMember {
    name: String,
    host: usize,
    /// Host whose peer URL the member advertises.
    advertised: usize,
    process: ChildProcess,
}

impl EtcdTestbed {
    fn start(release: EtcdRelease, network: Network) -> Result<Self> {
        let mut options = TestbedOptions::default();
        let address = format!("{}:{V3_PORT}", network.hub.address);
        options.serve_args.extend(["--etcd-listen".to_owned(), address]);
        Ok(Self { testbed: Testbed::start(network, options)?, release })
    }

    /// Makes a token. Returns its id.
    fn create_token(&self, name: &str, extra: &[&str]) -> Result<String> {
        let (out, cacert) = (self.variables(name), self.testbed.path(&format!("{name}.crt")));
        let args = [
            &["etcd-token", "create", name, "--size", "3", "--protocol", self.release.protocol][..],
            &["--out", path_text(&out)?, "--cacert", path_text(&cacert)?],
            extra,
        ];
        let made = self.testbed.admin_json(&args.concat())?;
        Ok(made["id"].as_str().context("an id")?.to_owned())
    }

    fn variables(&self, name: &str) -> PathBuf {
        self.testbed.path(&format!("{name}.env"))
    }

    fn show(&self, id: &str) -> Result<Value> {
        self.testbed.admin_json(&["etcd-token", "show", id])
    }

    fn wait_for_members(&self, id: &str, count: usize) -> Result<Value> {
        poll_slowly(&format!("{count} members to register"), FORMATION_LIMIT, || {
            let shown = self.show(id).ok()?;
            (listed(&shown) == count).then_some(shown)
        })
    }

    fn wait_for_state(&self, id: &str, state: &str) -> Result<Value> {
        poll_slowly(&format!("the list to be {state}"), FORMATION_LIMIT, || {
            self.show(id).ok().filter(|shown| shown["state"] == state)
        })
    }

    /// Starts an etcd on a host.
    fn member(&self, token: &str, host: usize) -> Result<StockMember> {
        self.member_as(token, &format!("n{host}"), host, host)
    }

    /// Starts an etcd with this name on a host, which advertises the peer URL of the host
    /// `advertised`.
    fn member_as(
        &self,
        token: &str,
        name: &str,
        host: usize,
        advertised: usize,
    ) -> Result<StockMember> {
        let process = self.spawn(token, name, host, advertised)?;
        Ok(StockMember { name: name.to_owned(), host, advertised, process })
    }

    fn spawn(
        &self,
        token: &str,
        name: &str,
        host: usize,
        advertised: usize,
    ) -> Result<ChildProcess> {
        let hosts = &self.testbed.network.hosts;
        let (address, shown) = (hosts[host].address, hosts[advertised].address);
        let data = self.testbed.path(&format!("{token}-{name}-{host}"));
        let mut command = hosts[host].command(&self.release.etcd);
        command
            .args(["--name", name, "--data-dir", path_text(&data)?])
            .args(["--listen-peer-urls", &format!("http://{address}:2380")])
            .args(["--initial-advertise-peer-urls", &format!("http://{shown}:2380")])
            .args(["--listen-client-urls", &format!("http://{address}:2379")])
            .args(["--advertise-client-urls", &format!("http://{shown}:2379")]);
        let variables = fs_err::read_to_string(self.variables(token))?;
        command.envs(variables.lines().filter_map(|line| line.split_once('=')));
        let log = self.testbed.path(&format!("{token}-{name}-{host}.log"));
        ChildProcess::spawn(name, command, &log)
    }

    /// Starts the etcd again, with the same data directory, as a supervisor does.
    fn restart(&self, token: &str, member: &mut StockMember) -> Result<()> {
        member.process = self.spawn(token, &member.name, member.host, member.advertised)?;
        Ok(())
    }

    /// Returns the names of the cluster's members, as an etcd on `host` lists them.
    fn etcd_members(&self, host: usize) -> Result<Vec<String>> {
        let host = &self.testbed.network.hosts[host];
        let mut command: Command = host.command("etcdctl");
        let endpoint = format!("--endpoints=http://{}:2379", host.address);
        command.env("ETCDCTL_API", "3").args([&endpoint, "member", "list", "-w", "json"]);
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let list: Value = serde_json::from_slice(&output.stdout)?;
        let name = |member: &Value| member["name"].as_str().unwrap_or_default().to_owned();
        let mut names: Vec<_> =
            list["members"].as_array().context("members")?.iter().map(name).collect();
        names.sort();
        Ok(names)
    }

    /// Waits until the etcd on `host` is in a cluster of exactly these members, which takes writes.
    fn wait_for_cluster(&self, host: usize, names: &[&str]) -> Result<()> {
        poll_slowly(&format!("a cluster of {names:?}"), FORMATION_LIMIT, || {
            (self.etcd_members(host).ok()? == names && self.writes(host)).then_some(())
        })
    }

    fn writes(&self, host: usize) -> bool {
        let host = &self.testbed.network.hosts[host];
        let mut command = host.command("etcdctl");
        let endpoint = format!("--endpoints=http://{}:2379", host.address);
        let put = command.env("ETCDCTL_API", "3").args([&endpoint, "put", "key", "value"]).output();
        put.is_ok_and(|output| output.status.success())
    }
}

fn listed(shown: &Value) -> usize {
    let members = shown["members"].as_array();
    members.map_or(0, |all| all.iter().filter(|member| member["lapsed"] == false).count())
}

/// Expects an etcd to end with exit code 1, and with at least one of these texts in its log.
fn expect_end(member: &mut StockMember, texts: &[&str]) -> Result<()> {
    let code = member.process.exit_code(END_LIMIT)?;
    let log = member.process.output();
    ensure!(code == 1, "exit code {code}: {log}");
    ensure!(texts.iter().any(|text| log.contains(text)), "none of {texts:?} in: {log}");
    Ok(())
}

/// Three members form a cluster. A fourth member and members with a revoked or unknown token must
/// be refused with the reason. Restarts must need no discovery.
fn check_forming(release: Option<EtcdRelease>) -> Result<()> {
    let (Some(release), Some(network)) = (release, network(4)) else { return Ok(()) };
    let mut bed = EtcdTestbed::start(release, network)?;
    let id = bed.create_token("demo", &["--cidr", "10.77.0.0/24"])?;
    let mut members = (0..3).map(|host| bed.member("demo", host)).collect::<Result<Vec<_>>>()?;
    bed.wait_for_cluster(0, &["n0", "n1", "n2"])?;
    let shown = bed.wait_for_state(&id, "complete")?;
    // The service shows the name and the source address of each member.
    let first = &bed.testbed.network.hosts[0];
    ensure!(
        shown["members"].as_array().is_some_and(|all| {
            all.iter().any(|member| {
                member["address"] == first.address.to_string() && member["name"] == "n0"
            })
        }),
        "{shown}"
    );
    let mut fourth = bed.member("demo", 3)?;
    expect_end(&mut fourth, &["discovery: cluster is full"])?;

    let other = bed.create_token("other", &["--cidr", "192.168.7.0/24"])?;
    bed.testbed.admin_command(&["etcd-token", "revoke", &other, "--yes"])?;
    let mut stale = bed.member("other", 3)?;
    expect_end(&mut stale, &["this discovery token is unknown, expired, revoked"])?;

    // A formed cluster needs no discovery, not even when all members restart.
    bed.testbed.stop_discovery()?;
    for member in &mut members {
        member.process.kill();
    }
    for member in &mut members {
        bed.restart("demo", member)?;
    }
    bed.wait_for_cluster(2, &["n0", "n1", "n2"])?;
    bed.testbed.start_discovery()?;
    let listed = bed.testbed.admin_command(&["etcd-token", "list"])?;
    ensure!(listed.contains("complete") && listed.contains("revoked"), "{listed}");
    let secret = fs_err::read_to_string(bed.variables("demo"))?;
    let secret = secret.split("mst_etcd_").nth(1).and_then(|rest| rest.split('_').nth(1));
    let log = fs_err::read_to_string(bed.testbed.path("discovery.log"))?;
    ensure!(!log.contains(secret.context("a secret")?), "the secret is in the service's log");
    Ok(())
}

#[test]
fn etcd_3_4_forms_a_cluster_by_v2() -> Result<()> {
    check_forming(release(stock_etcd::oldest(), "v2"))
}

#[test]
fn etcd_3_6_forms_a_cluster_by_v2() -> Result<()> {
    check_forming(release(stock_etcd::previous(work()), "v2"))
}

#[test]
fn etcd_3_6_forms_a_cluster_by_v3() -> Result<()> {
    check_forming(release(stock_etcd::previous(work()), "v3"))
}

#[test]
fn etcd_3_7_forms_a_cluster_by_v3() -> Result<()> {
    check_forming(release(stock_etcd::newest(work()), "v3"))
}

/// Checks that three members form a cluster by etcd's v3 discovery with changed environment
/// variables. `change` gets the variables that `etcd-token create` wrote, and returns those to use.
fn check_forming_with_variables(
    change: impl FnOnce(&EtcdTestbed, &str) -> Result<String>,
) -> Result<()> {
    let newest = release(stock_etcd::newest(work()), "v3");
    let (Some(newest), Some(network)) = (newest, network(3)) else { return Ok(()) };
    let bed = EtcdTestbed::start(newest, network)?;
    let id = bed.create_token("demo", &[])?;
    let written = fs_err::read_to_string(bed.variables("demo"))?;
    fs_err::write(bed.variables("demo"), change(&bed, &written)?)?;
    let _members = (0..3).map(|host| bed.member("demo", host)).collect::<Result<Vec<_>>>()?;
    bed.wait_for_cluster(0, &["n0", "n1", "n2"])?;
    bed.wait_for_state(&id, "complete")?;
    Ok(())
}

#[test]
fn v3_takes_the_whole_token_without_user_and_password() -> Result<()> {
    check_forming_with_variables(|_, written| {
        let pairs: Vec<_> = written.lines().filter_map(|line| line.split_once('=')).collect();
        let password = pairs.iter().find(|(name, _)| *name == "ETCD_DISCOVERY_PASSWORD");
        let (_, token) = password.context("a password")?;
        let replaced = ["TOKEN", "USER", "PASSWORD"].map(|name| format!("ETCD_DISCOVERY_{name}"));
        let is_kept = |name: &str| !replaced.iter().any(|replaced| replaced == name);
        let kept = pairs.iter().filter(|(name, _)| is_kept(name));
        let kept: String = kept.map(|(name, value)| format!("{name}={value}\n")).collect();
        Ok(format!("{kept}ETCD_DISCOVERY_TOKEN={token}\n"))
    })
}

/// The service asks for a client certificate and checks no chain, so etcd may have any or none.
#[test]
fn v3_serves_an_etcd_with_a_client_certificate() -> Result<()> {
    check_forming_with_variables(|bed, written| {
        let key = rcgen::KeyPair::generate()?;
        let certificate = rcgen::CertificateParams::new(vec!["stock.example".into()])?;
        let (cert_file, key_file) = (bed.testbed.path("etcd.crt"), bed.testbed.path("etcd.key"));
        fs_err::write(&cert_file, certificate.self_signed(&key)?.pem())?;
        fs_err::write(&key_file, key.serialize_pem())?;
        let (cert_file, key_file) = (path_text(&cert_file)?, path_text(&key_file)?);
        let files = format!("ETCD_DISCOVERY_CERT={cert_file}\nETCD_DISCOVERY_KEY={key_file}\n");
        Ok(format!("{written}{files}"))
    })
}

/// An etcd whose peer URL or name belongs to another member is refused. The service is killed and
/// started again while the others wait.
fn check_duplicates(release: Option<EtcdRelease>) -> Result<()> {
    let (Some(release), Some(network)) = (release, network(4)) else { return Ok(()) };
    let by_v2 = release.protocol == "v2";
    let mut bed = EtcdTestbed::start(release, network)?;
    let id = bed.create_token("demo", &[])?;
    let _first = bed.member("demo", 0)?;
    bed.wait_for_members(&id, 1)?;
    let mut same_url = bed.member_as("demo", "other", 1, 0)?;
    let mut same_name = bed.member_as("demo", "n0", 2, 2)?;
    if by_v2 {
        // etcd 3.4 and later versions report the duplicate URL in different words.
        let texts = ["has previously registered", "discovery: found duplicate id"];
        expect_end(&mut same_url, &texts)?;
        expect_end(&mut same_name, &["the name n0 belongs to a member"])?;
    } else {
        // An etcd that uses v3 discovery retries for ever and logs the reason, so the test kills
        // it.
        same_url
            .process
            .wait_for_output("a member with these peer URLs has registered", END_LIMIT)?;
        same_name.process.wait_for_output("the name n0 belongs to a member", END_LIMIT)?;
        same_url.process.kill();
        same_name.process.kill();
    }
    // A waiting member must survive a crash of the service, and an orderly restart.
    bed.testbed.kill_discovery();
    bed.testbed.start_discovery()?;
    bed.testbed.stop_discovery()?;
    bed.testbed.start_discovery()?;
    let _others = [bed.member("demo", 1)?, bed.member("demo", 3)?];
    bed.wait_for_cluster(0, &["n0", "n1", "n3"])
}

#[test]
fn a_duplicate_is_refused_by_v2() -> Result<()> {
    check_duplicates(release(stock_etcd::oldest(), "v2"))
}

#[test]
fn a_duplicate_is_refused_by_v3() -> Result<()> {
    check_duplicates(release(stock_etcd::newest(work()), "v3"))
}

/// An etcd that waits ends when its token is revoked.
fn check_revocation(release: Option<EtcdRelease>) -> Result<()> {
    let (Some(release), Some(network)) = (release, network(1)) else { return Ok(()) };
    let by_v2 = release.protocol == "v2";
    let bed = EtcdTestbed::start(release, network)?;
    let id = bed.create_token("demo", &[])?;
    let mut first = bed.member("demo", 0)?;
    let waiting = if by_v2 { "waiting for" } else { "waiting for peers" };
    first.process.wait_for_output(waiting, FORMATION_LIMIT)?;
    bed.testbed.admin_command(&["etcd-token", "revoke", &id, "--yes"])?;
    expect_end(&mut first, &["this discovery token is unknown", "the-discovery-token-ended"])
}

#[test]
fn a_revoked_token_ends_a_waiting_etcd_by_v2() -> Result<()> {
    check_revocation(release(stock_etcd::oldest(), "v2"))
}

#[test]
fn a_revoked_token_ends_a_waiting_etcd_by_v3() -> Result<()> {
    check_revocation(release(stock_etcd::newest(work()), "v3"))
}

/// A host that dies before the list is complete loses its place, and another host takes it.
fn check_lapse(release: Option<EtcdRelease>) -> Result<()> {
    let (Some(release), Some(network)) = (release, network(4)) else { return Ok(()) };
    let by_v2 = release.protocol == "v2";
    let bed = EtcdTestbed::start(release, network)?;
    let id = bed.create_token("demo", &[])?;
    let mut first = bed.member("demo", 0)?;
    bed.wait_for_members(&id, 1)?;
    let mut second = bed.member("demo", 1)?;
    bed.wait_for_members(&id, 2)?;
    second.process.kill();
    bed.wait_for_members(&id, 1)?;
    if !by_v2 {
        // The first etcd has already seen the second etcd and can't forget it. So the service makes
        // the first etcd end, and it is restarted.
        let reason = "a-member-stopped-waiting=start-this-etcd-again";
        expect_end(&mut first, &[reason])?;
        bed.restart("demo", &mut first)?;
    }
    let _others = [bed.member("demo", 2)?, bed.member("demo", 3)?];
    bed.wait_for_cluster(0, &["n0", "n2", "n3"])?;
    bed.wait_for_cluster(3, &["n0", "n2", "n3"])
}

#[test]
fn a_dead_host_loses_its_place_by_v2() -> Result<()> {
    check_lapse(release(stock_etcd::oldest(), "v2"))
}

#[test]
fn a_dead_host_loses_its_place_by_v3() -> Result<()> {
    check_lapse(release(stock_etcd::newest(work()), "v3"))
}
