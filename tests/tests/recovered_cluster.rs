//! Operations on a recovered cluster: members move, join, are replaced and are removed. The
//! commands of `docs/recovery.md` are run as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::process::last_lines;
use muster_tests::harness::programs::program_path;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{
    AgentProcess, Etcdctl, Network, TestHost, Testbed, poll_slowly, wait_for,
};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(90);
const PHRASE: &str = "make a new cluster of demo";
/// Number of machines in `docs/recovery.md`: `db-1` to `db-4`.
const MACHINES: usize = 4;
/// Number of members of the cluster in `docs/recovery.md`, before the recovery.
const SIZE: usize = 3;

/// Returns the agent of machine `name` on `host`. State and log belong to the machine, so they stay
/// if the host changes.
fn agent(
    testbed: &Testbed,
    name: &str,
    host: &TestHost,
    bundle: PathBuf,
    args: &[&str],
) -> AgentProcess {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    let options = AgentOptions { args, ..AgentOptions::default() };
    let log = testbed.path(&format!("{name}.log"));
    AgentProcess::new(host.clone(), testbed.path(name), bundle, log, options)
}

/// Forms the cluster `demo` of `db-1` to `db-3` on the first hosts, and writes a key.
fn form_cluster(testbed: &Testbed) -> Result<(BTreeMap<String, AgentProcess>, Etcdctl)> {
    let bundle = testbed.create_cluster_with_token("demo", SIZE)?;
    let mut agents = BTreeMap::new();
    for (at, host) in testbed.network.hosts[..SIZE].iter().enumerate() {
        let name = format!("db-{}", at + 1);
        let mut agent = agent(testbed, &name, host, bundle.clone(), &["--name", &name]);
        agent.start()?;
        agents.insert(name, agent);
    }
    testbed.wait_cluster_state("demo", "formed", LIMIT)?;
    let hosts: Vec<&TestHost> = testbed.network.hosts[..SIZE].iter().collect();
    let etcdctl = testbed.etcdctl("demo", &hosts)?;
    poll_slowly("a first write", LIMIT, || etcdctl.run(&["put", "k", "v"]).ok())?;
    Ok((agents, etcdctl))
}

/// Runs a command to its end, and returns its output.
fn run(mut command: Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let [out, error] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    ensure!(output.status.success(), "{command:?} ended with {}: {out}{error}", output.status);
    Ok(out.into_owned())
}

/// Returns a command that runs `muster-agent` on this agent's host, with the agent's data
/// directory.
fn on_host(agent: &AgentProcess, words: &[&str]) -> Result<Command> {
    let mut command = agent.host.command(program_path("muster-agent")?);
    command.args(words).args(["--data-dir", path_text(&agent.data_dir)?]);
    Ok(command)
}

/// Makes a new cluster from this agent's data directory, and returns the new Raft cluster's id.
fn make(testbed: &Testbed, agent: &AgentProcess) -> Result<String> {
    let key = testbed.admin_key();
    let key = ["--key", path_text(&key)?, "--i-accept-data-loss", "--yes", PHRASE, "--json"];
    let made = run(on_host(agent, &[&["recover", "make"], &key[..]].concat())?)?;
    let made: Value = serde_json::from_str(&made)?;
    Ok(made["made"]["is"]["cluster_id"].as_str().context("an id")?.to_owned())
}

/// Creates a ticket, and returns the agent of a host that will join with it under this name.
fn newcomer(testbed: &Testbed, name: &str, host: &TestHost) -> Result<AgentProcess> {
    let file = testbed.path(&format!("{name}.ticket"));
    let ticket = ["token", "create", "--cluster", "demo", "--kind", "join", "--out"];
    testbed.admin_command(&[&ticket[..], &[path_text(&file)?]].concat())?;
    Ok(agent(testbed, name, host, file, &["--name", name]))
}

/// Waits until all members answer at their listed addresses, are in sync, and `voters` of them are
/// voters.
fn wait_settled(testbed: &Testbed, agent: &AgentProcess, voters: usize) -> Result<()> {
    let mut last = String::new();
    poll_slowly("the members to answer", LIMIT, || {
        let waited = run(on_host(agent, &["member", "wait", "--patience", "5"]).ok()?);
        let listed = run(on_host(agent, &["member", "list", "--json"]).ok()?).ok()?;
        last = format!("{waited:?} {listed}");
        let listed: Value = serde_json::from_str(&listed).ok()?;
        let members = listed["members"].as_array()?;
        let votes = |member: &&Value| member["is_learner"] != true && member["isLearner"] != true;
        (waited.is_ok() && members.iter().filter(votes).count() == voters).then_some(())
    })
    .with_context(|| {
        let shown = testbed.admin_command(&["cluster", "show", "demo"]).unwrap_or_default();
        format!("{last}\n{shown}\n{}", last_lines(&agent.output(), 30))
    })
}

/// Waits until discovery follows the Raft cluster `id`.
fn wait_followed(testbed: &Testbed, id: &str) -> Result<()> {
    let mut last = Value::Null;
    poll_slowly("discovery to follow the recovery", LIMIT, || {
        last = testbed.admin_json(&["cluster", "show", "demo"]).ok()?["raft_cluster_id"].clone();
        let shown = u64::from_str_radix(last.as_str()?, 16).ok()?;
        (Some(shown) == u64::from_str_radix(id, 16).ok()).then_some(())
    })
    .with_context(|| format!("{last} is not {id}"))
}

/// Returns the output of the agent of `db-1`.
fn first_log(testbed: &Testbed) -> String {
    fs_err::read_to_string(testbed.path("db-1.log")).unwrap_or_default()
}

/// Checks that each host serves the written key to clients, with a certificate for the host's
/// address.
fn check_hosts_serve(testbed: &Testbed, hosts: &[&TestHost]) -> Result<()> {
    let etcdctl = testbed.etcdctl("demo", hosts)?;
    for host in hosts {
        let own = etcdctl.with_endpoint(host);
        let mut last = String::new();
        poll_slowly("a certificate for the member's address", LIMIT, || {
            let found = own.run(&["get", "k", "--print-value-only"]);
            last = format!("{}: {found:?}", host.address);
            (found.ok()?.trim() == "v").then_some(())
        })
        .context(last)?;
    }
    Ok(())
}

/// The documentation page whose commands the test types, and the machines that it types them on.
struct DocumentedCommands<'a> {
    testbed: &'a Testbed,
    agents: BTreeMap<String, AgentProcess>,
    /// Addresses in the page, and the hosts that replace them.
    places: Vec<(String, TestHost)>,
    /// Names of the machines that should be members after the commands so far.
    members: BTreeSet<String>,
}

impl DocumentedCommands<'_> {
    /// Returns the commands of a page in order; each is a pair of machine and command line.
    fn commands(text: &str) -> Vec<(&str, &str)> {
        let blocks = text.split("```console\n").skip(1);
        let lines = blocks.flat_map(|block| block.split("```").next().unwrap_or_default().lines());
        lines.filter_map(|line| line.split_once("$ ")).collect()
    }

    /// Splits a command line into words, like a shell that knows double quotes only. Replaces the
    /// page's addresses with those of the test's hosts.
    fn words(&self, line: &str) -> Vec<String> {
        let mut words = Vec::new();
        for (at, part) in line.split('"').enumerate() {
            if at % 2 == 1 {
                words.push(part.to_owned());
            } else {
                words.extend(part.split_whitespace().map(str::to_owned));
            }
        }
        for word in &mut words {
            for (address, host) in &self.places {
                *word = word.replace(address, &host.address.to_string());
            }
        }
        words
    }

    fn type_in(&mut self, place: &str, line: &str) -> Result<()> {
        let words = self.words(line);
        let (words, output) = match words.iter().position(|word| word == ">") {
            Some(at) => (words[..at].to_vec(), words.get(at + 1)),
            None => (words.clone(), None),
        };
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let printed = match words[..] {
            ["muster-agent", "run", ..] => return self.start(place, &words[2..]),
            ["muster-agent", ..] => {
                let agent = &self.agents[place];
                let mut command = on_host(agent, &words[1..])?;
                command.current_dir(self.testbed.path(""));
                // Repeat a command that the cluster refuses for now, as a person would.
                match words[1] {
                    "member" => {
                        self.retry_command(|| on_host(agent, &words[1..]), words[2] == "list")?
                    }
                    _ => run(command)?,
                }
            }
            ["muster-discovery", ..] => {
                let gone = words.windows(2).find(|pair| pair[0] == "--replace");
                let gone = gone.map(|pair| pair[1]);
                let gone = gone.or_else(|| words.contains(&"remove").then(|| words[4]));
                self.members.retain(|name| Some(name.as_str()) != gone);
                // If discovery doesn't know the last change yet, it refuses the order as stale.
                // Then the order is repeated.
                match words[1] {
                    "intent" => self.retry_command(|| self.by_admin(&words[1..]), false)?,
                    _ => run(self.by_admin(&words[1..])?)?,
                }
            }
            _ => bail!("{place}$ {line}: no command of ours"),
        };
        if let Some(file) = output {
            fs_err::write(self.testbed.path(file), printed)?;
        }
        Ok(())
    }

    /// Repeats a command until it succeeds. With `is_list`, repeats it until the list shows exactly
    /// the expected members.
    fn retry_command(
        &self,
        command: impl Fn() -> Result<Command>,
        is_list: bool,
    ) -> Result<String> {
        let mut last = String::new();
        poll_slowly("a command to be done", LIMIT, || {
            let done = command().and_then(run);
            last = format!("{done:?}");
            let text = done.ok()?;
            (!is_list || self.has_expected_members(&text)).then_some(text)
        })
        .with_context(|| format!("{last}\n{}", self.logs()))
    }

    /// Whether a member list has exactly the expected members, all of them voters and in sync.
    fn has_expected_members(&self, list: &str) -> bool {
        let rows: Vec<&str> = list.lines().skip(1).collect();
        let name = |row: &&str| row.split_whitespace().nth(1).map(str::to_owned);
        let names: BTreeSet<String> = rows.iter().filter_map(name).collect();
        let votes = |row: &&str| row.ends_with("in sync") && !row.contains(" learner ");
        names == self.members && rows.iter().all(votes)
    }

    fn by_admin(&self, words: &[&str]) -> Result<Command> {
        let mut command = self.testbed.network.hub.command(program_path("muster-discovery")?);
        command
            .args(words)
            .env("MUSTER_ADMIN_HOME", self.testbed.admin_home())
            .env("MUSTER_ADMIN_KEY", self.testbed.admin_key())
            .current_dir(self.testbed.path(""));
        Ok(command)
    }

    /// Starts an agent. Address and bundle are set as fields of the harness's agent instead of
    /// arguments.
    fn start(&mut self, place: &str, words: &[&str]) -> Result<()> {
        let flag_value = |flag: &str| {
            let at = words.iter().position(|word| *word == flag)?;
            words.get(at + 1).copied()
        };
        let address = flag_value("--advertise-address").context("an address")?;
        let host = self.places.iter().find(|(_, host)| host.address.to_string() == address);
        let host = host.context("a known address")?.1.clone();
        match flag_value("--bundle-file") {
            None => {
                let agent = self.agents.get_mut(place).context("a known machine")?;
                agent.host = host;
                agent.start()
            }
            Some(bundle) => {
                let name = flag_value("--name").context("a name")?;
                let bundle = self.testbed.path(bundle);
                let mut new = agent(self.testbed, place, &host, bundle, &["--name", name]);
                new.start()?;
                self.agents.insert(place.to_owned(), new);
                self.members.insert(name.to_owned());
                Ok(())
            }
        }
    }

    fn logs(&self) -> String {
        let log = |(name, agent): (&String, &AgentProcess)| {
            format!("--- {name}\n{}", last_lines(&agent.output(), 20))
        };
        self.agents.iter().map(log).collect()
    }
}

/// All three hosts have new addresses, and nothing runs at the old ones.
#[test]
fn a_cluster_whose_addresses_all_changed_is_recovered_as_the_page_says() -> Result<()> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/recovery.md");
    let page = fs_err::read_to_string(page)?;
    let hosts = SIZE + MACHINES;
    let testbed =
        Testbed::start(Network::loopback(u8::try_from(hosts)?), TestbedOptions::default())?;
    let (mut agents, etcdctl) = form_cluster(&testbed)?;
    // The second member has a shorter log than the first, and the third has lost its disk.
    agents.get_mut("db-2").context("a second machine")?.terminate(LIMIT)?;
    let first = etcdctl.with_endpoint(&testbed.network.hosts[0]);
    poll_slowly("a write without the second", LIMIT, || first.run(&["put", "k", "v"]).ok())?;
    for name in ["db-3", "db-1"] {
        agents.get_mut(name).context("a machine")?.terminate(LIMIT)?;
    }
    fs_err::remove_dir_all(&agents["db-3"].data_dir)?;
    fs_err::copy(testbed.admin_key(), testbed.path("operator.pem"))?;
    let places = (1..).zip(&testbed.network.hosts[SIZE..]);
    let places: Vec<(String, TestHost)> =
        places.map(|(n, host)| (format!("10.1.0.{n}"), host.clone())).collect();
    let new: Vec<TestHost> = places.iter().map(|(_, host)| host.clone()).collect();
    let members = BTreeSet::from(["db-1".to_owned()]);
    let mut typed = DocumentedCommands { testbed: &testbed, agents, places, members };
    let commands = DocumentedCommands::commands(&page);
    ensure!(commands.len() > 18, "{commands:?}");
    for (place, line) in commands {
        let done = typed.type_in(place, line);
        done.with_context(|| format!("{place}$ {line}\n{}", typed.logs()))?;
        if line.ends_with("member list") {
            check_hosts_serve(&testbed, &[&new[0]]).with_context(|| typed.logs())?;
        }
    }
    // By the page's commands, db-2 was replaced and db-3 was removed. So their agents end.
    for name in ["db-2", "db-3"] {
        let gone = typed.agents.get_mut(name).context("a machine")?;
        ensure!(gone.exit_code(LIMIT)? == 3, "{name}: {}", last_lines(&gone.output(), 20));
    }
    wait_settled(&testbed, &typed.agents["db-1"], 2).with_context(|| typed.logs())?;
    check_hosts_serve(&testbed, &[&new[0], &new[3]]).with_context(|| typed.logs())
}

/// The new cluster first uses the old addresses; then all members move one after another.
#[test]
fn members_move_after_a_recovery() -> Result<()> {
    let network = Network::loopback(2 * u8::try_from(SIZE)?);
    let homes = network.hosts.clone();
    let testbed = Testbed::start(network, TestbedOptions::default())?;
    let (mut agents, etcdctl) = form_cluster(&testbed)?;
    for agent in agents.values_mut() {
        agent.terminate(LIMIT)?;
    }
    let id = make(&testbed, &agents["db-1"])?;
    agents.get_mut("db-1").context("a first machine")?.start()?;
    let first = etcdctl.with_endpoint(&homes[0]);
    poll_slowly("the new cluster to serve", LIMIT, || first.run(&["put", "new", "x"]).ok())?;
    // A returning member of the lost cluster must be refused, with advice.
    let lost = agents.get_mut("db-2").context("a second machine")?;
    wait_followed(&testbed, &id).with_context(|| last_lines(&first_log(&testbed), 30))?;
    lost.start()?;
    let third = agents.get_mut("db-3").context("a third machine")?;
    third.start()?;
    third.wait_for_output("is of a cluster that was lost", LIMIT)?;
    for (at, name) in ["db-2", "db-3"].into_iter().enumerate() {
        let mut old = agents.remove(name).context("a machine")?;
        old.terminate(LIMIT)?;
        run(on_host(&old, &["reset", "--yes"])?)?;
        drop(old);
        let mut joining = newcomer(&testbed, name, &homes[at + 1])?;
        joining.start()?;
        agents.insert(name.to_owned(), joining);
        wait_settled(&testbed, &agents["db-1"], at + 2)?;
    }
    for (at, name) in ["db-1", "db-2", "db-3"].into_iter().enumerate() {
        let home = &homes[SIZE + at];
        let beside = if at == 0 { "db-2" } else { "db-1" };
        let url = format!("https://{}:2380", home.address);
        run(on_host(&agents[beside], &["member", "update", name, "--peer-urls", &url])?)?;
        let moved = agents.get_mut(name).context("a machine")?;
        moved.terminate(LIMIT)?;
        moved.host = home.clone();
        moved.start()?;
        wait_settled(&testbed, &agents[beside], SIZE)?;
    }
    let moved: Vec<&TestHost> = homes[SIZE..].iter().collect();
    check_hosts_serve(&testbed, &moved)
}

/// Discovery knows only addresses where no member runs any more, so an operator gives the right
/// address.
#[test]
fn a_newcomer_joins_at_the_cluster_address_that_an_operator_gives() -> Result<()> {
    let network = Network::loopback(2 * u8::try_from(SIZE)?);
    let homes = network.hosts.clone();
    let testbed = Testbed::start(network, TestbedOptions::default())?;
    let (mut agents, _) = form_cluster(&testbed)?;
    for agent in agents.values_mut() {
        agent.terminate(LIMIT)?;
    }
    let mut first = agents.remove("db-1").context("a first machine")?;
    make(&testbed, &first)?;
    first.host = homes[SIZE].clone();
    first.start()?;
    wait_settled(&testbed, &first, 1)?;
    let mut newcomer = newcomer(&testbed, "db-4", &homes[SIZE + 1])?;
    newcomer.options.env = vec![("MUSTER_CRASH_AT".to_owned(), "added".to_owned())];
    newcomer.start()?;
    newcomer.exit_code(LIMIT)?;
    // Discovery loses its knowledge of the members' addresses, and no agent runs to report them.
    first.kill();
    testbed.psql("DELETE FROM directory_reports; DELETE FROM directory")?;
    newcomer.options.env.clear();
    newcomer.start()?;
    newcomer.wait_for_output("say --cluster-address", LIMIT)?;
    ensure!(newcomer.node_pid().is_none(), "a node was started without the cluster's list");
    newcomer.kill();
    let address = first.host.address.to_string();
    newcomer.options.args.extend(["--cluster-address".to_owned(), address]);
    newcomer.start()?;
    wait_for("the newcomer's node", LIMIT, || newcomer.node_pid())
        .with_context(|| last_lines(&newcomer.output(), 30))?;
    first.start()?;
    wait_settled(&testbed, &first, 2)?;
    check_hosts_serve(&testbed, &[&first.host, &newcomer.host])
}

/// A backup from before a recovery is restored after the recovery, so discovery knows the lost
/// cluster only. The survivor's agent must report the recovery to discovery again. Then a newcomer
/// joins the recovered cluster.
#[test]
fn discovery_follows_a_recovery_again_after_a_restore_from_before_it() -> Result<()> {
    let mut testbed = Testbed::start(Network::loopback(4), TestbedOptions::default())?;
    let homes = testbed.network.hosts.clone();
    let (mut agents, _) = form_cluster(&testbed)?;
    let (postgres, ledger) = (testbed.postgres_dir(), testbed.path("discovery-ledger"));
    let backup = testbed.path("backup");
    let places = ["--managed-postgres", path_text(&postgres)?, "--ledger", path_text(&ledger)?];
    testbed.admin_command(&[&["backup", "--out", path_text(&backup)?], &places[..]].concat())?;
    for agent in agents.values_mut() {
        agent.terminate(LIMIT)?;
    }
    let mut survivor = agents.remove("db-1").context("a first machine")?;
    let id = make(&testbed, &survivor)?;
    survivor.start()?;
    wait_followed(&testbed, &id)?;

    testbed.stop_discovery()?;
    fs_err::remove_dir_all(&ledger)?;
    fs_err::rename(&postgres, testbed.path("postgres-of-today"))?;
    testbed.admin_command(&[&["restore", "--from", path_text(&backup)?], &places[..]].concat())?;
    testbed.start_discovery()?;
    poll_slowly("an owner to accept the database", LIMIT, || {
        testbed.admin_command(&["db", "accept", "--yes"]).ok()
    })?;
    // Restart the agent, so that it reports at once. A running agent reports only every two
    // minutes.
    survivor.kill();
    survivor.start()?;
    wait_followed(&testbed, &id).with_context(|| last_lines(&survivor.output(), 30))?;
    let mut joining = newcomer(&testbed, "db-4", &homes[SIZE])?;
    joining.start()?;
    wait_settled(&testbed, &survivor, 2)?;
    check_hosts_serve(&testbed, &[&survivor.host, &joining.host])
}
