//! One member of one program, and what it answers, in a form that can be compared.

use std::fmt::Debug;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::lease_client::LeaseClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{
    AlarmRequest, DefragmentRequest, DowngradeRequest, HashKvRequest, LeaseKeepAliveRequest,
    LeaseKeepAliveResponse, LeaseLeasesRequest, LeaseLeasesResponse, LeaseRevokeRequest,
    LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, MoveLeaderRequest, ResponseHeader,
    StatusRequest, StatusResponse,
};
use tonic::Status;
use tonic::transport::Channel;

use super::requests::{Call, Who};
use super::watches::Watches;
use crate::bench::cluster::free_ports;
use crate::bench::process::Server as Process;
use crate::client::channel;

const START_TIME: Duration = Duration::from_secs(30);
/// What no member is called.
const STRANGER: u64 = 0xfeed;
/// What each server's own id becomes.
const ITSELF: u64 = 1;

/// An answer, or a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) text: String,
    /// The revision in its header, if it has one.
    pub(super) revision: Option<i64>,
    pub(super) is_refusal: bool,
}

pub(super) struct Server {
    kv: KvClient<Channel>,
    lease: LeaseClient<Channel>,
    maintenance: MaintenanceClient<Channel>,
    member: u64,
    pub(super) watches: Watches,
    channel: Channel,
    _process: Process,
}

impl Server {
    /// Starts `program` as a cluster of one in `dir`.
    pub(super) async fn start(name: &'static str, program: &Path, dir: &Path) -> Result<Self> {
        fs_err::create_dir_all(dir)?;
        let ports = free_ports(2)?;
        let (peer, client) =
            (format!("http://127.0.0.1:{}", ports[0]), format!("http://127.0.0.1:{}", ports[1]));
        let args = [
            "--name=one".to_owned(),
            format!("--data-dir={}", dir.join("data").display()),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--initial-cluster=one={peer}"),
        ];
        let process = Process::start(program, &args, &dir.join("log"))?;
        let channel = channel(SocketAddr::from((Ipv4Addr::LOCALHOST, ports[1])), None)?;
        let mut maintenance = MaintenanceClient::new(channel.clone());
        let start = Instant::now();
        let member = loop {
            match maintenance.status(StatusRequest {}).await {
                Ok(status) if status.get_ref().leader != 0 => break status.into_inner().leader,
                _ if start.elapsed() > START_TIME => bail!("{name} does not serve"),
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let watches = Watches::open(channel.clone());
        let kv = KvClient::new(channel.clone());
        let lease = LeaseClient::new(channel.clone());
        Ok(Self { kv, lease, maintenance, member, watches, channel, _process: process })
    }

    /// One wish on a stream of its own, and its answer.
    async fn keep_alive(
        &mut self,
        id: i64,
    ) -> Result<tonic::Response<LeaseKeepAliveResponse>, Status> {
        let wishes = futures_util::stream::iter([LeaseKeepAliveRequest { id }]);
        let mut answers = self.lease.lease_keep_alive(wishes).await?.into_inner();
        let answer = answers.message().await?;
        answer.map(tonic::Response::new).ok_or_else(|| Status::aborted("no answer"))
    }

    fn id(&self, who: Who) -> u64 {
        match who {
            Who::Itself => self.member,
            Who::Nobody => 0,
            Who::Stranger => STRANGER,
        }
    }

    async fn time_to_live(
        &mut self,
        request: LeaseTimeToLiveRequest,
    ) -> Result<tonic::Response<LeaseTimeToLiveResponse>, Status> {
        let mut response = self.lease.lease_time_to_live(request).await?;
        let left = response.get_mut();
        // Seconds pass between the two.
        if left.ttl > (left.granted_ttl - 3_600).max(0) {
            left.ttl = left.granted_ttl;
        }
        left.keys.sort_unstable();
        Ok(response)
    }

    async fn leases(&mut self) -> Result<tonic::Response<LeaseLeasesResponse>, Status> {
        let mut response = self.lease.lease_leases(LeaseLeasesRequest {}).await?;
        // etcd lists them by the time that they have left.
        response.get_mut().leases.sort_unstable_by_key(|lease| lease.id);
        Ok(response)
    }

    /// Asks, and waits for the answer; what watches are told comes by itself.
    pub(super) async fn call(&mut self, call: &Call) -> Result<Answer> {
        let call = call.clone();
        Ok(match call {
            Call::Range(request) => answer(self.kv.range(request).await, |a| &mut a.header),
            Call::Put(request) => answer(self.kv.put(request).await, |a| &mut a.header),
            Call::Delete(request) => answer(self.kv.delete_range(request).await, |a| &mut a.header),
            Call::Txn(request) => answer(self.kv.txn(request).await, |a| &mut a.header),
            Call::Compact(request) => answer(self.kv.compact(request).await, |a| &mut a.header),
            Call::HashKv(revision) => {
                let request = HashKvRequest { revision };
                answer(self.maintenance.hash_kv(request).await, |a| &mut a.header)
            }
            Call::Status => {
                let response = self.maintenance.status(StatusRequest {}).await;
                let member = self.member;
                let response = response.map(|r| r.map(|status| comparable(status, member)));
                answer(response, |a| &mut a.header)
            }
            Call::Alarm { action, who, alarm } => {
                let request = AlarmRequest { action, member_id: self.id(who), alarm };
                let member = self.member;
                let mut response = self.maintenance.alarm(request).await;
                if let Ok(response) = &mut response {
                    let alarms = response.get_mut().alarms.iter_mut();
                    alarms.filter(|a| a.member_id == member).for_each(|a| a.member_id = ITSELF);
                    // As etcd's maps happen to have them.
                    response.get_mut().alarms.sort_unstable_by_key(|a| (a.alarm, a.member_id));
                }
                answer(response, |a| &mut a.header)
            }
            Call::MoveLeader(who) => {
                let request = MoveLeaderRequest { target_id: self.id(who) };
                answer(self.maintenance.move_leader(request).await, |a| &mut a.header)
            }
            Call::Defragment => {
                answer(self.maintenance.defragment(DefragmentRequest {}).await, |a| &mut a.header)
            }
            Call::Downgrade(action, version) => {
                let request = DowngradeRequest { action, version: version.to_owned() };
                answer(self.maintenance.downgrade(request).await, |a| &mut a.header)
            }
            Call::LeaseGrant(request) => {
                answer(self.lease.lease_grant(request).await, |a| &mut a.header)
            }
            Call::LeaseRevoke(id) => {
                let request = LeaseRevokeRequest { id };
                answer(self.lease.lease_revoke(request).await, |a| &mut a.header)
            }
            Call::LeaseKeepAlive(id) => answer(self.keep_alive(id).await, |a| &mut a.header),
            Call::LeaseTimeToLive(request) => {
                answer(self.time_to_live(request).await, |a| &mut a.header)
            }
            Call::LeaseLeases => answer(self.leases().await, |a| &mut a.header),
            Call::Watch(_) | Call::CancelWatch(_) | Call::WatchProgress => {
                self.watches.ask(&call).await?;
                Answer { text: "asked".to_owned(), revision: None, is_refusal: false }
            }
            Call::Reopen => {
                self.watches = Watches::open(self.channel.clone());
                Answer { text: "opened".to_owned(), revision: None, is_refusal: false }
            }
        })
    }
}

/// What can be the same of two members: not ids and terms.
pub(super) fn anonymous(header: &mut Option<ResponseHeader>) -> Option<i64> {
    let header = header.as_mut()?;
    (header.cluster_id, header.member_id, header.raft_term) = (0, 0, 0);
    Some(header.revision)
}

fn answer<T: Debug>(
    response: Result<tonic::Response<T>, Status>,
    header: impl Fn(&mut T) -> &mut Option<ResponseHeader>,
) -> Answer {
    match response {
        Ok(response) => {
            let mut response = response.into_inner();
            let revision = anonymous(header(&mut response));
            Answer { text: format!("{response:?}"), revision, is_refusal: false }
        }
        Err(status) => {
            let text = format!("{:?}: {}", status.code(), status.message());
            Answer { text, revision: None, is_refusal: true }
        }
    }
}

/// Of a status: not versions, sizes and places in the log, which belong to the program. What must
/// hold of them is checked instead. In use are etcd's pages, and here the bytes of the records: none
/// in a store that is empty.
fn comparable(mut status: StatusResponse, member: u64) -> StatusResponse {
    let in_use = status.db_size_in_use;
    let sizes = format!("in use {}", 0 <= in_use && in_use <= status.db_size);
    status.errors.push(sizes);
    let applied = status.raft_applied_index <= status.raft_index;
    status.errors.push(format!("applied {applied}"));
    (status.db_size, status.db_size_in_use) = (0, 0);
    (status.raft_index, status.raft_applied_index, status.raft_term) = (0, 0, 0);
    (status.version, status.storage_version) = (String::new(), String::new());
    if status.leader == member {
        status.leader = ITSELF;
    }
    let own = format!("memberID:{member} ");
    for error in &mut status.errors {
        // How many spaces stand in between depends on how etcd was built, deliberately.
        let words: Vec<&str> = error.split_whitespace().collect();
        *error = format!("{} ", words.join(" ")).replace(&own, "memberID:1 ");
    }
    // etcd lists its alarms as Go's maps happen to have them.
    status.errors.sort_unstable();
    status
}

impl Server {
    /// Waits for the first answer that has a revision.
    pub(super) async fn revision(&mut self) -> Result<i64> {
        let answer = self.call(&Call::Status).await?;
        answer.revision.context("a status has a header")
    }
}
