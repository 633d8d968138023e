//! Answers the KV calls that carry most of the load directly, without a router and without tonic.
//!
//! A call takes this path if it is an ordinary one. It uses gRPC over HTTP/2 and a method of
//! [`DirectKv`], and has one whole, uncompressed message that can be decoded. Any other request
//! goes to the router, with the bytes that were read already in front of its body. So all errors
//! for unusual requests are made in one place, by the router's services.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::BoxError;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version};
use hyper::body::{Body, Frame, SizeHint};
use tonic::metadata::MetadataMap;

use super::ClientConnection;
use super::unread_answers::{AnswerAccounting, AnswerBody};
use crate::http::is_grpc;
use crate::rpc::{Deadline, DirectKv, DirectRequest, MESSAGE_HEADER_BYTES};

/// Media type of an answer.
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// Whether a request's head is that of a call to a method of [`DirectKv`] that needs no router.
pub(super) fn is_direct<B>(request: &Request<B>) -> bool {
    let headers = request.headers();
    request.version() == Version::HTTP_2
        && request.method() == Method::POST
        && DirectKv::has(request.uri().path())
        && is_grpc(headers)
        && headers.get("grpc-encoding").is_none_or(|encoding| encoding == "identity")
}

/// Answers a call without the router. Returns the request if only the router can answer it.
pub(super) async fn answer<B>(
    kv: &DirectKv,
    request: Request<B>,
    client: &ClientConnection,
    answers: &Arc<AnswerAccounting>,
) -> Result<Response<AnswerBody>, Request<ReplayedBody<B>>>
where
    B: Body<Data = Bytes, Error = BoxError> + Unpin,
{
    let (mut head, body) = request.into_parts();
    let Ok(deadline) = Deadline::of(&head.headers) else {
        return Err(Request::from_parts(head, ReplayedBody::unread(body)));
    };
    let mut body = Some(ReplayedBody::unread(body));
    let result = {
        // The future is large, and is pinned here so that it isn't moved into another one.
        let work = pin!(async {
            let request = take_request(&mut body, head.uri.path(), kv.max_request_bytes()).await?;
            let metadata = MetadataMap::from_headers(std::mem::take(&mut head.headers));
            Some(kv.answer(request, &metadata, client.user.as_ref(), &answers.account).await)
        });
        deadline.bound(work).await
    };
    match result {
        Ok(Some(Ok((message, charge)))) => {
            let mut response = Response::new(answers.count_message(message, charge));
            response.headers_mut().insert(CONTENT_TYPE, GRPC);
            Ok(response)
        }
        Ok(None) => {
            let body = body.expect("only the body of a request that is answered is dropped");
            Err(Request::from_parts(head, body))
        }
        Ok(Some(Err(status))) | Err(status) => Ok(answers.count(status.into_http())),
    }
}

/// Reads and decodes the request of a call that needs no router, and drops its body. The charge for
/// an unfinished request ends with the body, so it doesn't last until the answer. Returns `None`
/// and keeps the body if the call needs the router.
async fn take_request<B>(
    unread: &mut Option<ReplayedBody<B>>,
    path: &str,
    max_bytes: usize,
) -> Option<DirectRequest>
where
    B: Body<Data = Bytes, Error = BoxError> + Unpin,
{
    let body = unread.as_mut()?;
    let message = body.read_message(max_bytes).await?;
    let Some(request) = DirectKv::decode(path, message.slice(MESSAGE_HEADER_BYTES..)) else {
        body.read.push_back(Ok(Frame::data(message)));
        return None;
    };
    *unread = None;
    Some(request)
}

/// Request body that first returns the frames that were read from it before, and then the rest.
#[derive(Debug)]
pub(super) struct ReplayedBody<B> {
    /// Frames that were read, in order; the last one is possibly an error.
    read: VecDeque<Result<Frame<Bytes>, BoxError>>,
    rest: B,
}

impl<B> ReplayedBody<B> {
    /// Wraps a body that nobody has read from yet.
    pub(super) fn unread(body: B) -> Self {
        Self { read: VecDeque::new(), rest: body }
    }
}

impl<B> ReplayedBody<B>
where
    B: Body<Data = Bytes, Error = BoxError> + Unpin,
{
    /// Reads the body up to its end. Returns its only message with the header, if the message is
    /// whole, uncompressed and at most `max_bytes` long. Otherwise [`Body::poll_frame`] will return
    /// all bytes of the body, including those read here.
    async fn read_message(&mut self, max_bytes: usize) -> Option<Bytes> {
        let mut received = Received::default();
        loop {
            let rest = &mut self.rest;
            let frame = std::future::poll_fn(|context| Pin::new(&mut *rest).poll_frame(context));
            let last = match frame.await {
                None => None,
                Some(Ok(frame)) if frame.is_data() => {
                    received.add(frame.into_data().unwrap_or_default(), max_bytes);
                    match received.left(max_bytes) {
                        Some(_) if !self.rest.is_end_stream() => continue,
                        _ => None,
                    }
                }
                // The frame is an error, or trailers, which tonic would add to the request's
                // metadata. The router handles both.
                Some(other) => Some(other),
            };
            let is_whole = last.is_none() && received.left(max_bytes) == Some(0);
            let message = received.into_bytes();
            if is_whole {
                return Some(message);
            }
            self.read.push_back(Ok(Frame::data(message)));
            self.read.extend(last);
            return None;
        }
    }
}

/// Bytes of a message that were received so far. A message in one frame isn't copied.
#[derive(Debug, Default)]
struct Received {
    first: Bytes,
    /// All bytes so far, if more than one frame has arrived; otherwise empty.
    all: Vec<u8>,
}

impl Received {
    /// Adds the bytes of a frame. Once the message's length is known, its memory is reserved
    /// exactly, as the accounting of unfinished requests assumes.
    fn add(&mut self, data: Bytes, max_bytes: usize) {
        if self.bytes().is_empty() {
            self.first = data;
        } else if !data.is_empty() {
            let left = self.left(max_bytes).unwrap_or(data.len());
            if self.all.is_empty() {
                self.all.reserve_exact(self.first.len() + left.max(data.len()));
                self.all.extend_from_slice(&std::mem::take(&mut self.first));
            }
            self.all.reserve_exact(left.max(data.len()));
            self.all.extend_from_slice(&data);
        }
    }

    fn bytes(&self) -> &[u8] {
        if self.all.is_empty() { &self.first } else { &self.all }
    }

    /// Returns the number of bytes that are missing at the message's end, as far as that is known.
    /// Returns `None` if the bytes aren't the beginning of one uncompressed message of at most
    /// `max_bytes`.
    fn left(&self, max_bytes: usize) -> Option<usize> {
        let Some((&[flag, ref length @ ..], message)) =
            self.bytes().split_first_chunk::<MESSAGE_HEADER_BYTES>()
        else {
            return Some(MESSAGE_HEADER_BYTES - self.bytes().len());
        };
        let length = u32::from_be_bytes(*length) as usize;
        if flag != 0 || length > max_bytes { None } else { length.checked_sub(message.len()) }
    }

    fn into_bytes(self) -> Bytes {
        if self.all.is_empty() { self.first } else { self.all.into() }
    }
}

impl<B> Body for ReplayedBody<B>
where
    B: Body<Data = Bytes, Error = BoxError> + Unpin,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.read.pop_front() {
            Some(frame) => Poll::Ready(Some(frame)),
            None => Pin::new(&mut self.rest).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.read.is_empty() { self.rest.size_hint() } else { SizeHint::default() }
    }
}

/// Body of a successful answer: one message, then the status "ok".
#[derive(Debug)]
pub(super) struct MessageBody {
    message: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

impl MessageBody {
    /// Makes the body of an answer. `message` includes the header of a gRPC message.
    pub(super) fn new(message: Bytes) -> Self {
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        Self { message: Some(message), trailers: Some(trailers) }
    }
}

impl Body for MessageBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(message) = self.message.take() {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.trailers.is_none()
    }
}

#[cfg(test)]
mod tests;
