//! A cluster of one of the two programs, whose answers are converted into a comparable form.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use node_proto::etcdserverpb::cluster_client::ClusterClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{
    Member, MemberAddRequest, MemberListRequest, MemberPromoteRequest, MemberRemoveRequest,
    MemberUpdateRequest, StatusRequest,
};
use tonic::transport::Channel;

use super::requests::{ExpectedCluster, MAX_MEMBERS, MemberCall, MemberReference, MemberUrl};
use super::until;
use crate::bench::cluster::free_ports;
use crate::bench::process::ServerProcess as Process;
use crate::client::channel;

/// Member id that no member has.
const UNKNOWN_ID: u64 = 0xfeed;

/// A cluster's answer, in a comparable form.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) is_refusal: bool,
}

/// Addresses of a member for peers and for clients, and the channel to it.
struct MemberEndpoint {
    peers: String,
    clients: String,
    channel: Channel,
}

pub(super) struct ClusterUnderTest {
    program: PathBuf,
    dir: PathBuf,
    endpoints: Vec<MemberEndpoint>,
    /// Ids of the members, in the order of addition.
    ids: Vec<u64>,
    processes: BTreeMap<usize, Process>,
}

impl ClusterUnderTest {
    /// Starts a cluster of `members` members, and waits until all of them answer.
    pub(super) async fn start(program: &Path, dir: &Path, members: usize) -> Result<Self> {
        fs_err::create_dir_all(dir)?;
        let ports = free_ports(2 * MAX_MEMBERS)?;
        let place = |ports: &[u16]| {
            let url = |port| format!("http://127.0.0.1:{port}");
            let channel = channel(SocketAddr::from((Ipv4Addr::LOCALHOST, ports[1])), None)?;
            Ok(MemberEndpoint { peers: url(ports[0]), clients: url(ports[1]), channel })
        };
        let endpoints = ports.chunks(2).map(place).collect::<Result<Vec<_>>>()?;
        let (program, dir) = (program.to_owned(), dir.to_owned());
        let mut cluster =
            Self { program, dir, endpoints, ids: Vec::new(), processes: BTreeMap::new() };
        let all: Vec<_> =
            (0..members).map(|n| format!("m{n}={}", cluster.endpoints[n].peers)).collect();
        for number in 0..members {
            cluster.run(number, "new", &all.join(","))?;
        }
        cluster.ids = until(async || {
            let list = cluster.list(0, true).await.unwrap_or_default();
            let id = |n: usize| list.iter().find(|m| m.name == format!("m{n}")).map(|m| m.id);
            Ok((0..members).map(id).collect::<Option<Vec<_>>>())
        })
        .await?;
        cluster.settle(&ExpectedCluster::new(members, true)).await?;
        Ok(cluster)
    }

    fn run(&mut self, number: usize, state: &str, cluster: &str) -> Result<()> {
        let MemberEndpoint { peers, clients, .. } = &self.endpoints[number];
        let args = [
            format!("--name=m{number}"),
            format!("--data-dir={}", self.dir.join(format!("m{number}")).display()),
            format!("--listen-peer-urls={peers}"),
            format!("--initial-advertise-peer-urls={peers}"),
            format!("--listen-client-urls={clients}"),
            format!("--advertise-client-urls={clients}"),
            format!("--initial-cluster={cluster}"),
            format!("--initial-cluster-state={state}"),
        ];
        let log = self.dir.join(format!("m{number}.log"));
        let process = Process::start(&self.program, &args, &log)?;
        self.processes.insert(number, process);
        Ok(())
    }

    /// Starts an added member, with the URLs of all present members; their names in that list don't
    /// matter.
    fn join(&mut self, number: usize, known: &ExpectedCluster) -> Result<()> {
        let mut cluster = Vec::new();
        for other in known.numbers_where(|member| !member.is_gone) {
            for url in &known.members[other].urls {
                cluster.push(format!("m{other}={}", self.url(*url)));
            }
        }
        self.run(number, "existing", &cluster.join(","))
    }

    fn cluster(&self, at: usize) -> ClusterClient<Channel> {
        ClusterClient::new(self.endpoints[at].channel.clone())
    }

    async fn list(&self, at: usize, linearizable: bool) -> Result<Vec<Member>> {
        let list = self.cluster(at).member_list(MemberListRequest { linearizable }).await?;
        Ok(list.into_inner().members)
    }

    fn id(&self, who: MemberReference) -> u64 {
        match who {
            MemberReference::Member(number) => self.ids[number],
            MemberReference::ZeroId => 0,
            MemberReference::UnknownId => UNKNOWN_ID,
        }
    }

    fn url(&self, url: MemberUrl) -> String {
        match url {
            MemberUrl::OfMember(number) => self.endpoints[number].peers.clone(),
            MemberUrl::Unused(number) => format!("http://127.9.9.{number}:1"),
            MemberUrl::Literal(text) => text.to_owned(),
        }
    }

    fn urls(&self, urls: &[MemberUrl]) -> Vec<String> {
        urls.iter().map(|url| self.url(*url)).collect()
    }

    /// Sends the request, or starts or stops the member that `call` names.
    pub(super) async fn call(
        &mut self,
        call: &MemberCall,
        known: &ExpectedCluster,
    ) -> Result<Answer> {
        let (added, members) = match call {
            MemberCall::Add { urls, is_learner, at } => {
                let request =
                    MemberAddRequest { peer_ur_ls: self.urls(urls), is_learner: *is_learner };
                match self.cluster(*at).member_add(request).await {
                    Ok(answer) => {
                        let answer = answer.into_inner();
                        let added = answer.member.context("the answer has the added member")?;
                        self.ids.push(added.id);
                        (Some(added), Ok(answer.members))
                    }
                    Err(status) => (None, Err(status)),
                }
            }
            MemberCall::Promote { who, at } => {
                let request = MemberPromoteRequest { id: self.id(*who) };
                let answer = self.cluster(*at).member_promote(request).await;
                (None, answer.map(|answer| answer.into_inner().members))
            }
            MemberCall::Update { who, urls, at } => {
                let request =
                    MemberUpdateRequest { id: self.id(*who), peer_ur_ls: self.urls(urls) };
                let answer = self.cluster(*at).member_update(request).await;
                (None, answer.map(|answer| answer.into_inner().members))
            }
            MemberCall::Remove { who, at } => {
                let request = MemberRemoveRequest { id: self.id(*who) };
                let answer = self.cluster(*at).member_remove(request).await;
                (None, answer.map(|answer| answer.into_inner().members))
            }
            MemberCall::List { linearizable, at } => {
                let request = MemberListRequest { linearizable: *linearizable };
                let answer = self.cluster(*at).member_list(request).await;
                (None, answer.map(|answer| answer.into_inner().members))
            }
            MemberCall::Start(number) => {
                self.join(*number, known)?;
                (None, Ok(Vec::new()))
            }
            MemberCall::Stop(number) => {
                self.processes.remove(number);
                (None, Ok(Vec::new()))
            }
        };
        Ok(match members {
            Ok(members) => {
                let added = added.map(|member| self.describe_member(&member));
                let mut members_text: Vec<_> =
                    members.iter().map(|member| self.describe_member(member)).collect();
                members_text.sort_unstable();
                Answer { text: format!("{added:?} {members_text:?}"), is_refusal: false }
            }
            Err(status) => {
                let text = format!("{:?}: {}", status.code(), status.message());
                Answer { text, is_refusal: true }
            }
        })
    }

    /// Formats a member without the values that differ between the two programs.
    fn describe_member(&self, member: &Member) -> String {
        let Member { id, name, peer_ur_ls, client_ur_ls, is_learner } = member;
        let number = self.ids.iter().position(|known| known == id);
        let masked = |urls: &[String]| {
            let mask = |url: &String| {
                let place = self.endpoints.iter().enumerate();
                let mut named = place.filter_map(|(n, place)| match url {
                    url if *url == place.peers => Some(format!("peers {n}")),
                    url if *url == place.clients => Some(format!("clients {n}")),
                    _ => None,
                });
                named.next_back().unwrap_or_else(|| url.clone())
            };
            urls.iter().map(mask).collect::<Vec<_>>()
        };
        let (peers, clients) = (masked(peer_ur_ls), masked(client_ur_ls));
        format!("{number:?} {name} {peers:?} {clients:?} learner {is_learner}")
    }

    /// Waits until the process of a removed member has ended.
    pub(super) async fn wait_for_end(&mut self, number: usize) -> Result<()> {
        let mut process = self.processes.remove(&number).context("the removed member runs")?;
        until(async || process.exit_status()).await?;
        Ok(())
    }

    /// Waits until every running member knows the leader and has applied as much as any voter.
    /// Voters must also know all members and the client URLs of the running ones.
    pub(super) async fn settle(&mut self, known: &ExpectedCluster) -> Result<()> {
        let mut highest_applied = 0;
        for number in known.numbers_where(|member| member.runs && !member.is_learner) {
            until(async || {
                self.check_running(number)?;
                let Some((leader, applied)) = self.status(number).await else { return Ok(None) };
                let leads = known.numbers_where(|member| member.runs && !member.is_learner);
                let is_known = leads.iter().any(|number| self.ids[*number] == leader);
                highest_applied = highest_applied.max(applied);
                Ok((is_known && self.knows_all_members(number, known).await?).then_some(()))
            })
            .await?;
        }
        for number in known.numbers_where(|member| member.runs) {
            until(async || {
                self.check_running(number)?;
                let status = self.status(number).await;
                Ok(status.filter(|(leader, applied)| *leader != 0 && *applied >= highest_applied))
            })
            .await?;
        }
        Ok(())
    }

    fn check_running(&mut self, number: usize) -> Result<()> {
        let process = self.processes.get_mut(&number).context("the member runs")?;
        ensure!(process.exit_status()?.is_none(), "member {number} ended: {}", self.dir.display());
        Ok(())
    }

    /// Returns the leader that a member knows, and its applied index.
    async fn status(&self, number: usize) -> Option<(u64, u64)> {
        let mut maintenance = MaintenanceClient::new(self.endpoints[number].channel.clone());
        let status = maintenance.status(StatusRequest {}).await.ok()?.into_inner();
        Some((status.leader, status.raft_applied_index))
    }

    async fn knows_all_members(&self, number: usize, known: &ExpectedCluster) -> Result<bool> {
        let Ok(list) = self.list(number, false).await else { return Ok(false) };
        let all = known.numbers_where(|member| !member.is_gone);
        let is_known = |number: &usize| {
            let (id, wanted) = (self.ids[*number], &known.members[*number]);
            list.iter().any(|member| {
                member.id == id
                    && member.is_learner == wanted.is_learner
                    && member.peer_ur_ls.len() == wanted.urls.len()
                    && (!wanted.runs || !member.client_ur_ls.is_empty())
            })
        };
        Ok(list.len() == all.len() && all.iter().all(is_known))
    }
}
