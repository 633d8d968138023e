//! The Lock service: a named lock that one client holds at a time (server/etcdserver/api/v3lock in
//! etcd).

use bytes::Bytes;
use node_proto::etcdserverpb::DeleteRangeRequest;
use node_proto::v3lockpb::{LockRequest, LockResponse, UnlockRequest, UnlockResponse, lock_server};
use tonic::{Request, Status};

use super::context::{CallContext, header};
use super::error::Error;
use super::lock_queue::{LockQueueError, LockQueues};
use super::metrics::Method;

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct LockService(pub(super) LockQueues);

impl LockService {
    async fn lock(
        &self,
        request: LockRequest,
        call: &mut CallContext,
    ) -> Result<LockResponse, LockQueueError> {
        let lease = self.0.lease_or_grant(request.lease, call).await?;
        let mut place = self.0.enter(&request.name, lease, Bytes::new(), call).await?;
        let revision = place.wait_for_turn(call).await?.ok_or(Error::SessionExpired)?;
        Ok(LockResponse { header: header(revision), key: place.key().clone() })
    }

    async fn unlock(
        &self,
        request: UnlockRequest,
        call: &mut CallContext,
    ) -> Result<UnlockResponse, LockQueueError> {
        let delete = DeleteRangeRequest { key: request.key, ..DeleteRangeRequest::default() };
        let deleted = self.0.delete(delete, call).await?;
        Ok(UnlockResponse { header: deleted.header })
    }
}

#[tonic::async_trait]
impl lock_server::Lock for LockService {
    async fn lock(&self, request: Request<LockRequest>) -> Answer<LockResponse> {
        let work = async |request, call: &mut CallContext| self.lock(request, call).await;
        self.0.context.call(Method::Lock, request, work).await
    }

    async fn unlock(&self, request: Request<UnlockRequest>) -> Answer<UnlockResponse> {
        let work = async |request, call: &mut CallContext| self.unlock(request, call).await;
        self.0.context.call(Method::Unlock, request, work).await
    }
}
