//! Methods with more than one request or answer.

use std::pin::Pin;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::oneshot;
use tonic::{Status, Streaming};

use super::apart::Apart;
use super::methods::Method;
use super::raw::Raw;
use super::values::Values;
use super::{Call, Gateway, errors, json};
use crate::rpc::Deadline;

/// What became of the requests, if they were not all right: never, else.
type Broken = Pin<Box<dyn Future<Output = Status> + Send>>;

/// Answers, as they are written.
struct Lines {
    method: &'static Method,
    apart: Apart,
    deadline: Deadline,
    answers: Streaming<Bytes>,
    broken: Broken,
}

impl Gateway {
    /// The first request is looked at before anything else, and the first answer is waited for: until then
    /// a refusal can be the response.
    pub(super) async fn stream(self, call: Call, mut values: Values) -> Result<Response, Status> {
        let Call { method, metadata, extensions, deadline } = call;
        let first = match deadline.bound(values.next()).await?? {
            Some(value) => Some(deadline.bound(read(&self.apart, method, value)).await??),
            // One request is always there.
            None if !method.takes_more => Some(Bytes::new()),
            None => None,
        };
        let (requests, broken) = requests(method, self.apart.clone(), first, values);
        let request = tonic::Request::from_parts(metadata, extensions, requests);
        let mut client = self.client().await?;
        let opened = deadline.bound(client.streaming(request, method.path.clone(), Raw)).await?;
        let answers = match opened {
            Ok(opened) => opened.into_inner(),
            Err(status) => return Ok(errors::stream_refusal(&status)),
        };
        let mut lines = Lines { method, apart: self.apart, deadline, answers, broken };
        let begun = match lines.next().await {
            Ok(Some(first)) => stream::unfold(Some((Some(first), lines)), next).boxed(),
            Ok(None) => stream::empty().boxed(),
            Err(status) => return Ok(errors::stream_refusal(&status)),
        };
        Ok(([(CONTENT_TYPE, "application/json")], Body::from_stream(begun)).into_response())
    }
}

async fn read(apart: &Apart, method: &'static Method, value: Bytes) -> Result<Bytes, Status> {
    apart.run(value.len(), move || json::read(&method.input, &value)).await
}

/// A method's requests, and what breaks them off.
fn requests(
    method: &'static Method,
    apart: Apart,
    first: Option<Bytes>,
    values: Values,
) -> (BoxStream<'static, Bytes>, Broken) {
    let first = stream::iter(first);
    if !method.takes_more {
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
                // Who isn't there any more need not be told.
                let _ = tell.send(status);
                None
            }
        }
    });
    let broken = async {
        match told.await {
            Ok(status) => status,
            // They are over, and all were right.
            Err(_) => std::future::pending().await,
        }
    };
    (first.chain(rest).boxed(), Box::pin(broken))
}

impl Lines {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Status> {
        let answer = async {
            tokio::select! {
                biased;
                answer = self.answers.message() => answer,
                status = &mut self.broken => Err(status),
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
        self.apart.run(size, writing).await
    }
}

/// The next line: the first is there already, and nothing follows a refusal.
async fn next(
    state: Option<(Option<Vec<u8>>, Lines)>,
) -> Option<(Result<Bytes, std::convert::Infallible>, Option<(Option<Vec<u8>>, Lines)>)> {
    let (first, mut lines) = state?;
    let line = match first {
        Some(line) => Ok(Some(line)),
        None => lines.next().await,
    };
    match line {
        Ok(line) => Some((Ok(line?.into()), Some((None, lines)))),
        Err(status) => Some((Ok(errors::line(&status).into()), None)),
    }
}
