//! Identity of a call's caller, and the check of its permissions.
//!
//! A call is checked before anything is done for it, on the state that this member has applied.
//! That state can be outdated, so a refused call is checked once more after a read barrier. Reads
//! are checked again on the view of the store that is read. Log entries are checked again when they
//! are applied.

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use node_state::auth::{Caller, Claims, Jwt, RequestedAccess, SimpleTokens, TokenError, authorise};
use node_state::lease::LeaseTable;
use node_state::mvcc::{Store, View};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tonic::Request;
use tonic::metadata::MetadataMap;
use zeroize::Zeroizing;

use super::error::Error;

/// Interval of the search for expired tokens, as in etcd.
const TOKEN_EXPIRY_INTERVAL: Duration = Duration::from_secs(1);
/// Names of the metadata in which a client sends its token. Over HTTP, `authorization` holds the
/// token, alone or after `Bearer`.
const TOKEN_METADATA: [&str; 2] = ["token", "authorization"];
const BEARER: &str = "Bearer ";

/// User named by the verified certificate of a client. It is in the extensions of each request on
/// the connection, if `--client-cert-auth` makes certificates name users.
#[derive(Clone, Debug)]
pub(crate) struct CertificateUser(pub Arc<str>);

/// Metadata that grpc-gateway adds to every request (server/auth/store.go in etcd).
const GATEWAY_METADATA: &str = "grpcgateway-accept";

/// Identity that comes with a call, before it is checked.
#[derive(Clone)]
pub(crate) enum Credentials {
    /// The call is made by this member itself.
    Member,
    /// The call is made by a client. Either the token, or the name in its certificate, or both can
    /// be absent.
    Client { token: Option<PresentedToken>, name: Option<Arc<str>> },
}

/// Token that a client has presented.
#[derive(Clone)]
pub(crate) struct PresentedToken {
    text: Zeroizing<String>,
    /// Verified claims of a signed token, computed once per call.
    claims: OnceLock<Result<Claims, TokenError>>,
}

impl PresentedToken {
    pub(super) fn new(text: &str) -> Self {
        Self { text: Zeroizing::new(text.to_owned()), claims: OnceLock::new() }
    }
}

impl Credentials {
    /// Takes the token and the certificate's name from a client's request.
    pub(crate) fn of<Q>(request: &Request<Q>) -> Self {
        Self::new(request.metadata(), request.extensions().get())
    }

    /// Takes the token from the metadata of a client's request. `user` is the name in the client's
    /// certificate, if it has one.
    pub(super) fn new(metadata: &MetadataMap, user: Option<&CertificateUser>) -> Self {
        let shown = TOKEN_METADATA.iter().find_map(|name| metadata.get(*name));
        let token = shown.map(|value| {
            // A value that isn't text can't be a token that this cluster issued.
            let text = value.to_str().unwrap_or_default();
            PresentedToken::new(text.strip_prefix(BEARER).unwrap_or(text))
        });
        // grpc-gateway makes calls for other clients with its own certificate, and marks these
        // calls. The certificate of such a call doesn't identify the caller.
        let name = user.filter(|_| !metadata.contains_key(GATEWAY_METADATA));
        let name = name.map(|CertificateUser(name)| name.clone());
        Self::Client { token, name }
    }

    /// Returns the caller when authentication is disabled.
    pub(super) fn anonymous_caller(&self) -> Caller {
        match self {
            Self::Member => Caller::Member,
            Self::Client { .. } => Caller::Unauthenticated,
        }
    }
}

/// Monotonic clock for the lifetime of tokens.
struct TokenClock {
    began: Instant,
    ttl: Duration,
}

/// Returns the user of a signed token, if the token's auth revision equals that of `view`.
///
/// A token with an older auth revision proves nothing. Since then the user may have changed the
/// password, or the name may belong to another user. (etcd accepts such a token where only `root`
/// is needed.)
///
/// A token with a newer auth revision proves nothing either. If this member is behind, the check is
/// repeated once it has caught up. Otherwise the token was issued before a snapshot was restored,
/// and its name may now belong to another user. (etcd refuses such a token for ranges, also on a
/// member that is behind, and accepts it for other requests.)
fn user_of_signed_token(jwt: &Jwt, token: &PresentedToken, view: &View) -> Result<Arc<str>, Error> {
    let claims = match token.claims.get_or_init(|| jwt.verify(&token.text)) {
        Ok(claims) if claims.are_valid_at(jiff::Timestamp::now().as_second()) => claims,
        Ok(_) => return Err(Error::InvalidAuthToken),
        Err(why) => {
            tracing::debug!(%why, "refused a token");
            return Err(Error::InvalidAuthToken);
        }
    };
    if claims.revision != view.auth().revision() {
        return Err(Error::AuthOldRevision);
    }
    Ok(claims.user.as_str().into())
}

/// Checks callers: by the tokens that this member knows, by the key of signed tokens, and by the
/// users and roles of a view.
pub(crate) struct Authoriser {
    store: Store,
    clock: TokenClock,
    /// Key that signs tokens; `None` if tokens are simple ones.
    pub(super) signed_tokens: Option<Arc<Jwt>>,
}

impl Authoriser {
    /// Makes the authoriser for the tokens and users of `store`. A simple token expires when it was
    /// not used for `ttl`.
    pub(super) fn new(store: Store, ttl: Duration, signed_tokens: Option<Arc<Jwt>>) -> Self {
        Self { store, clock: TokenClock { began: Instant::now(), ttl }, signed_tokens }
    }

    fn tokens(&self) -> MutexGuard<'_, SimpleTokens> {
        self.store.tokens().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Identifies the caller. A token has precedence over a certificate, even if the token is
    /// invalid.
    fn identify(&self, who: &Credentials, view: &View) -> Result<Caller, Error> {
        let name = match who {
            Credentials::Member => return Ok(Caller::Member),
            Credentials::Client { token: Some(token), .. } => match &self.signed_tokens {
                Some(jwt) => user_of_signed_token(jwt, token, view)?,
                None => {
                    let clock = &self.clock;
                    let found = self.tokens().find(&token.text, clock.began.elapsed(), clock.ttl);
                    found.ok_or(Error::InvalidAuthToken)?
                }
            },
            Credentials::Client { token: None, name: Some(name) } => name.clone(),
            Credentials::Client { token: None, name: None } => return Ok(Caller::Unauthenticated),
        };
        Ok(Caller::User { name, revision: view.auth().revision() })
    }

    /// Checks `access` by the users and roles of `view`. Returns the caller if the access is
    /// allowed.
    pub(super) fn authorise_on(
        &self,
        who: &Credentials,
        view: &View,
        access: RequestedAccess<'_>,
    ) -> Result<Caller, Error> {
        if !view.auth().is_enabled() {
            return Ok(who.anonymous_caller());
        }
        let leases = self.store.leases().read().unwrap_or_else(PoisonError::into_inner);
        self.authorise_with_leases(who, view, access, &leases)
    }

    /// Checks `access` as [`Self::authorise_on`] does, with the lease table that the calling
    /// function has locked already.
    pub(super) fn authorise_with_leases(
        &self,
        who: &Credentials,
        view: &View,
        access: RequestedAccess<'_>,
        leases: &LeaseTable,
    ) -> Result<Caller, Error> {
        let caller = match access {
            _ if !view.auth().is_enabled() => who.anonymous_caller(),
            RequestedAccess::Authenticate => Caller::Unauthenticated,
            _ => self.identify(who, view)?,
        };
        authorise(view.auth(), &caller, access, leases)?;
        Ok(caller)
    }
}

/// Removes expired tokens, for as long as the node runs.
pub(super) async fn expire_tokens(access: Arc<Authoriser>) {
    let mut look = interval(TOKEN_EXPIRY_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let clock = &access.clock;
        access.tokens().expire(clock.began.elapsed(), clock.ttl);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateways_certificate_does_not_identify_its_clients() {
        let name = |request: &Request<()>| match Credentials::of(request) {
            Credentials::Client { name, .. } => name,
            Credentials::Member => None,
        };
        let mut request = Request::new(());
        request.extensions_mut().insert(CertificateUser("some".into()));
        assert_eq!(name(&request).as_deref(), Some("some"));
        request.metadata_mut().insert(GATEWAY_METADATA, "*/*".parse().unwrap());
        assert_eq!(name(&request), None);
    }
}
