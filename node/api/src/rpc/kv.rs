//! The KV service: range, put, delete, transaction, compaction.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::{BufMut as _, Bytes, BytesMut};
use muster_shares::memory::{MemoryAccount, MemoryCharge};
use node_proto::etcdserverpb::kv_server;
use node_proto::etcdserverpb::{
    CompactionRequest, CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, PutRequest,
    PutResponse, RangeRequest, RangeResponse, RangeStreamResponse, TxnRequest, TxnResponse,
};
use node_state::apply::{ReadTxn, is_read_only, is_serializable};
use node_state::auth::RequestedAccess;
use node_state::mvcc::{AnswerBudget, RangeStep, ReadError};
use prost::Message as _;
use tonic::codegen::BoxStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use super::access::{CertificateUser, Credentials};
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
        call: &mut CallContext,
    ) -> Result<RangeResponse, Error> {
        self.0.barrier(request.serializable).await?;
        let began = Instant::now();
        let read = self.read(request, call).await;
        self.0.metrics.ranges[usize::from(read.is_ok())].record(began.elapsed());
        read
    }

    async fn read(
        &self,
        request: &RangeRequest,
        call: &mut CallContext,
    ) -> Result<RangeResponse, Error> {
        'view: loop {
            let view = self.0.store.view();
            self.0.access.authorise_on(
                call.credentials(),
                &view,
                RequestedAccess::Range(request),
            )?;
            let mut gather = self.0.store.begin_range(&view, request)?;
            loop {
                let step = self.0.store.step_range(&view, &mut gather);
                call.charge(gather.bytes())?;
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

    async fn put(&self, request: PutRequest, call: &mut CallContext) -> Result<PutResponse, Error> {
        self.0.propose(request, call).await
    }

    pub(super) async fn delete(
        &self,
        request: DeleteRangeRequest,
        call: &mut CallContext,
    ) -> Result<DeleteRangeResponse, Error> {
        self.0.propose(request, call).await
    }

    pub(super) async fn txn(
        &self,
        request: TxnRequest,
        call: &mut CallContext,
    ) -> Result<TxnResponse, Error> {
        if is_read_only(&request) {
            self.0.barrier(is_serializable(&request)).await?;
            return self.read_only(&request, call).await;
        }
        self.0.propose(request, call).await
    }

    async fn read_only(
        &self,
        txn: &TxnRequest,
        call: &mut CallContext,
    ) -> Result<TxnResponse, Error> {
        'view: loop {
            let view = self.0.store.view();
            self.0.access.authorise_on(call.credentials(), &view, RequestedAccess::Txn(txn))?;
            let mut read = ReadTxn::new(txn);
            let mut bytes = 0;
            loop {
                let step = {
                    let mut fits = |bytes| call.try_charge(bytes);
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
                        call.charge(bytes)?;
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
        call: &mut CallContext,
    ) -> Result<CompactionResponse, Error> {
        let mut finished = self.0.store.finished_compactions();
        let response = self.0.propose(request, call).await?;
        if request.physical {
            let done = finished.wait_for(|revision| *revision >= request.revision);
            done.await.map_err(|_| Error::Stopped)?;
        }
        Ok(response)
    }
}

/// Path of the KV service, before the name of a method.
const SERVICE_PATH: &str = "/etcdserverpb.KV/";

/// Request of a KV method that [`DirectKv`] answers.
pub(crate) enum DirectRequest {
    Range(RangeRequest),
    Put(PutRequest),
    DeleteRange(DeleteRangeRequest),
    Txn(TxnRequest),
}

/// The KV methods that carry most of the load, for a server that needs neither tonic nor a router
/// to call them.
#[derive(Clone)]
pub struct DirectKv(Arc<ApiContext>);

impl DirectKv {
    /// Makes the KV methods, which use `context`.
    #[must_use]
    pub fn new(context: Arc<ApiContext>) -> Self {
        Self(context)
    }

    /// Whether a call to the HTTP path `path` can be answered without the router.
    pub(crate) fn has(path: &str) -> bool {
        let method = path.strip_prefix(SERVICE_PATH);
        matches!(method, Some("Range" | "Put" | "DeleteRange" | "Txn"))
    }

    /// Decodes the request of a call to `path`. Returns `None` if it is malformed, or if the call
    /// isn't answered here.
    pub(crate) fn decode(path: &str, message: Bytes) -> Option<DirectRequest> {
        Some(match path.strip_prefix(SERVICE_PATH)? {
            "Range" => DirectRequest::Range(RangeRequest::decode(message).ok()?),
            "Put" => DirectRequest::Put(PutRequest::decode(message).ok()?),
            "DeleteRange" => DirectRequest::DeleteRange(DeleteRangeRequest::decode(message).ok()?),
            "Txn" => DirectRequest::Txn(TxnRequest::decode(message).ok()?),
            _ => return None,
        })
    }

    /// Returns the maximum length of a request in bytes.
    pub(crate) fn max_request_bytes(&self) -> usize {
        super::largest_message(self.0.limits.max_request_bytes)
    }

    /// Answers a request. The result is the encoded answer as a gRPC message, and the charge for
    /// its memory, which must last until the answer is sent.
    pub(crate) async fn answer(
        &self,
        request: DirectRequest,
        metadata: &MetadataMap,
        user: Option<&CertificateUser>,
        account: &Arc<MemoryAccount>,
    ) -> Result<(Bytes, MemoryCharge), Status> {
        let call = CallContext::of(account, Credentials::new(metadata, user));
        let (kv, api) = (KvService(self.0.clone()), &self.0);
        match request {
            DirectRequest::Range(request) => {
                let work = async |request, call: &mut CallContext| kv.range(&request, call).await;
                framed(api.run_call(Method::Range, metadata, call, request, work).await)
            }
            DirectRequest::Put(request) => {
                let work = async |request, call: &mut CallContext| kv.put(request, call).await;
                framed(api.run_call(Method::Put, metadata, call, request, work).await)
            }
            DirectRequest::DeleteRange(request) => {
                let work = async |request, call: &mut CallContext| kv.delete(request, call).await;
                framed(api.run_call(Method::DeleteRange, metadata, call, request, work).await)
            }
            DirectRequest::Txn(request) => {
                let work = async |request, call: &mut CallContext| kv.txn(request, call).await;
                framed(api.run_call(Method::Txn, metadata, call, request, work).await)
            }
        }
    }
}

/// Length of a gRPC message's header: the flag for compression, and the message's length.
pub(crate) const MESSAGE_HEADER_BYTES: usize = 5;

/// Encodes an answer as an uncompressed gRPC message.
fn framed<T: prost::Message>(
    result: Result<(T, MemoryCharge), Status>,
) -> Result<(Bytes, MemoryCharge), Status> {
    let (answer, charge) = result?;
    let length = answer.encoded_len();
    let Ok(stated) = u32::try_from(length) else {
        return Err(Status::resource_exhausted("the answer is longer than 4 GiB"));
    };
    let mut message = BytesMut::with_capacity(MESSAGE_HEADER_BYTES + length);
    message.put_u8(0);
    message.put_u32(stated);
    answer.encode_raw(&mut message);
    Ok((message.freeze(), charge))
}

#[tonic::async_trait]
impl kv_server::Kv for KvService {
    async fn range(&self, request: Request<RangeRequest>) -> Answer<RangeResponse> {
        let work =
            async |request: RangeRequest, call: &mut CallContext| self.range(&request, call).await;
        self.0.call(Method::Range, request, work).await
    }

    async fn range_stream(
        &self,
        request: Request<RangeRequest>,
    ) -> Answer<BoxStream<RangeStreamResponse>> {
        range_stream::answer(self.0.clone(), request).await
    }

    async fn put(&self, request: Request<PutRequest>) -> Answer<PutResponse> {
        let work = async |request, call: &mut CallContext| self.put(request, call).await;
        self.0.call(Method::Put, request, work).await
    }

    async fn delete_range(
        &self,
        request: Request<DeleteRangeRequest>,
    ) -> Answer<DeleteRangeResponse> {
        let work = async |request, call: &mut CallContext| self.delete(request, call).await;
        self.0.call(Method::DeleteRange, request, work).await
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Answer<TxnResponse> {
        let work = async |request, call: &mut CallContext| self.txn(request, call).await;
        self.0.call(Method::Txn, request, work).await
    }

    async fn compact(&self, request: Request<CompactionRequest>) -> Answer<CompactionResponse> {
        let work = async |request, call: &mut CallContext| self.compact(request, call).await;
        self.0.call(Method::Compact, request, work).await
    }
}
