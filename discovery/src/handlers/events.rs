//! Handler for the event chains, for auditors.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json, Query};
use discovery_types::api::{EventList, EventQuery};
use discovery_types::problem::Problem;
use discovery_types::role::Action;

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
