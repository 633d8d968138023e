//! The HTTP paths on the client port: version, health, metrics.

mod authority;
mod health;
mod metrics;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, ALLOW,
    CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};

pub(crate) use authority::Lenient;

use crate::config::CLUSTER_VERSION;
use crate::gateway;
use crate::rpc::Context;

/// Everything that answers on a client port, told apart by path: the methods, the JSON gateway to them,
/// if it is served, whose requests are up to so many bytes, and what is in here.
pub(crate) fn all(grpc: Router, context: Arc<Context>, gateway: Option<usize>) -> Router {
    let mut all = grpc.clone().merge(router(context));
    if let Some(largest_request) = gateway {
        let gateway = gateway::router(grpc, largest_request);
        all = all.merge(gateway.layer(map_response(allow_origins)));
    }
    all
}

fn router(context: Arc<Context>) -> Router {
    Router::new()
        .route("/version", only(get(version)))
        .route("/health", only(get(health::health)))
        .route("/livez", only(get(health::livez)))
        .route("/livez/{check}", only(get(health::livez_check)))
        .route("/readyz", only(get(health::readyz)))
        .route("/readyz/{check}", only(get(health::readyz_check)))
        .route("/metrics", get(metrics::metrics))
        .layer(map_response(allow_origins))
        .fallback(not_found)
        .with_state(context)
}

/// GET, and not HEAD either: as etcd has it, whose load balancers are told to GET.
fn only(get: MethodRouter<Arc<Context>>) -> MethodRouter<Arc<Context>> {
    get.head(not_allowed).fallback(not_allowed)
}

async fn not_allowed() -> Response {
    let text = (CONTENT_TYPE, "text/plain; charset=utf-8");
    let headers = [text, (X_CONTENT_TYPE_OPTIONS, "nosniff"), (ALLOW, "GET")];
    (StatusCode::METHOD_NOT_ALLOWED, headers, "Method Not Allowed\n").into_response()
}

/// What etcd tells browsers by default (`--cors`).
async fn allow_origins<B>(mut response: Response<B>) -> Response<B> {
    let headers = response.headers_mut();
    let mut insert = |name, value| headers.insert(name, HeaderValue::from_static(value));
    insert(ACCESS_CONTROL_ALLOW_ORIGIN, "*");
    insert(ACCESS_CONTROL_ALLOW_METHODS, "POST, GET, OPTIONS, PUT, DELETE");
    insert(ACCESS_CONTROL_ALLOW_HEADERS, "accept, content-type, authorization");
    response
}

/// A path that is neither a gRPC method nor one of these.
async fn not_found(request: Request) -> axum::response::Response {
    let content = request.headers().get(CONTENT_TYPE);
    if content.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
        let path = request.uri().path().trim_start_matches('/');
        let service = path.split('/').next().unwrap_or_default();
        return tonic::Status::unimplemented(format!("unknown service {service}")).into_http();
    }
    let kind = [(CONTENT_TYPE, "text/plain; charset=utf-8")];
    (StatusCode::NOT_FOUND, kind, "404 page not found\n").into_response()
}

async fn version(State(context): State<Arc<Context>>) -> impl IntoResponse {
    let body = format!(
        r#"{{"etcdserver":"{}","etcdcluster":"{CLUSTER_VERSION}","storage":"{CLUSTER_VERSION}"}}"#,
        context.identity.version
    );
    ([(CONTENT_TYPE, "application/json")], body)
}
