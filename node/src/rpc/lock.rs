//! The Lock service: a named lock that one client holds at a time (server/etcdserver/api/v3lock in
//! etcd).

use bytes::Bytes;
use node_proto::etcdserverpb::DeleteRangeRequest;
use node_proto::v3lockpb::{LockRequest, LockResponse, UnlockRequest, UnlockResponse, lock_server};
use tonic::{Request, Status};

use super::context::{Held, header};
use super::error::Error;
use super::line::{Line, Refusal};
use super::metrics::Method;

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct Lock(pub(super) Line);

impl Lock {
    async fn lock(&self, request: LockRequest, held: &mut Held) -> Result<LockResponse, Refusal> {
        let lease = self.0.lease(request.lease, held).await?;
        let mut place = self.0.enter(&request.name, lease, Bytes::new(), held).await?;
        let revision = place.turn(held).await?.ok_or(Error::SessionExpired)?;
        Ok(LockResponse { header: header(revision), key: place.key().clone() })
    }

    async fn unlock(
        &self,
        request: UnlockRequest,
        held: &mut Held,
    ) -> Result<UnlockResponse, Refusal> {
        let delete = DeleteRangeRequest { key: request.key, ..DeleteRangeRequest::default() };
        let deleted = self.0.delete(delete, held).await?;
        Ok(UnlockResponse { header: deleted.header })
    }
}

#[tonic::async_trait]
impl lock_server::Lock for Lock {
    async fn lock(&self, request: Request<LockRequest>) -> Answer<LockResponse> {
        let work = async |request, held: &mut Held| self.lock(request, held).await;
        self.0.context.call(Method::Lock, request, work).await
    }

    async fn unlock(&self, request: Request<UnlockRequest>) -> Answer<UnlockResponse> {
        let work = async |request, held: &mut Held| self.unlock(request, held).await;
        self.0.context.call(Method::Unlock, request, work).await
    }
}
