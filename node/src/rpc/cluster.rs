//! Cluster: the members, and changes of them.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use node_proto::etcdserverpb::cluster_server;
use node_proto::etcdserverpb::{
    self as pb, MemberAddRequest, MemberAddResponse, MemberListRequest, MemberListResponse,
    MemberPromoteRequest, MemberPromoteResponse, MemberRemoveRequest, MemberRemoveResponse,
    MemberUpdateRequest, MemberUpdateResponse, ResponseHeader,
};
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use super::context::{Context, Held};
use super::error::Error;
use super::metrics::Method;
use crate::config::PeerUrl;
use crate::identity::{Incarnation, MemberId, NodeKey};
use crate::membership::{Member, MemberChange};

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct Cluster(pub(super) Arc<Context>);

/// The Cluster service's headers have no revision, as in etcd.
fn header() -> Option<ResponseHeader> {
    Some(ResponseHeader::default())
}

/// Peer URLs as etcd takes them, sorted; at least one.
fn peer_urls(urls: &[String]) -> Result<Vec<String>, Error> {
    let parsed: Result<Vec<_>, _> = urls.iter().map(|url| PeerUrl::parse(url)).collect();
    let parsed = parsed.map_err(|_| Error::BadMemberUrls)?;
    let mut urls: Vec<String> = parsed.iter().map(ToString::to_string).collect();
    urls.sort_unstable();
    if urls.is_empty() { Err(Error::BadMemberUrls) } else { Ok(urls) }
}

/// What a new member is bound to from the beginning, if whoever adds it knows that.
struct Binding {
    incarnation: Option<Incarnation>,
    node_key: Option<NodeKey>,
}

impl Binding {
    fn of(metadata: &MetadataMap) -> Result<Self, Error> {
        fn value<T: std::str::FromStr>(of: &MetadataMap, name: &str) -> Result<Option<T>, Error> {
            let parse = |text: &tonic::metadata::MetadataValue<_>| text.to_str().ok()?.parse().ok();
            of.get(name).map(|text| parse(text).ok_or(Error::BadBinding)).transpose()
        }
        Ok(Self {
            incarnation: value(metadata, "muster-incarnation")?,
            node_key: value(metadata, "muster-node-key")?,
        })
    }
}

impl Cluster {
    async fn list(&self, request: MemberListRequest) -> Result<MemberListResponse, Error> {
        self.0.barrier(!request.linearizable).await?;
        let members = self.0.store.view().members().members().map(Into::into).collect();
        Ok(MemberListResponse { header: header(), members })
    }

    async fn add(
        &self,
        request: MemberAddRequest,
        binding: Result<Binding, Error>,
    ) -> Result<MemberAddResponse, Error> {
        let peer_urls = peer_urls(&request.peer_ur_ls)?;
        let Binding { incarnation, node_key } = binding?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = MemberId::added_at(&peer_urls, now);
        let member = Member {
            id,
            name: String::new(),
            peer_urls,
            client_urls: Vec::new(),
            is_learner: request.is_learner,
            incarnation,
            node_key,
            changed: 0,
            vote_when_ready: false,
        };
        let members = self.0.change_members(MemberChange::Add(member)).await?;
        let member = members.iter().find(|member| member.id == id.0).cloned();
        Ok(MemberAddResponse { header: header(), member, members })
    }

    async fn change(&self, change: MemberChange) -> Result<Vec<pb::Member>, Error> {
        self.0.change_members(change).await
    }

    async fn update(&self, request: MemberUpdateRequest) -> Result<Vec<pb::Member>, Error> {
        let urls = peer_urls(&request.peer_ur_ls)?;
        self.change(MemberChange::Update(MemberId(request.id), urls)).await
    }
}

#[tonic::async_trait]
impl cluster_server::Cluster for Cluster {
    async fn member_list(&self, request: Request<MemberListRequest>) -> Answer<MemberListResponse> {
        let work = async |request, _: &mut Held| self.list(request).await;
        self.0.call(Method::MemberList, request, work).await
    }

    async fn member_add(&self, request: Request<MemberAddRequest>) -> Answer<MemberAddResponse> {
        let binding = Binding::of(request.metadata());
        let work = async |request, _: &mut Held| self.add(request, binding).await;
        self.0.call(Method::MemberAdd, request, work).await
    }

    async fn member_remove(
        &self,
        request: Request<MemberRemoveRequest>,
    ) -> Answer<MemberRemoveResponse> {
        let work = async |request: MemberRemoveRequest, _: &mut Held| {
            let members = self.change(MemberChange::Remove(MemberId(request.id))).await?;
            Ok(MemberRemoveResponse { header: header(), members })
        };
        self.0.call(Method::MemberRemove, request, work).await
    }

    async fn member_update(
        &self,
        request: Request<MemberUpdateRequest>,
    ) -> Answer<MemberUpdateResponse> {
        let work = async |request, _: &mut Held| {
            let members = self.update(request).await?;
            Ok(MemberUpdateResponse { header: header(), members })
        };
        self.0.call(Method::MemberUpdate, request, work).await
    }

    async fn member_promote(
        &self,
        request: Request<MemberPromoteRequest>,
    ) -> Answer<MemberPromoteResponse> {
        let work = async |request: MemberPromoteRequest, _: &mut Held| {
            let members = self.change(MemberChange::Promote(MemberId(request.id))).await?;
            Ok(MemberPromoteResponse { header: header(), members })
        };
        self.0.call(Method::MemberPromote, request, work).await
    }
}
