//! A cluster of members of one server program on loopback, whose members can be added and removed.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use node_proto::etcdserverpb::{
    MemberAddRequest, MemberListRequest, cluster_client::ClusterClient,
};
use rustls::ClientConfig;
use serde::Serialize;
use tonic::transport::Channel;

use super::process::ServerProcess;
use crate::client::{EtcdClient, channel};
use crate::harness::credentials::Credentials;

/// Default number of members.
pub(super) const MEMBERS: usize = 3;
/// Time limit for a cluster to have a leader that all members follow.
const START_TIME: Duration = Duration::from_secs(60);
const CALL_TIME: Duration = Duration::from_secs(2);

/// A server program to measure.
#[derive(Clone, Debug, Serialize)]
pub struct ServerProgram {
    /// Name in tables: `muster-node` or `etcd`.
    pub name: String,
    /// First line of the output of `--version`.
    pub version: String,
    /// Path of the executable.
    pub path: PathBuf,
}

impl ServerProgram {
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

/// Running members of one cluster.
#[derive(Debug)]
pub(super) struct BenchCluster {
    program: ServerProgram,
    tls: Option<Arc<ClientConfig>>,
    /// Auth token that clients send.
    token: Option<String>,
    dir: PathBuf,
    /// Flags that every member is started with.
    flags: Vec<String>,
    members: Vec<BenchMember>,
    /// Number of members that were ever started. New members are named by this number, so that no
    /// name is used twice.
    started_members: usize,
}

/// Name and URLs of a member, whether or not the member has been started.
#[derive(Clone, Debug)]
pub(super) struct MemberAddress {
    pub name: String,
    pub peer_url: String,
    client_url: String,
    client: SocketAddr,
}

impl MemberAddress {
    fn new(number: usize, has_tls: bool, peer: u16, client: u16) -> Self {
        let scheme = if has_tls { "https" } else { "http" };
        let url = |port: u16| format!("{scheme}://{}:{port}", Ipv4Addr::LOCALHOST);
        Self {
            name: format!("n{number}"),
            peer_url: url(peer),
            client_url: url(client),
            client: (Ipv4Addr::LOCALHOST, client).into(),
        }
    }
}

/// Returns the flag `--initial-cluster` for these members.
fn initial_cluster<'a>(places: impl Iterator<Item = &'a MemberAddress>) -> String {
    let all: Vec<String> =
        places.map(|address| format!("{}={}", address.name, address.peer_url)).collect();
    format!("--initial-cluster={}", all.join(","))
}

#[derive(Debug)]
struct BenchMember {
    address: MemberAddress,
    args: Vec<String>,
    log: PathBuf,
    server: ServerProcess,
}

impl BenchCluster {
    /// Starts `size` members in `dir`, and waits until all of them follow one leader.
    pub(super) async fn start(
        program: &ServerProgram,
        dir: &Path,
        size: usize,
        credentials: Option<&Credentials>,
        flags: &[&str],
    ) -> Result<Self> {
        fs_err::create_dir_all(dir)?;
        let ports = free_ports(2 * size)?;
        let places: Vec<MemberAddress> = (0..size)
            .map(|n| MemberAddress::new(n, credentials.is_some(), ports[n], ports[size + n]))
            .collect();
        let initial = initial_cluster(places.iter());
        let mut all = credentials.map(Credentials::mutual_flags).unwrap_or_default();
        all.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let members = places.into_iter().map(|address| {
            let given = all.iter().chain([&initial]).cloned();
            BenchMember::start(program, dir, address, given)
        });
        let mut cluster = Self {
            members: members.collect::<Result<_>>()?,
            program: program.clone(),
            tls: credentials.map(|credentials| Arc::clone(&credentials.client)),
            token: None,
            dir: dir.to_owned(),
            flags: all,
            started_members: size,
        };
        cluster.wait_settled().await?;
        Ok(cluster)
    }

    pub(super) fn name(&self) -> &str {
        &self.program.name
    }

    /// Returns a client of member `n`, with a connection of its own.
    pub(super) fn client(&self, n: usize) -> Result<EtcdClient> {
        let client = EtcdClient::new(self.members[n].address.client, self.tls.clone())?;
        Ok(client.with_token(self.token.clone()))
    }

    /// Sets the token of all clients that are created from now on.
    pub(super) fn set_token(&mut self, token: Option<String>) {
        self.token = token;
    }

    /// Returns a connection to member `n`.
    pub(super) fn channel(&self, n: usize) -> Result<Channel> {
        channel(self.members[n].address.client, self.tls.clone())
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns the index of the leader. Fails if the members don't agree on one.
    pub(super) async fn leader(&self) -> Result<usize> {
        let mut statuses = Vec::new();
        for n in 0..self.len() {
            let status = self.client(n)?.status(CALL_TIME).await?;
            let own = status.header.context("a header")?.member_id;
            statuses.push((own, status.leader));
        }
        let leader = statuses[0].1;
        if leader == 0 || statuses.iter().any(|(_, other)| *other != leader) {
            bail!("the members do not agree on a leader");
        }
        statuses.iter().position(|(own, _)| *own == leader).context("the leader is a member")
    }

    /// Waits until all members follow one leader and have applied the same revision. Returns the
    /// leader's index.
    pub(super) async fn wait_settled(&mut self) -> Result<usize> {
        let start = Instant::now();
        loop {
            for member in &mut self.members {
                if let Some(end) = member.exit_report()? {
                    bail!("{} {end}", self.program.name);
                }
            }
            let last = match (self.leader().await, self.have_same_revision().await) {
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

    async fn have_same_revision(&self) -> Result<bool> {
        let mut revisions = Vec::new();
        for n in 0..self.len() {
            let status = self.client(n)?.status(CALL_TIME).await?;
            revisions.push(status.header.context("a header")?.revision);
        }
        Ok(revisions.iter().all(|revision| *revision == revisions[0]))
    }

    /// Returns a client of the Cluster API of member `n`.
    pub(super) fn api(&self, n: usize) -> Result<ClusterClient<Channel>> {
        Ok(ClusterClient::new(self.channel(n)?))
    }

    /// Returns the id of member `n`.
    pub(super) async fn id(&self, n: usize) -> Result<u64> {
        let status = self.client(n)?.status(CALL_TIME).await?;
        Ok(status.header.context("a header")?.member_id)
    }

    /// Adds a learner through member `via`, starts it as the last of `members`, and returns its
    /// id.
    pub(super) async fn join(&mut self, via: usize) -> Result<u64> {
        let address = self.next_address()?;
        let peer_ur_ls = vec![address.peer_url.clone()];
        let request = MemberAddRequest { peer_ur_ls, is_learner: true };
        let added = self.api(via)?.member_add(request).await?.into_inner();
        self.start_joiner(address)?;
        Ok(added.member.context("the new member")?.id)
    }

    /// Chooses name and ports of the next member, without starting it.
    pub(super) fn next_address(&self) -> Result<MemberAddress> {
        let ports = free_ports(2)?;
        Ok(MemberAddress::new(self.started_members, self.tls.is_some(), ports[0], ports[1]))
    }

    /// Starts a member that the cluster has added, as the last of `members`.
    pub(super) fn start_joiner(&mut self, address: MemberAddress) -> Result<()> {
        let all = self.members.iter().map(|member| &member.address).chain([&address]);
        let initial = ["--initial-cluster-state=existing".to_owned(), initial_cluster(all)];
        let flags = self.flags.iter().cloned().chain(initial);
        self.members.push(BenchMember::start(&self.program, &self.dir, address, flags)?);
        self.started_members += 1;
        Ok(())
    }

    /// Whether member `via` lists a member with the peer URL of `address`.
    pub(super) async fn lists(&self, via: usize, address: &MemberAddress) -> Result<bool> {
        let request = MemberListRequest { linearizable: false };
        let list = self.api(via)?.member_list(request).await?.into_inner();
        Ok(list.members.iter().any(|member| member.peer_ur_ls.contains(&address.peer_url)))
    }

    /// Restarts the newest member if it has exited, as a supervisor would. A new member that runs
    /// stock etcd asks another member, and exits if that one has not applied the addition yet.
    pub(super) fn restart_newest_if_ended(&mut self) -> Result<()> {
        let newest = self.len() - 1;
        if self.members[newest].exit_report()?.is_some() {
            self.restart(newest)?;
        }
        Ok(())
    }

    /// Returns the client URLs of all members, separated by commas as for `--endpoints`.
    pub(super) fn endpoints(&self) -> String {
        let urls: Vec<&str> =
            self.members.iter().map(|member| &*member.address.client_url).collect();
        urls.join(",")
    }

    /// Kills member `n` and deletes its data.
    pub(super) fn kill_and_delete(&mut self, n: usize) -> Result<()> {
        let member = self.members.remove(n);
        drop(member.server);
        fs_err::remove_dir_all(self.dir.join(member.address.name))?;
        Ok(())
    }

    /// Returns the peak resident memory of member `n`.
    pub(super) fn peak_bytes(&self, n: usize) -> Result<u64> {
        self.members[n].server.peak_bytes()
    }

    /// Returns the CPU time that member `n` has used.
    pub(super) fn cpu_of(&self, n: usize) -> Result<Duration> {
        self.members[n].server.cpu()
    }

    /// Returns the current resident memory of member `n`.
    pub(super) fn resident_bytes_of(&self, n: usize) -> Result<u64> {
        self.members[n].server.resident_bytes()
    }

    pub(super) fn kill(&mut self, n: usize) -> Result<()> {
        self.members[n].server.kill()
    }

    pub(super) fn restart(&mut self, n: usize) -> Result<()> {
        let member = &mut self.members[n];
        member.server = ServerProcess::start(&self.program.path, &member.args, &member.log)?;
        Ok(())
    }

    /// Returns the CPU time that all members have used together.
    pub(super) fn cpu(&self) -> Result<Duration> {
        self.members.iter().map(|member| member.server.cpu()).sum()
    }

    /// Returns the number of context switches of all members' threads so far.
    pub(super) fn context_switches(&self) -> Result<u64> {
        self.members.iter().map(|member| member.server.context_switches()).sum()
    }

    /// Returns the resident memory of each member, largest first.
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

impl BenchMember {
    /// Returns exit status and last log line, if the process has exited.
    fn exit_report(&mut self) -> Result<Option<String>> {
        let Some(status) = self.server.exit_status()? else { return Ok(None) };
        let log = fs_err::read_to_string(&self.log).unwrap_or_default();
        let last = log.lines().last().unwrap_or("it said nothing");
        Ok(Some(format!("ended with {status}: {last}")))
    }

    fn start(
        program: &ServerProgram,
        dir: &Path,
        address: MemberAddress,
        flags: impl Iterator<Item = String>,
    ) -> Result<Self> {
        let MemberAddress { name, peer_url, client_url, .. } = &address;
        let mut args = vec![
            format!("--name={name}"),
            format!("--data-dir={}", dir.join(name).display()),
            format!("--listen-peer-urls={peer_url}"),
            format!("--initial-advertise-peer-urls={peer_url}"),
            format!("--listen-client-urls={client_url}"),
            format!("--advertise-client-urls={client_url}"),
        ];
        args.extend(flags);
        let log = dir.join(format!("{name}.log"));
        let server = ServerProcess::start(&program.path, &args, &log)?;
        Ok(Self { address, args, log, server })
    }
}

/// Returns ports that are free now. All are bound at the same time, so that they differ.
pub(crate) fn free_ports(count: usize) -> Result<Vec<u16>> {
    let listeners = (0..count)
        .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .collect::<std::io::Result<Vec<_>>>()?;
    Ok(listeners
        .iter()
        .map(|l| l.local_addr().map(|a| a.port()))
        .collect::<std::io::Result<Vec<_>>>()?)
}
