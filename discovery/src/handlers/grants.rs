//! Handlers for grants: signed permissions for tokens that this service never sees.

use std::collections::BTreeMap;

use actix_web::HttpRequest;
use actix_web::web::{Data, Json, Path, Query};
use discovery_formation::service::Phase;
use discovery_types::api::{
    GrantList, GrantQuery, GrantState, GrantView, IssuedCertificate, MAX_REDEMPTIONS, Redemption,
    RedemptionList, RevokeQuery, SignedBody,
};
use discovery_types::confirmation::GrantConfirmation;
use discovery_types::grant::{Grant, GrantId, ISSUER_SKEW_SECONDS, TokenKind, VerifiedGrant};
use discovery_types::jws::{Jws, JwsType};
use discovery_types::key::KeyId;
use discovery_types::problem::{Code, Problem};
use discovery_types::role::Action;
use uuid::Uuid;

use super::body::JsonBody;
use super::pages::{has_next_page, page_limit, parse_position};
use crate::app::App;
use crate::auth::{authorise, check_named_or_owner, check_statement_allows};
use crate::error::ApiError;
use crate::forming::ClusterRequest;
use crate::redeem::{is_void, unsettled_error};
use crate::store::changes::StoredPolicy;
use crate::store::grants::{GrantUse, RedemptionRow};
use crate::store::{ListPosition, StoreError};

/// Stores the signed grant of a token.
#[utoipa::path(put, path = "/v1/grants", tag = "grants", request_body = SignedBody,
    responses((status = 200, body = GrantView), (status = "default", body = Problem)))]
pub(crate) async fn put(
    request: HttpRequest,
    app: Data<App>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<GrantView>, ApiError> {
    let refused = |detail: String| {
        let next = "Mint another one with `muster-discovery token create`.";
        ApiError::new(Code::GrantRefused, detail, next)
    };
    let claimed: Grant = body
        .jws
        .claims_unverified(JwsType::Grant)
        .map_err(|error| refused(format!("The grant: {error}.")))?;
    let action = claimed.kind.action();
    let caller = authorise(&request, &app, action, Some(claimed.cluster)).await?;
    let found = app.store.read_cluster(claimed.cluster).await?;
    let (cluster, chain, now) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    let signer = chain.newest().admin(body.jws.kid()).map_or(caller.key, |admin| admin.key);
    check_statement_allows(&chain, &signer, action)?;
    let grant = VerifiedGrant::verify(&body.jws, &chain)?;
    let seconds = now.0 / 1_000_000;
    if grant.issued_at > seconds + ISSUER_SKEW_SECONDS || grant.expires_at <= seconds {
        return Err(refused(format!(
            "The grant runs from {} to {}, and it is {seconds}.",
            grant.issued_at, grant.expires_at
        )));
    }
    check_token_kind(grant.kind, cluster.phase)?;
    if grant.kind == TokenKind::Heal {
        check_policy_limit(&app, grant.cluster, grant.id).await?;
    }
    app.store.put_grant(&grant, &caller.name, now).await?;
    if grant.kind == TokenKind::Heal {
        app.notifier.wake(grant.cluster);
    }
    Ok(Json(grant_view(&app, grant.id).await?))
}

/// Maximum number of a cluster's replacement policies that are neither revoked nor expired.
const MAX_POLICIES: usize = 8;

/// Returns an error if the cluster has [`MAX_POLICIES`] other policies already.
async fn check_policy_limit(app: &App, cluster: Uuid, new: GrantId) -> Result<(), ApiError> {
    let stored = app.store.membership_changes(cluster).await?.policies;
    let is_other = |policy: &&StoredPolicy| {
        let grant: Option<Grant> = policy.grant.claims_unverified(JwsType::Grant).ok();
        !policy.is_revoked && grant.is_none_or(|grant| grant.id != new)
    };
    let others = stored.iter().filter(is_other).count();
    if others < MAX_POLICIES {
        return Ok(());
    }
    let detail = format!("The cluster has {others} replacement policies already.");
    let next =
        "Revoke those that are not needed: `muster-discovery policy list`, then `policy revoke`.";
    Err(ApiError::new(Code::Conflict, detail, next))
}

/// Checks the token's kind: boot tokens are for clusters that form, join tickets for running ones,
/// and replacement policies for both.
fn check_token_kind(kind: TokenKind, phase: Phase) -> Result<(), ApiError> {
    let detail = format!("The cluster is {}.", phase.as_str());
    match (kind, phase) {
        (TokenKind::Boot | TokenKind::Heal, Phase::Open | Phase::Preparing)
        | (TokenKind::Join | TokenKind::Heal, Phase::Committed | Phase::Formed) => Ok(()),
        (TokenKind::Boot, Phase::Committed | Phase::Formed) => {
            let next = "Make a join ticket: `muster-discovery token create --kind join`.";
            Err(ApiError::new(Code::BootClosed, detail, next))
        }
        (TokenKind::Join, Phase::Open | Phase::Preparing) => {
            let next = "Make a boot token (`--kind boot`), or wait until the cluster runs.";
            Err(ApiError::new(Code::WrongState, detail, next))
        }
        _ => Err(ApiError::new(Code::BootClosed, detail, "Create a new cluster.")),
    }
}

/// Lists the grants of all clusters, newest first, a page at a time.
#[utoipa::path(get, path = "/v1/grants", tag = "grants", params(GrantQuery),
    responses((status = 200, body = GrantList), (status = "default", body = Problem)))]
pub(crate) async fn list_all(
    request: HttpRequest,
    app: Data<App>,
    query: Query<GrantQuery>,
) -> Result<Json<GrantList>, ApiError> {
    authorise(&request, &app, Action::ReadGrants, None).await?;
    Ok(Json(grant_list(&app, None, &query).await?))
}

/// Lists a cluster's grants, newest first, a page at a time.
#[utoipa::path(get, path = "/v1/clusters/{id}/grants", tag = "grants",
    params(("id" = Uuid, Path,), GrantQuery),
    responses((status = 200, body = GrantList), (status = "default", body = Problem)))]
pub(crate) async fn list(
    request: HttpRequest,
    app: Data<App>,
    path: Path<Uuid>,
    query: Query<GrantQuery>,
) -> Result<Json<GrantList>, ApiError> {
    authorise(&request, &app, Action::ReadGrants, Some(*path)).await?;
    Ok(Json(grant_list(&app, Some(*path), &query).await?))
}

/// Reads a page of the list of a cluster's grants, or of all grants.
pub(crate) async fn grant_list(
    app: &App,
    cluster: Option<Uuid>,
    query: &GrantQuery,
) -> Result<GrantList, ApiError> {
    let limit = page_limit(query.limit)?;
    let position = parse_position::<GrantId>(query.after.as_deref(), ListPosition::start(""))?;
    // Read one item more than the page holds: it shows whether there is another page.
    let only_policies = query.policies.unwrap_or(false);
    let mut rows =
        app.store.grants((cluster, only_policies), &position, i64::from(limit) + 1).await?;
    let more = has_next_page(&mut rows, limit);
    let next = rows.last().filter(|_| more).map(|row| {
        ListPosition { at_us: row.grant.stored_us, id: row.grant.id.clone() }.to_string()
    });
    let now = app.store.now().await?;
    let grants = rows.iter().map(|row| view_of(row, now)).collect::<Result<_, _>>()?;
    Ok(GrantList { grants, next })
}

/// Returns one grant by its id.
#[utoipa::path(get, path = "/v1/grants/{id}", tag = "grants",
    params(("id" = String, Path,)),
    responses((status = 200, body = GrantView), (status = "default", body = Problem)))]
pub(crate) async fn show(
    request: HttpRequest,
    app: Data<App>,
    path: Path<GrantId>,
) -> Result<Json<GrantView>, ApiError> {
    authorise(&request, &app, Action::ReadGrants, None).await?;
    Ok(Json(grant_view(&app, *path).await?))
}

/// Lists the hosts that have redeemed a token, the newest first.
#[utoipa::path(get, path = "/v1/grants/{id}/redemptions", tag = "grants",
    params(("id" = String, Path,)),
    responses((status = 200, body = RedemptionList), (status = "default", body = Problem)))]
pub(crate) async fn redemptions(
    request: HttpRequest,
    app: Data<App>,
    path: Path<GrantId>,
) -> Result<Json<RedemptionList>, ApiError> {
    authorise(&request, &app, Action::ReadGrants, None).await?;
    let id = path.to_string();
    app.store.grant(&id).await?.ok_or_else(|| ApiError::not_found("such token"))?;
    let redeemed = redemptions_of(&app, &[*path], MAX_REDEMPTIONS).await?.into_iter();
    let mut redemptions: Vec<Redemption> = redeemed.map(|(_, host)| host).collect();
    let mut certificates: BTreeMap<KeyId, Vec<IssuedCertificate>> = BTreeMap::new();
    for (agent, certificate) in app.store.certificates_by(*path).await? {
        certificates.entry(agent).or_default().push(certificate);
    }
    for host in &mut redemptions {
        host.certificates = certificates.get(&host.agent).cloned().unwrap_or_default();
    }
    Ok(Json(RedemptionList { redemptions }))
}

/// Reads the hosts that have redeemed each of these tokens, without their certificates: for each
/// token at most `limit`, newest first.
pub(crate) async fn redemptions_of(
    app: &App,
    grants: &[GrantId],
    limit: usize,
) -> Result<Vec<(GrantId, Redemption)>, StoreError> {
    let ids: Vec<String> = grants.iter().map(ToString::to_string).collect();
    let rows = app.store.redemptions(&ids, limit as i64).await?;
    let redemption = |row: RedemptionRow| {
        let id = row.grant_id.clone();
        let damaged = || StoreError::damaged(format!("a host that redeemed token {id}"));
        Ok((id.parse().map_err(|_| damaged())?, row.parse().ok_or_else(damaged)?))
    };
    rows.into_iter().map(redemption).collect()
}

/// Revokes a grant: no new key can redeem it. Taken seats stay, unless the query frees them.
#[utoipa::path(post, path = "/v1/grants/{id}/revoke", tag = "grants",
    params(("id" = String, Path,), RevokeQuery),
    responses((status = 200, body = GrantView), (status = "default", body = Problem)))]
pub(crate) async fn revoke(
    request: HttpRequest,
    app: Data<App>,
    path: Path<GrantId>,
    query: Query<RevokeQuery>,
) -> Result<Json<GrantView>, ApiError> {
    // The grant's kind isn't known yet. Check for the broadest right first, which is the right to
    // revoke boot tokens.
    let caller = authorise(&request, &app, Action::RevokeBootGrant, None).await?;
    let row = app.store.grant(&path.to_string()).await?;
    let row = row.ok_or_else(|| ApiError::not_found("such token"))?;
    let action = if row.grant.kind == TokenKind::Join.as_str() {
        Action::RevokeJoinGrant
    } else if row.grant.kind == TokenKind::Heal.as_str() {
        Action::RevokePolicy
    } else {
        Action::RevokeBootGrant
    };
    if action != Action::RevokeBootGrant {
        authorise(&request, &app, action, None).await?;
    }
    check_named_or_owner(&app, &caller, action, row.grant.cluster_id).await?;
    let frees_seats = query.free_seats.unwrap_or(false);
    let incoming = ClusterRequest::RevokeGrant { id: *path, by: caller.name, frees_seats };
    app.apply(row.grant.cluster_id, incoming).await?;
    Ok(Json(grant_view(&app, *path).await?))
}

/// Confirms a boot token, or a replacement policy, that a change of the database has made void.
#[utoipa::path(post, path = "/v1/grants/{id}/confirm", tag = "grants",
    params(("id" = String, Path,)), request_body = SignedBody,
    responses((status = 200, body = GrantView), (status = "default", body = Problem)))]
pub(crate) async fn confirm(
    request: HttpRequest,
    app: Data<App>,
    path: Path<GrantId>,
    JsonBody(body): JsonBody<SignedBody>,
) -> Result<Json<GrantView>, ApiError> {
    let caller = authorise(&request, &app, Action::ReadGrants, None).await?;
    let row = app.store.grant(&path.to_string()).await?;
    let row = row.ok_or_else(|| ApiError::not_found("such token"))?;
    let action = match row.grant.kind == TokenKind::Heal.as_str() {
        true => Action::PutPolicy,
        false => Action::PutBootGrant,
    };
    authorise(&request, &app, action, None).await?;
    let found = app.store.read_cluster(row.grant.cluster_id).await?;
    let (_, chain, now) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    check_statement_allows(&chain, &caller.key, action)?;
    let damaged = |_| StoreError::damaged(format!("grant {}", row.grant.id));
    let grant = VerifiedGrant::verify(&row.grant.jws.parse().map_err(damaged)?, &chain)?;
    let again = "Make another one: `muster-discovery token create`.";
    if grant.kind == TokenKind::Join {
        let detail = "A join ticket isn't confirmed: it can have been used before the change.";
        return Err(ApiError::new(Code::WrongState, detail, again));
    }
    if row.grant.revoked_us.is_some() {
        return Err(ApiError::new(Code::GrantRevoked, "The token was revoked.", again));
    }
    if !app.store.refresh_generation().await?.settled {
        // Refuse while the database is unsettled: its change isn't over, and a further change would
        // make the token void again.
        return Err(unsettled_error("The database was changed, and isn't settled yet."));
    }
    GrantConfirmation::verify(&body.jws, &chain, &grant, row.void_before_us.unsigned_abs())?;
    if !app.store.confirm_grant(&grant, &body.jws, &caller.name, now).await? {
        return Err(ApiError::new(Code::GrantRevoked, "The token was revoked.", again));
    }
    Ok(Json(grant_view(&app, *path).await?))
}

/// Reads one grant, as [`show`] returns it.
pub(crate) async fn grant_view(app: &App, id: GrantId) -> Result<GrantView, ApiError> {
    let row = app.store.grant(&id.to_string()).await?;
    let row = row.ok_or_else(|| ApiError::not_found("such token"))?;
    let now = app.store.now().await?;
    Ok(view_of(&row, now)?)
}

fn view_of(row: &GrantUse, now: i64) -> Result<GrantView, StoreError> {
    let damaged = || StoreError::damaged(format!("grant {}", row.grant.id));
    let jws: Jws = row.grant.jws.parse().map_err(|_| damaged())?;
    let grant: Grant = jws.claims_unverified(JwsType::Grant).map_err(|_| damaged())?;
    let void_before = discovery_formation::UnixMicros(row.void_before_us.unsigned_abs());
    let is_taken = match grant.kind {
        TokenKind::Boot => !matches!(row.phase.as_str(), "open" | "preparing"),
        TokenKind::Join => row.keys > 0 || !matches!(row.phase.as_str(), "committed" | "formed"),
        TokenKind::Heal => {
            !matches!(row.phase.as_str(), "open" | "preparing" | "committed" | "formed")
        }
    };
    let state = if row.grant.revoked_us.is_some() {
        GrantState::Revoked
    } else if is_taken {
        GrantState::Closed
    } else if grant.expires_at.saturating_mul(1_000_000) <= now.unsigned_abs() {
        GrantState::Expired
    } else if is_void(&grant, row.grant.stored_us, void_before)
        && confirmed_change(row) != Some(void_before.0)
    {
        GrantState::Void
    } else {
        GrantState::Valid
    };
    let void_before_us = (state == GrantState::Void).then_some(void_before.0);
    let cluster_name = Some(row.cluster_name.parse().map_err(|_| damaged())?);
    let (issuer, keys) = (*jws.kid(), row.keys as u32);
    let made_by = Some(row.issued_by.clone());
    Ok(GrantView { issuer, grant, jws, made_by, state, keys, cluster_name, void_before_us })
}

/// Returns the change of the database that a grant's confirmation names: the time before which
/// tokens are void, in microseconds. The confirmation isn't verified here, because it is only
/// shown. A redeem verifies it.
fn confirmed_change(row: &GrantUse) -> Option<u64> {
    let jws: Jws = row.grant.confirmation.as_ref()?.parse().ok()?;
    let claimed: GrantConfirmation = jws.claims_unverified(JwsType::GrantConfirmation).ok()?;
    Some(claimed.void_before_us)
}
