//! The HTTP paths on the client port: version, health, metrics.

mod health;
mod metrics;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;

use crate::rpc::Context;

/// The version of the cluster's data and protocol: what etcd calls cluster and storage version.
pub(crate) const CLUSTER_VERSION: &str = "3.6.0";

/// The whole table of paths.
pub(crate) fn router(context: Arc<Context>) -> Router {
    Router::new()
        .route("/version", get(version))
        .route("/health", get(health::health))
        .route("/livez", get(health::livez))
        .route("/livez/{check}", get(health::livez_check))
        .route("/readyz", get(health::readyz))
        .route("/readyz/{check}", get(health::readyz_check))
        .route("/metrics", get(metrics::metrics))
        .with_state(context)
}

async fn version(State(context): State<Arc<Context>>) -> impl IntoResponse {
    let body = format!(
        r#"{{"etcdserver":"{}","etcdcluster":"{CLUSTER_VERSION}","storage":"{CLUSTER_VERSION}"}}"#,
        context.identity.version
    );
    ([(CONTENT_TYPE, "application/json")], body)
}
