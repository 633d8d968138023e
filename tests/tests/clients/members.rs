//! A cluster of three members of one server program on loopback.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use muster_tests::harness::credentials::Credentials;
use muster_tests::harness::nodes::{client_url, peer_url};
use muster_tests::harness::{Network, NodeProcess, poll_slowly};
use serde_json::Value;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);
const MEMBERS: u8 = 3;

/// Three running members, which are killed when this value is dropped.
pub(crate) struct ThreeMemberCluster {
    /// Client URLs of the members.
    pub(crate) urls: Vec<String>,
    /// CA of the members' certificates, if they use TLS.
    pub(crate) ca: Option<PathBuf>,
    pub(crate) nodes: Vec<NodeProcess>,
    /// Folder of the members' data and logs, and of other files of the test.
    pub(crate) folder: TempDir,
}

impl ThreeMemberCluster {
    pub(crate) fn start(program: &Path, tls: bool) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let hosts = Network::loopback(MEMBERS).hosts.clone();
        let addresses: Vec<String> = hosts.iter().map(|host| host.address.to_string()).collect();
        let credentials =
            if tls { Some(Credentials::make(folder.path(), &addresses)?) } else { None };
        let all: Vec<String> =
            hosts.iter().map(|host| format!("{}={}", host.name, peer_url(host))).collect();
        let secured = |url: String| if tls { url.replace("http:", "https:") } else { url };
        let mut nodes = Vec::new();
        for host in &hosts {
            let mut node = NodeProcess::new(host, &host.name, program, folder.path());
            // Client URLs may use TLS while peer URLs don't: the settings are independent.
            for flag in node.flags.iter_mut().filter(|flag| flag.contains("-client-urls=")) {
                *flag = secured(std::mem::take(flag));
            }
            node.flags.push(format!("--name={}", host.name));
            node.flags.push(format!("--initial-cluster={}", all.join(",")));
            node.flags.extend(credentials.iter().flat_map(Credentials::flags));
            node.start()?;
            nodes.push(node);
        }
        for node in &mut nodes {
            node.wait_ready(LIMIT)?;
        }
        let urls = hosts.iter().map(|host| secured(client_url(host))).collect();
        Ok(Self { urls, ca: credentials.map(|each| each.ca()), nodes, folder })
    }

    /// Kills the leader with SIGKILL, and returns its index.
    pub(crate) fn kill_leader(&mut self) -> Result<usize> {
        let leads = poll_slowly("a member to lead", LIMIT, || {
            let leads = |url: &String| self.leads(url).unwrap_or_default();
            self.urls.iter().position(leads)
        })?;
        self.nodes[leads].kill();
        Ok(leads)
    }

    fn leads(&self, url: &str) -> Result<bool> {
        let mut etcdctl = Command::new("etcdctl");
        etcdctl.env("ETCDCTL_API", "3").args(["--endpoints", url, "-w", "json"]);
        if let Some(ca) = &self.ca {
            etcdctl.arg("--cacert").arg(ca);
        }
        let output = etcdctl.args(["endpoint", "status"]).output()?;
        let status = &serde_json::from_slice::<Value>(&output.stdout)?[0]["Status"];
        Ok(status["leader"].is_u64() && status["leader"] == status["header"]["member_id"])
    }
}
