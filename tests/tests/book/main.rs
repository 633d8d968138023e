//! Runs the commands of the operator's manual, page by page, in the order in which they are
//! printed.
//!
//! Each test takes a page's commands one after the other, and ends only if none is left. A command
//! that a test doesn't run is left out by name, with the reason or with the test that runs it. Some
//! pages have tests elsewhere; [`coverage`] lists all pages.

mod clusters;
mod coverage;
mod etcd;
mod members;
mod page;
mod service;
mod typist;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::agents::AgentOptions;
use muster_tests::harness::process::last_lines;
use muster_tests::harness::testbed::{TestbedOptions, path_text};
use muster_tests::harness::{AgentProcess, Etcdctl, Network, Testbed, poll_slowly};

use self::typist::Typist;

const LIMIT: Duration = Duration::from_secs(90);

/// A formed cluster `demo` with the members `db-1`, `db-2` and so on.
struct BookCluster {
    /// Declared before `testbed`, because dropping an agent needs the test bed's folder.
    agents: Vec<AgentProcess>,
    testbed: Testbed,
}

impl BookCluster {
    /// Forms a cluster of `size` members. The network has `room` hosts. `args` are further
    /// arguments of each agent.
    fn form(size: usize, room: u8, args: &[&str]) -> Result<Self> {
        let testbed = Testbed::start(Network::loopback(room), TestbedOptions::default())?;
        let bundle = testbed.create_cluster_with_token("demo", size)?;
        let mut cluster = Self { agents: Vec::new(), testbed };
        for host in 0..size {
            cluster.start(host, &bundle, args)?;
        }
        cluster.testbed.wait_cluster_state("demo", "formed", LIMIT)?;
        cluster.wait_members(size)?;
        Ok(cluster)
    }

    /// Starts the agent `db-N` on host N - 1.
    fn start(&mut self, host: usize, bundle: &Path, args: &[&str]) -> Result<()> {
        let name = format!("db-{}", host + 1);
        let args = [&["--name", &name], args].concat();
        let args = args.into_iter().map(str::to_owned).collect();
        let options = AgentOptions { args, ..AgentOptions::default() };
        let mut agent = self.testbed.agent_with(host, bundle, options);
        agent.start()?;
        self.agents.push(agent);
        Ok(())
    }

    /// Waits until discovery shows `size` voters that have all reported.
    fn wait_members(&self, size: usize) -> Result<()> {
        poll_slowly("all members to vote", LIMIT, || {
            let shown = self.testbed.admin_command(&["cluster", "show", "demo"]).ok()?;
            let votes = |line: &&str| line.contains(" voter ") || line.contains(" leader ");
            (shown.lines().filter(votes).count() == size).then_some(())
        })
        .with_context(|| {
            let shown = self.testbed.admin_command(&["cluster", "show", "demo"]);
            let logs = self.agents.iter().map(|agent| last_lines(&agent.output(), 15));
            format!("{shown:?}\n{}", logs.collect::<Vec<_>>().join("\n---\n"))
        })
    }

    fn etcdctl(&self) -> Result<Etcdctl> {
        let hosts: Vec<_> = self.agents.iter().map(|agent| &agent.host).collect();
        self.testbed.etcdctl("demo", &hosts)
    }

    /// Opens a page for this cluster. `admin` and the machine without a name have the admin's key
    /// and a client's certificate, `db-N` the data directory of its agent.
    fn open(&self, page: &str, sections: &[&str]) -> Result<Typist> {
        let folder = page.trim_start_matches("docs/").replace(['.', '/'], "-");
        let mut typed = Typist::open(page, sections, &self.testbed.path(&folder))?;
        let (home, key) = (self.testbed.admin_home(), self.testbed.admin_key());
        let own = self.agents[0].data_dir.clone();
        let env: [(&str, &Path); 3] =
            [("MUSTER_ADMIN_HOME", &home), ("MUSTER_ADMIN_KEY", &key), ("MUSTER_DATA_DIR", &own)];
        for admin in ["admin", "auditor", ""] {
            typed.machine(admin, &self.testbed.network.hub, &env);
        }
        for (n, agent) in (1..).zip(&self.agents) {
            let env: [(&str, &Path); 1] = [("MUSTER_DATA_DIR", &agent.data_dir)];
            typed.machine(&format!("db-{n}"), &agent.host, &env);
        }
        let etcdctl = self.etcdctl()?;
        let credentials = etcdctl.credentials();
        typed.set("", "ETCDCTL_ENDPOINTS", &etcdctl.endpoints()[0])?;
        for (name, file) in [("CACERT", "ca.crt"), ("CERT", "client.crt"), ("KEY", "client.key")] {
            typed.set("", &format!("ETCDCTL_{name}"), path_text(&credentials.join(file))?)?;
        }
        Ok(typed)
    }
}

/// Returns the value of a flag in a command line.
fn flag_value<'l>(line: &'l str, flag: &str) -> Result<&'l str> {
    let mut words = line.split_whitespace().skip_while(|word| *word != flag).skip(1);
    words.next().with_context(|| format!("{line} has no {flag}"))
}

/// Returns the last word of the output's line that contains `part`.
fn last_word<'o>(output: &'o str, part: &str) -> Result<&'o str> {
    let line = output.lines().find(|line| line.contains(part));
    line.and_then(|line| line.split_whitespace().last()).with_context(|| output.to_owned())
}
