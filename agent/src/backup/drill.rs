//! The trial of a restore: a cluster of one member is made from the snapshot, started, and asked
//! for its keys.
//!
//! The member listens on loopback alone, and accepts only the client certificate that was made for
//! this trial. The trial's folder is removed afterwards.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, PKCS_ECDSA_P256_SHA256,
};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use super::manifest::SnapshotFacts;
use crate::cluster::{ClusterApiClient, KeyCount};
use crate::endpoint::{ClientEndpoint, ClientTlsIdentity};
use crate::exit::error_chain;
use crate::launch::environment;
use crate::launch::node_command::{NodeKind, detect_kind};

/// The longest that the restore of a snapshot may take.
const RESTORE_LIMIT: Duration = Duration::from_hours(1);
/// The longest that the new member may take until it serves.
const START_LIMIT: Duration = Duration::from_mins(5);
/// The longest that the member may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(15);
/// Pause between two requests to a member that is starting.
const ASK_INTERVAL: Duration = Duration::from_millis(250);
/// Number of lines of a program's output in an error.
const SHOWN_LINES: usize = 5;

/// Why the trial restore of a backup failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DrillError {
    /// The programs can't be used.
    #[error("{0}")]
    Program(String),
    /// A file or folder of the trial can't be made.
    #[error("the trial can't be prepared")]
    Files(#[source] std::io::Error),
    /// The certificates of the trial can't be made.
    #[error("the trial's certificates can't be made")]
    Certificates(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The restoring program ended with an error.
    #[error("the restore failed ({status}): {output}")]
    Restore {
        /// How the program ended.
        status: String,
        /// Last lines of its output.
        output: String,
    },
    /// The restored member does not serve.
    #[error("the restored member does not serve: {0}")]
    Start(String),
    /// The restored member has other data than the backup.
    #[error("the restored member has {what} {found}, and the backup {expected}")]
    Difference {
        /// Name of the property that differs.
        what: &'static str,
        found: u64,
        expected: u64,
    },
}

/// Result of a successful trial restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DrillResult {
    /// Kind of the program that was started.
    pub program: String,
    /// Revision of the restored member.
    pub revision: u64,
    /// Number of the member's keys; `None` if the cluster has users, because only users may count
    /// keys.
    pub keys: Option<u64>,
    /// Milliseconds from the snapshot's file to a member that serves.
    pub duration_ms: u64,
}

/// A temporary folder, which is removed on drop.
struct TrialFolder(PathBuf);

impl TrialFolder {
    fn make(parent: &Path) -> Result<Self, DrillError> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())
            .map_err(|error| DrillError::Files(error.into()))?;
        let path = parent.join(format!("muster-drill-{:016x}", u64::from_le_bytes(random)));
        let mut builder = std::fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path).map_err(DrillError::Files)?;
        Ok(Self(path))
    }
}

impl Drop for TrialFolder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!("{} can't be removed: {error}", self.0.display());
        }
    }
}

/// The programs that a trial restore runs.
pub(crate) struct DrillPrograms {
    node: PathBuf,
    kind: NodeKind,
    /// The program that restores, and its first arguments.
    restore: (PathBuf, &'static [&'static str]),
}

impl DrillPrograms {
    /// Finds the program that restores a snapshot for this node.
    pub(crate) async fn find(node: &Path) -> Result<Self, DrillError> {
        let kind = detect_kind(node).await.map_err(DrillError::Program)?;
        let node = node.to_owned();
        let name = match kind {
            NodeKind::Muster => {
                let restore = (node.clone(), &["snapshot", "restore"][..]);
                return Ok(Self { node, kind, restore });
            }
            NodeKind::Etcd { major, minor } if (major, minor) < (3, 5) => "etcdctl",
            NodeKind::Etcd { .. } => "etcdutl",
        };
        let path = std::env::var_os("PATH");
        let in_path = path.iter().flat_map(std::env::split_paths).map(|dir| dir.join(name));
        let mut places = std::iter::once(node.with_file_name(name)).chain(in_path);
        let missing = || {
            DrillError::Program(format!(
                "no {name} beside {} or in PATH, which restores",
                node.display()
            ))
        };
        let tool = places.find(|place| place.is_file()).ok_or_else(missing)?;
        Ok(Self { node, kind, restore: (tool, &["snapshot", "restore"]) })
    }

    /// Restores `snapshot` in a new folder below `folder`, and starts the member. Compares its
    /// revision and number of keys with `facts`.
    pub(crate) async fn run(
        &self,
        snapshot: File,
        facts: &SnapshotFacts,
        folder: &Path,
    ) -> Result<DrillResult, DrillError> {
        let began = Instant::now();
        let trial = TrialFolder::make(folder)?;
        let file = trial.0.join("snapshot.db");
        copy(snapshot, file.clone()).await?;
        let [peer, client] = free_ports()?;
        let identity = TrialCertificates::write(&trial.0)?;
        self.restore(&file, &trial.0, peer).await?;
        let mut member = self.start(&trial.0, peer, client)?;
        let endpoint =
            ClientEndpoint::parse(&format!("https://127.0.0.1:{client}"), Some(&identity));
        let endpoint = endpoint.map_err(|error| DrillError::Program(error_chain(&error)))?;
        let asked = ask(&ClusterApiClient::new(vec![endpoint]), &mut member, &trial.0).await;
        stop(member).await;
        let (revision, counted) = asked?;
        let compare = |what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(DrillError::Difference { what, found, expected }),
        };
        compare("the revision", revision, facts.revision)?;
        if let Some(KeyCount { keys, .. }) = counted {
            compare("a number of keys of", keys, facts.keys)?;
        }
        Ok(DrillResult {
            program: self.kind.to_string(),
            revision,
            keys: counted.map(|counted| counted.keys),
            duration_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        })
    }

    fn command(program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs(environment::node_variables())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    async fn restore(&self, snapshot: &Path, trial: &Path, peer: u16) -> Result<(), DrillError> {
        let (program, words) = &self.restore;
        let url = format!("https://127.0.0.1:{peer}");
        let mut command = Self::command(program);
        command
            .args(*words)
            .arg(snapshot)
            .args(["--name", "drill", "--initial-cluster", &format!("drill={url}")])
            .args(["--initial-advertise-peer-urls", &url, "--data-dir"])
            .arg(trial.join("data"))
            // Only etcdctl before 3.5 reads this variable, which selects its v3 API.
            .env("ETCDCTL_API", "3");
        let failed = |status: String, output: String| DrillError::Restore { status, output };
        let output = tokio::time::timeout(RESTORE_LIMIT, command.output()).await;
        let output = output
            .map_err(|_| {
                failed(format!("not done within {} s", RESTORE_LIMIT.as_secs()), String::new())
            })?
            .map_err(|error| DrillError::Program(format!("{}: {error}", program.display())))?;
        if output.status.success() {
            return Ok(());
        }
        let said = [output.stdout, output.stderr].concat();
        Err(failed(output.status.to_string(), last_lines(&String::from_utf8_lossy(&said))))
    }

    fn start(&self, trial: &Path, peer: u16, client: u16) -> Result<Child, DrillError> {
        let log = File::create(trial.join("log")).map_err(DrillError::Files)?;
        let again = log.try_clone().map_err(DrillError::Files)?;
        let [peer, client] = [peer, client].map(|port| format!("https://127.0.0.1:{port}"));
        let mut command = Self::command(&self.node);
        command.args(["--name", "drill", "--data-dir"]).arg(trial.join("data"));
        for (flag, url) in [
            ("--listen-peer-urls", &peer),
            ("--initial-advertise-peer-urls", &peer),
            ("--listen-client-urls", &client),
            ("--advertise-client-urls", &client),
        ] {
            command.args([flag, url]);
        }
        command.args(["--initial-cluster", &format!("drill={peer}")]);
        for prefix in ["", "peer-"] {
            for (flag, file) in
                [("cert-file", CERTIFICATE), ("key-file", KEY), ("trusted-ca-file", CA)]
            {
                command.arg(format!("--{prefix}{flag}")).arg(trial.join(file));
            }
            command.arg(format!("--{prefix}client-cert-auth"));
        }
        let started = command.stdout(log).stderr(again).spawn();
        started.map_err(|error| DrillError::Program(format!("{}: {error}", self.node.display())))
    }
}

/// Copies the snapshot into the trial's folder, where the restoring program finds it.
async fn copy(mut from: File, to: PathBuf) -> Result<(), DrillError> {
    let work = tokio::task::spawn_blocking(move || {
        let mut to = muster_files::data::recreate(&to).map_err(std::io::Error::other)?;
        std::io::copy(&mut from, &mut to).map(drop)
    });
    let panicked = |error| DrillError::Files(std::io::Error::other(error));
    work.await.map_err(panicked)?.map_err(DrillError::Files)
}

/// Waits until the member serves. Returns its revision, and its number of keys unless the cluster
/// has users.
async fn ask(
    cluster: &ClusterApiClient,
    member: &mut Child,
    trial: &Path,
) -> Result<(u64, Option<KeyCount>), DrillError> {
    let log = || last_lines(&std::fs::read_to_string(trial.join("log")).unwrap_or_default());
    let began = Instant::now();
    loop {
        let ended: Option<ExitStatus> = member.try_wait().map_err(DrillError::Files)?;
        if let Some(status) = ended {
            return Err(DrillError::Start(format!("it ended with {status}: {}", log())));
        }
        let why = match cluster.status().await {
            Ok(status) if status.leader.is_some() => match cluster.count_keys().await {
                Ok(counted) => return Ok((counted.revision, Some(counted))),
                // The refusal means that the snapshot's cluster has users. The trial has no
                // password, so it can't count the keys.
                Err(error) if error.refusal().is_some() => return Ok((status.revision, None)),
                Err(error) => error_chain(&error),
            },
            Ok(_) => "it has no leader".to_owned(),
            Err(error) => error_chain(&error),
        };
        if began.elapsed() > START_LIMIT {
            return Err(DrillError::Start(format!("{why}: {}", log())));
        }
        sleep(ASK_INTERVAL).await;
    }
}

/// Stops the member with SIGTERM, and kills it if it hasn't ended after [`STOP_LIMIT`].
async fn stop(mut member: Child) {
    let pid = member.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    if tokio::time::timeout(STOP_LIMIT, member.wait()).await.is_err() {
        let _ = member.kill().await;
    }
}

/// Returns two TCP ports that are free on loopback now.
fn free_ports() -> Result<[u16; 2], DrillError> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(DrillError::Files);
    // Both listeners stay open until both ports are known, so that the ports differ.
    let listeners = [bind()?, bind()?];
    let port = |listener: &TcpListener| listener.local_addr().map(|at| at.port());
    let [first, second] = listeners.each_ref().map(port);
    Ok([first.map_err(DrillError::Files)?, second.map_err(DrillError::Files)?])
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().rev().take(SHOWN_LINES).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("; ")
}

/// File name of the trial's CA certificate, in the trial's folder.
const CA: &str = "ca.crt";
const CERTIFICATE: &str = "trial.crt";
const KEY: &str = "trial.key";

/// One certificate of a CA that exists for this trial alone. The member and its client share it.
struct TrialCertificates;

impl TrialCertificates {
    /// Writes the certificates into the trial's folder, and returns the client's identity.
    fn write(trial: &Path) -> Result<ClientTlsIdentity, DrillError> {
        let failed = |error: rcgen::Error| DrillError::Certificates(error.into());
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let ca = CertifiedIssuer::self_signed(ca, key).map_err(failed)?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let names = vec![Ipv4Addr::LOCALHOST.to_string()];
        let leaf = CertificateParams::new(names).map_err(failed)?;
        let leaf = leaf.signed_by(&key, &ca).map_err(failed)?;
        let secret = zeroize::Zeroizing::new(key.serialize_pem());
        for (file, text) in
            [(CA, ca.pem().as_str()), (CERTIFICATE, leaf.pem().as_str()), (KEY, secret.as_str())]
        {
            let written = muster_files::create(&trial.join(file), text.as_bytes(), 0o600);
            written.map_err(|error| DrillError::Certificates(error.into()))?;
        }
        ClientTlsIdentity::load(&trial.join(CA), &trial.join(CERTIFICATE), &trial.join(KEY))
            .map_err(|error| DrillError::Certificates(error.into()))
    }
}
