//! The Cluster service: lists the members, and changes them.

use std::str::FromStr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use node_proto::etcdserverpb::cluster_server;
use node_proto::etcdserverpb::{
    self as pb, MemberAddRequest, MemberAddResponse, MemberListRequest, MemberListResponse,
    MemberPromoteRequest, MemberPromoteResponse, MemberRemoveRequest, MemberRemoveResponse,
    MemberUpdateRequest, MemberUpdateResponse, ResponseHeader,
};
use node_state::identity::{Incarnation, MemberId, NodeKey, OperationId};
use node_state::membership::{ChangeRequest, Member, MemberChange};
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use super::context::{self, ApiContext, CallContext};
use super::error::{CONFIGURATION_METADATA, Error};
use super::metrics::Method;
use super::reconfigure::change_members;
use super::required_access::CheckedRequest;
use super::required_access::peer_urls;

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct ClusterService(pub(super) Arc<ApiContext>);

/// Returns a header for the Cluster service, which has no revision, as in etcd.
fn header() -> Option<ResponseHeader> {
    Some(ResponseHeader::default())
}

/// gRPC metadata of a member change. etcd has no such metadata.
#[derive(Debug, PartialEq)]
struct ChangeMetadata {
    /// ID of the operation, so that a repeated request doesn't make the change again.
    operation: Option<OperationId>,
    /// Log index of the configuration that the change was planned on.
    planned_at: Option<u64>,
    /// Incarnation and key to which a new member is bound from the beginning.
    incarnation: Option<Incarnation>,
    node_key: Option<NodeKey>,
}

impl ChangeMetadata {
    fn of(metadata: &MetadataMap) -> Result<Self, Error> {
        fn value<T: FromStr>(of: &MetadataMap, name: &str) -> Result<Option<T>, Error> {
            let mut values = of.get_all(name).iter();
            let Some(value) = values.next() else { return Ok(None) };
            let parsed = value.to_str().ok().and_then(|text| text.parse().ok());
            // A repeated header is refused, since it is unclear which value was meant.
            let only = parsed.filter(|_| values.next().is_none());
            only.map(Some).ok_or(Error::BadExtras)
        }
        let Decimal(planned_at) = value(metadata, "muster-planned-at")?.unwrap_or_default();
        Ok(Self {
            operation: value(metadata, "muster-operation")?,
            planned_at,
            incarnation: value(metadata, "muster-incarnation")?,
            node_key: value(metadata, "muster-node-key")?,
        })
    }

    fn with(&self, change: MemberChange) -> ChangeRequest {
        ChangeRequest { change, operation: self.operation, planned_at: self.planned_at }
    }
}

/// Number that is parsed from digits alone. Rust's own parser would accept a plus sign.
#[derive(Default)]
struct Decimal(Option<u64>);

impl FromStr for Decimal {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        if digits { text.parse().map(|index| Self(Some(index))).map_err(drop) } else { Err(()) }
    }
}

/// Result of a method: its answer, and the log index of the member configuration that the answer
/// shows.
type ResultWithConfiguration<T> = Result<(T, u64), Error>;

impl ClusterService {
    async fn list(
        &self,
        request: MemberListRequest,
    ) -> ResultWithConfiguration<MemberListResponse> {
        self.0.barrier(!request.linearizable).await?;
        let view = self.0.store.view();
        let members = view.members().members().map(Into::into).collect();
        Ok((MemberListResponse { header: header(), members }, view.members().configuration_index()))
    }

    async fn add(
        &self,
        request: MemberAddRequest,
        extras: ChangeMetadata,
    ) -> ResultWithConfiguration<MemberAddResponse> {
        let peer_urls = peer_urls(&request.peer_ur_ls)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = MemberId::added_at(&peer_urls, now);
        let member = Member {
            id,
            name: String::new(),
            peer_urls,
            client_urls: Vec::new(),
            is_learner: request.is_learner,
            incarnation: extras.incarnation,
            node_key: extras.node_key,
            changed_at: 0,
            vote_when_ready: false,
            operations: Vec::new(),
        };
        let (members, at) = self.change(&extras, MemberChange::Add(member)).await?;
        let member = members.iter().find(|member| member.id == id.0).cloned();
        Ok((MemberAddResponse { header: header(), member, members }, at))
    }

    async fn change(
        &self,
        extras: &ChangeMetadata,
        change: MemberChange,
    ) -> ResultWithConfiguration<Vec<pb::Member>> {
        let changed = change_members(&self.0, extras.with(change)).await?;
        Ok((changed.members, changed.configuration_index))
    }

    /// Runs a method: reads the request's metadata, and adds the index of the member configuration
    /// to the answer's metadata.
    async fn call<Q: CheckedRequest, T: context::Answer>(
        &self,
        method: Method,
        request: Request<Q>,
        work: impl AsyncFnOnce(Q, ChangeMetadata) -> ResultWithConfiguration<T>,
    ) -> Answer<T> {
        let extras = ChangeMetadata::of(request.metadata());
        let mut configuration = 0;
        let work = async |request, _: &mut CallContext| {
            let (answer, at) = work(request, extras?).await?;
            configuration = at;
            Ok::<_, Error>(answer)
        };
        let mut answer = self.0.call(method, request, work).await?;
        answer.metadata_mut().insert(CONFIGURATION_METADATA, configuration.into());
        Ok(answer)
    }
}

#[tonic::async_trait]
impl cluster_server::Cluster for ClusterService {
    async fn member_list(&self, request: Request<MemberListRequest>) -> Answer<MemberListResponse> {
        let work = async |request, _| self.list(request).await;
        self.call(Method::MemberList, request, work).await
    }

    async fn member_add(&self, request: Request<MemberAddRequest>) -> Answer<MemberAddResponse> {
        let work = async |request, extras| self.add(request, extras).await;
        self.call(Method::MemberAdd, request, work).await
    }

    async fn member_remove(
        &self,
        request: Request<MemberRemoveRequest>,
    ) -> Answer<MemberRemoveResponse> {
        let work = async |request: MemberRemoveRequest, extras| {
            let change = MemberChange::Remove(MemberId(request.id));
            let (members, at) = self.change(&extras, change).await?;
            Ok((MemberRemoveResponse { header: header(), members }, at))
        };
        self.call(Method::MemberRemove, request, work).await
    }

    async fn member_update(
        &self,
        request: Request<MemberUpdateRequest>,
    ) -> Answer<MemberUpdateResponse> {
        let work = async |request: MemberUpdateRequest, extras| {
            let urls = peer_urls(&request.peer_ur_ls)?;
            let change = MemberChange::Update(MemberId(request.id), urls);
            let (members, at) = self.change(&extras, change).await?;
            Ok((MemberUpdateResponse { header: header(), members }, at))
        };
        self.call(Method::MemberUpdate, request, work).await
    }

    async fn member_promote(
        &self,
        request: Request<MemberPromoteRequest>,
    ) -> Answer<MemberPromoteResponse> {
        let work = async |request: MemberPromoteRequest, extras| {
            let change = MemberChange::Promote(MemberId(request.id));
            let (members, at) = self.change(&extras, change).await?;
            Ok((MemberPromoteResponse { header: header(), members }, at))
        };
        self.call(Method::MemberPromote, request, work).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[(&'static str, &str)]) -> Result<ChangeMetadata, Error> {
        let mut metadata = MetadataMap::new();
        for (name, value) in values {
            metadata.append(*name, value.parse().unwrap());
        }
        ChangeMetadata::of(&metadata)
    }

    #[test]
    fn the_total_length_of_a_members_urls_is_limited() {
        let urls = |n: usize| vec!["http://127.0.0.1:2380".to_owned(); n];
        let taken = |n| peer_urls(&urls(n)).map(|urls| urls.len());
        assert_eq!(taken(0), Err(Error::BadMemberUrls));
        assert_eq!(taken(700), Ok(700));
        assert_eq!(taken(800), Err(Error::BadMemberUrls));
    }

    #[test]
    fn the_metadata_of_a_change_is_read_exactly_or_refused() {
        let operation = "0123456789abcdef0123456789abcdef";
        let read = of(&[("muster-operation", operation), ("muster-planned-at", "17")]).unwrap();
        assert_eq!(read.operation.unwrap().to_string(), operation);
        assert_eq!(read.planned_at, Some(17));
        let key = "01234567".repeat(8);
        let read = of(&[("muster-incarnation", operation), ("muster-node-key", &key)]).unwrap();
        assert_eq!(read.incarnation.map(|bound| bound.to_string()).as_deref(), Some(operation));
        assert_eq!(read.node_key.map(|bound| bound.to_string()), Some(key));
        let nothing = of(&[]).unwrap();
        assert_eq!((nothing.operation, nothing.planned_at), (None, None));
        assert_eq!((nothing.incarnation, nothing.node_key), (None, None));
        for (name, value) in [
            ("muster-operation", ""),
            ("muster-operation", "0123"),
            ("muster-operation", "0123456789ABCDEF0123456789ABCDEF"),
            ("muster-operation", "0123456789abcdef0123456789abcdeg"),
            ("muster-planned-at", ""),
            ("muster-planned-at", "+17"),
            ("muster-planned-at", "-1"),
            ("muster-planned-at", " 17"),
            ("muster-planned-at", "18446744073709551616"),
            ("muster-incarnation", "0"),
            ("muster-node-key", operation),
        ] {
            assert_eq!(of(&[(name, value)]), Err(Error::BadExtras), "{name}: {value}");
        }
        let twice = [("muster-planned-at", "17"), ("muster-planned-at", "17")];
        assert_eq!(of(&twice), Err(Error::BadExtras));
    }
}
