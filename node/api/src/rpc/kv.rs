//! The KV service: range, put, delete, transaction, compaction.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use node_proto::etcdserverpb::kv_server;
use node_proto::etcdserverpb::{
    CompactionRequest, CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, PutRequest,
    PutResponse, RangeRequest, RangeResponse, RangeStreamResponse, TxnRequest, TxnResponse,
};
use node_state::apply::{ReadTxn, is_read_only, is_serializable};
use node_state::auth::RequestedAccess;
use node_state::mvcc::{AnswerBudget, RangeStep, ReadError};
use tonic::codegen::BoxStream;
use tonic::{Request, Status};

use super::context::{ApiContext, CallContext};
use super::error::Error;
use super::metrics::Method;
use super::range_stream;

type Answer<T> = Result<tonic::Response<T>, Status>;

pub(super) struct KvService(pub(super) Arc<ApiContext>);

impl KvService {
    pub(super) async fn range(
        &self,
        request: &RangeRequest,
        held: &mut CallContext,
    ) -> Result<RangeResponse, Error> {
        self.0.barrier(request.serializable).await?;
        let began = Instant::now();
        let read = self.read(request, held).await;
        self.0.metrics.ranges[usize::from(read.is_ok())].record(began.elapsed());
        read
    }

    async fn read(
        &self,
        request: &RangeRequest,
        held: &mut CallContext,
    ) -> Result<RangeResponse, Error> {
        'view: loop {
            let view = self.0.store.view();
            self.0.access.authorise_on(
                held.credentials(),
                &view,
                RequestedAccess::Range(request),
            )?;
            let mut gather = self.0.store.begin_range(&view, request)?;
            loop {
                let step = self.0.store.step_range(&view, &mut gather);
                held.charge(gather.bytes())?;
                match step {
                    Ok(RangeStep::Done(response)) => return Ok(response),
                    // A wide range yields between steps, so that other tasks on this thread can
                    // run.
                    Ok(RangeStep::Unfinished) => tokio::task::yield_now().await,
                    Err(ReadError::Superseded) => {
                        tokio::task::yield_now().await;
                        continue 'view;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }

    async fn put(&self, request: PutRequest, held: &mut CallContext) -> Result<PutResponse, Error> {
        self.0.propose(request, held).await
    }

    pub(super) async fn delete(
        &self,
        request: DeleteRangeRequest,
        held: &mut CallContext,
    ) -> Result<DeleteRangeResponse, Error> {
        self.0.propose(request, held).await
    }

    pub(super) async fn txn(
        &self,
        request: TxnRequest,
        held: &mut CallContext,
    ) -> Result<TxnResponse, Error> {
        if is_read_only(&request) {
            self.0.barrier(is_serializable(&request)).await?;
            return self.read_only(&request, held).await;
        }
        self.0.propose(request, held).await
    }

    async fn read_only(
        &self,
        txn: &TxnRequest,
        held: &mut CallContext,
    ) -> Result<TxnResponse, Error> {
        'view: loop {
            let view = self.0.store.view();
            self.0.access.authorise_on(held.credentials(), &view, RequestedAccess::Txn(txn))?;
            let mut read = ReadTxn::new(txn);
            let mut bytes = 0;
            loop {
                let step = {
                    let mut fits = |bytes| held.try_charge(bytes);
                    let mut room = AnswerBudget::new(bytes, &mut fits);
                    let step = read.step(&self.0.store, &view, &mut room);
                    if room.is_overdrawn() {
                        return Err(Error::TooMuchUnread);
                    }
                    bytes = room.used_bytes();
                    step
                };
                match step {
                    Ok(Some(response)) => {
                        // Charge only the answer. Pairs that were read but aren't in the answer
                        // have been freed.
                        held.charge(bytes)?;
                        if response.responses.len() > 1 {
                            self.0.store.operations().txns.fetch_add(1, Ordering::Relaxed);
                        }
                        return Ok(response);
                    }
                    // A wide range yields between steps, so that other tasks on this thread can
                    // run.
                    Ok(None) => tokio::task::yield_now().await,
                    Err(ReadError::Superseded) => {
                        tokio::task::yield_now().await;
                        continue 'view;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }

    async fn compact(
        &self,
        request: CompactionRequest,
        held: &mut CallContext,
    ) -> Result<CompactionResponse, Error> {
        let mut finished = self.0.store.finished_compactions();
        let response = self.0.propose(request, held).await?;
        if request.physical {
            let done = finished.wait_for(|revision| *revision >= request.revision);
            done.await.map_err(|_| Error::Stopped)?;
        }
        Ok(response)
    }
}

#[tonic::async_trait]
impl kv_server::Kv for KvService {
    async fn range(&self, request: Request<RangeRequest>) -> Answer<RangeResponse> {
        let work =
            async |request: RangeRequest, held: &mut CallContext| self.range(&request, held).await;
        self.0.call(Method::Range, request, work).await
    }

    async fn range_stream(
        &self,
        request: Request<RangeRequest>,
    ) -> Answer<BoxStream<RangeStreamResponse>> {
        range_stream::answer(self.0.clone(), request).await
    }

    async fn put(&self, request: Request<PutRequest>) -> Answer<PutResponse> {
        let work = async |request, held: &mut CallContext| self.put(request, held).await;
        self.0.call(Method::Put, request, work).await
    }

    async fn delete_range(
        &self,
        request: Request<DeleteRangeRequest>,
    ) -> Answer<DeleteRangeResponse> {
        let work = async |request, held: &mut CallContext| self.delete(request, held).await;
        self.0.call(Method::DeleteRange, request, work).await
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Answer<TxnResponse> {
        let work = async |request, held: &mut CallContext| self.txn(request, held).await;
        self.0.call(Method::Txn, request, work).await
    }

    async fn compact(&self, request: Request<CompactionRequest>) -> Answer<CompactionResponse> {
        let work = async |request, held: &mut CallContext| self.compact(request, held).await;
        self.0.call(Method::Compact, request, work).await
    }
}
