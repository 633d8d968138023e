//! HTTP paths on the client port: version, health, metrics.

mod authority;
mod browsers;
mod grpc_calls;
mod health;
mod metrics;
mod path_redirects;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{ALLOW, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};

pub(crate) use authority::AuthorityRewriter;
pub use browsers::AllowedNames;
pub use browsers::BrowserRules;
pub(crate) use grpc_calls::is_grpc;
use node_state::CLUSTER_VERSION;

use crate::gateway;
use crate::rpc::{ApiContext, DirectKv};

/// Routers for the client ports, which dispatch by path.
pub struct Routes {
    calls: Router,
    direct: DirectKv,
    pages: Router,
    browsers: BrowserRules,
}

impl Routes {
    /// Combines the gRPC methods, this module's pages and the JSON gateway. `gateway` is the
    /// gateway's maximum request size in bytes; `None` means that it isn't served.
    pub fn new(
        grpc: Router,
        context: Arc<ApiContext>,
        gateway: Option<usize>,
        browsers: BrowserRules,
    ) -> Self {
        let calls = grpc.clone().route_layer(from_fn(grpc_calls::calls_only));
        let direct = DirectKv::new(Arc::clone(&context));
        let mut pages = router(context);
        if let Some(largest_request) = gateway {
            pages = pages.merge(gateway::router(grpc, largest_request));
        }
        // The fallback gets CORS headers too: without them, a page of another origin couldn't read
        // "not found".
        let pages = browsers.add_cors_headers(pages.fallback(not_found));
        Self { calls, direct, pages, browsers }
    }

    /// Returns a router with the gRPC methods alone.
    pub fn calls(&self) -> Router {
        self.calls.clone().fallback(not_found)
    }

    /// Returns the KV methods that can be called without the router. Only a port that serves gRPC
    /// may use them.
    pub fn direct_calls(&self) -> DirectKv {
        self.direct.clone()
    }

    /// Returns a router with everything except gRPC, for a port with or without TLS.
    pub fn pages(&self, https: bool) -> Router {
        let pages = self.pages.clone();
        if https { pages } else { self.browsers.check_host(pages) }
    }

    /// Returns a router with the gRPC methods and all pages.
    pub fn all(&self, https: bool) -> Router {
        self.calls.clone().merge(self.pages(https))
    }
}

fn router(context: Arc<ApiContext>) -> Router {
    Router::new()
        .route("/version", get_only(get(version)))
        .route("/health", get_only(get(health::health)))
        .route("/livez", get_only(get(health::livez)))
        .route("/livez/{check}", get_only(get(health::livez_check)))
        .route("/readyz", get_only(get(health::readyz)))
        .route("/readyz/{check}", get_only(get(health::readyz_check)))
        .route("/metrics", get(metrics::metrics))
        .with_state(context)
}

/// Restricts a page to GET, as in etcd. Even HEAD is refused, so load balancers must use GET.
fn get_only(get: MethodRouter<Arc<ApiContext>>) -> MethodRouter<Arc<ApiContext>> {
    get.head(not_allowed).fallback(not_allowed)
}

async fn not_allowed() -> Response {
    let text = (CONTENT_TYPE, "text/plain; charset=utf-8");
    let headers = [text, (X_CONTENT_TYPE_OPTIONS, "nosniff"), (ALLOW, "GET")];
    (StatusCode::METHOD_NOT_ALLOWED, headers, "Method Not Allowed\n").into_response()
}

/// Answers a path that is neither a gRPC method nor a page.
async fn not_found(request: Request) -> Response {
    if is_grpc(request.headers()) {
        let path = request.uri().path().trim_start_matches('/');
        let service = path.split('/').next().unwrap_or_default();
        return tonic::Status::unimplemented(format!("unknown service {service}")).into_http();
    }
    path_redirects::redirect(request.uri()).unwrap_or_else(no_such_page)
}

fn no_such_page() -> Response {
    let kind = [(CONTENT_TYPE, "text/plain; charset=utf-8")];
    (StatusCode::NOT_FOUND, kind, "404 page not found\n").into_response()
}

async fn version(State(context): State<Arc<ApiContext>>) -> impl IntoResponse {
    let body = format!(
        r#"{{"etcdserver":"{}","etcdcluster":"{CLUSTER_VERSION}","storage":"{CLUSTER_VERSION}"}}"#,
        context.identity.version
    );
    ([(CONTENT_TYPE, "application/json")], body)
}
