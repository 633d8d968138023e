//! KV: range, put, delete, transaction, compaction.

use std::sync::Arc;

use node_proto::command::Operation;
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
    Response, check_delete, check_put, check_range, check_txn, is_read_only, is_serializable,
    read_only_txn,
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
        match self.0.propose(Operation::Put(request)).await? {
            Response::Put(response) => Ok(response),
            other => unreachable!("a put is answered as a put, not by {other:?}"),
        }
    }

    async fn delete(&self, request: DeleteRangeRequest) -> Result<DeleteRangeResponse, Error> {
        check_delete(&request)?;
        match self.0.propose(Operation::DeleteRange(request)).await? {
            Response::DeleteRange(response) => Ok(response),
            other => unreachable!("a delete is answered as a delete, not by {other:?}"),
        }
    }

    async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Error> {
        check_txn(&request, self.0.limits.max_txn_ops)?;
        if is_read_only(&request) {
            self.0.barrier(is_serializable(&request)).await?;
            return self.0.read(|store, view| read_only_txn(store, view, &request)).await;
        }
        match self.0.propose(Operation::Txn(request)).await? {
            Response::Txn(response) => Ok(response),
            other => unreachable!("a transaction is answered as one, not by {other:?}"),
        }
    }

    async fn compact(&self, request: CompactionRequest) -> Result<CompactionResponse, Error> {
        let mut finished = self.0.store.finished_compactions();
        let response = match self.0.propose(Operation::Compact(request)).await? {
            Response::Compact(response) => response,
            other => unreachable!("a compaction is answered as one, not by {other:?}"),
        };
        if request.physical {
            let done = finished.wait_for(|revision| *revision >= request.revision);
            done.await.map_err(|_| Error::Stopped)?;
        }
        Ok(response)
    }

    /// Counts the call, refuses it without a leader if it asked for that, fills in the header.
    async fn answer<Q, T>(
        &self,
        method: Method,
        request: Request<Q>,
        header: impl Fn(&mut T) -> &mut Option<node_proto::etcdserverpb::ResponseHeader>,
        work: impl AsyncFnOnce(Q) -> Result<T, Error>,
    ) -> Answer<T> {
        let call = self.0.metrics.start(method);
        let result = match self.0.check_leader(request.metadata()) {
            Ok(()) => work(request.into_inner()).await.map_err(Status::from),
            Err(status) => Err(status),
        };
        call.end(result.as_ref().err());
        let mut response = result?;
        self.0.fill(header(&mut response));
        Ok(tonic::Response::new(response))
    }
}

#[tonic::async_trait]
impl kv_server::Kv for Kv {
    async fn range(&self, request: Request<RangeRequest>) -> Answer<RangeResponse> {
        let work = async |request: RangeRequest| self.range(&request).await;
        self.answer(Method::Range, request, |r| &mut r.header, work).await
    }

    async fn put(&self, request: Request<PutRequest>) -> Answer<PutResponse> {
        let work = async |request| self.put(request).await;
        self.answer(Method::Put, request, |r| &mut r.header, work).await
    }

    async fn delete_range(
        &self,
        request: Request<DeleteRangeRequest>,
    ) -> Answer<DeleteRangeResponse> {
        let work = async |request| self.delete(request).await;
        self.answer(Method::DeleteRange, request, |r| &mut r.header, work).await
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Answer<TxnResponse> {
        let work = async |request| self.txn(request).await;
        self.answer(Method::Txn, request, |r| &mut r.header, work).await
    }

    async fn compact(&self, request: Request<CompactionRequest>) -> Answer<CompactionResponse> {
        let work = async |request| self.compact(request).await;
        self.answer(Method::Compact, request, |r| &mut r.header, work).await
    }
}
