//! A test environment: a discovery service with Postgres, its admin, and hosts.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::agents::{AgentOptions, AgentProcess};
use super::etcdctl::Etcdctl;
use super::network::{Network, TestHost};
use super::postgres_template;
use super::process::ChildProcess;
use super::programs::program_in;
use super::wait::poll_slowly;

/// Maximum time that Postgres and discovery may take to start on a loaded machine.
pub const START_LIMIT: Duration = Duration::from_secs(60);

/// Options of a test bed. The default options shorten the service's times, because tests wait for
/// them to pass.
#[derive(Clone, Debug)]
pub struct TestbedOptions {
    /// Extra arguments of `muster-discovery serve`.
    pub serve_args: Vec<String>,
    /// Extra environment variables of `muster-discovery serve`.
    pub serve_env: Vec<(String, String)>,
    /// Ports in the service's URLs. [`Testbed::start`] serves on the first of them.
    pub ports: Vec<u16>,
    /// Folder of the service's program, which is also the admin's tool; `None` for the program that
    /// was built with the test.
    pub programs: Option<PathBuf>,
}

impl Default for TestbedOptions {
    fn default() -> Self {
        let times = ["--lease", "6s", "--prepare", "6s", "--sweep", "1s", "--poll", "2s"];
        // On loopback the admin and all hosts have one address, so all their requests count towards
        // the service's limit for one address. Raise that limit.
        let limits = ["--rate", "1000"];
        Self {
            serve_args: times.iter().chain(&limits).map(|arg| (*arg).to_owned()).collect(),
            serve_env: Vec::new(),
            ports: vec![8443],
            programs: None,
        }
    }
}

/// A discovery service with its admin and hosts. All its processes are killed when this value is
/// dropped.
#[derive(Debug)]
pub struct Testbed {
    /// Network of the hub and the hosts.
    pub network: Network,
    /// Process of the service; `None` while a test has stopped it.
    pub discovery: Option<ChildProcess>,
    /// Options of the service's next start.
    pub options: TestbedOptions,
    folder: tempfile::TempDir,
}

impl Testbed {
    /// Creates keys, Postgres and an admin context, and starts discovery. The test bed is then
    /// ready for `cluster create`.
    pub fn start(network: Network, options: TestbedOptions) -> Result<Self> {
        let mut testbed = Self::prepare(network, options)?;
        postgres_template::copy_to(&testbed.postgres_dir())?;
        testbed.start_discovery()?;
        Ok(testbed)
    }

    /// Prepares a test bed as [`Testbed::start`] does, but doesn't start discovery. There is no
    /// folder of a Postgres yet.
    pub fn prepare(network: Network, options: TestbedOptions) -> Result<Self> {
        // An unprivileged Postgres must be able to reach its socket in this folder. A socket's path
        // may have at most 107 bytes.
        let mut folder = tempfile::Builder::new().prefix("muster-").tempdir()?;
        // If `MUSTER_TEST_KEEP` is set, keep the folder after the test.
        folder.disable_cleanup(std::env::var_os("MUSTER_TEST_KEEP").is_some());
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs_err::set_permissions(folder.path(), mode)?;
        let testbed = Self { network, discovery: None, options, folder };
        fs_err::create_dir(testbed.admin_home())?;
        let key = testbed.admin_key();
        testbed.admin_command(&["key", "new", "--out", path_text(&key)?])?;
        let public = fs_err::read_to_string(key.with_extension("pub"))?;
        let keys = testbed.keys_dir();
        let urls: Vec<String> =
            testbed.options.ports.iter().map(|port| testbed.url_of(*port)).collect();
        let mut init = vec!["init", "--owner", public.trim(), "--dir", path_text(&keys)?];
        init.extend(urls.iter().flat_map(|url| ["--url", url]));
        let context = testbed.admin_command(&init)?;
        let file = testbed.path("context");
        fs_err::write(&file, context)?;
        testbed.admin_command(&["context", "add", path_text(&file)?])?;
        Ok(testbed)
    }

    /// Starts or restarts Postgres and discovery.
    pub fn start_discovery(&mut self) -> Result<()> {
        let name = "discovery";
        let mut process = self.spawn_discovery(name, self.options.ports[0], None)?;
        process.wait_for_output("listening", START_LIMIT)?;
        self.discovery = Some(process);
        self.wait_ready()
    }

    /// Starts a discovery process. With `database_url`, the process uses a Postgres that runs
    /// already. Without it, the process manages a Postgres of its own.
    pub fn spawn_discovery(
        &self,
        name: &str,
        port: u16,
        database_url: Option<&str>,
    ) -> Result<ChildProcess> {
        let mut command = self.network.hub.command(self.program()?);
        command
            .args(["serve", "--keys", path_text(&self.keys_dir())?])
            .args(["--listen", &self.network.hub.at_port(port).to_string()])
            .args(["--ledger", path_text(&self.path(&format!("{name}-ledger")))?])
            .args(&self.options.serve_args)
            .envs(self.options.serve_env.iter().cloned());
        match database_url {
            Some(url) => command.args(["--database-url", url]),
            None => command.args(["--managed-postgres", path_text(&self.postgres_dir())?]),
        };
        ChildProcess::spawn(name, command, &self.path(&format!("{name}.log")))
    }

    fn program(&self) -> Result<PathBuf> {
        program_in(self.options.programs.as_deref(), "muster-discovery")
    }

    /// Kills discovery with SIGKILL. The Postgres that discovery manages ends too.
    pub fn kill_discovery(&mut self) {
        self.discovery = None;
    }

    /// Sends SIGTERM to discovery, and waits until discovery and its Postgres have shut down.
    pub fn stop_discovery(&mut self) -> Result<()> {
        let mut process = self.discovery.take().context("discovery is not running")?;
        let status = process.terminate(START_LIMIT)?;
        ensure!(status.success(), "discovery ended with {status}: {}", process.output());
        Ok(())
    }

    /// Waits until the service answers an authenticated admin.
    pub fn wait_ready(&self) -> Result<()> {
        poll_slowly("discovery to answer", START_LIMIT, || {
            self.admin_output(&["cluster", "list", "--json"])
                .ok()
                .filter(|out| out.status.success())
        })?;
        Ok(())
    }

    /// Creates a cluster, and returns the JSON output of the command.
    pub fn create_cluster(&self, name: &str, size: usize, extra: &[&str]) -> Result<Value> {
        let size = size.to_string();
        let mut args = vec!["cluster", "create", name, "--size", &size, "--allow-shared-host"];
        if self.network.hub.is_loopback() {
            args.push("--allow-loopback");
        }
        args.extend_from_slice(extra);
        self.admin_json(&args)
    }

    /// Creates a token, and returns the path of the join bundle.
    pub fn create_token(&self, cluster: &str) -> Result<PathBuf> {
        let file = self.path(&format!("{cluster}.bundle"));
        if file.exists() {
            fs_err::remove_file(&file)?;
        }
        self.admin_command(&["token", "create", "--cluster", cluster, "--out", path_text(&file)?])?;
        Ok(file)
    }

    /// Runs a `muster-discovery` command as the admin, and returns its standard output. Fails if
    /// the command fails.
    pub fn admin_command(&self, args: &[&str]) -> Result<String> {
        let output = self.admin_output(args)?;
        ensure!(
            output.status.success(),
            "muster-discovery {} ended with {}: {}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a command as the admin with `--json`, and returns its parsed output.
    pub fn admin_json(&self, args: &[&str]) -> Result<Value> {
        let text = self.admin_command(&[args, &["--json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
    }

    /// Runs a command as the admin, and returns its output whatever its exit code.
    pub fn admin_output(&self, args: &[&str]) -> Result<Output> {
        let mut command = self.network.hub.command(self.program()?);
        command
            .args(args)
            .env("MUSTER_ADMIN_HOME", self.admin_home())
            .env("MUSTER_ADMIN_KEY", self.admin_key());
        command.output().with_context(|| format!("running muster-discovery {}", args.join(" ")))
    }

    /// Returns an agent on host `index`, not started yet.
    pub fn agent(&self, index: usize, bundle: &Path) -> AgentProcess {
        self.agent_with(index, bundle, AgentOptions::default())
    }

    /// Returns an agent on host `index` with these options, not started yet.
    pub fn agent_with(&self, index: usize, bundle: &Path, options: AgentOptions) -> AgentProcess {
        let host = self.network.hosts[index].clone();
        let data_dir = self.path(&host.name);
        let log = self.path(&format!("{}.log", host.name));
        AgentProcess::new(host, data_dir, bundle.to_path_buf(), log, options)
    }

    /// Creates a cluster of `size` members and a token for it. Returns the path of the join bundle.
    pub fn create_cluster_with_token(&self, cluster: &str, size: usize) -> Result<PathBuf> {
        self.create_cluster(cluster, size, &[])?;
        self.create_token(cluster)
    }

    /// Creates and starts an agent on each of these hosts.
    pub fn start_agents(
        &self,
        hosts: impl IntoIterator<Item = usize>,
        bundle: &Path,
    ) -> Result<Vec<AgentProcess>> {
        hosts
            .into_iter()
            .map(|i| {
                let mut agent = self.agent(i, bundle);
                agent.start()?;
                Ok(agent)
            })
            .collect()
    }

    /// Waits until the service reports this state of the cluster, and returns the output of
    /// `cluster show`.
    pub fn wait_cluster_state(&self, name: &str, state: &str, limit: Duration) -> Result<Value> {
        poll_slowly(&format!("cluster {name} to be {state}"), limit, || {
            let shown = self.admin_json(&["cluster", "show", name]).ok()?;
            (shown["state"] == state).then_some(shown)
        })
        .with_context(|| {
            self.admin_command(&["cluster", "explain", name]).unwrap_or_else(|e| e.to_string())
        })
    }

    /// Returns a stock `etcdctl` with a client certificate that the service issued for `cluster`.
    pub fn etcdctl(&self, cluster: &str, hosts: &[&TestHost]) -> Result<Etcdctl> {
        let folder = self.path(&format!("{cluster}-credentials"));
        // Check the file, not the folder: a failed earlier attempt may have left the folder empty.
        if !folder.join("client.crt").exists() {
            let out = path_text(&folder)?.to_owned();
            self.admin_command(&["cluster", "credentials", cluster, "--out", &out])?;
        }
        let endpoints = hosts.iter().map(|h| format!("https://{}", h.at_port(2379))).collect();
        Ok(Etcdctl::new(self.network.hub.clone(), folder, endpoints))
    }

    /// Returns the path of a file in the test bed's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the service's URL for agents and admins.
    pub fn url(&self) -> String {
        self.url_of(self.options.ports[0])
    }

    fn url_of(&self, port: u16) -> String {
        format!("https://{}", self.network.hub.at_port(port))
    }

    /// Returns the process id of the managed Postgres.
    pub fn postmaster_pid(&self) -> Result<u32> {
        let find = |dir: PathBuf| -> Option<u32> {
            let text = fs_err::read_to_string(dir.join("postmaster.pid")).ok()?;
            text.lines().next()?.trim().parse().ok()
        };
        find(self.postgres_dir().join("data"))
            .or_else(|| find(self.postgres_dir()))
            .context("the managed Postgres has no postmaster.pid")
    }

    /// Returns the folder of the managed Postgres.
    pub fn postgres_dir(&self) -> PathBuf {
        self.path("pg")
    }

    /// Returns the folder of the service's keys.
    pub fn keys_dir(&self) -> PathBuf {
        self.path("keys")
    }

    /// Returns the folder of the admin's context.
    pub fn admin_home(&self) -> PathBuf {
        self.path("admin")
    }

    /// Returns the path of the owner's private key.
    pub fn admin_key(&self) -> PathBuf {
        self.admin_home().join("owner.pem")
    }

    /// Runs one SQL statement in the managed Postgres with `psql`, and returns its output.
    pub fn psql(&self, sql: &str) -> Result<String> {
        let mut command = Command::new("psql");
        command
            .args(["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql])
            .arg(self.database_url()?);
        let output = command.output().context("running psql")?;
        ensure!(output.status.success(), "psql: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Returns the connection URL of the managed Postgres, whose socket is in the folder `run`
    /// beside its data.
    pub fn database_url(&self) -> Result<String> {
        let socket = self.postgres_dir().join("run");
        Ok(format!("postgresql:///muster?host={}&user=muster", path_text(&socket)?))
    }

    /// Leaves all processes running and keeps the folder. Returns the folder, and the names of the
    /// namespaces.
    pub fn leave_running(mut self) -> (PathBuf, Vec<String>) {
        if let Some(process) = self.discovery.take() {
            std::mem::forget(process);
        }
        let namespaces = self.network.keep_namespaces();
        let folder = std::mem::replace(
            &mut self.folder,
            tempfile::Builder::new().prefix("muster-gone-").tempdir().expect("a temporary folder"),
        );
        (folder.keep(), namespaces)
    }
}

/// Converts a path to text; the tests' own paths are always UTF-8.
pub fn path_text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}
