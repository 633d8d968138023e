//! Authentication and authorisation of every request, in one place.
//!
//! [`authorise`] checks every request with a token, in this order:
//!
//! 1. The TLS key that the connection proves.
//! 2. The access token, which is bound to that key.
//! 3. The principal: an admin (in the owner-signed chain, looked up now) or an agent of one
//!    cluster.
//! 4. The table of actions in `discovery_types::role`.
//!
//! A change of one cluster also needs the role in that cluster's newest statement. Handlers check
//! this by [`check_statement_of`], [`check_named_or_owner`] or [`check_statement_allows`]. Every
//! admin may read every cluster.

use std::sync::Arc;

use actix_web::HttpRequest;
use actix_web::http::header;
use discovery_types::access::{AccessToken, ClientKind};
use discovery_types::admin::Admin;
use discovery_types::api::TokenResponse;
use discovery_types::digest::Digest;
use discovery_types::jws::Jws;
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::role::{Action, Principal, Role, is_allowed, roles_allow};
use discovery_types::statement::StatementChain;
use uuid::Uuid;

use crate::app::App;
use crate::error::ApiError;
use crate::server::ConnectionPeer;

/// An authenticated caller that may do what it asks for.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// Public key that the connection has proven, and to which the access token is bound.
    pub key: PublicKey,
    /// The caller's role: admin or agent.
    pub principal: Principal,
    /// An admin's name, or an agent's key id.
    pub name: String,
}

/// Returns the connection's remote address and client certificate.
pub(crate) fn peer(request: &HttpRequest) -> Result<&ConnectionPeer, ApiError> {
    let missing = "The connection is not one of ours.";
    request
        .conn_data::<ConnectionPeer>()
        .ok_or_else(|| ApiError::new(Code::Internal, missing, "Connect to the service itself."))
}

/// Returns the key that the connection's client certificate proves.
pub(crate) fn tls_key(request: &HttpRequest) -> Result<PublicKey, ApiError> {
    let certificate = peer(request)?.certificate.as_ref();
    let key = certificate.and_then(|certificate| certificate.ed25519);
    key.and_then(|key| PublicKey::try_from(key).ok()).ok_or_else(|| {
        let next = "Connect with a self-signed client certificate of your Ed25519 key.";
        ApiError::new(Code::ClientKeyMissing, "The connection has no Ed25519 client key.", next)
    })
}

/// Returns the caller if it may do `action` on `cluster`. Agents of removed members are refused
/// here, unless the handler of `action` refuses them ([`refuses_removed_itself`]).
pub(crate) async fn authorise(
    request: &HttpRequest,
    app: &App,
    action: Action,
    cluster: Option<Uuid>,
) -> Result<Caller, ApiError> {
    // Box the future, so that its memory is freed before the authorised request waits.
    Box::pin(find_caller(request, app, action, cluster)).await
}

async fn find_caller(
    request: &HttpRequest,
    app: &App,
    action: Action,
    cluster: Option<Uuid>,
) -> Result<Caller, ApiError> {
    let key = tls_key(request)?;
    let token = access_token(request, app, &key)?;
    let (principal, name) = match token.subject {
        ClientKind::Agent(own) => (Principal::Agent { cluster: own }, key.key_id().to_string()),
        ClientKind::Admin => {
            let admin = current_admin(app, &key).await?;
            (Principal::Admin { roles: admin.roles }, admin.name.to_string())
        }
    };
    check_allowed(&principal, action, cluster)?;
    if let (Principal::Agent { cluster }, false) = (&principal, refuses_removed_itself(action))
        && let Some(removal) = app.store.removal_of(*cluster, key.as_bytes()).await?
    {
        return Err(ApiError::removed(removal));
    }
    Ok(Caller { key, principal, name })
}

/// Returns the admin with this key from the current admin chain. Fails if the key is unknown or was
/// revoked.
pub(crate) async fn current_admin(app: &App, key: &PublicKey) -> Result<Admin, ApiError> {
    let admins = app.admins.current().await?;
    admins.chain.find(&key.key_id()).cloned().ok_or_else(|| {
        let next = "Ask an owner to add the key with `muster-discovery admin add`.";
        ApiError::new(Code::UnknownKey, "The key is no admin's any more.", next)
    })
}

/// Checks that the principal may do `action` on `cluster`.
pub(crate) fn check_allowed(
    principal: &Principal,
    action: Action,
    cluster: Option<Uuid>,
) -> Result<(), ApiError> {
    if is_allowed(principal, action, cluster) {
        return Ok(());
    }
    Err(ApiError::new(
        Code::Forbidden,
        format!("This needs {}.", action.needs()),
        "Ask somebody who has that role, or an owner for the role.",
    ))
}

/// Checks that the cluster's newest statement gives the key a role that may do `action`.
pub(crate) fn check_statement_allows(
    chain: &StatementChain,
    key: &PublicKey,
    action: Action,
) -> Result<(), ApiError> {
    let newest = chain.newest();
    match newest.admin(&key.key_id()) {
        Some(admin) if roles_allow(&admin.roles, action) => Ok(()),
        Some(_) => Err(ApiError::new(
            Code::NotInStatement,
            format!(
                "Statement {} of cluster {} gives your key other roles: this takes {}.",
                newest.seq,
                newest.name,
                action.needs()
            ),
            format!(
                "Have an owner change the roles with `muster-discovery admin add --replace`, then \
                 run `muster-discovery cluster restate {}`.",
                newest.name
            ),
        )),
        None => Err(ApiError::new(
            Code::NotInStatement,
            format!(
                "Statement {} of cluster {} doesn't give your key a role that may do this.",
                newest.seq, newest.name
            ),
            format!("Have an owner run `muster-discovery cluster restate {}`.", newest.name),
        )),
    }
}

/// Checks that the cluster's newest statement gives the caller a role that may do `action`.
pub(crate) async fn check_statement_of(
    app: &App,
    caller: &Caller,
    action: Action,
    cluster: Uuid,
) -> Result<(), ApiError> {
    let found = app.store.read_cluster(cluster).await?;
    let (_, chain, _) = found.ok_or_else(|| ApiError::not_found("such cluster"))?;
    check_statement_allows(&chain, &caller.key, action)
}

/// Checks that the caller is an owner of the service, or has a role in the cluster's newest
/// statement that may do `action`.
///
/// This is for actions that only take something away: they end a forming cluster or a token. A
/// statement that is damaged, or whose admins have all been revoked, must not prevent them.
pub(crate) async fn check_named_or_owner(
    app: &App,
    caller: &Caller,
    action: Action,
    cluster: Uuid,
) -> Result<(), ApiError> {
    match &caller.principal {
        Principal::Admin { roles } if roles.contains(&Role::Owner) => Ok(()),
        Principal::Admin { .. } | Principal::Agent { .. } => {
            check_statement_of(app, caller, action, cluster).await
        }
    }
}

/// Whether the handler of `action` refuses agents of removed members. Such handlers read the
/// necessary rows anyway, which saves a query for the most frequent requests.
fn refuses_removed_itself(action: Action) -> bool {
    matches!(
        action,
        Action::TakePart | Action::ReadIntents | Action::ReportOutcome | Action::RenewLeaves
    )
}

/// Issues an access token for `key` in answer to `request`. The token is stored for the connection,
/// so that the next request, which shows it, needs no verification of its signature.
pub(crate) fn answer_with_access_token(
    request: &HttpRequest,
    app: &App,
    key: &PublicKey,
    subject: ClientKind,
) -> Result<TokenResponse, ApiError> {
    let (token, response) = app.sign_access_token(key, subject);
    let hash = Digest::of(response.access_token.as_str().as_bytes());
    peer(request)?.last_token.set(hash, *response.access_token.kid(), Arc::new(token));
    Ok(response)
}

/// Returns the request's access token, verified. `key` is the key that the connection proves.
///
/// A connection remembers its last token, because nearly all its requests show the same one. Such a
/// token's signature isn't verified again, as long as the key directory has the key that made it.
fn access_token(
    request: &HttpRequest,
    app: &App,
    key: &PublicKey,
) -> Result<Arc<AccessToken>, ApiError> {
    let next = "Ask for a token at /v1/token.";
    let missing = || ApiError::new(Code::TokenMissing, "There is no access token.", next);
    let header = request.headers().get(header::AUTHORIZATION).ok_or_else(missing)?;
    let text = header.to_str().ok().and_then(|text| text.strip_prefix("Bearer "));
    let text = text.ok_or_else(missing)?;
    let (hash, now) = (Digest::of(text.as_bytes()), app.clock.seconds());
    let last = &peer(request)?.last_token;
    let signing_keys = &app.keys.signing_keys;
    if let Some((signer, token)) = last.with_hash(&hash)
        && signing_keys.contains(&signer)
    {
        token.check_again(key, now)?;
        return Ok(token);
    }
    let jws: Jws = text
        .parse()
        .map_err(|_| ApiError::new(Code::TokenInvalid, "The access token can't be read.", next))?;
    let signing = signing_keys.current();
    let signing = signing.iter().map(|signing| signing.key.public());
    let token = Arc::new(AccessToken::verify(&jws, signing, &app.issuer, key, now)?);
    last.set(hash, *jws.kid(), token.clone());
    Ok(token)
}
