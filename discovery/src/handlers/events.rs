//! Handlers for the event chains: for auditors, and for the agents that keep checkpoints of them.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json, Path, Query};
use discovery_types::api::{CheckpointQuery, EventList, EventQuery, SignedBody};
use discovery_types::checkpoint::Checkpoint;
use discovery_types::problem::Problem;
use discovery_types::role::Action;
use uuid::Uuid;

use super::pages::page_limit;
use crate::app::App;
use crate::auth::authorise;
use crate::error::ApiError;

/// Returns events of a cluster's chain, or of the service's own, in order.
#[utoipa::path(get, path = "/v1/events", tag = "events", params(EventQuery),
    responses((status = 200, body = EventList), (status = "default", body = Problem)))]
pub(crate) async fn list(
    request: HttpRequest,
    app: Data<App>,
    query: Query<EventQuery>,
) -> Result<Json<EventList>, ApiError> {
    let cluster = (!query.stream.is_nil()).then_some(query.stream);
    authorise(&request, &app, Action::ReadEvents, cluster).await?;
    let limit = i64::from(page_limit(query.limit)?);
    let after = i64::try_from(query.after.unwrap_or(0)).unwrap_or(i64::MAX);
    let (last, events) = app.store.event_chain(query.stream, after, limit).await?;
    Ok(Json(EventList { stream: query.stream, last, events }))
}

/// Returns a signed checkpoint of a cluster's event chain, for an agent of one of its members.
#[utoipa::path(get, path = "/v1/clusters/{id}/checkpoint", tag = "events",
    params(("id" = Uuid, Path,), CheckpointQuery),
    responses((status = 200, body = SignedBody), (status = "default", body = Problem)))]
pub(crate) async fn checkpoint(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    query: Query<CheckpointQuery>,
) -> Result<Json<SignedBody>, ApiError> {
    authorise(&request, &app, Action::Report, Some(*path)).await?;
    let (last, earlier) = app.store.chain_positions(*path, query.known).await?;
    let at = app.clock.micros().unsigned_abs() / 1_000_000;
    let checkpoint = Checkpoint { cluster: *path, last, earlier, at };
    Ok(Json(SignedBody { jws: checkpoint.sign(&app.keys.signer().key) }))
}
