//! A Postgres server under Patroni, which the test starts and kills as if it were a machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use muster_tests::harness::process::{is_alive, last_lines, send_signal};
use muster_tests::harness::{ChildProcess, TestHost, wait_for};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::members::ThreeMemberCluster;

/// Name of the Patroni cluster.
pub(crate) const SCOPE: &str = "demo";
const PORT: u16 = 5432;
const API_PORT: u16 = 8008;
/// Account that runs Postgres if the test runs as root, because Postgres refuses to run as root.
/// Debian's package creates the account.
const ACCOUNT: &str = "postgres";
/// Folder in which Debian's packages install the server programs.
const PACKAGED_PROGRAMS: &str = "/usr/lib/postgresql";
/// Time limit for a server to end after a signal.
const END_LIMIT: Duration = Duration::from_secs(60);
const SHOWN_LINES: usize = 60;

/// A Postgres server and its Patroni. Both are ended when this value is dropped.
pub(crate) struct PostgresServer {
    pub(crate) host: TestHost,
    python: PathBuf,
    folder: PathBuf,
    patroni: Option<ChildProcess>,
}

impl PostgresServer {
    /// Returns a server that is not started yet, with its data in the members' folder.
    pub(crate) fn new(
        python: &Path,
        host: &TestHost,
        members: &ThreeMemberCluster,
    ) -> Result<Self> {
        let folder = members.folder.path().join(format!("of-{}", host.name));
        fs_err::create_dir(&folder)?;
        let server = Self { host: host.clone(), python: python.to_owned(), folder, patroni: None };
        // Patroni reads a YAML file, and JSON is valid YAML.
        fs_err::write(server.config(), server.settings(members)?.to_string())?;
        ensure_account(&server.folder)?;
        Ok(server)
    }

    fn settings(&self, members: &ThreeMemberCluster) -> Result<Value> {
        let address = self.host.address;
        let place = |port: u16| format!("{address}:{port}");
        let hosts: Vec<&str> =
            members.urls.iter().filter_map(|url| url.split("//").nth(1)).collect();
        let everybody = ["local", "host"].map(|kind| match kind {
            "local" => "local all all trust".to_owned(),
            _ => "host all all 127.0.0.0/8 trust".to_owned(),
        });
        let replicas = "host replication all 127.0.0.0/8 trust".to_owned();
        let [local, network] = everybody;
        Ok(json!({
            "scope": SCOPE,
            "name": self.host.name,
            "etcd3": { "hosts": hosts, "protocol": "https", "cacert": members.ca },
            "restapi": { "listen": place(API_PORT), "connect_address": place(API_PORT) },
            "bootstrap": {
                "dcs": {
                    // This TTL is the shortest that Patroni accepts. The retry timeout is the
                    // longest that this TTL allows.
                    "ttl": 20, "loop_wait": 2, "retry_timeout": 8,
                    // A row is acknowledged only when the leader and the standby have it. If the
                    // standby is lost, the leader acknowledges rows alone. Then no other server may
                    // become leader.
                    "synchronous_mode": true,
                    "postgresql": { "use_pg_rewind": true },
                },
                "initdb": [{ "encoding": "UTF8" }, { "locale": "C" }, "data-checksums"],
            },
            "postgresql": {
                "listen": place(PORT),
                "connect_address": place(PORT),
                "data_dir": self.data(),
                "bin_dir": programs()?,
                "pgpass": self.folder.join("pgpass"),
                "authentication": {
                    "superuser": { "username": "postgres" },
                    "replication": { "username": "replicator" },
                },
                "parameters": { "unix_socket_directories": self.folder, "shared_buffers": "16MB" },
                "pg_hba": [local, network, replicas],
            },
            "watchdog": { "mode": "off" },
        }))
    }

    fn config(&self) -> PathBuf {
        self.folder.join("patroni.yml")
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// Starts or restarts Patroni, which starts Postgres.
    pub(crate) fn start(&mut self) -> Result<()> {
        let mut command = self.command("patroni");
        command.arg(self.config());
        let log = self.folder.join("patroni.log");
        self.patroni = Some(ChildProcess::spawn(&self.host.name, command, &log)?);
        Ok(())
    }

    /// Kills Patroni and Postgres with SIGKILL, as if the machine were lost.
    pub(crate) fn kill(&mut self) -> Result<()> {
        let server = self.postmaster().context("it has no Postgres")?;
        self.patroni = None;
        send_signal(server, Signal::KILL);
        wait_for("Postgres to be gone", END_LIMIT, || (!is_alive(server)).then_some(()))
    }

    /// Returns the process id of Postgres, if it runs.
    fn postmaster(&self) -> Option<u32> {
        let file = fs_err::read_to_string(self.data().join("postmaster.pid")).ok()?;
        let id = file.lines().next()?.trim().parse().ok()?;
        // The pid file remains after a kill, and another process may get its process id, so check
        // the working directory.
        let folder = fs_err::read_link(format!("/proc/{id}/cwd")).ok()?;
        (folder == self.data()).then_some(id)
    }

    /// Runs `patronictl` on the cluster, and returns its output.
    pub(crate) fn patronictl(&self, args: &[&str]) -> Result<String> {
        let output = self.command("patronictl").arg("-c").arg(self.config()).args(args).output()?;
        let printed = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "patronictl {}: {printed}", args.join(" "));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Returns the end of the log of Patroni and Postgres.
    pub(crate) fn log_tail(&self) -> String {
        let log = fs_err::read(self.folder.join("patroni.log")).unwrap_or_default();
        format!("{}:\n{}", self.host.name, last_lines(&String::from_utf8_lossy(&log), SHOWN_LINES))
    }

    /// Returns the connection string for clients, with the addresses of all servers.
    pub(crate) fn connection(servers: &[Self]) -> String {
        let hosts: Vec<String> = servers.iter().map(|each| each.host.address.to_string()).collect();
        format!("host={} port={PORT} user=postgres dbname=postgres", hosts.join(","))
    }

    /// Returns a command for a program of the Python environment, under the account of Postgres.
    fn command(&self, name: &str) -> Command {
        let program = self.python.with_file_name(name);
        if !rustix::process::geteuid().is_root() {
            return super::bare_command(&program);
        }
        // The account may lack read access to the fetched files, so it keeps the capability
        // CAP_DAC_OVERRIDE.
        let mut command = super::bare_command(Path::new("setpriv"));
        command
            .args([format!("--reuid={ACCOUNT}"), format!("--regid={ACCOUNT}")])
            .args(["--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override"])
            .arg(program)
            .env("HOME", &self.folder);
        command
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        let server = self.postmaster();
        self.patroni = None;
        if let Some(server) = server {
            // On SIGQUIT, Postgres ends at once, but still removes its shared memory.
            send_signal(server, Signal::QUIT);
            if wait_for("Postgres to end", END_LIMIT, || (!is_alive(server)).then_some(())).is_err()
            {
                send_signal(server, Signal::KILL);
            }
        }
    }
}

/// Changes the owner of a folder to the account that runs Postgres.
fn ensure_account(folder: &Path) -> Result<()> {
    if rustix::process::geteuid().is_root() {
        let status =
            Command::new("chown").arg(format!("{ACCOUNT}:{ACCOUNT}")).arg(folder).status()?;
        ensure!(status.success(), "no account {ACCOUNT}: apt-get install postgresql");
    }
    Ok(())
}

/// Returns the folder of Postgres' server programs.
fn programs() -> Result<PathBuf> {
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    for version in fs_err::read_dir(PACKAGED_PROGRAMS).into_iter().flatten() {
        folders.push(version?.path().join("bin"));
    }
    let whole = |folder: &PathBuf| {
        ["initdb", "postgres", "pg_rewind"].iter().all(|name| folder.join(name).exists())
    };
    folders.into_iter().find(whole).context("no Postgres server: apt-get install postgresql")
}
