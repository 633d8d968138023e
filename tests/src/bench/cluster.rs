//! Three members of one program on loopback.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustls::ClientConfig;
use serde::Serialize;

use super::{process::Server, tls::Credentials};
use crate::client::Client;

const MEMBERS: usize = 3;
/// How long a cluster may take to have a leader that everybody follows.
const START_TIME: Duration = Duration::from_secs(60);
const CALL_TIME: Duration = Duration::from_secs(2);

/// A server program.
#[derive(Clone, Debug, Serialize)]
pub struct Program {
    /// What it is called in tables.
    pub name: String,
    /// The first line of its `--version`.
    pub version: String,
    /// Where it is.
    pub path: PathBuf,
}

impl Program {
    /// Asks the program at `path` for its version.
    pub(super) async fn find(name: &str, path: PathBuf) -> Result<Self> {
        let output = tokio::process::Command::new(&path)
            .arg("--version")
            .output()
            .await
            .with_context(|| format!("run {}", path.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.lines().next().context("a version")?.to_owned();
        Ok(Self { name: name.to_owned(), version, path })
    }
}

/// Three running members.
#[derive(Debug)]
pub(super) struct Cluster {
    program: Program,
    tls: Option<Arc<ClientConfig>>,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    args: Vec<String>,
    log: PathBuf,
    client: SocketAddr,
    server: Server,
}

impl Cluster {
    /// Starts three members in `dir` and waits until all of them follow one leader.
    pub(super) async fn start(
        program: &Program,
        dir: &Path,
        credentials: Option<&Credentials>,
    ) -> Result<Self> {
        fs_err::create_dir_all(dir)?;
        let ports = free_ports(2 * MEMBERS)?;
        let scheme = if credentials.is_some() { "https" } else { "http" };
        let url = |port: u16| format!("{scheme}://127.0.0.1:{port}");
        let initial: Vec<String> =
            (0..MEMBERS).map(|n| format!("n{n}={}", url(ports[n]))).collect();
        let mut members = Vec::new();
        for n in 0..MEMBERS {
            let (peer, client) = (url(ports[n]), url(ports[MEMBERS + n]));
            let mut args = vec![
                format!("--name=n{n}"),
                format!("--data-dir={}", dir.join(format!("n{n}")).display()),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
                format!("--listen-client-urls={client}"),
                format!("--advertise-client-urls={client}"),
                format!("--initial-cluster={}", initial.join(",")),
            ];
            args.extend(credentials.map(Credentials::flags).unwrap_or_default());
            let log = dir.join(format!("n{n}.log"));
            let server = Server::start(&program.path, &args, &log)?;
            let client = SocketAddr::from((Ipv4Addr::LOCALHOST, ports[MEMBERS + n]));
            members.push(Member { args, log, client, server });
        }
        let tls = credentials.map(|credentials| Arc::clone(&credentials.client));
        let mut cluster = Self { program: program.clone(), tls, members };
        cluster.settled().await?;
        Ok(cluster)
    }

    pub(super) fn name(&self) -> &str {
        &self.program.name
    }

    /// A client of member `n`, on a connection of its own.
    pub(super) fn client(&self, n: usize) -> Result<Client> {
        Client::new(self.members[n].client, self.tls.clone())
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Which member leads, if the members agree.
    pub(super) async fn leader(&self) -> Result<usize> {
        let mut seen = Vec::new();
        for n in 0..self.len() {
            let status = self.client(n)?.status(CALL_TIME).await?;
            let own = status.header.context("a header")?.member_id;
            seen.push((own, status.leader));
        }
        let leader = seen[0].1;
        if leader == 0 || seen.iter().any(|(_, other)| *other != leader) {
            bail!("the members do not agree on a leader");
        }
        seen.iter().position(|(own, _)| *own == leader).context("the leader is a member")
    }

    /// Waits until all members follow one leader and have applied the same; which one leads.
    pub(super) async fn settled(&mut self) -> Result<usize> {
        let start = Instant::now();
        loop {
            for member in &mut self.members {
                if let Some(status) = member.server.ended()? {
                    let log = fs_err::read_to_string(&member.log).unwrap_or_default();
                    let last = log.lines().last().unwrap_or("it said nothing");
                    bail!("{} ended with {status}: {last}", self.program.name);
                }
            }
            let last = match (self.leader().await, self.level().await) {
                (Ok(leader), Ok(true)) => return Ok(leader),
                (Err(error), _) | (_, Err(error)) => error,
                (Ok(_), Ok(false)) => anyhow::anyhow!("a member is still behind"),
            };
            if start.elapsed() > START_TIME {
                let name = &self.program.name;
                return Err(last.context(format!("{name} did not settle within {START_TIME:?}")));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn level(&self) -> Result<bool> {
        let mut revisions = Vec::new();
        for n in 0..self.len() {
            let status = self.client(n)?.status(CALL_TIME).await?;
            revisions.push(status.header.context("a header")?.revision);
        }
        Ok(revisions.iter().all(|revision| *revision == revisions[0]))
    }

    pub(super) fn kill(&mut self, n: usize) -> Result<()> {
        self.members[n].server.kill()
    }

    pub(super) fn restart(&mut self, n: usize) -> Result<()> {
        let member = &mut self.members[n];
        member.server = Server::start(&self.program.path, &member.args, &member.log)?;
        Ok(())
    }

    /// What the three have used together.
    pub(super) fn cpu(&self) -> Result<Duration> {
        self.members.iter().map(|member| member.server.cpu()).sum()
    }

    /// Of each member, largest first.
    pub(super) fn resident_bytes(&self) -> Result<Vec<u64>> {
        let mut all = self
            .members
            .iter()
            .map(|member| member.server.resident_bytes())
            .collect::<Result<Vec<_>>>()?;
        all.sort_unstable_by(|a, b| b.cmp(a));
        Ok(all)
    }
}

/// Ports that were free a moment ago: held together, so that they differ.
pub(crate) fn free_ports(count: usize) -> Result<Vec<u16>> {
    let held = (0..count)
        .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .collect::<std::io::Result<Vec<_>>>()?;
    Ok(held
        .iter()
        .map(|l| l.local_addr().map(|a| a.port()))
        .collect::<std::io::Result<Vec<_>>>()?)
}
