//! The database that changed under us, and the processes that share it.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json, Path};
use discovery_types::api::{AcceptRequest, AcceptResponse, ProcessList, ProcessView};
use discovery_types::problem::Problem;
use discovery_types::role::Action;
use uuid::Uuid;

use super::body::Body;
use crate::app::App;
use crate::auth::authorise;
use crate::error::ApiError;

/// Takes a changed database as it is: abandons every cluster that isn't committed, and revokes
/// every token.
#[utoipa::path(post, path = "/v1/db/accept", tag = "database", request_body = AcceptRequest,
    responses((status = 200, body = AcceptResponse), (status = "default", body = Problem)))]
pub async fn accept(
    request: HttpRequest,
    app: Data<App>,
    Body(body): Body<AcceptRequest>,
) -> Result<Json<AcceptResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::AcceptDatabase, None).await?;
    let identifier = body.system_identifier.as_deref();
    let accepted = app.forming.accept_database(identifier, &caller.name).await?;
    tracing::warn!(
        by = caller.name,
        abandoned = accepted.abandoned.len(),
        revoked = accepted.revoked_tokens,
        "the database was accepted as it is"
    );
    Ok(Json(accepted))
}

/// Processes that use, or used, this database.
#[utoipa::path(get, path = "/v1/processes", tag = "database",
    responses((status = 200, body = ProcessList), (status = "default", body = Problem)))]
pub async fn list(request: HttpRequest, app: Data<App>) -> Result<Json<ProcessList>, ApiError> {
    authorise(&request, &app, Action::AcceptDatabase, None).await?;
    list_of(&app).await
}

/// Says that a process won't come back: its ledger isn't waited for.
#[utoipa::path(post, path = "/v1/processes/{id}/forget", tag = "database",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = ProcessList), (status = "default", body = Problem)))]
pub async fn forget(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<ProcessList>, ApiError> {
    let caller = authorise(&request, &app, Action::AcceptDatabase, None).await?;
    if !app.forming.store.forget_process(*path, &caller.name).await? {
        return Err(ApiError::not_found("such process"));
    }
    tracing::warn!(by = caller.name, process = %path.into_inner(), "a process was forgotten");
    app.forming.wakes.wake_all();
    list_of(&app).await
}

async fn list_of(app: &App) -> Result<Json<ProcessList>, ApiError> {
    let generation = app.forming.store.look_at_generation().await?;
    let own = app.forming.store.ledger().process();
    let rows = app.forming.store.processes().await?;
    let processes = rows
        .into_iter()
        .map(|row| ProcessView {
            id: row.id,
            answering: row.id == own,
            ledger_entries: row.entries.unsigned_abs(),
            first_seen_ms: row.first_seen_us / 1_000,
            last_seen_ms: row.last_seen_us / 1_000,
            missing: generation.missing.contains(&row.id),
            forgotten_at_ms: row.forgotten_us.map(|at| at / 1_000),
        })
        .collect();
    Ok(Json(ProcessList {
        generation: generation.number,
        settled: generation.settled,
        explain: generation.explain(),
        processes,
    }))
}
