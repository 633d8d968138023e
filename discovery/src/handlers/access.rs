//! Handlers for access tokens and for public information about the service.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json};
use discovery_types::access::{AccessError, Assertion, ClientKind, JWT_BEARER};
use discovery_types::api::{ContextResponse, Jwk, Jwks, TokenRequest, TokenResponse};
use discovery_types::problem::{Code, Problem};

use super::body::FormBody;
use crate::app::App;
use crate::auth::{answer_with_access_token, tls_key};
use crate::error::ApiError;
use crate::store::StoreError;

/// Exchanges an assertion for an access token (RFC 7523).
#[utoipa::path(post, path = "/v1/token", tag = "access",
    request_body(content = TokenRequest, content_type = "application/x-www-form-urlencoded"),
    responses((status = 200, body = TokenResponse), (status = "default", body = Problem)))]
pub(crate) async fn token(
    request: HttpRequest,
    app: Data<App>,
    FormBody(body): FormBody<TokenRequest>,
) -> Result<Json<TokenResponse>, ApiError> {
    let key = tls_key(&request)?;
    let refused = |detail: String| {
        let next = "Sign a new assertion, timed by this service's Date header.";
        ApiError::new(Code::AssertionRefused, detail, next)
    };
    if body.grant_type != JWT_BEARER {
        return Err(refused(format!("The grant_type must be {JWT_BEARER}.")));
    }
    let now = app.clock.seconds();
    let assertion =
        Assertion::verify(&body.assertion, &key, &app.issuer, now).map_err(|error| {
            let clock = matches!(error, AccessError::Time { .. });
            let error = refused(format!("The assertion: {error}."));
            // Perhaps the client's clock is wrong. This response carries the right time, so a retry
            // can succeed.
            if clock { error.mark_retryable() } else { error }
        })?;
    let admins = app.admins.current().await?;
    let subject = if admins.chain.find(&key.key_id()).is_some() {
        ClientKind::Admin
    } else {
        let found = app.store.cluster_of_agent(&key).await?;
        for cluster in &found.forged {
            app.metrics.count_alarm("agent_rows_ignored");
            tracing::error!(cluster.id = %cluster, agent = %key.key_id(),
                "the signatures in an agent's row aren't valid: somebody changed the database. The \
                 agent gets no access token by this row");
        }
        let next = "An admin's key is added with `muster-discovery admin add`; an agent redeems \
                    its token first.";
        let unknown = || match found.forged.first() {
            None => ApiError::new(Code::UnknownKey, "The key is not known here.", next),
            // An honest agent whose row was changed may be let in again, once the row is repaired.
            Some(cluster) => {
                StoreError::damaged(format!("an agent's row of cluster {cluster}")).into()
            }
        };
        let cluster = found.cluster.ok_or_else(unknown)?;
        if let Some(removal) = app.store.removal_of(cluster, key.as_bytes()).await? {
            return Err(ApiError::removed(removal));
        }
        ClientKind::Agent(cluster)
    };
    let expires_us = i64::try_from(assertion.exp.saturating_mul(1_000_000)).unwrap_or(i64::MAX);
    let jti = assertion.jti.to_string();
    if !app.store.use_assertion(key.as_bytes(), &jti, expires_us).await? {
        app.metrics.count_alarm("assertion_replayed");
        return Err(refused("The assertion was used before.".into()));
    }
    Ok(Json(answer_with_access_token(&request, &app, &key, subject)?))
}

/// Returns the service's URLs, the pins of its TLS keys, and the start of its admin chain.
#[utoipa::path(get, path = "/v1/context", tag = "access",
    responses((status = 200, body = ContextResponse), (status = "default", body = Problem)))]
pub(crate) async fn context(app: Data<App>) -> Result<Json<ContextResponse>, ApiError> {
    let keys = &app.keys;
    let admins = app.admins.current().await?;
    Ok(Json(ContextResponse {
        issuer: app.issuer.to_string(),
        urls: keys.settings.urls.clone(),
        pins: vec![keys.pin()],
        root_owner: keys.owner,
        admin_head: admins.chain.head(),
        max_deadline_seconds: app.max_deadline_seconds,
        now_ms: app.clock.micros() / 1_000,
        version: env!("CARGO_PKG_VERSION").into(),
    }))
}

/// Returns the service's signing keys.
#[utoipa::path(get, path = "/v1/jwks", tag = "access",
    responses((status = 200, body = Jwks)))]
pub(crate) async fn jwks(app: Data<App>) -> Json<Jwks> {
    Json(jwks_of(&app))
}

/// Returns the service's signing keys as a key set.
pub(crate) fn jwks_of(app: &App) -> Jwks {
    let keys = app.keys.signing_keys.current();
    Jwks { keys: keys.iter().map(|signing| Jwk::new(signing.key.public())).collect() }
}
