//! Cluster: the member list. Changing it comes with reconfiguration.

use std::sync::Arc;

use node_proto::etcdserverpb::cluster_server;
use node_proto::etcdserverpb::{MemberListRequest, MemberListResponse, ResponseHeader};
use tonic::{Request, Status};

use super::context::Context;
use super::error::Error;
use super::metrics::Method;

pub(super) struct Cluster(pub(super) Arc<Context>);

impl Cluster {
    async fn list(&self, request: MemberListRequest) -> Result<MemberListResponse, Error> {
        self.0.barrier(!request.linearizable).await?;
        let members = self.0.store.view().members().members().map(Into::into).collect();
        // The Cluster service's headers have no revision, as in etcd.
        Ok(MemberListResponse { header: Some(ResponseHeader::default()), members })
    }
}

#[tonic::async_trait]
impl cluster_server::Cluster for Cluster {
    async fn member_list(
        &self,
        request: Request<MemberListRequest>,
    ) -> Result<tonic::Response<MemberListResponse>, Status> {
        self.0.call(Method::MemberList, request, async |request| self.list(request).await).await
    }
}
