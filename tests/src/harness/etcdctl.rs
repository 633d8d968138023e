//! Stock `etcdctl`, with a client certificate that discovery issued.

use std::path::PathBuf;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::network::TestHost;

/// Stock `etcdctl` for one cluster, run on a host.
#[derive(Clone, Debug)]
pub struct Etcdctl {
    host: TestHost,
    credentials: PathBuf,
    endpoints: Vec<String>,
}

impl Etcdctl {
    /// Returns `etcdctl` on this host. `credentials` is a folder with `client.crt`, `client.key`
    /// and `ca.crt`.
    pub fn new(host: TestHost, credentials: PathBuf, endpoints: Vec<String>) -> Self {
        Self { host, credentials, endpoints }
    }

    /// Returns a copy of the tool that uses only the endpoint of `host`.
    pub fn with_endpoint(&self, host: &TestHost) -> Self {
        Self { endpoints: vec![format!("https://{}", host.at_port(2379))], ..self.clone() }
    }

    /// Returns the folder with the client's certificate, key and CA.
    pub fn credentials(&self) -> &PathBuf {
        &self.credentials
    }

    /// Returns the URLs of the endpoints.
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Returns a command with certificates and endpoints in its environment.
    pub fn command(&self, args: &[&str]) -> std::process::Command {
        let mut command = self.host.command("etcdctl");
        command
            .env("ETCDCTL_API", "3")
            .env("ETCDCTL_CACERT", self.credentials.join("ca.crt"))
            .env("ETCDCTL_CERT", self.credentials.join("client.crt"))
            .env("ETCDCTL_KEY", self.credentials.join("client.key"))
            .env("ETCDCTL_ENDPOINTS", self.endpoints.join(","))
            .args(args);
        command
    }

    /// Runs a command, and returns its output whatever its exit code.
    pub fn output(&self, args: &[&str]) -> Result<Output> {
        self.command(args).output().with_context(|| format!("running etcdctl {}", args.join(" ")))
    }

    /// Runs a command, and returns its standard output. Fails if the command fails.
    pub fn run(&self, args: &[&str]) -> Result<String> {
        let output = self.output(args)?;
        ensure!(
            output.status.success(),
            "etcdctl {} ended with {}: {}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a command with `-w json`, and returns its parsed output.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let text = self.run(&[args, &["-w", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
    }

    /// Returns the index in `hosts` of the host whose node is the leader.
    pub fn leader(&self, hosts: &[&TestHost]) -> Option<usize> {
        hosts.iter().position(|host| {
            self.with_endpoint(host).json(&["endpoint", "status"]).is_ok_and(|status| {
                let status = &status[0]["Status"];
                status["leader"].is_u64() && status["leader"] == status["header"]["member_id"]
            })
        })
    }
}
