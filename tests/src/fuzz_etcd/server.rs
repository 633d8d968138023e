//! One server under test, a single-member cluster, whose answers are converted into a comparable
//! form.

mod auth;
mod concurrency;

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
    LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, MoveLeaderRequest, RangeRequest,
    ResponseHeader, StatusRequest, StatusResponse,
};
use node_proto::mvccpb::KeyValue;
use tonic::metadata::AsciiMetadataValue;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

use self::auth::auth;
pub(super) use self::concurrency::send_concurrency_call;
use super::pending_calls::PendingCalls;
use super::requests::{CallWithToken, EtcdCall, MemberChoice, TokenChoice};
use super::users::TOKENS;
use super::watches::WatchConnection;
use crate::bench::cluster::free_ports;
use crate::bench::process::ServerProcess as Process;
use crate::client::channel;

const START_TIME: Duration = Duration::from_secs(30);
/// Member id that no member has.
const UNKNOWN_ID: u64 = 0xfeed;
/// Value that replaces each server's own member id.
const MASKED_ID: u64 = 1;

/// A token that was never issued.
const INVALID_TOKEN: &str = "abcdefghijklmnop.1";
/// Lifetime of tokens in seconds, longer than any run.
const TOKEN_SECONDS: u64 = 100_000;

/// Channel to the server that may attach a token.
pub(super) type TokenChannel = InterceptedService<Channel, TokenInterceptor>;

/// Interceptor that attaches a token to each request.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenInterceptor(Option<AsciiMetadataValue>);

impl Interceptor for TokenInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("token", token.clone());
        }
        Ok(request)
    }
}

/// An answer or a refusal, in a comparable form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) text: String,
    /// Revision in the answer's header, if it has one.
    pub(super) revision: Option<i64>,
    pub(super) is_refusal: bool,
}

impl Answer {
    fn success(text: &str) -> Self {
        Self { text: text.to_owned(), revision: None, is_refusal: false }
    }
}

pub(super) struct ServerUnderTest {
    member: u64,
    pub(super) watches: WatchConnection,
    pub(super) pending_calls: PendingCalls,
    /// Tokens that this server has issued, by the slots that requests name.
    tokens: [Option<AsciiMetadataValue>; TOKENS],
    channel: Channel,
    _process: Process,
}

impl ServerUnderTest {
    /// Starts `program` as a single-member cluster in `dir`.
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
            // The cost of password hashes is the lowest possible one, because many requests check a
            // password.
            "--bcrypt-cost=4".to_owned(),
            format!("--auth-token-ttl={TOKEN_SECONDS}"),
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
        let watches =
            WatchConnection::open(TokenChannel::new(channel.clone(), TokenInterceptor(None)));
        let (pending_calls, tokens) = (PendingCalls::default(), Default::default());
        Ok(Self { member, watches, pending_calls, tokens, channel, _process: process })
    }

    fn service(&self, by: TokenChoice) -> TokenChannel {
        let token = match by {
            TokenChoice::NoToken => None,
            TokenChoice::Invalid => Some(AsciiMetadataValue::from_static(INVALID_TOKEN)),
            TokenChoice::Stored(place) => self.tokens[place].clone(),
        };
        TokenChannel::new(self.channel.clone(), TokenInterceptor(token))
    }

    fn id(&self, who: MemberChoice) -> u64 {
        match who {
            MemberChoice::Own => self.member,
            MemberChoice::Zero => 0,
            MemberChoice::Unknown => UNKNOWN_ID,
        }
    }

    /// Returns all keys and the revision they were read at, as an unauthenticated caller.
    pub(super) async fn keys(&self) -> Result<(i64, Vec<KeyValue>)> {
        let (key, range_end) = (vec![0].into(), vec![0].into());
        let all = RangeRequest { key, range_end, ..RangeRequest::default() };
        let found =
            KvClient::new(self.service(TokenChoice::NoToken)).range(all).await?.into_inner();
        Ok((found.header.context("an answer has a header")?.revision, found.kvs))
    }

    async fn status(&self, mut maintenance: MaintenanceClient<TokenChannel>) -> Answer {
        let response = maintenance.status(StatusRequest {}).await;
        let response = response.map(|r| r.map(|status| comparable_status(status, self.member)));
        answer(response, |a| &mut a.header)
    }

    async fn alarm(
        &self,
        mut maintenance: MaintenanceClient<TokenChannel>,
        request: AlarmRequest,
    ) -> Answer {
        let mut response = maintenance.alarm(request).await;
        if let Ok(response) = &mut response {
            let alarms = response.get_mut().alarms.iter_mut();
            alarms.filter(|a| a.member_id == self.member).for_each(|a| a.member_id = MASKED_ID);
            // etcd lists alarms in the order of a Go map, which is random.
            response.get_mut().alarms.sort_unstable_by_key(|a| (a.alarm, a.member_id));
        }
        answer(response, |a| &mut a.header)
    }

    /// Sends the request and waits for its answer. Watch events arrive separately.
    pub(super) async fn call(&mut self, call_with_token: &CallWithToken) -> Result<Answer> {
        let service = self.service(call_with_token.token);
        let mut kv = KvClient::new(service.clone());
        let mut lease = LeaseClient::new(service.clone());
        let mut maintenance = MaintenanceClient::new(service.clone());
        let call = call_with_token.call.clone();
        Ok(match call {
            EtcdCall::Range(request) => answer(kv.range(request).await, |a| &mut a.header),
            EtcdCall::Put(request) => answer(kv.put(request).await, |a| &mut a.header),
            EtcdCall::Delete(request) => answer(kv.delete_range(request).await, |a| &mut a.header),
            EtcdCall::Txn(request) => answer(kv.txn(request).await, |a| &mut a.header),
            EtcdCall::Compact(request) => answer(kv.compact(request).await, |a| &mut a.header),
            EtcdCall::HashKv(revision) => {
                let request = HashKvRequest { revision };
                answer(maintenance.hash_kv(request).await, |a| &mut a.header)
            }
            EtcdCall::Status => self.status(maintenance).await,
            EtcdCall::Alarm { action, who, alarm } => {
                let request = AlarmRequest { action, member_id: self.id(who), alarm };
                self.alarm(maintenance, request).await
            }
            EtcdCall::MoveLeader(who) => {
                let request = MoveLeaderRequest { target_id: self.id(who) };
                answer(maintenance.move_leader(request).await, |a| &mut a.header)
            }
            EtcdCall::Defragment => {
                answer(maintenance.defragment(DefragmentRequest {}).await, |a| &mut a.header)
            }
            EtcdCall::Downgrade(action, version) => {
                let request = DowngradeRequest { action, version: version.to_owned() };
                answer(maintenance.downgrade(request).await, |a| &mut a.header)
            }
            EtcdCall::LeaseGrant(request) => {
                answer(lease.lease_grant(request).await, |a| &mut a.header)
            }
            EtcdCall::LeaseRevoke(id) => {
                let request = LeaseRevokeRequest { id };
                answer(lease.lease_revoke(request).await, |a| &mut a.header)
            }
            EtcdCall::LeaseKeepAlive(id) => answer(keep_alive(lease, id).await, |a| &mut a.header),
            EtcdCall::LeaseTimeToLive(request) => {
                answer(time_to_live(lease, request).await, |a| &mut a.header)
            }
            EtcdCall::LeaseLeases => answer(leases(lease).await, |a| &mut a.header),
            EtcdCall::Watch(_) | EtcdCall::CancelWatch(_) | EtcdCall::WatchProgress => {
                self.watches.send_and_wait(&call).await?;
                Answer::success("asked")
            }
            EtcdCall::Reopen => {
                self.watches = WatchConnection::open(service);
                Answer::success("opened")
            }
            EtcdCall::Auth(call) => auth(call, service, &mut self.tokens).await,
            EtcdCall::Concurrency(call) => send_concurrency_call(call, service).await,
            EtcdCall::Begin(number, call) => {
                self.pending_calls.begin(number, call, service);
                Answer::success("begun")
            }
            EtcdCall::Observe(number, name) => {
                self.pending_calls.observe(number, name, service);
                Answer::success("begun")
            }
            EtcdCall::Abandon(number) => {
                self.pending_calls.abandon(number);
                Answer::success("abandoned")
            }
        })
    }
}

/// Clears the header fields that differ between two clusters: ids and terms. Returns the header's
/// revision.
pub(super) fn anonymise_header(header: &mut Option<ResponseHeader>) -> Option<i64> {
    let header = header.as_mut()?;
    (header.cluster_id, header.member_id, header.raft_term) = (0, 0, 0);
    Some(header.revision)
}

/// Sends one keep-alive request on a stream of its own, and returns the answer.
async fn keep_alive(
    mut lease: LeaseClient<TokenChannel>,
    id: i64,
) -> Result<tonic::Response<LeaseKeepAliveResponse>, Status> {
    let requests = futures_util::stream::iter([LeaseKeepAliveRequest { id }]);
    let mut answers = lease.lease_keep_alive(requests).await?.into_inner();
    let answer = answers.message().await?;
    answer.map(tonic::Response::new).ok_or_else(|| Status::aborted("no answer"))
}

async fn time_to_live(
    mut lease: LeaseClient<TokenChannel>,
    request: LeaseTimeToLiveRequest,
) -> Result<tonic::Response<LeaseTimeToLiveResponse>, Status> {
    let mut response = lease.lease_time_to_live(request).await?;
    let left = response.get_mut();
    // The two servers are asked at slightly different times, so a remaining TTL that is close to
    // the granted one counts as equal to it.
    if left.ttl > (left.granted_ttl - 3_600).max(0) {
        left.ttl = left.granted_ttl;
    }
    left.keys.sort_unstable();
    Ok(response)
}

async fn leases(
    mut lease: LeaseClient<TokenChannel>,
) -> Result<tonic::Response<LeaseLeasesResponse>, Status> {
    let mut response = lease.lease_leases(LeaseLeasesRequest {}).await?;
    // etcd lists leases by their remaining time, so they are sorted by id for the comparison.
    response.get_mut().leases.sort_unstable_by_key(|lease| lease.id);
    Ok(response)
}

pub(super) fn answer<T: Debug>(
    response: Result<tonic::Response<T>, Status>,
    header: impl Fn(&mut T) -> &mut Option<ResponseHeader>,
) -> Answer {
    match response {
        Ok(response) => {
            let mut response = response.into_inner();
            let revision = anonymise_header(header(&mut response));
            Answer { text: format!("{response:?}"), revision, is_refusal: false }
        }
        Err(status) => {
            let text = format!("{:?}: {}", status.code(), status.message());
            Answer { text, revision: None, is_refusal: true }
        }
    }
}

/// Replaces the values of a status that depend on the program: versions, sizes, log indexes and the
/// term. Adds whether the sizes and the indexes are consistent. In etcd the size in use counts
/// pages. In `muster-node` it counts bytes of records, so an empty store uses none.
fn comparable_status(mut status: StatusResponse, member: u64) -> StatusResponse {
    let bytes_in_use = status.db_size_in_use;
    let sizes = format!("in use {}", 0 <= bytes_in_use && bytes_in_use <= status.db_size);
    status.errors.push(sizes);
    let applied = status.raft_applied_index <= status.raft_index;
    status.errors.push(format!("applied {applied}"));
    (status.db_size, status.db_size_in_use) = (0, 0);
    (status.raft_index, status.raft_applied_index, status.raft_term) = (0, 0, 0);
    (status.version, status.storage_version) = (String::new(), String::new());
    if status.leader == member {
        status.leader = MASKED_ID;
    }
    let own_id = format!("memberID:{member} ");
    for error in &mut status.errors {
        // The protobuf text format varies its spaces deliberately, depending on how etcd was built.
        let words: Vec<&str> = error.split_whitespace().collect();
        *error = format!("{} ", words.join(" ")).replace(&own_id, "memberID:1 ");
    }
    // etcd lists alarms in the order of a Go map, which is random.
    status.errors.sort_unstable();
    status
}

impl ServerUnderTest {
    /// Returns the server's current revision.
    pub(super) async fn revision(&mut self) -> Result<i64> {
        let answer = self
            .call(&CallWithToken { token: TokenChoice::NoToken, call: EtcdCall::Status })
            .await?;
        answer.revision.context("a status has a header")
    }
}
