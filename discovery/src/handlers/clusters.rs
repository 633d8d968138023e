//! Handlers with which admins create, show and end clusters.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json, Path, Query};
use discovery_formation::service::{Cluster, FormationSettings, Phase};
use discovery_types::SIZES;
use discovery_types::api::{
    AbandonRequest, AddressesRequest, AddressesResponse, AskingHost, ClusterList, ClusterQuery,
    ClusterState, ClusterStates, ClusterSummary, ClusterView, CommitDocument, CredentialsRequest,
    CredentialsResponse, DraftRequest, DraftResponse, ExplainResponse, Explanation,
    MAX_STATEMENTS_BODY_BYTES, MembersView, RotationView, SignedBody, StatementList,
    StatementsRequest,
};
use discovery_types::convert;
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::name::Name;
use discovery_types::problem::{Code, Problem};
use discovery_types::retire::MAX_REASON;
use discovery_types::role::Action;
use discovery_types::statement::{CaPair, Statement, StatementChain};
use uuid::Uuid;

use super::agent_key;
use super::body::{JsonBody, unreadable_request};
use super::pages::{has_next_page, page_limit, parse_position};
use crate::app::App;
use crate::auth::{
    Caller, authorise, check_named_or_owner, check_statement_allows, check_statement_of,
};
use crate::ca::CREDENTIAL_LIFE;
use crate::ca_rotation::check_issuing;
use crate::error::ApiError;
use crate::forming::{ClusterRequest, explanations, show, summary_of};
use crate::intents;
use crate::kek::KeyPurpose;
use crate::members::roster::check_running;
use crate::store::clusters::{ClusterFilter, Draft, OpenResult};
use crate::store::{ListPosition, UnixMicros};

/// Makes a draft of a cluster: an id and two CAs, which the first statement will contain.
#[utoipa::path(post, path = "/v1/drafts", tag = "clusters", request_body = DraftRequest,
    responses((status = 200, body = DraftResponse), (status = "default", body = Problem)))]
pub(crate) async fn draft(
    request: HttpRequest,
    app: Data<App>,
    JsonBody(body): JsonBody<DraftRequest>,
) -> Result<Json<DraftResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::CreateDraft, None).await?;
    if !SIZES.contains(&body.size) {
        let next = "Choose a size from 1 to 9; odd sizes are better.";
        let detail = format!("A cluster of {} members can't be formed.", body.size);
        return Err(ApiError::new(Code::InvalidRequest, detail, next));
    }
    if app.store.is_name_taken(body.name.as_str()).await? {
        return Err(name_taken_error(body.name.as_str()));
    }
    let now = app.store.now().await?;
    let cluster = Uuid::now_v7();
    let seconds = now.unsigned_abs() / 1_000_000;
    let make = |purpose| app.make_wrapped_ca(cluster, body.name.as_str(), purpose, seconds);
    let (peer, client) = (make(KeyPurpose::PeerCa)?, make(KeyPurpose::ClientCa)?);
    let (name, by) = (body.name.as_str(), caller.name.as_str());
    let store = &app.store;
    let expires =
        store.add_draft(cluster, name, body.size, by, app.draft_life, [&peer, &client]).await?;
    Ok(Json(DraftResponse {
        cluster,
        peer_ca: show::pem("CERTIFICATE", &peer.ca.certificate),
        client_ca: show::pem("CERTIFICATE", &client.ca.certificate),
        expires_at_ms: expires / 1_000,
        max_deadline_seconds: app.max_deadline_seconds,
    }))
}

fn name_taken_error(name: &str) -> ApiError {
    let next = "Choose another name, or abandon or retire that cluster first.";
    ApiError::new(Code::NameTaken, format!("There is a live cluster called {name}."), next)
}

/// Makes new CAs for a running cluster, which its next statement can name.
#[utoipa::path(post, path = "/v1/clusters/{id}/cas", tag = "clusters",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = CaPair), (status = "default", body = Problem)))]
pub(crate) async fn make_cas(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<CaPair>, ApiError> {
    let caller = authorise(&request, &app, Action::PutStatement, Some(*path)).await?;
    // New CAs replace earlier ones that no statement names yet. So only an owner who could sign the
    // next statement may make them.
    check_statement_of(&app, &caller, Action::PutStatement, *path).await?;
    Ok(Json(app.make_other_cas(*path).await?))
}

/// Shows the progress of the members in the replacement of their cluster's CAs.
#[utoipa::path(get, path = "/v1/clusters/{id}/cas", tag = "clusters",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = RotationView), (status = "default", body = Problem)))]
pub(crate) async fn rotation(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<RotationView>, ApiError> {
    authorise(&request, &app, Action::ShowCluster, Some(*path)).await?;
    Ok(Json(app.rotation(*path).await?))
}

/// Stores a draft's first statement, which opens the cluster, or a cluster's next statement.
#[utoipa::path(put, path = "/v1/clusters/{id}/statement", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = SignedBody,
    responses((status = 200, body = ClusterSummary), (status = "default", body = Problem)))]
pub(crate) async fn statement(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<ClusterSummary>, ApiError> {
    let caller = authorise(&request, &app, Action::PutStatement, Some(*path)).await?;
    match app.store.draft(*path).await? {
        Some(draft) => open(&app, &caller, *path, &draft, &body.jws).await?,
        None => {
            let row = app.store.summary(*path).await?;
            if row.is_none_or(|row| row.phase == "draft") {
                let next = "Run `muster-discovery cluster create` again.";
                return Err(ApiError::new(Code::DraftGone, "The draft is gone.", next));
            }
            let incoming = ClusterRequest::Restate { jws: body.jws, is_new: true };
            app.apply(*path, incoming).await?;
        }
    }
    summary(&app, *path).await
}

async fn open(
    app: &App,
    caller: &Caller,
    id: Uuid,
    draft: &Draft,
    jws: &Jws,
) -> Result<(), ApiError> {
    let refused = |detail: &str| {
        let next = "Sign the statement over the draft as it was answered.";
        ApiError::new(Code::StatementRefused, detail, next)
    };
    let chain = StatementChain::verify_links(std::slice::from_ref(jws))?;
    let statement: &Statement = chain.newest();
    if *chain.root() != caller.key.key_id() {
        return Err(refused("The first statement must be signed by the owner who puts it."));
    }
    let same = statement.cluster == id
        && statement.name.as_str() == draft.name
        && i16::from(statement.size) == draft.size
        && draft.authorities.are_issuing(statement)
        && statement.also_trusted.is_some() == statement.adopted.is_some();
    if !same {
        return Err(refused("Id, name, size or a CA is not the draft's."));
    }
    if statement.deadline_seconds > app.max_deadline_seconds {
        let most = app.max_deadline_seconds;
        return Err(refused(&format!("The deadline may be at most {most} seconds here.")));
    }
    let opened = app
        .store
        .open_cluster(
            convert::statement(&chain),
            jws,
            statement.deadline_seconds,
            &app.settings,
            &caller.name,
        )
        .await?;
    match opened {
        OpenResult::Open => Ok(()),
        OpenResult::NameTaken => Err(name_taken_error(&draft.name)),
        // A concurrent request may have opened the cluster with the same statement. This request
        // then succeeds, too.
        OpenResult::NoDraft => {
            app.apply(id, ClusterRequest::Restate { jws: jws.clone(), is_new: true }).await?;
            Ok(())
        }
    }
}

async fn summary(app: &App, id: Uuid) -> Result<Json<ClusterSummary>, ApiError> {
    let row = app.store.summary(id).await?;
    let row = row.ok_or_else(|| ApiError::not_found("such cluster"))?;
    Ok(Json(summary_of(&row)?))
}

/// Lists clusters, newest first, a page at a time.
#[utoipa::path(get, path = "/v1/clusters", tag = "clusters", params(ClusterQuery),
    responses((status = 200, body = ClusterList), (status = "default", body = Problem)))]
pub(crate) async fn list(
    request: HttpRequest,
    app: Data<App>,
    query: Query<ClusterQuery>,
) -> Result<Json<ClusterList>, ApiError> {
    authorise(&request, &app, Action::ListClusters, None).await?;
    Ok(Json(cluster_list(&app, &query).await?))
}

/// Reads a page of the list of clusters.
pub(crate) async fn cluster_list(app: &App, query: &ClusterQuery) -> Result<ClusterList, ApiError> {
    let limit = page_limit(query.limit)?;
    let states = query.state.as_ref().map_or(&ClusterState::ALL[..], ClusterStates::as_slice);
    let phases: Vec<&str> = states.iter().map(|state| state.as_str()).collect();
    let start = ListPosition::start(Uuid::nil());
    let created_before = match query.created_before_ms {
        Some(ms) => micros("created_before_ms", ms)?,
        None => start.at_us,
    };
    let created_from_us = match query.created_from_ms {
        Some(ms) => micros("created_from_ms", ms)?,
        None => 0,
    };
    let after = parse_position::<Uuid>(query.after.as_deref(), start.clone())?
        .min(ListPosition { at_us: created_before, ..start });
    let filter = ClusterFilter {
        name: query.name.as_ref().map(Name::as_str),
        phases: &phases,
        created_from_us,
        after: &after,
        // Read one item more than the page holds: it shows whether there is another page.
        limit: i64::from(limit) + 1,
    };
    let mut rows = app.store.clusters(&filter).await?;
    let more = has_next_page(&mut rows, limit);
    let next = rows
        .last()
        .filter(|_| more)
        .map(|row| ListPosition { at_us: row.created_us, id: row.id.to_string() }.to_string());
    let clusters = rows.iter().map(summary_of).collect::<Result<_, _>>()?;
    Ok(ClusterList { clusters, next })
}

fn micros(parameter: &str, ms: u64) -> Result<UnixMicros, ApiError> {
    ms.checked_mul(1_000).and_then(|us| UnixMicros::try_from(us).ok()).ok_or_else(|| {
        let latest = UnixMicros::MAX / 1_000;
        unreadable_request(&format!("{parameter}: {ms} is too large, at most {latest}"))
    })
}

/// Returns one cluster, with its seats, its timeline, and the reasons why it waits.
#[utoipa::path(get, path = "/v1/clusters/{id}", tag = "clusters", params(("id" = Uuid, Path,)),
    responses((status = 200, body = ClusterView), (status = "default", body = Problem)))]
pub(crate) async fn show_one(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<ClusterView>, ApiError> {
    authorise(&request, &app, Action::ShowCluster, Some(*path)).await?;
    Ok(Json(cluster_view(&app, *path).await?))
}

/// Reads one cluster, as [`show_one`] returns it.
pub(crate) async fn cluster_view(app: &App, id: Uuid) -> Result<ClusterView, ApiError> {
    let store = &app.store;
    let row = store.summary(id).await?.ok_or_else(|| ApiError::not_found("such cluster"))?;
    let summary = summary_of(&row)?;
    let Some((cluster, chain, now)) = store.read_cluster(id).await? else {
        return Ok(ClusterView {
            summary,
            statement: None,
            seats: Vec::new(),
            timeline: Vec::new(),
            explain: Vec::new(),
            document: None,
            raft_cluster_id: None,
            alarms: Vec::new(),
            present: MembersView::default(),
            asking: Vec::new(),
            ended: None,
        });
    };
    let origins = store.origins(id).await?;
    let present = app.present_members((&cluster, &chain), &origins, now.0 as UnixMicros).await?;
    let asking = app.asking_hosts(&cluster).await?;
    let name = chain.newest().name.as_str();
    let others = explain_others(app, (&cluster, &chain), &present, now.0 as UnixMicros).await?;
    let events = store.events(id, show::TIMELINE_EVENTS).await?;
    let generation = store.watch().generation.borrow().clone();
    let decided = matches!(cluster.phase, Phase::Committed | Phase::Formed | Phase::Retired);
    let settings: &FormationSettings = &app.settings;
    let recovery = app.recovery_view(&cluster, &chain).await?;
    let alarms = [show::alarms(&cluster), recovery.alarms].concat();
    Ok(ClusterView {
        summary,
        statement: Some(chain.newest_hash()),
        seats: show::seats(&cluster, &origins),
        timeline: show::timeline(events),
        explain: add_member_explanations(
            explanations(&cluster, &chain, settings, now, generation.as_ref()),
            &cluster,
            name,
            (&present, &asking),
            others,
        ),
        document: cluster
            .frozen
            .as_ref()
            .filter(|_| decided)
            .map(|frozen| Digest(frozen.proposal_hash.0)),
        raft_cluster_id: recovery.raft_cluster.or_else(|| show::raft_cluster(&cluster)),
        alarms,
        present,
        asking,
        ended: show::end_view(&cluster, settings, now),
    })
}

/// Returns all statements of a cluster.
#[utoipa::path(get, path = "/v1/clusters/{id}/statements", tag = "clusters",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = StatementList), (status = "default", body = Problem)))]
pub(crate) async fn statements(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<StatementList>, ApiError> {
    authorise(&request, &app, Action::ReadStatements, Some(*path)).await?;
    let found = app.store.read_cluster(*path).await?;
    let (_, chain, _) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    let service = app.store.service_statement(*path).await?;
    Ok(Json(StatementList { statements: chain.jws(), service }))
}

/// Accepts the statement chain of a member's agent, signed by owners. This database may have lost
/// some of the statements, for example by a restore.
#[utoipa::path(post, path = "/v1/clusters/{id}/statements", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = StatementsRequest,
    responses((status = 200, body = StatementList), (status = "default", body = Problem)))]
pub(crate) async fn restore_statements(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<StatementsRequest, MAX_STATEMENTS_BODY_BYTES>,
) -> Result<Json<StatementList>, ApiError> {
    let caller = authorise(&request, &app, Action::Report, Some(*path)).await?;
    let found = app.store.read_cluster(*path).await?;
    let (cluster, chain, _) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    check_running(&cluster)?;
    let shown = StatementChain::verify_links(&body.statements)?;
    if shown.position(&chain.newest_hash()).is_some() {
        for jws in shown.jws().iter().skip(chain.jws().len()) {
            app.apply(*path, ClusterRequest::Restate { jws: jws.clone(), is_new: false }).await?;
            tracing::warn!(cluster.id = %path, "a statement that the database had lost is back");
        }
    } else if chain.position(&shown.newest_hash()).is_none() {
        app.note_branch(*path, &caller.key, &shown).await?;
        let detail =
            "The statements part from those that are known here, and owners have signed both.";
        let next = "Look who signed them: two statement chains of one cluster can't both be right.";
        return Err(ApiError::new(Code::Conflict, detail, next));
    }
    let found = app.store.read_cluster(*path).await?;
    let (_, chain, _) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    let service = app.store.service_statement(*path).await?;
    Ok(Json(StatementList { statements: chain.jws(), service }))
}

/// Stores the signed addresses of the caller's member, if the member has moved. Returns the
/// addresses of all present members that have moved. Agents use these addresses to find peers while
/// their cluster has no leader.
#[utoipa::path(post, path = "/v1/clusters/{id}/addresses", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = AddressesRequest,
    responses((status = 200, body = AddressesResponse), (status = "default", body = Problem)))]
pub(crate) async fn addresses(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<AddressesRequest>,
) -> Result<Json<AddressesResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::Report, Some(*path)).await?;
    let addresses = app.exchange_addresses(*path, &caller.key, body.own.as_ref()).await?;
    Ok(Json(AddressesResponse { addresses }))
}

/// Explains what a cluster waits for, which hosts delay it, and what to do.
#[utoipa::path(get, path = "/v1/clusters/{id}/explain", tag = "clusters",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = ExplainResponse), (status = "default", body = Problem)))]
pub(crate) async fn explain(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<ExplainResponse>, ApiError> {
    authorise(&request, &app, Action::ShowCluster, Some(*path)).await?;
    let found = app.store.read_cluster(*path).await?;
    let (cluster, chain, now) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    let generation = app.store.refresh_generation().await?;
    let origins = app.store.origins(*path).await?;
    let present = app.present_members((&cluster, &chain), &origins, now.0 as UnixMicros).await?;
    let asking = app.asking_hosts(&cluster).await?;
    let name = chain.newest().name.as_str();
    let others = explain_others(&app, (&cluster, &chain), &present, now.0 as UnixMicros).await?;
    Ok(Json(ExplainResponse {
        state: convert::state(cluster.phase),
        epoch: cluster.epoch,
        seats: show::seats(&cluster, &origins),
        explain: add_member_explanations(
            explanations(&cluster, &chain, &app.settings, now, Some(&generation)),
            &cluster,
            name,
            (&present, &asking),
            others,
        ),
        present,
        asking,
    }))
}

/// Explains which members follow another statement than the service, and what a formed cluster's
/// moved members and its standbys wait for.
async fn explain_others(
    app: &App,
    (cluster, chain): (&Cluster, &StatementChain),
    present: &MembersView,
    now: UnixMicros,
) -> Result<Vec<Explanation>, ApiError> {
    let name = chain.newest().name.as_str();
    let mut lines = app.explain_branches(chain, present).await?;
    lines.extend(app.move_explanations(cluster, chain, present).await?);
    lines.extend(app.standby_explanations(cluster, present, name, now).await?);
    Ok(lines)
}

/// Adds what a person should know about a running cluster's members. A committed cluster that isn't
/// formed gets no list of silent members: the reason why it isn't formed names them already.
/// `others` are the explanations of [`explain_others`].
fn add_member_explanations(
    mut lines: Vec<Explanation>,
    cluster: &Cluster,
    name: &str,
    (present, asking): (&MembersView, &[AskingHost]),
    others: Vec<Explanation>,
) -> Vec<Explanation> {
    match cluster.phase {
        Phase::Formed => lines.extend(intents::explain(present, asking, name)),
        Phase::Committed => {
            let unknown = present.unknown.clone();
            let none = MembersView { unknown, ..MembersView::default() };
            lines.extend(intents::explain(&none, asking, name));
        }
        Phase::Open | Phase::Preparing | Phase::Expired | Phase::Abandoned | Phase::Retired => {}
    }
    lines.extend(others);
    lines
}

/// Returns a committed cluster's commit document. A member also gets its certificates.
#[utoipa::path(get, path = "/v1/clusters/{id}/document", tag = "clusters",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = CommitDocument), (status = "default", body = Problem)))]
pub(crate) async fn document(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<CommitDocument>, ApiError> {
    let caller = authorise(&request, &app, Action::ReadDocument, Some(*path)).await?;
    let (delivery, statements) = app.document(*path, agent_key(&caller)).await?;
    let delivery = delivery.ok_or_else(|| {
        let next = "Wait until the cluster is committed.";
        ApiError::new(Code::WrongState, "There is no document yet.", next)
    })?;
    Ok(Json(show::commit_document(&delivery, &statements)))
}

/// Stores an issuer's signed approval of a host that may found the cluster.
#[utoipa::path(post, path = "/v1/clusters/{id}/approvals", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = SignedBody,
    responses((status = 200, body = ClusterSummary), (status = "default", body = Problem)))]
pub(crate) async fn approve(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<ClusterSummary>, ApiError> {
    authorise(&request, &app, Action::ApproveHost, Some(*path)).await?;
    app.apply(*path, ClusterRequest::Approve { jws: body.jws }).await?;
    summary(&app, *path).await
}

/// Abandons a cluster that has not committed.
#[utoipa::path(post, path = "/v1/clusters/{id}/abandon", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = AbandonRequest,
    responses((status = 200, body = ClusterSummary), (status = "default", body = Problem)))]
pub(crate) async fn abandon(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<AbandonRequest>,
) -> Result<Json<ClusterSummary>, ApiError> {
    let caller = authorise(&request, &app, Action::AbandonCluster, Some(*path)).await?;
    check_named_or_owner(&app, &caller, Action::AbandonCluster, *path).await?;
    if body.reason.len() > MAX_REASON || body.reason.contains(char::is_control) {
        let next = "Shorten it.";
        let detail = format!("A reason has at most {MAX_REASON} bytes, and no control characters.");
        return Err(ApiError::new(Code::InvalidRequest, detail, next));
    }
    let by = match body.reason.is_empty() {
        true => format!("abandoned by {}", caller.name),
        false => format!("abandoned by {}: {}", caller.name, body.reason),
    };
    app.abandon(*path, by).await?;
    summary(&app, *path).await
}

/// Retires a committed cluster, by an owner's signed request.
#[utoipa::path(post, path = "/v1/clusters/{id}/retire", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = SignedBody,
    responses((status = 200, body = ClusterSummary), (status = "default", body = Problem)))]
pub(crate) async fn retire(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<ClusterSummary>, ApiError> {
    authorise(&request, &app, Action::RetireCluster, Some(*path)).await?;
    app.apply(*path, ClusterRequest::Retire { jws: body.jws }).await?;
    summary(&app, *path).await
}

/// Undoes a cluster's retirement within a week, by an owner's signed request.
#[utoipa::path(post, path = "/v1/clusters/{id}/unretire", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = SignedBody,
    responses((status = 200, body = ClusterSummary), (status = "default", body = Problem)))]
pub(crate) async fn unretire(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<ClusterSummary>, ApiError> {
    authorise(&request, &app, Action::RetireCluster, Some(*path)).await?;
    app.apply(*path, ClusterRequest::Unretire { jws: body.jws }).await?;
    summary(&app, *path).await
}

/// Reopens a cluster whose deadline passed within the last week: it may form until a new deadline,
/// as far ahead as the first one was when the cluster was created.
#[utoipa::path(post, path = "/v1/clusters/{id}/reopen", tag = "clusters",
    params(("id" = Uuid, Path,)),
    responses((status = 200, body = ClusterSummary), (status = "default", body = Problem)))]
pub(crate) async fn reopen(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
) -> Result<Json<ClusterSummary>, ApiError> {
    let caller = authorise(&request, &app, Action::ReopenCluster, Some(*path)).await?;
    check_statement_of(&app, &caller, Action::ReopenCluster, *path).await?;
    app.apply(*path, ClusterRequest::Reopen { by: caller.name.to_string() }).await?;
    summary(&app, *path).await
}

/// Issues a client certificate for `etcdctl` and applications.
#[utoipa::path(post, path = "/v1/clusters/{id}/credentials", tag = "clusters",
    params(("id" = Uuid, Path,)), request_body = CredentialsRequest,
    responses((status = 200, body = CredentialsResponse), (status = "default", body = Problem)))]
pub(crate) async fn credentials(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<CredentialsRequest>,
) -> Result<Json<CredentialsResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::IssueCredentials, Some(*path)).await?;
    body.csr.verify().map_err(|error| {
        let next = "Send a PKCS#10 request of an ECDSA P-256 key.";
        ApiError::new(Code::CsrRefused, format!("{error}."), next)
    })?;
    let found = app.store.read_cluster(*path).await?;
    let (cluster, chain, now) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    // The service alone can't authorise a client: the owner-signed statement must also allow the
    // caller to issue credentials.
    check_statement_allows(&chain, &caller.key, Action::IssueCredentials)?;
    if cluster.phase.has_ended() {
        let detail = format!("The cluster is {}.", cluster.phase.as_str());
        return Err(ApiError::new(Code::WrongState, detail, "Ask for one of a live cluster."));
    }
    let authorities = app.store.authorities(*path).await?;
    check_issuing(&authorities, chain.newest())?;
    let ca = app.open_ca(*path, KeyPurpose::ClientCa, &authorities.client)?;
    let seconds = now.0 / 1_000_000;
    let leaf = ca.issue_credential(body.csr.der(), &caller.name, seconds)?;
    tracing::info!(cluster.id = %path, by = caller.name, "issued a client certificate");
    // Return the client URLs of voters only, because learners refuse most requests. Silent members
    // come last.
    let present = app.present_members((&cluster, &chain), &[], now.0 as UnixMicros).await?;
    let mut voters: Vec<_> = present.members.iter().filter(|member| !member.is_learner).collect();
    voters.sort_by_key(|member| member.is_silent || member.is_awaited);
    let urls = voters.iter().flat_map(|member| &member.client_urls);
    let endpoints = urls.filter_map(|url| url.parse().ok());
    Ok(Json(CredentialsResponse {
        certificate: show::pem("CERTIFICATE", &leaf),
        client_ca: chain.newest().client_bundle(),
        expires_at_ms: ((seconds + CREDENTIAL_LIFE.as_secs()) * 1_000) as i64,
        endpoints: endpoints.collect(),
    }))
}
