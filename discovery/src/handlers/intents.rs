//! Handlers for changes of a running cluster.

use std::time::Duration;

use actix_web::HttpRequest;
use actix_web::web::{Data, Json, Path, Query};
use discovery_types::access::ClientKind;
use discovery_types::api::{
    ClusterExport, DirectoryResponse, IntentList, IntentState, IntentView, JoinResponse,
    LeavesRequest, MAX_RECOVERIES_BODY_BYTES, NodeProgram, OutcomeRequest, RecoveriesRequest,
    RecoveriesResponse, SignedBody, StatementList, WaitRequest,
};
use discovery_types::digest::OperationId;
use discovery_types::jws::JwsType;
use discovery_types::leaves::Leaves;
use discovery_types::order::{Order, OrderError};
use discovery_types::problem::Problem;
use discovery_types::readmission::ReadmitRequest;
use discovery_types::role::{Action, Principal, is_allowed};
use serde::Deserialize;
use tokio::time::Instant;
use utoipa::IntoParams;
use uuid::Uuid;

use super::access::jwks_of;
use super::body::JsonBody;
use crate::app::App;
use crate::auth::{Caller, answer_with_access_token, authorise, check_statement_of, peer, tls_key};
use crate::error::ApiError;
use crate::intents::IntentReader;
use crate::redeem::RedeemRequest;

/// The query of a newcomer's request to join.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct JoinQuery {
    /// Program that the newcomer's host runs as its node. Older agents don't send it.
    #[param(inline)]
    pub program: Option<NodeProgram>,
}

/// Readmits a member that joined after the backup from which this service was restored. Its own
/// proofs and the cluster's list of members decide; an access token isn't needed.
#[utoipa::path(post, path = "/v1/clusters/{id}/readmit", tag = "intents",
    params(("id" = Uuid, Path,)), request_body = ReadmitRequest,
    responses((status = 200, body = IntentView), (status = "default", body = Problem)))]
pub(crate) async fn readmit(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<ReadmitRequest>,
) -> Result<Json<IntentView>, ApiError> {
    let key = tls_key(&request)?;
    let address = peer(&request)?.address.ip().to_canonical();
    // Limit these requests: each costs several signature checks, and anybody may send one.
    app.adoption_limit.check(address).map_err(|wait| app.rate_limited(address, wait))?;
    if !is_allowed(&Principal::Agent { cluster: *path }, Action::Readmit, Some(*path)) {
        return Err(ApiError::not_found("such cluster"));
    }
    Ok(Json(app.readmit(*path, &key, address, &body).await?))
}

/// Redeems a join ticket. Needs no access token, like the redemption of a boot token.
#[utoipa::path(post, path = "/v1/join", tag = "intents", params(JoinQuery),
    request_body = SignedBody,
    responses((status = 200, body = JoinResponse), (status = "default", body = Problem)))]
pub(crate) async fn join(
    request: HttpRequest,
    app: Data<App>,
    query: Query<JoinQuery>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<JoinResponse>, ApiError> {
    let key = tls_key(&request)?;
    let address = peer(&request)?.address.ip().to_canonical();
    let redeem = RedeemRequest::open(body.jws, key, app.keys.pin(), address)?;
    let joined = app.join(&redeem, query.program).await?;
    Ok(Json(JoinResponse {
        token: answer_with_access_token(&request, &app, &key, ClientKind::Agent(redeem.cluster()))?,
        issuer: app.issuer.to_string(),
        jwks: jwks_of(&app),
        now_ms: app.clock.micros() / 1_000,
        statements: joined.statements,
        document: joined.document,
        intent: joined.intent,
    }))
}

/// Orders the removal of a member, or new peer URLs for it. An agent of the cluster carries the
/// order out.
#[utoipa::path(put, path = "/v1/orders", tag = "intents", request_body = SignedBody,
    responses((status = 200, body = IntentView), (status = "default", body = Problem)))]
pub(crate) async fn order(
    request: HttpRequest,
    app: Data<App>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<IntentView>, ApiError> {
    let claimed: Order = body.jws.claims_unverified(JwsType::Order).map_err(OrderError::Jws)?;
    let caller = authorise(&request, &app, Action::PutOrder, Some(claimed.cluster)).await?;
    Ok(Json(app.put_order(&caller, &body.jws).await?))
}

/// Filter of the intent list.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct IntentsQuery {
    /// Value of the cluster's change counter (`rev`) that the caller has seen. The service waits
    /// until the value differs, or until the poll's time is up. Without this parameter it answers
    /// at once.
    pub after: Option<u64>,
    /// Whether to list ended intents, too, if they were made within the last day.
    pub all: Option<bool>,
}

/// Lists a cluster's intents.
#[utoipa::path(get, path = "/v1/clusters/{id}/intents", tag = "intents",
    params(("id" = Uuid, Path,), IntentsQuery),
    responses((status = 200, body = IntentList), (status = "default", body = Problem)))]
pub(crate) async fn list(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    query: Query<IntentsQuery>,
) -> Result<Json<IntentList>, ApiError> {
    let caller = authorise(&request, &app, Action::ReadIntents, Some(*path)).await?;
    let all = query.all.unwrap_or(false);
    let read = async || app.intents(*path, intent_reader(&caller), all).await;
    let wait = IntentPoll { cluster: *path, caller: &caller, after: query.after };
    let list =
        wait.wait_for_change(&app, read, |list| (list.rev, earliest_end(&list.intents))).await?;
    Ok(Json(list))
}

/// Path of an intent.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct IntentPath {
    pub id: Uuid,
    pub operation: OperationId,
}

/// Query of a request for one intent.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct IntentQuery {
    /// Value of the intent's `rev` that the caller has seen. The service waits until the value
    /// differs, or until the poll's time is up. Without this parameter it answers at once.
    pub after: Option<u64>,
}

/// Returns one intent by its id.
#[utoipa::path(get, path = "/v1/clusters/{id}/intents/{operation}", tag = "intents",
    params(("id" = Uuid, Path,), ("operation" = String, Path,), IntentQuery),
    responses((status = 200, body = IntentView), (status = "default", body = Problem)))]
pub(crate) async fn show(
    request: HttpRequest,
    app: Data<App>,
    path: Path<IntentPath>,
    query: Query<IntentQuery>,
) -> Result<Json<IntentView>, ApiError> {
    let caller = authorise(&request, &app, Action::ReadIntents, Some(path.id)).await?;
    let read = async || app.intent(path.id, intent_reader(&caller), path.operation).await;
    let wait = IntentPoll { cluster: path.id, caller: &caller, after: query.after };
    let seen = |view: &IntentView| (view.rev, earliest_end(std::slice::from_ref(view)));
    Ok(Json(wait.wait_for_change(&app, read, seen).await?))
}

/// Stores the outcome of an intent, as an agent of the cluster reports it.
#[utoipa::path(post, path = "/v1/clusters/{id}/intents/{operation}/outcome", tag = "intents",
    params(("id" = Uuid, Path,), ("operation" = String, Path,)), request_body = OutcomeRequest,
    responses((status = 200, body = IntentView), (status = "default", body = Problem)))]
pub(crate) async fn outcome(
    request: HttpRequest,
    app: Data<App>,
    path: Path<IntentPath>,
    JsonBody(body): JsonBody<OutcomeRequest>,
) -> Result<Json<IntentView>, ApiError> {
    let caller = authorise(&request, &app, Action::ReportOutcome, Some(path.id)).await?;
    Ok(Json(app.report_outcome(path.id, path.operation, &caller.key, &body).await?))
}

/// Stores the reason why an intent waits, as an agent of the cluster reports it.
#[utoipa::path(post, path = "/v1/clusters/{id}/intents/{operation}/wait", tag = "intents",
    params(("id" = Uuid, Path,), ("operation" = String, Path,)), request_body = WaitRequest,
    responses((status = 200, body = IntentView), (status = "default", body = Problem)))]
pub(crate) async fn wait(
    request: HttpRequest,
    app: Data<App>,
    path: Path<IntentPath>,
    JsonBody(body): JsonBody<WaitRequest>,
) -> Result<Json<IntentView>, ApiError> {
    let caller = authorise(&request, &app, Action::ReportOutcome, Some(path.id)).await?;
    Ok(Json(app.report_wait(path.id, path.operation, &caller.key, &body.reason).await?))
}

/// Withdraws an intent that no agent has begun.
#[utoipa::path(post, path = "/v1/clusters/{id}/intents/{operation}/withdraw", tag = "intents",
    params(("id" = Uuid, Path,), ("operation" = String, Path,)),
    responses((status = 200, body = IntentView), (status = "default", body = Problem)))]
pub(crate) async fn withdraw(
    request: HttpRequest,
    app: Data<App>,
    path: Path<IntentPath>,
) -> Result<Json<IntentView>, ApiError> {
    let caller = authorise(&request, &app, Action::WithdrawIntent, Some(path.id)).await?;
    Ok(Json(app.withdraw(&caller, path.id, path.operation).await?))
}

/// Returns a cluster's members, as the members themselves report them.
#[utoipa::path(get, path = "/v1/clusters/{id}/directory", tag = "clusters",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = DirectoryResponse), (status = "default", body = Problem)))]
pub(crate) async fn directory(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<DirectoryResponse>, ApiError> {
    authorise(&request, &app, Action::ShowCluster, Some(*path)).await?;
    Ok(Json(app.directory(*path).await?))
}

/// Stores the recovery statements by which the cluster goes on as another Raft cluster. They are
/// sent by the agent of the host from whose data the new Raft cluster was made. Sending them again
/// changes nothing.
#[utoipa::path(post, path = "/v1/clusters/{id}/recoveries", tag = "intents",
    params(("id" = Uuid, Path,)), request_body = RecoveriesRequest,
    responses((status = 200, body = RecoveriesResponse), (status = "default", body = Problem)))]
pub(crate) async fn recoveries(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<RecoveriesRequest, MAX_RECOVERIES_BODY_BYTES>,
) -> Result<Json<RecoveriesResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::ShowRecoveries, Some(*path)).await?;
    Ok(Json(app.follow_recoveries(*path, &caller.key, &body.recoveries).await?))
}

/// Stores an owner's statement of this service's URLs and keys, for the agents of a running
/// cluster. Sending the stored statement again changes nothing.
#[utoipa::path(put, path = "/v1/clusters/{id}/service", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = SignedBody,
    responses((status = 200, body = StatementList), (status = "default", body = Problem)))]
pub(crate) async fn service(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<StatementList>, ApiError> {
    let caller = authorise(&request, &app, Action::AnnounceService, Some(*path)).await?;
    Ok(Json(app.put_service(&caller, *path, &body.jws).await?))
}

/// Issues new certificates to a member, or a newcomer's first ones.
#[utoipa::path(post, path = "/v1/clusters/{id}/leaves", tag = "intents",
    params(("id" = Uuid, Path,)), request_body = LeavesRequest,
    responses((status = 200, body = Leaves), (status = "default", body = Problem)))]
pub(crate) async fn leaves(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<LeavesRequest>,
) -> Result<Json<Leaves>, ApiError> {
    let caller = authorise(&request, &app, Action::RenewLeaves, Some(*path)).await?;
    Ok(Json(app.renew_leaves(*path, &caller.key, &body.csr).await?))
}

/// Exports a cluster's CAs for `ca issue`; their keys are encrypted, and only the key directory can
/// decrypt them.
#[utoipa::path(get, path = "/v1/clusters/{id}/export", tag = "clusters",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = ClusterExport), (status = "default", body = Problem)))]
pub(crate) async fn export(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<ClusterExport>, ApiError> {
    let caller = authorise(&request, &app, Action::ExportCluster, Some(*path)).await?;
    check_statement_of(&app, &caller, Action::ExportCluster, *path).await?;
    tracing::info!(cluster.id = %path, by = caller.name, "exported a cluster's encrypted CAs");
    Ok(Json(app.export(*path).await?))
}

fn intent_reader(caller: &Caller) -> IntentReader {
    match caller.principal {
        Principal::Agent { .. } => IntentReader::Agent(caller.key),
        Principal::Admin { .. } => IntentReader::Admin,
    }
}

/// Returns the time at which the next open intent expires, in seconds since 1970.
fn earliest_end(intents: &[IntentView]) -> Option<u64> {
    let open = intents.iter().filter(|view| view.state == IntentState::Open);
    open.map(|view| view.intent.expires_at).min()
}

/// A long poll for changes of a cluster's intents.
struct IntentPoll<'a> {
    cluster: Uuid,
    caller: &'a Caller,
    after: Option<u64>,
}

impl IntentPoll<'_> {
    /// Reads until the cluster's change counter differs from the value that the caller has seen, an
    /// intent expires, or the poll's time is up. `seen` returns the counter's value in the result,
    /// and the time in seconds since 1970 at which the next intent expires.
    async fn wait_for_change<T>(
        &self,
        app: &App,
        read: impl AsyncFn() -> Result<T, ApiError>,
        seen: impl Fn(&T) -> (u64, Option<u64>),
    ) -> Result<T, ApiError> {
        // Subscribe before reading, so that no change in between is missed.
        let mut news = app.notifier.subscribe(self.cluster);
        let mut found = Box::pin(read()).await?;
        let (rev, ends) = seen(&found);
        if self.after != Some(rev) || app.draining.is_cancelled() {
            return Ok(found);
        }
        let _place = app.take_poll_slot(&self.caller.key)?;
        let until_end = ends.map(|at| at.saturating_sub(app.clock.seconds()) + 1);
        let wait = until_end
            .map_or(app.max_poll_wait, |left| app.max_poll_wait.min(Duration::from_secs(left)));
        let end = Instant::now() + wait;
        loop {
            let over = tokio::select! {
                () = news.changed() => false,
                () = tokio::time::sleep_until(end) => true,
                () = app.draining.cancelled() => return Ok(found),
            };
            found = Box::pin(read()).await?;
            if over || self.after != Some(seen(&found).0) {
                return Ok(found);
            }
        }
    }
}
