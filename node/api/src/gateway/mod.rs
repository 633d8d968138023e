//! The JSON gateway: etcd's API as plain HTTP, for clients without gRPC. etcd builds its gateway on
//! grpc-gateway (server/embed/serve.go in etcd).
//!
//! A request is a POST of one JSON object to a method's path, and the answer is another object.
//! Watches and keep-alives take a sequence of objects, and answer with one line of JSON each. Other
//! methods with several answers also send lines. Each call is made through the gRPC router, with
//! all of its checks.

mod blocking_pool;
mod errors;
#[cfg(fuzzing)]
pub mod fuzz;
mod inexact_numbers;
mod json;
mod methods;
mod raw_codec;
mod streams;
mod values;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap};
use axum::http::{Extensions, Method as Verb, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use tonic::Status;
use tonic::client::Grpc;
use tonic::metadata::MetadataMap;

pub(crate) use methods::takes_values;
use muster_shares::memory::{MemoryAccount, MemoryCharge};

use self::blocking_pool::BlockingPool;
use self::methods::GatewayMethod;
use self::raw_codec::RawCodec;
use self::values::Values;
use crate::rpc::{self, answer_share};

/// Maximum length of a request's JSON, as a multiple of the maximum gRPC request. JSON is longer:
/// base64 turns three bytes into four, and field names take space.
pub(crate) const REQUEST_GROWTH: usize = 2;
/// Estimated bytes of JSON per byte of a gRPC answer, charged while the answer is written.
const ANSWER_GROWTH: usize = 3;
/// Prefix of an HTTP header that carries gRPC metadata. The rest of the header's name is the name
/// of the metadata.
const METADATA: &str = "grpc-metadata-";

#[derive(Clone)]
struct Gateway {
    grpc: Router,
    /// Maximum length of one JSON object in bytes.
    max_object_bytes: usize,
    blocking_pool: BlockingPool,
}

/// Data of one call through the gateway, apart from its messages.
struct GatewayCall {
    method: &'static GatewayMethod,
    metadata: MetadataMap,
    extensions: Extensions,
    deadline: rpc::Deadline,
}

/// Makes a router for the gateway's paths, which makes its calls through `grpc`.
pub(crate) fn router(grpc: Router, largest_request: usize) -> Router {
    let most = largest_request * REQUEST_GROWTH;
    let gateway = Gateway { grpc, max_object_bytes: most, blocking_pool: BlockingPool::new() };
    let mut router = Router::new();
    for prefix in methods::PREFIXES {
        router = router.route(prefix, any(serve)).route(&format!("{prefix}{{*path}}"), any(serve));
    }
    router.with_state(gateway)
}

async fn serve(State(gateway): State<Gateway>, request: Request) -> Response {
    if request.method() == Verb::OPTIONS {
        return StatusCode::OK.into_response();
    }
    let answered = match methods::find(request.uri().path()) {
        None => Err(Status::not_found("Not Found")),
        Some(_) if request.method() != Verb::POST => {
            Err(Status::unimplemented("Method Not Allowed"))
        }
        Some(method) => gateway.call(method, request).await,
    };
    answered.unwrap_or_else(|status| errors::refusal(&status))
}

/// Converts a request's headers to gRPC metadata.
fn metadata(headers: &HeaderMap) -> MetadataMap {
    let mut passed = HeaderMap::new();
    for (name, value) in headers {
        let name = match name.as_str().strip_prefix(METADATA) {
            Some(rest) => rest.parse().ok(),
            None => (*name == AUTHORIZATION).then(|| name.clone()),
        };
        if let Some(name) = name {
            passed.append(name, value.clone());
        }
    }
    MetadataMap::from_headers(passed)
}

impl Gateway {
    async fn call(
        self,
        method: &'static GatewayMethod,
        request: Request,
    ) -> Result<Response, Status> {
        let (mut parts, body) = request.into_parts();
        // Any web page can make a browser post here, and browsers present certificates unasked. So
        // a caller is identified only by a token, as in etcd.
        parts.extensions.remove::<rpc::CertificateUser>();
        let call = GatewayCall {
            method,
            metadata: metadata(&parts.headers),
            extensions: parts.extensions,
            deadline: rpc::Deadline::of(&parts.headers).map_err(
                |rpc::MalformedTimeout(value)| {
                    Status::invalid_argument(format!("invalid grpc-timeout: {value}"))
                },
            )?,
        };
        let values = Values::new(body, self.max_object_bytes);
        if method.is_stream() {
            self.stream(call, values).await
        } else {
            self.unary(call, values).await
        }
    }

    async fn client(&self) -> Result<Grpc<Router>, Status> {
        let mut client = Grpc::new(self.grpc.clone()).max_decoding_message_size(usize::MAX);
        match client.ready().await {
            Ok(()) => Ok(client),
            Err(never) => match never {},
        }
    }

    async fn unary(self, call: GatewayCall, mut values: Values) -> Result<Response, Status> {
        let GatewayCall { method, metadata, extensions, deadline } = call;
        let account = extensions
            .get::<Arc<MemoryAccount>>()
            .cloned()
            .unwrap_or_else(MemoryAccount::unbounded);
        let value = deadline.bound(values.next()).await??.unwrap_or_default();
        let size = value.len();
        let reading = move || json::read(&method.input, &value);
        let message = deadline.bound(self.blocking_pool.run(size, reading)).await??;
        let request = tonic::Request::from_parts(metadata, extensions, message);
        let mut client = self.client().await?;
        let answered = client.unary(request, method.path.clone(), RawCodec);
        let (_, message, kept) = deadline.bound(answered).await??.into_parts();
        let mut charge = MemoryCharge::new(&account);
        let size = message.len();
        let room = size * ANSWER_GROWTH;
        if !charge.try_set(room, answer_share(room)) {
            return Err(rpc::Error::TooMuchUnread.into());
        }
        let writing = move || json::write(&method.output, message);
        let json = self.blocking_pool.run(size, writing).await?;
        drop(kept);
        charge.force(json.len());
        let mut response = ([(CONTENT_TYPE, "application/json")], json).into_response();
        response.extensions_mut().insert(Arc::new(charge));
        Ok(response)
    }
}

#[cfg(test)]
mod tests;
