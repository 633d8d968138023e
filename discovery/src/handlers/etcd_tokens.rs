//! Handlers for etcd tokens, by which stock etcd forms clusters. The members' own requests are
//! answered in `etcd_tokens`.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json, Path, Query};
use discovery_types::SIZES;
use discovery_types::api::{
    EtcdMember, EtcdTokenList, EtcdTokenQuery, EtcdTokenRequest, EtcdTokenResponse, EtcdTokenState,
    EtcdTokenView,
};
use discovery_types::etcd_token::{EtcdPeers, EtcdProtocol, MAX_ETCD_TOKEN_SECONDS};
use discovery_types::grant::{GrantId, MAX_CIDRS};
use discovery_types::problem::{Code, Problem};
use discovery_types::role::Action;

use super::body::JsonBody;
use super::pages::{has_next_page, page_limit, parse_position};
use crate::app::App;
use crate::auth::authorise;
use crate::error::ApiError;
use crate::etcd_tokens::registry::RegisteredMember;
use crate::forming::show;
use crate::store::etcd_tokens::StoredEtcdToken;
use crate::store::{ListPosition, StoreError};

/// Largest number of etcd tokens that have not expired.
const MAX_LIVE_TOKENS: i64 = 10_000;

/// Stores an etcd token. The service gets only the hash of its secret.
#[utoipa::path(put, path = "/v1/etcd-tokens", tag = "etcd-tokens", request_body = EtcdTokenRequest,
    responses((status = 200, body = EtcdTokenResponse), (status = "default", body = Problem)))]
pub(crate) async fn put(
    request: HttpRequest,
    app: Data<App>,
    JsonBody(body): JsonBody<EtcdTokenRequest>,
) -> Result<Json<EtcdTokenResponse>, ApiError> {
    let caller = authorise(&request, &app, Action::PutEtcdToken, None).await?;
    check_request(&app, &body)?;
    if app.store.live_etcd_tokens(MAX_LIVE_TOKENS).await? >= MAX_LIVE_TOKENS {
        let detail = format!("There are {MAX_LIVE_TOKENS} etcd tokens that have not expired.");
        let next = "Wait until some of them expire: `muster-discovery etcd-token list`.";
        return Err(ApiError::new(Code::Conflict, detail, next));
    }
    if !app.store.put_etcd_token(&body, &caller.name).await? {
        let stored = app.store.etcd_token(&body.id).await?;
        if stored.is_none_or(|stored| stored.secret_hash != body.secret_hash) {
            let next = "Make another token; ids are random.";
            return Err(ApiError::new(Code::Conflict, "There is a token with this id.", next));
        }
        // The client repeats a request whose answer was lost. The stored token stays as it is.
    }
    Ok(Json(EtcdTokenResponse {
        token: find(&app, body.id).await?,
        service_certificate: show::pem("CERTIFICATE", &app.keys.tls_certificate),
        v3_endpoints: app.etcd_v3_endpoints.to_vec(),
    }))
}

fn check_request(app: &App, body: &EtcdTokenRequest) -> Result<(), ApiError> {
    let refused = |detail: String, next: &str| {
        Err(ApiError::new(Code::InvalidRequest, detail, next.to_owned()))
    };
    if !SIZES.contains(&body.size) {
        let detail = format!("A cluster of {} members can't be formed.", body.size);
        return refused(detail, "Choose a size from 1 to 9; odd sizes are better.");
    }
    if !(1..=MAX_ETCD_TOKEN_SECONDS).contains(&body.lifetime_seconds) {
        let detail = format!("A token can't live for {} seconds.", body.lifetime_seconds);
        return refused(detail, "Choose a lifetime from 1 second to 24 hours.");
    }
    if body.cidrs.len() > MAX_CIDRS {
        let detail = format!("{} networks are too many.", body.cidrs.len());
        return refused(detail, "Name at most 8 networks.");
    }
    if body.protocol == EtcdProtocol::V3 && app.etcd_v3_endpoints.is_empty() {
        let next = "Start the service with `--etcd-listen ADDR:PORT`, or use the protocol v2 (etcd \
                    3.4 to 3.6).";
        let detail = "This process doesn't serve etcd's discovery protocol v3.";
        return Err(ApiError::new(Code::WrongState, detail, next));
    }
    Ok(())
}

/// Lists the etcd tokens, newest first, a page at a time.
#[utoipa::path(get, path = "/v1/etcd-tokens", tag = "etcd-tokens", params(EtcdTokenQuery),
    responses((status = 200, body = EtcdTokenList), (status = "default", body = Problem)))]
pub(crate) async fn list(
    request: HttpRequest,
    app: Data<App>,
    query: Query<EtcdTokenQuery>,
) -> Result<Json<EtcdTokenList>, ApiError> {
    authorise(&request, &app, Action::ReadEtcdTokens, None).await?;
    let limit = page_limit(query.limit)?;
    let position = parse_position::<GrantId>(query.after.as_deref(), ListPosition::start(""))?;
    // Read one item more than the page holds: it shows whether there is another page.
    let mut rows = app.store.etcd_tokens(&position, i64::from(limit) + 1).await?;
    let more = has_next_page(&mut rows, limit);
    let next = rows
        .last()
        .filter(|_| more)
        .map(|row| ListPosition { at_us: row.made_us, id: row.id.to_string() }.to_string());
    let tokens = rows.iter().map(view).collect::<Result<_, _>>()?;
    Ok(Json(EtcdTokenList { tokens, next }))
}

/// Returns one etcd token, and the members that registered with it.
#[utoipa::path(get, path = "/v1/etcd-tokens/{id}", tag = "etcd-tokens",
    params(("id" = String, Path,)),
    responses((status = 200, body = EtcdTokenView), (status = "default", body = Problem)))]
pub(crate) async fn show(
    request: HttpRequest,
    app: Data<App>,
    path: Path<GrantId>,
) -> Result<Json<EtcdTokenView>, ApiError> {
    authorise(&request, &app, Action::ReadEtcdTokens, None).await?;
    find(&app, *path).await.map(Json)
}

/// Revokes an etcd token: no member can register with it any more, and etcds that wait exit with an
/// error.
#[utoipa::path(post, path = "/v1/etcd-tokens/{id}/revoke", tag = "etcd-tokens",
    params(("id" = String, Path,)),
    responses((status = 200, body = EtcdTokenView), (status = "default", body = Problem)))]
pub(crate) async fn revoke(
    request: HttpRequest,
    app: Data<App>,
    path: Path<GrantId>,
) -> Result<Json<EtcdTokenView>, ApiError> {
    let caller = authorise(&request, &app, Action::RevokeEtcdToken, None).await?;
    if !app.store.revoke_etcd_token(&path, &caller.name).await? {
        return Err(ApiError::not_found("such etcd token"));
    }
    find(&app, *path).await.map(Json)
}

async fn find(app: &App, id: GrantId) -> Result<EtcdTokenView, ApiError> {
    let stored = app.store.etcd_token(&id).await?;
    let stored = stored.ok_or_else(|| ApiError::not_found("such etcd token"))?;
    Ok(view(&stored)?)
}

fn view(stored: &StoredEtcdToken) -> Result<EtcdTokenView, StoreError> {
    let damaged = || StoreError::damaged(format!("etcd token {}", stored.id));
    let registry = &stored.registry;
    let mut members: Vec<&RegisteredMember> = registry.members.iter().collect();
    members.sort_by_key(|member| (member.has_lapsed, member.created_index));
    let member = |member: &RegisteredMember| {
        let peers: EtcdPeers = member.value.parse().ok()?;
        Some(EtcdMember {
            id: member.id,
            name: peers.name,
            peer_urls: peers.urls,
            address: member.address.to_string(),
            at_ms: member.at_us / 1_000,
            lapsed: member.has_lapsed,
        })
    };
    let members = members.into_iter().map(member).collect::<Option<_>>().ok_or_else(damaged)?;
    let state = if stored.is_revoked {
        EtcdTokenState::Revoked
    } else if registry.is_complete {
        EtcdTokenState::Complete
    } else if stored.now >= stored.expires_us {
        EtcdTokenState::Expired
    } else if stored.is_void {
        EtcdTokenState::Void
    } else {
        EtcdTokenState::Open
    };
    Ok(EtcdTokenView {
        id: stored.id,
        name: stored.name.parse().map_err(|_| damaged())?,
        protocol: registry.protocol,
        size: registry.size,
        state,
        made_by: stored.made_by.clone(),
        made_at_ms: stored.made_us / 1_000,
        expires_at_ms: stored.expires_us / 1_000,
        cidrs: stored.cidrs.clone(),
        members,
    })
}
