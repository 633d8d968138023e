//! Handlers for agents that form a cluster.

use std::net::IpAddr;
use std::time::Duration;

use actix_web::http::header::HeaderMap;
use actix_web::web::{Data, Json, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use discovery_formation as formation;
use discovery_formation::service::next_deadline;
use discovery_types::access::ClientKind;
use discovery_types::api::{
    AdoptRequest, ClusterSummary, MAX_ADOPT_BODY_BYTES, NackRequest, PREFER, PollRequest,
    PollResponse, ProbesRequest, RETURN_MINIMAL, RedeemResponse, ReportRequest, ReportResponse,
    Session, SignedBody, TroubleRequest,
};
use discovery_types::convert;
use discovery_types::document::VerifiedDocument;
use discovery_types::features::{AGENT_BUILD, AgentBuild};
use discovery_types::grant::{GrantId, TokenKind};
use discovery_types::key::{KeyId, PublicKey};
use discovery_types::problem::{Code, Problem};
use discovery_types::role::{Action, Principal, is_allowed};
use discovery_types::statement::StatementChain;
use serde::Deserialize;
use tokio::time::Instant;
use utoipa::IntoParams;
use uuid::Uuid;

use super::access::jwks_of;
use super::agent_key;
use super::body::{JsonBody, unreadable_request};
use crate::app::App;
use crate::auth::{Caller, answer_with_access_token, authorise, peer, tls_key};
use crate::error::ApiError;
use crate::forming::{ClusterReply, ClusterRequest, poll_response, summary_of};
use crate::intents;
use crate::notify::Subscription;
use crate::redeem::{RedeemRequest, hide_unknown_cluster, unknown_token};
use crate::store::UnixMicros;
use crate::store::leases::LeaseRenewal;

/// Maximum length in characters of a text from an agent that is stored.
const MAX_TEXT_CHARS: usize = 300;
/// Margin that is added to the wait for a cluster's deadline, so that the deadline has surely
/// passed when it is checked.
const DEADLINE_SLACK: Duration = Duration::from_millis(5);

/// Redeems a token: takes a seat or a place in the queue. Needs no access token: the connection's
/// key signs the envelope and the record, and the token signs the record.
#[utoipa::path(post, path = "/v1/redeem", tag = "forming", request_body = SignedBody,
    responses((status = 200, body = RedeemResponse), (status = "default", body = Problem)))]
pub(crate) async fn redeem(
    request: HttpRequest,
    app: Data<App>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<RedeemResponse>, ApiError> {
    let key = tls_key(&request)?;
    let address = peer(&request)?.address.ip().to_canonical();
    let redeem = RedeemRequest::open(body.jws, key, app.keys.pin(), address)?;
    let cluster = redeem.cluster();
    let (grant, name) = (redeem.grant(), redeem.claimed.name.to_string());
    let asker = Requester { key, grant, name, address };
    let applied = match app.apply(cluster, ClusterRequest::Redeem(Box::new(redeem))).await {
        Ok(applied) => applied,
        Err(error) if error.problem().code == Code::BootClosed => {
            return Err(refuse_late_host(&app, cluster, &asker, error).await?);
        }
        Err(error) => return Err(hide_unknown_cluster(error)),
    };
    let grant = applied.redeemed_grant.as_ref().ok_or_else(unknown_token)?;
    let agent = convert::key(&key);
    Ok(Json(RedeemResponse {
        token: answer_with_access_token(&request, &app, &key, ClientKind::Agent(cluster))?,
        issuer: app.issuer.to_string(),
        jwks: jwks_of(&app),
        grant: grant.parse().map_err(|error| unreadable_request(&error))?,
        poll: respond(&app, &applied, Some(agent))?,
    }))
}

/// A host that sent a valid boot token, as it describes itself.
struct Requester {
    key: PublicKey,
    grant: GrantId,
    name: String,
    address: IpAddr,
}

/// Records a host that came after the commit. Returns an error that names the command to make a
/// join ticket for the host.
async fn refuse_late_host(
    app: &App,
    cluster: Uuid,
    asker: &Requester,
    refused: ApiError,
) -> Result<ApiError, ApiError> {
    let found = app.store.read_cluster(cluster).await?;
    let (machine, chain, now) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    let grant = app.store.grant(&asker.grant.to_string()).await?;
    if grant.is_some_and(|row| row.grant.kind == TokenKind::Heal.as_str()) {
        return Ok(refused.with_advice(
            "The host's agent asks for the place of a dead member next, by its replacement policy."
                .to_owned(),
        ));
    }
    app.note_asking_host(cluster, &asker.key, &asker.name, &asker.address.to_string()).await?;
    let present = app.present_members((&machine, &chain), &[], now.0 as i64).await?;
    let command = intents::ticket_command(&present, chain.newest().name.as_str());
    Ok(refused.with_advice(format!(
        "This host needs a join ticket: have an operator run `{command}` (without --replace for one \
         more member), and start the agent with that bundle, or run it with --wait-for-ticket."
    )))
}

fn respond(
    app: &App,
    applied: &ClusterReply,
    key: Option<formation::AgentKey>,
) -> Result<PollResponse, ApiError> {
    let generation = app.store.watch().generation.borrow().clone();
    let mut response = poll_response(applied, key, &app.settings, generation.as_ref())?;
    // Use the time of this response, not of the last read: agents compare their clocks with it.
    response.now_ms = app.clock.micros() / 1_000;
    Ok(response)
}

/// Renews the agent's lease, and waits for news. An agent that prefers a minimal answer (`Prefer:
/// return=minimal`, RFC 7240) gets 204 if there are none.
#[utoipa::path(post, path = "/v1/clusters/{id}/poll", tag = "forming",
    params(("id" = Uuid, Path,)), request_body = PollRequest,
    responses((status = 200, body = PollResponse),
        (status = 204, description = "Nothing has changed, and `Prefer: return=minimal` was sent"),
        (status = "default", body = Problem)))]
pub(crate) async fn poll(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<PollRequest>,
) -> Result<HttpResponse, ApiError> {
    let caller = authorise(&request, &app, Action::TakePart, Some(*path)).await?;
    let is_minimal = prefers_minimal(&request);
    // Subscribe before reading, so that no change in between is missed.
    let news = app.notifier.subscribe(*path);
    let generation = app.settled_generation();
    let renewed = match LeaseRenewal::of_poll(*path, &caller.key, &body) {
        Some(renewal) => app.renew_lease(renewal).await,
        None => None,
    };
    let wait = match renewed {
        Some(next_deadline) => PollWait::new(&app, *path, &caller, body.after, Some(next_deadline)),
        None => {
            let incoming = ClusterRequest::Poll {
                key: caller.key,
                session: Session { boot: body.boot, nonce: body.nonce },
                highest_epoch: body.highest_epoch,
            };
            let applied = Box::pin(app.apply(*path, incoming)).await?;
            if body.after != Some(applied.answer.rev) {
                return Ok(HttpResponse::Ok().json(respond(&app, &applied, agent_key(&caller))?));
            }
            PollWait::of_reply(&app, *path, &caller, &applied)
        }
    };
    // A full answer also explains that the cluster waits for the database. So an empty answer is
    // allowed only if the database is settled, and still the same.
    let is_same_database = || generation.is_some_and(|number| app.is_settled_in(number));
    let seen = match wait.wait(news).await? {
        None if is_minimal && is_same_database() => return Ok(HttpResponse::NoContent().finish()),
        None => Box::pin(app.view_cluster(*path, agent_key(&caller))).await?,
        Some(changed) => *changed,
    };
    Ok(HttpResponse::Ok().json(respond(&app, &seen, agent_key(&caller))?))
}

/// Whether the caller prefers a minimal answer (RFC 7240).
fn prefers_minimal(request: &HttpRequest) -> bool {
    request
        .headers()
        .get_all(PREFER)
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|preference| preference.trim().eq_ignore_ascii_case(RETURN_MINIMAL))
}

/// Query of the poll by GET, which changes nothing.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct WatchQuery {
    /// Value of the cluster's change counter (`rev`) that the caller has seen. The service waits
    /// until the value differs, or until the poll's time is up. Without this parameter it answers
    /// at once.
    pub after: Option<u64>,
}

/// Waits for news of a cluster, and changes nothing.
#[utoipa::path(get, path = "/v1/clusters/{id}/poll", tag = "forming",
    params(("id" = Uuid, Path,), WatchQuery),
    responses((status = 200, body = PollResponse), (status = "default", body = Problem)))]
pub(crate) async fn watch(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    query: Query<WatchQuery>,
) -> Result<Json<PollResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::ShowCluster, Some(*path)).await?;
    let key = agent_key(&caller);
    // Subscribe before reading, so that no change in between is missed.
    let news = app.notifier.subscribe(*path);
    let mut seen = Box::pin(app.view_cluster(*path, key)).await?;
    if query.after == Some(seen.answer.rev) {
        let wait = PollWait::of_reply(&app, *path, &caller, &seen);
        // Free the reply before waiting: it is large, and the wait can be long.
        drop(seen);
        seen = match wait.wait(news).await? {
            Some(changed) => *changed,
            None => Box::pin(app.view_cluster(*path, key)).await?,
        };
    }
    Ok(Json(respond(&app, &seen, key)?))
}

/// A request that waits for news of a cluster. It holds no state of the cluster, so that many can
/// wait at once.
struct PollWait<'a> {
    app: &'a App,
    cluster: Uuid,
    caller: &'a Caller,
    /// Value of the cluster's change counter that the caller has seen.
    after: Option<u64>,
    /// Next deadline of the cluster. It can be earlier than necessary.
    next_deadline: Option<UnixMicros>,
}

impl<'a> PollWait<'a> {
    fn new(
        app: &'a App,
        cluster: Uuid,
        caller: &'a Caller,
        after: Option<u64>,
        next_deadline: Option<UnixMicros>,
    ) -> Self {
        PollWait { app, cluster, caller, after, next_deadline }
    }

    /// Waits for a change of the cluster in `reply`, which the caller has seen.
    fn of_reply(app: &'a App, cluster: Uuid, caller: &'a Caller, reply: &ClusterReply) -> Self {
        let next_deadline = deadline_of(app, reply);
        PollWait::new(app, cluster, caller, Some(reply.answer.rev), next_deadline)
    }

    /// Waits until the cluster's change counter differs from [`Self::after`], and returns the
    /// changed cluster. Returns `None` if nothing has changed by the poll's time limit or the
    /// process's shutdown.
    async fn wait(mut self, mut news: Subscription) -> Result<Option<Box<ClusterReply>>, ApiError> {
        let app = self.app;
        if app.draining.is_cancelled() {
            return Ok(None);
        }
        let _place = app.take_poll_slot(&self.caller.key)?;
        // Return within half a lease, so that the agent renews it in time.
        let half_a_lease = Duration::from_millis(app.settings.lease.0 / 2);
        let end = Instant::now() + app.max_poll_wait.min(half_a_lease);
        loop {
            let due = self.next_deadline.map_or(end, |at| instant_of(app, at)).min(end);
            tokio::select! {
                () = news.changed() => {}
                () = tokio::time::sleep_until(due) => {
                    if due == end {
                        return Ok(None);
                    }
                    if Box::pin(self.postpone_deadline()).await? {
                        continue;
                    }
                    Box::pin(app.apply(self.cluster, ClusterRequest::Tick)).await?;
                }
                () = app.draining.cancelled() => return Ok(None),
            }
            let seen = Box::pin(app.view_cluster(self.cluster, agent_key(self.caller))).await?;
            if self.after != Some(seen.answer.rev) {
                return Ok(Some(Box::new(seen)));
            }
            self.next_deadline = deadline_of(app, &seen);
        }
    }

    /// Called when the cluster's next deadline has passed. If agents have renewed their leases
    /// meanwhile and nothing is due, stores a later deadline in the database and in `self`. Returns
    /// whether it has stored one.
    async fn postpone_deadline(&mut self) -> Result<bool, ApiError> {
        let (clusters, lease) = ([self.cluster], self.app.settings.lease);
        let postponed = self.app.store.postpone_deadlines(&clusters, lease).await?;
        let Some((_, next)) = postponed.first() else { return Ok(false) };
        self.next_deadline = Some(*next);
        Ok(true)
    }
}

/// Returns the next deadline of the cluster in `reply`.
fn deadline_of(app: &App, reply: &ClusterReply) -> Option<UnixMicros> {
    next_deadline(&reply.cluster, &app.settings, reply.now).map(|at| at.0 as UnixMicros)
}

/// Returns an instant at which `at`, a time of the database's clock, has surely passed.
fn instant_of(app: &App, at: UnixMicros) -> Instant {
    let left = at.saturating_sub(app.clock.micros()).max(0);
    Instant::now() + Duration::from_micros(left.unsigned_abs()) + DEADLINE_SLACK
}

/// Consents to the present proposal. The last missing consent commits the list.
#[utoipa::path(post, path = "/v1/clusters/{id}/ack", tag = "forming",
    params(("id" = Uuid, Path,)), request_body = SignedBody,
    responses((status = 200, body = PollResponse), (status = "default", body = Problem)))]
pub(crate) async fn ack(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<PollResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::TakePart, Some(*path)).await?;
    let incoming = ClusterRequest::Ack { key: caller.key, jws: body.jws };
    let applied = app.apply(*path, incoming).await?;
    Ok(Json(respond(&app, &applied, agent_key(&caller))?))
}

/// Refuses the present proposal, for a reason that concerns the agent itself.
#[utoipa::path(post, path = "/v1/clusters/{id}/nack", tag = "forming",
    params(("id" = Uuid, Path,)), request_body = NackRequest,
    responses((status = 200, body = PollResponse), (status = "default", body = Problem)))]
pub(crate) async fn nack(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<NackRequest>,
) -> Result<Json<PollResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::TakePart, Some(*path)).await?;
    let code = serde_json::to_value(body.reason).unwrap_or_default();
    let reason = format!("{}: {}", code.as_str().unwrap_or_default(), clean_text(&body.detail));
    let incoming = ClusterRequest::Nack {
        key: caller.key,
        session: body.session,
        epoch: body.epoch,
        h: body.h,
        reason,
    };
    let applied = app.apply(*path, incoming).await?;
    Ok(Json(respond(&app, &applied, agent_key(&caller))?))
}

/// Cleans a text from an agent: printable characters only, at most `MAX_TEXT_CHARS`.
fn clean_text(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_TEXT_CHARS).collect()
}

/// Stores the agent's row of the probe matrix.
#[utoipa::path(post, path = "/v1/clusters/{id}/probes", tag = "forming",
    params(("id" = Uuid, Path,)), request_body = ProbesRequest,
    responses((status = 200, body = PollResponse), (status = "default", body = Problem)))]
pub(crate) async fn probes(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(mut body): JsonBody<ProbesRequest>,
) -> Result<Json<PollResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::TakePart, Some(*path)).await?;
    for result in &mut body.results {
        result.error = result.error.as_deref().map(clean_text);
    }
    let incoming = ClusterRequest::Probes {
        key: caller.key,
        session: body.session,
        epoch: body.epoch,
        h: body.h,
        results: body.results,
    };
    let applied = app.apply(*path, incoming).await?;
    Ok(Json(respond(&app, &applied, agent_key(&caller))?))
}

/// Stores the agent's signed promise never to be a member of a list of the given epoch or an
/// earlier one.
#[utoipa::path(post, path = "/v1/clusters/{id}/release", tag = "forming",
    params(("id" = Uuid, Path,)), request_body = SignedBody,
    responses((status = 200, body = PollResponse), (status = "default", body = Problem)))]
pub(crate) async fn release(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<PollResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::TakePart, Some(*path)).await?;
    let incoming = ClusterRequest::Release { key: caller.key, jws: body.jws };
    let applied = app.apply(*path, incoming).await?;
    Ok(Json(respond(&app, &applied, agent_key(&caller))?))
}

/// Stores a report by a member's agent: the state of its own node.
#[utoipa::path(post, path = "/v1/clusters/{id}/report", tag = "forming",
    params(("id" = Uuid, Path,)), request_body = ReportRequest,
    responses((status = 200, body = ReportResponse), (status = "default", body = Problem)))]
pub(crate) async fn report(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<ReportRequest>,
) -> Result<Json<ReportResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::Report, Some(*path)).await?;
    let raft_cluster = u64::from_str_radix(&body.raft_cluster_id, 16)
        .map_err(|error| unreadable_request(&error))?;
    // Only founders' reports decide whether the cluster becomes formed. A report by a member that
    // joined later isn't applied to the state machine.
    let phase = if app.is_newcomer(*path, &caller.key).await? {
        app.view_cluster(*path, None).await?.cluster.phase
    } else {
        let incoming = ClusterRequest::Report {
            key: caller.key,
            session: body.session,
            h: body.h,
            raft_cluster,
        };
        app.apply(*path, incoming).await?.answer.phase
    };
    let followed = app.note_membership(*path, &caller.key, raft_cluster, &body).await?;
    if let Some(build) = reported_build(request.headers()) {
        app.store.note_agent_build(*path, &caller.key, &build).await?;
    }
    if let Some(cas) = body.cas {
        app.note_member_cas(*path, &caller.key, cas).await?;
    }
    let raft_cluster_id = followed.map(|id| format!("{id:016x}"));
    Ok(Json(ReportResponse { state: convert::state(phase), raft_cluster_id }))
}

/// Returns the build of the agent that sends a report. Agents of older versions send no features,
/// so only the version of their HTTP client is known.
fn reported_build(headers: &HeaderMap) -> Option<AgentBuild> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    match text(AGENT_BUILD) {
        Some(build) => build.parse().ok(),
        None => text("user-agent").and_then(AgentBuild::of_user_agent),
    }
}

/// Stores the reason why a member's node finds no leader, as its agent reports it.
#[utoipa::path(post, path = "/v1/clusters/{id}/trouble", tag = "forming",
    params(("id" = Uuid, Path,)), request_body = TroubleRequest,
    responses((status = 200, body = ReportResponse), (status = "default", body = Problem)))]
pub(crate) async fn trouble(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<TroubleRequest>,
) -> Result<Json<ReportResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::Report, Some(*path)).await?;
    let text = clean_text(&body.detail);
    let phase = if app.is_newcomer(*path, &caller.key).await? {
        app.view_cluster(*path, None).await?.cluster.phase
    } else {
        let text = text.clone();
        let incoming =
            ClusterRequest::Trouble { key: caller.key, session: body.session, h: body.h, text };
        app.apply(*path, incoming).await?.answer.phase
    };
    app.note_trouble(*path, &caller.key, &text).await?;
    Ok(Json(ReportResponse { state: convert::state(phase), raft_cluster_id: None }))
}

/// Presents a commit document, in case this service has lost it. Every agent that a valid document
/// lists is allowed to do so: a restored database can lack both the agent's key and its token.
#[utoipa::path(post, path = "/v1/clusters/{id}/adopt", tag = "forming",
    params(("id" = Uuid, Path,)), request_body = AdoptRequest,
    responses((status = 200, body = ClusterSummary), (status = "default", body = Problem)))]
pub(crate) async fn adopt(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    JsonBody(body): JsonBody<AdoptRequest, MAX_ADOPT_BODY_BYTES>,
) -> Result<Json<ClusterSummary>, ApiError> {
    let key = tls_key(&request)?;
    let forbidden = |detail: &str| {
        let next = "Look who signed the cluster's statements.";
        ApiError::new(Code::Forbidden, detail, next)
    };
    // Refuse callers that can't be members before any signature is checked: this request needs a
    // key but no token, so anybody can send it.
    if !VerifiedDocument::claims_seat(&body.document, &key.key_id())? {
        return Err(forbidden("The connection's key is not in the document."));
    }
    let admins = app.admins.current().await?;
    let begun_by_owner = |root: &KeyId| admins.ever_owners.contains(root);
    if !body.statements.first().is_some_and(|first| begun_by_owner(first.kid())) {
        return Err(forbidden("No owner of this service has begun the document's statements."));
    }
    let address = peer(&request)?.address.ip();
    app.adoption_limit.check(address).map_err(|wait| app.rate_limited(address, wait))?;
    if let Some(removal) = app.store.removal_of(*path, key.as_bytes()).await? {
        return Err(ApiError::removed(removal));
    }
    let chain = StatementChain::verify_from(&body.statements, begun_by_owner)?;
    let document = VerifiedDocument::verify(&body.document, &chain)?;
    let seated = document.proposal().seat_of(&key).is_some();
    let principal = Principal::Agent { cluster: document.proposal().proposal().cluster };
    if body.cluster != *path || !seated || !is_allowed(&principal, Action::Adopt, Some(*path)) {
        return Err(forbidden("The connection's key is not in the document."));
    }
    let incoming = ClusterRequest::Adopt { document: body.document, statements: body.statements };
    app.apply(*path, incoming).await?;
    let row = app.store.summary(*path).await?;
    let row = row.ok_or_else(|| ApiError::not_found("such cluster"))?;
    Ok(Json(summary_of(&row)?))
}
