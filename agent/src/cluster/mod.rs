//! Client of the Cluster API: lists a cluster's members and changes them.
//!
//! Every change of a cluster's members goes through this module, and from here through the
//! cluster's own consensus. A request is sent once. [`ClusterError`] tells whether it was refused,
//! could not be sent, or may have been carried out. In the last case the caller must read the list
//! of members before trying again. Every wait has a named limit.
//!
//! A change can carry an operation id and the configuration for which it was planned. `muster-node`
//! carries out each operation id at most once, and refuses the change at any other configuration.
//! Stock etcd ignores the id and the configuration.

mod change;
mod departure;
mod error;
mod founded;
mod keys;
mod member;
mod refusal;
mod snapshot;

use std::time::Duration;

use node_proto::etcdserverpb::cluster_client::ClusterClient;
use node_proto::etcdserverpb::kv_client::KvClient;
use node_proto::etcdserverpb::maintenance_client::MaintenanceClient;
use node_proto::etcdserverpb::{
    self as pb, MemberAddRequest, MemberListRequest, MemberPromoteRequest, MemberRemoveRequest,
    MemberUpdateRequest, MoveLeaderRequest, RangeRequest, StatusRequest,
};
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

pub(crate) use self::change::{ChangeMetadata, ClusterMemberChange, NewMember};
pub(crate) use self::departure::RemovalOrigin;
pub(crate) use self::error::ClusterError;
pub(crate) use self::founded::founded_cluster_id;
pub(crate) use self::keys::StoredValue;
pub(crate) use self::member::{ClusterMember, MemberId, MemberList, NodeStatus};
pub(crate) use self::refusal::ClusterRefusal;
pub(crate) use self::snapshot::KeyCount;
use crate::endpoint::ClientEndpoint;
use crate::exit::error_chain;

/// The longest that a read may take.
const READ_DEADLINE: Duration = Duration::from_secs(5);
/// The longest that a status request may take: a member answers without asking other members.
const STATUS_DEADLINE: Duration = Duration::from_secs(3);
/// The longest that a change may take; longer than the server's own time limit.
const CHANGE_DEADLINE: Duration = Duration::from_secs(15);

/// gRPC metadata key of the configuration index in answers.
const CONFIGURATION: &str = "muster-configuration";

/// A client of a cluster, which knows the client ports of its members.
#[derive(Clone, Debug)]
pub(crate) struct ClusterApiClient {
    endpoints: Vec<ClientEndpoint>,
}

impl ClusterApiClient {
    /// Makes a client that tries these client ports in order, and uses the first that it can
    /// connect to.
    pub(crate) fn new(endpoints: Vec<ClientEndpoint>) -> Self {
        Self { endpoints }
    }

    /// Returns a client that also tries these members' client URLs, after the ports of `self`. One
    /// of those ports may belong to a member that is about to be removed.
    pub(crate) fn with_members(&self, members: &MemberList) -> Self {
        let mut endpoints = self.endpoints.clone();
        for url in members.list.iter().flat_map(|member| &member.client_urls) {
            let identity = self.endpoints.iter().find_map(ClientEndpoint::identity);
            endpoints.extend(
                ClientEndpoint::of_member(url, identity)
                    .ok()
                    .filter(|endpoint| !self.has(endpoint)),
            );
        }
        Self { endpoints }
    }

    /// Returns a client that also tries the client ports of `other`.
    pub(crate) fn with_endpoints_of(&self, other: &Self) -> Self {
        let mut joined = self.clone();
        for endpoint in &other.endpoints {
            if !joined.has(endpoint) {
                joined.endpoints.push(endpoint.clone());
            }
        }
        joined
    }

    fn has(&self, endpoint: &ClientEndpoint) -> bool {
        self.endpoints.iter().any(|own| own.to_string() == endpoint.to_string())
    }

    /// Returns the members by a linearizable read.
    pub(crate) async fn list_members(&self) -> Result<MemberList, ClusterError> {
        self.send_request(RequestKind::Read("member list"), async |channel| {
            let mut cluster = ClusterClient::new(channel.clone());
            catch_up_old_member(channel).await?;
            cluster.member_list(MemberListRequest { linearizable: true }).await
        })
        .await
    }

    /// Returns the members as the answering member knows them. This needs no leader, and may be
    /// outdated.
    pub(crate) async fn list_members_serializable(&self) -> Result<MemberList, ClusterError> {
        self.send_request(RequestKind::Read("member list"), async |channel| {
            let request = MemberListRequest { linearizable: false };
            ClusterClient::new(channel).member_list(request).await
        })
        .await
    }

    /// Sends a change once.
    async fn send_change(
        &self,
        change: &ClusterMemberChange,
        carrying: &ChangeMetadata,
    ) -> Result<MemberList, ClusterError> {
        let kind = RequestKind::Change(change.name());
        let metadata = carrying.metadata();
        match change {
            ClusterMemberChange::Add(new) => {
                let metadata = new.metadata(metadata);
                let is_learner = new.is_learner;
                let request = MemberAddRequest { peer_ur_ls: new.peer_urls.clone(), is_learner };
                self.send_request(kind, async |channel| {
                    let request = request_with_metadata(metadata.clone(), request.clone());
                    ClusterClient::new(channel).member_add(request).await
                })
                .await
            }
            ClusterMemberChange::Promote(MemberId(id)) => {
                self.send_request(kind, async |channel| {
                    let request =
                        request_with_metadata(metadata.clone(), MemberPromoteRequest { id: *id });
                    ClusterClient::new(channel).member_promote(request).await
                })
                .await
            }
            ClusterMemberChange::Remove(MemberId(id)) => {
                self.send_request(kind, async |channel| {
                    let request =
                        request_with_metadata(metadata.clone(), MemberRemoveRequest { id: *id });
                    ClusterClient::new(channel).member_remove(request).await
                })
                .await
            }
            ClusterMemberChange::Update(MemberId(id), urls) => {
                self.send_request(kind, async |channel| {
                    let request = MemberUpdateRequest { id: *id, peer_ur_ls: urls.clone() };
                    let request = request_with_metadata(metadata.clone(), request);
                    ClusterClient::new(channel).member_update(request).await
                })
                .await
            }
        }
    }

    /// Returns the status of the first member that answers.
    pub(crate) async fn status(&self) -> Result<NodeStatus, ClusterError> {
        self.send_request(RequestKind::Status, async |channel| status(channel).await).await
    }

    /// Returns a member's status. Asks the member at its own client URLs.
    pub(crate) async fn status_of(
        &self,
        member: &ClusterMember,
    ) -> Result<NodeStatus, ClusterError> {
        let status = self.client_of(member)?.status().await?;
        if status.member_id == member.id {
            return Ok(status);
        }
        let text = format!("member {} answers in its place", status.member_id);
        Err(ClusterError::Unavailable { text })
    }

    /// Makes `to` the leader. The request is sent to `leader`, since only the leader can transfer
    /// the leadership.
    pub(crate) async fn move_leader(
        &self,
        leader: &ClusterMember,
        to: MemberId,
    ) -> Result<(), ClusterError> {
        self.client_of(leader)?
            .send_request(RequestKind::Change("move leader"), async |channel| {
                let request = MoveLeaderRequest { target_id: to.0 };
                MaintenanceClient::new(channel).move_leader(request).await
            })
            .await
    }

    /// Returns a client that asks only this member, at the member's client URLs. Don't use it for
    /// this host's own node, whose client URL may lead elsewhere. Reach that node at its listen
    /// address instead.
    pub(crate) fn client_of(&self, member: &ClusterMember) -> Result<Self, ClusterError> {
        let identity = self.endpoints.iter().find_map(ClientEndpoint::identity);
        let (mut endpoints, mut refused) = (Vec::new(), None);
        for url in &member.client_urls {
            match ClientEndpoint::of_member(url, identity) {
                Ok(endpoint) => endpoints.push(endpoint),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if endpoints.is_empty() => Err(error.into()),
            _ => Ok(Self::new(endpoints)),
        }
    }

    /// Sends a request over the first connection that can be made. Another member is tried only if
    /// it is certain that the first one has done nothing.
    async fn send_request<A, T: From<Answer<A>>>(
        &self,
        kind: RequestKind,
        send: impl AsyncFn(Channel) -> Result<Response<A>, Status>,
    ) -> Result<T, ClusterError> {
        let (what, deadline, is_change) = kind.parts();
        let mut unreachable = Vec::new();
        let mut last = None;
        for endpoint in &self.endpoints {
            let channel = match endpoint.channel().await {
                Ok(channel) => channel,
                Err(error) => {
                    unreachable.push(format!("{endpoint}: {}", error_chain(&error)));
                    continue;
                }
            };
            let error = match tokio::time::timeout(deadline, send(channel)).await {
                Ok(Ok(response)) => return Ok(Answer::from(response).into()),
                Ok(Err(status)) => ClusterError::from_status(&status, what, is_change),
                Err(_) => ClusterError::timed_out(what, is_change, deadline),
            };
            if !error.may_try_another_member() {
                return Err(error);
            }
            last = Some(error);
        }
        Err(last.unwrap_or(ClusterError::Unreachable(unreachable)))
    }
}

/// Returns the status of the node at this client port.
pub(crate) async fn node_status(endpoint: &ClientEndpoint) -> Result<NodeStatus, ClusterError> {
    ClusterApiClient::new(vec![endpoint.clone()]).status().await
}

/// Kind of a request, which determines its deadline.
#[derive(Clone, Copy)]
enum RequestKind {
    Read(&'static str),
    Status,
    Change(&'static str),
}

impl RequestKind {
    fn parts(self) -> (&'static str, Duration, bool) {
        match self {
            Self::Read(what) => (what, READ_DEADLINE, false),
            Self::Status => ("status", STATUS_DEADLINE, false),
            Self::Change(what) => (what, CHANGE_DEADLINE, true),
        }
    }
}

fn request_with_metadata<T>(metadata: MetadataMap, message: T) -> Request<T> {
    let mut request = Request::new(message);
    *request.metadata_mut() = metadata;
    request
}

async fn status(channel: Channel) -> Result<Response<pb::StatusResponse>, Status> {
    MaintenanceClient::new(channel).status(StatusRequest::default()).await
}

/// Makes a member that runs etcd before 3.5 catch up, by a linearizable read. Without that read,
/// the list that the member then gives may be outdated.
async fn catch_up_old_member(channel: Channel) -> Result<(), Status> {
    let version = status(channel.clone()).await?.into_inner().version;
    if ["3.2.", "3.3.", "3.4."].iter().any(|old| version.starts_with(old)) {
        let request =
            RangeRequest { key: vec![0].into(), limit: 1, count_only: true, ..Default::default() };
        KvClient::new(channel).range(request).await?;
    }
    Ok(())
}

/// An answer, and the configuration index in its metadata.
struct Answer<T> {
    configuration: Option<u64>,
    message: T,
}

impl<T> From<Response<T>> for Answer<T> {
    fn from(response: Response<T>) -> Self {
        let value = response.metadata().get(CONFIGURATION);
        let configuration = value.and_then(|value| value.to_str().ok()?.parse().ok());
        Self { configuration, message: response.into_inner() }
    }
}

macro_rules! lists {
    ($($name:ident)*) => {
        $(impl From<Answer<pb::$name>> for MemberList {
            fn from(answer: Answer<pb::$name>) -> Self {
                let Answer { configuration, message } = answer;
                let cluster_id = message.header.unwrap_or_default().cluster_id;
                let list = message.members.into_iter().map(ClusterMember::from).collect();
                Self { cluster_id, configuration, list }
            }
        })*
    };
}

lists! {
    MemberListResponse MemberAddResponse MemberPromoteResponse MemberRemoveResponse
    MemberUpdateResponse
}

impl From<Answer<pb::StatusResponse>> for NodeStatus {
    fn from(answer: Answer<pb::StatusResponse>) -> Self {
        answer.message.into()
    }
}

impl From<Answer<pb::MoveLeaderResponse>> for () {
    fn from(_: Answer<pb::MoveLeaderResponse>) {}
}
