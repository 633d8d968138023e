//! KV: range, put, delete, transaction, compaction.

use std::sync::Arc;

use node_proto::etcdserverpb::kv_server;
use node_proto::etcdserverpb::{
    CompactionRequest, CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, PutRequest,
    PutResponse, RangeRequest, RangeResponse, TxnRequest, TxnResponse,
};
use tonic::{Request, Status};

use super::context::Context;
use super::error::Error;
use super::metrics::Method;
use crate::apply::{
    check_delete, check_put, check_range, check_txn, is_read_only, is_serializable, read_only_txn,
};
use crate::mvcc::{ReadError, Step};

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct Kv(pub(super) Arc<Context>);

impl Kv {
    async fn range(&self, request: &RangeRequest) -> Result<RangeResponse, Error> {
        check_range(request)?;
        self.0.barrier(request.serializable).await?;
        'view: loop {
            let view = self.0.store.view();
            let mut gather = self.0.store.gather(&view, request)?;
            loop {
                match self.0.store.step(&view, &mut gather) {
                    Ok(Step::Done(response)) => return Ok(response),
                    // A wide range lets others on this thread have a turn.
                    Ok(Step::Again) => tokio::task::yield_now().await,
                    Err(ReadError::Superseded) => {
                        tokio::task::yield_now().await;
                        continue 'view;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }

    async fn put(&self, request: PutRequest) -> Result<PutResponse, Error> {
        check_put(&request)?;
        self.0.propose(request).await
    }

    async fn delete(&self, request: DeleteRangeRequest) -> Result<DeleteRangeResponse, Error> {
        check_delete(&request)?;
        self.0.propose(request).await
    }

    async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Error> {
        check_txn(&request, self.0.limits.max_txn_ops)?;
        if is_read_only(&request) {
            self.0.barrier(is_serializable(&request)).await?;
            return self.0.read(|store, view| read_only_txn(store, view, &request)).await;
        }
        self.0.propose(request).await
    }

    async fn compact(&self, request: CompactionRequest) -> Result<CompactionResponse, Error> {
        let mut finished = self.0.store.finished_compactions();
        let response = self.0.propose(request).await?;
        if request.physical {
            let done = finished.wait_for(|revision| *revision >= request.revision);
            done.await.map_err(|_| Error::Stopped)?;
        }
        Ok(response)
    }
}

#[tonic::async_trait]
impl kv_server::Kv for Kv {
    async fn range(&self, request: Request<RangeRequest>) -> Answer<RangeResponse> {
        let work = async |request: RangeRequest| self.range(&request).await;
        self.0.call(Method::Range, request, work).await
    }

    async fn put(&self, request: Request<PutRequest>) -> Answer<PutResponse> {
        let work = async |request| self.put(request).await;
        self.0.call(Method::Put, request, work).await
    }

    async fn delete_range(
        &self,
        request: Request<DeleteRangeRequest>,
    ) -> Answer<DeleteRangeResponse> {
        let work = async |request| self.delete(request).await;
        self.0.call(Method::DeleteRange, request, work).await
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Answer<TxnResponse> {
        let work = async |request| self.txn(request).await;
        self.0.call(Method::Txn, request, work).await
    }

    async fn compact(&self, request: Request<CompactionRequest>) -> Answer<CompactionResponse> {
        let work = async |request| self.compact(request).await;
        self.0.call(Method::Compact, request, work).await
    }
}
