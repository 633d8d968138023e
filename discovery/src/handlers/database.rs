//! Handlers for a database that was replaced or set back to an older state, and for the processes
//! that share it.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json, Path};
use discovery_types::api::{AcceptRequest, AcceptResponse, ProcessList, ProcessView};
use discovery_types::problem::{Code, Problem};
use discovery_types::role::Action;
use uuid::Uuid;

use super::body::JsonBody;
use crate::app::App;
use crate::auth::authorise;
use crate::error::ApiError;
use crate::store::UnixMicros;

/// A process seen within this time counts as running, in microseconds.
const ALIVE_US: UnixMicros = 60_000_000;

/// Accepts a changed database: abandons every cluster that isn't committed, and revokes every
/// token.
#[utoipa::path(post, path = "/v1/db/accept", tag = "database", request_body = AcceptRequest,
    responses((status = 200, body = AcceptResponse), (status = "default", body = Problem)))]
pub(crate) async fn accept(
    request: HttpRequest,
    app: Data<App>,
    JsonBody(body): JsonBody<AcceptRequest>,
) -> Result<Json<AcceptResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::AcceptDatabase, None).await?;
    let identifier = body.system_identifier.as_deref();
    let accepted = app.accept_database(identifier, &caller.name).await?;
    tracing::warn!(
        by = caller.name,
        abandoned = accepted.abandoned.len(),
        revoked = accepted.revoked_tokens,
        "the database was accepted as it is"
    );
    Ok(Json(accepted))
}

/// Lists the processes that use, or used, this database.
#[utoipa::path(get, path = "/v1/processes", tag = "database",
    responses((status = 200, body = ProcessList), (status = "default", body = Problem)))]
pub(crate) async fn list(
    request: HttpRequest,
    app: Data<App>,
) -> Result<Json<ProcessList>, ApiError> {
    authorise(&request, &app, Action::ReadProcesses, None).await?;
    list_of(&app).await
}

/// Declares that a process won't come back, so that its ledger isn't waited for. The request is
/// refused if the process is running.
#[utoipa::path(post, path = "/v1/processes/{id}/forget", tag = "database",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = ProcessList), (status = "default", body = Problem)))]
pub(crate) async fn forget(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<ProcessList>, ApiError> {
    let caller = authorise(&request, &app, Action::AcceptDatabase, None).await?;
    check_not_running(&app, *path).await?;
    if !app.store.forget_process(*path, &caller.name).await? {
        return Err(no_process());
    }
    tracing::warn!(by = caller.name, process = %path.into_inner(), "a process was forgotten");
    app.notifier.wake_all();
    list_of(&app).await
}

/// Returns an error if the process is possibly still running. A running process would register
/// again, so forgetting it would have no effect.
async fn check_not_running(app: &App, id: Uuid) -> Result<(), ApiError> {
    let store = &app.store;
    let runs = |detail: &str| {
        let next = "Forget only a process whose ledger is lost for good: stop it, wait for a \
                    minute, and look at `muster-discovery process list`.";
        Err(ApiError::new(Code::WrongState, detail, next))
    };
    if id == store.ledger().process() {
        return runs("This is the process that answers you.");
    }
    let now = store.now().await?;
    let rows = store.processes().await?;
    let row = rows.iter().find(|row| row.id == id).ok_or_else(no_process)?;
    if row.forgotten_us.is_some() {
        return Ok(());
    }
    if now - row.last_seen_us < ALIVE_US {
        return runs("The process was heard of in the last minute.");
    }
    // After a restore, `last_seen_us` is as old as the dump. A process can be running that hasn't
    // connected to this database yet.
    if now - store.refresh_generation().await?.changed_us < ALIVE_US {
        return runs(
            "The database changed in the last minute: the process may not have seen it yet.",
        );
    }
    Ok(())
}

fn no_process() -> ApiError {
    ApiError::not_found("such process")
}

async fn list_of(app: &App) -> Result<Json<ProcessList>, ApiError> {
    let generation = app.store.refresh_generation().await?;
    let own = app.store.ledger().process();
    let rows = app.store.processes().await?;
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
