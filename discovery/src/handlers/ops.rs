//! Handlers for operators: health and metrics.

use actix_web::http::header::{self, HeaderValue};
use actix_web::web::Data;
use actix_web::{HttpResponse, ResponseError};
use discovery_types::problem::{Code, Problem};
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::error::ApiError;

/// Answer of `GET /readyz`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Readiness {
    /// `ready`; or `degraded`: the service answers, but freezes and commits no list.
    pub status: &'static str,
    /// Problem and remedy; none if the service is ready.
    pub detail: Option<String>,
    /// Generation of the database: the number of its present history.
    pub generation: i64,
}

/// Answers as long as the process runs.
#[utoipa::path(get, path = "/livez", tag = "operations", responses((status = 200)))]
pub(crate) async fn livez() -> &'static str {
    "ok\n"
}

/// Checks that the database answers and took the last write, because the process can't serve
/// requests otherwise. Changes nothing.
#[utoipa::path(get, path = "/readyz", tag = "operations",
    responses((status = 200, body = Readiness), (status = 503, body = Problem)))]
pub(crate) async fn readyz(app: Data<App>) -> Result<HttpResponse, ApiError> {
    let looked = app.store.refresh_generation().await;
    let refuses_writes = app.store.watch().refuses_writes();
    app.metrics.database_up.set(i64::from(looked.is_ok() && !refuses_writes));
    let generation = looked?;
    if app.draining.is_cancelled() {
        let next = "Use another one.";
        return Err(ApiError::new(Code::Overloaded, "The process is stopping.", next));
    }
    if refuses_writes {
        return Err(ApiError::takes_no_writes());
    }
    let incomplete = || app.store.watch().explain_incomplete(generation.number);
    let detail = generation.explain().or_else(incomplete);
    let status = if detail.is_none() { "ready" } else { "degraded" };
    Ok(HttpResponse::Ok().json(Readiness { status, detail, generation: generation.number }))
}

/// Returns the metrics, in OpenMetrics text format.
#[utoipa::path(get, path = "/metrics", tag = "operations", responses((status = 200)))]
pub(crate) async fn metrics(app: Data<App>) -> HttpResponse {
    let metrics = &app.metrics;
    metrics.parked.set(app.poll_slots.taken() as i64);
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    HttpResponse::Ok().insert_header((header::CONTENT_TYPE, kind)).body(metrics.text())
}

/// Response for an unknown path.
pub(crate) async fn not_found() -> HttpResponse {
    let next = "Look into /openapi.json for the paths that there are.";
    ApiError::new(Code::NotFound, "There is nothing at this path.", next).error_response()
}

/// Response for a known path with a method that it doesn't have. `allow` lists its methods (RFC
/// 9110, 15.5.6).
pub(crate) async fn method_not_allowed(allow: &'static str) -> HttpResponse {
    let next = format!("Use one of: {allow}.");
    let error = ApiError::new(Code::MethodNotAllowed, "This path takes another method.", next);
    let mut response = error.error_response();
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
    response
}

/// Refuses every method: only the cluster itself changes its members.
#[utoipa::path(method(post, put, patch, delete), path = "/v1/clusters/{id}/members", tag = "clusters",
    params(("id" = uuid::Uuid, Path,)), responses((status = 405, body = Problem)))]
pub(crate) async fn membership() -> HttpResponse {
    let mut response = ApiError::new(
        Code::MembershipElsewhere,
        "Discovery changes no membership.",
        "Use the cluster's own Cluster API: `muster-agent member` on a member's host, or `etcdctl \
         member` at a client URL. `muster-discovery token create --kind join` and \
         `muster-discovery intent` ask the cluster's own agents to do so.",
    )
    .error_response();
    // RFC 9110 requires the header `Allow` with status 405, even if no method is allowed.
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(""));
    response
}
