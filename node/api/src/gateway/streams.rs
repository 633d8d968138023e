//! Gateway methods with several requests or answers.

use std::pin::Pin;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::oneshot;
use tonic::{Status, Streaming};

use super::blocking_pool::BlockingPool;
use super::methods::GatewayMethod;
use super::raw_codec::RawCodec;
use super::values::Values;
use super::{Gateway, GatewayCall, errors, json};
use crate::rpc::Deadline;

/// Future that completes with the error of the first bad request. It never completes if all
/// requests are good.
type BadRequestFuture = Pin<Box<dyn Future<Output = Status> + Send>>;

/// Answers of a call, written as lines of JSON.
struct JsonLines {
    method: &'static GatewayMethod,
    blocking_pool: BlockingPool,
    deadline: Deadline,
    answers: Streaming<Bytes>,
    bad_request: BadRequestFuture,
}

impl Gateway {
    /// Runs a streaming call. The response begins after the first answer, so that an earlier error
    /// can determine its HTTP status. The first request is read before the call is made.
    pub(super) async fn stream(
        self,
        call: GatewayCall,
        mut values: Values,
    ) -> Result<Response, Status> {
        let GatewayCall { method, metadata, extensions, deadline } = call;
        let first = match deadline.bound(values.next()).await?? {
            Some(value) => Some(deadline.bound(read(&self.blocking_pool, method, value)).await??),
            // A method that takes a single request reads an empty body as an empty message.
            None if !method.has_request_stream => Some(Bytes::new()),
            None => None,
        };
        let (requests, broken) = requests(method, self.blocking_pool.clone(), first, values);
        let request = tonic::Request::from_parts(metadata, extensions, requests);
        let mut client = self.client().await?;
        let opened =
            deadline.bound(client.streaming(request, method.path.clone(), RawCodec)).await?;
        let answers = match opened {
            Ok(opened) => opened.into_inner(),
            Err(status) => return Ok(errors::stream_refusal(&status)),
        };
        let mut lines = JsonLines {
            method,
            blocking_pool: self.blocking_pool,
            deadline,
            answers,
            bad_request: broken,
        };
        let begun = match lines.next().await {
            Ok(Some(first)) => stream::unfold(Some((Some(first), lines)), next).boxed(),
            Ok(None) => stream::empty().boxed(),
            Err(status) => return Ok(errors::stream_refusal(&status)),
        };
        Ok(([(CONTENT_TYPE, "application/json")], Body::from_stream(begun)).into_response())
    }
}

async fn read(
    apart: &BlockingPool,
    method: &'static GatewayMethod,
    value: Bytes,
) -> Result<Bytes, Status> {
    apart.run(value.len(), move || json::read(&method.input, &value)).await
}

/// Returns a method's requests as a stream, and a future that completes with the error that ends
/// them.
fn requests(
    method: &'static GatewayMethod,
    apart: BlockingPool,
    first: Option<Bytes>,
    values: Values,
) -> (BoxStream<'static, Bytes>, BadRequestFuture) {
    let first = stream::iter(first);
    if !method.has_request_stream {
        return (first.boxed(), Box::pin(std::future::pending()));
    }
    let (tell, told) = oneshot::channel();
    let state = (values, tell, apart);
    let rest = stream::unfold(state, move |(mut values, tell, apart)| async move {
        let read = match values.next().await {
            Ok(value) => read(&apart, method, value?).await,
            Err(status) => Err(status),
        };
        match read {
            Ok(request) => Some((request, (values, tell, apart))),
            Err(status) => {
                // Sending fails if the call has ended meanwhile, which needs no handling.
                let _ = tell.send(status);
                None
            }
        }
    });
    let broken = async {
        match told.await {
            Ok(status) => status,
            // The stream of requests ended without an error, so this future must never complete.
            Err(_) => std::future::pending().await,
        }
    };
    (first.chain(rest).boxed(), Box::pin(broken))
}

impl JsonLines {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Status> {
        let answer = async {
            tokio::select! {
                biased;
                answer = self.answers.message() => answer,
                status = &mut self.bad_request => Err(status),
            }
        };
        let Some(answer) = self.deadline.bound(answer).await?? else { return Ok(None) };
        let (method, size) = (self.method, answer.len());
        let writing = move || {
            let mut line = Vec::with_capacity(size * 2);
            line.extend_from_slice(br#"{"result":"#);
            json::append(&method.output, answer, &mut line)?;
            line.extend_from_slice(b"}\n");
            Ok(Some(line))
        };
        self.blocking_pool.run(size, writing).await
    }
}

/// Returns the next line of a stream of answers. The first line was read before. No line follows an
/// error.
async fn next(
    state: Option<(Option<Vec<u8>>, JsonLines)>,
) -> Option<(Result<Bytes, std::convert::Infallible>, Option<(Option<Vec<u8>>, JsonLines)>)> {
    let (first, mut lines) = state?;
    let line = match first {
        Some(line) => Ok(Some(line)),
        None => lines.next().await,
    };
    match line {
        Ok(line) => Some((Ok(line?.into()), Some((None, lines)))),
        Err(status) => Some((Ok(errors::error_line(&status).into()), None)),
    }
}
