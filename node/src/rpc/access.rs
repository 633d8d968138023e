//! Identity of a call's caller, and the check of its permissions.
//!
//! A call is checked before anything is done for it, on the state that this member knows. A refusal
//! might be outdated, so such a call is checked once more after a read barrier. Reads are checked
//! again on the view that is read. Entries are checked again where they are applied.

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use node_proto::command;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tonic::Request;
use zeroize::Zeroizing;

use super::context::Context;
use super::error::Error;
use crate::auth::{Access, Caller, Claims, Jwt, TokenError, Tokens, authorise};
use crate::lease::LeaseTable;
use crate::mvcc::View;

/// Interval of the search for expired tokens, as in etcd.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Names of the metadata in which a client sends its token. Over HTTP, `authorization` has a bearer
/// token or the bare token.
const TOKEN: [&str; 2] = ["token", "authorization"];
const BEARER: &str = "Bearer ";

/// User named by the verified certificate of a client. It is in the extensions of each request on
/// the connection, if `--client-cert-auth` makes certificates name users.
#[derive(Clone, Debug)]
pub(crate) struct ClientName(pub Arc<str>);

/// Metadata that grpc-gateway adds to every request (server/auth/store.go in etcd).
const BY_GATEWAY: &str = "grpcgateway-accept";

/// Identity that comes with a call, before it is checked.
#[derive(Clone)]
pub(crate) enum Who {
    /// The call comes from this member itself.
    Member,
    /// The call comes from a client, with a token or the name in its certificate, if it has one.
    Client { token: Option<Shown>, name: Option<Arc<str>> },
}

/// Token that a client has presented.
#[derive(Clone)]
pub(crate) struct Shown {
    text: Zeroizing<String>,
    /// Verified claims of a signed token, computed once per call.
    claims: OnceLock<Result<Claims, TokenError>>,
}

impl Shown {
    pub(super) fn new(text: &str) -> Self {
        Self { text: Zeroizing::new(text.to_owned()), claims: OnceLock::new() }
    }
}

impl Who {
    /// Takes the token and the certificate's name from a client's request.
    pub(crate) fn of<Q>(request: &Request<Q>) -> Self {
        let shown = TOKEN.iter().find_map(|name| request.metadata().get(*name));
        let token = shown.map(|value| {
            // A value that isn't text can't be a token that this cluster issued.
            let text = value.to_str().unwrap_or_default();
            Shown::new(text.strip_prefix(BEARER).unwrap_or(text))
        });
        // grpc-gateway makes calls for others with its own certificate, and marks them. The
        // certificate doesn't identify the caller then.
        let by_gateway = request.metadata().contains_key(BY_GATEWAY);
        let name = request.extensions().get::<ClientName>().filter(|_| !by_gateway);
        let name = name.map(|ClientName(name)| name.clone());
        Self::Client { token, name }
    }

    /// Returns the caller when authentication is disabled.
    fn unasked(&self) -> Caller {
        match self {
            Self::Member => Caller::Member,
            Self::Client { .. } => Caller::Nobody,
        }
    }
}

/// Monotonic clock for the lifetime of tokens.
pub(crate) struct TokenClock {
    began: Instant,
    ttl: Duration,
}

impl TokenClock {
    pub(super) fn new(ttl: Duration) -> Self {
        Self { began: Instant::now(), ttl }
    }
}

/// Returns the user of a signed token, if the token's auth revision is the one of `view`.
///
/// An older token proves nothing: its user may have another password since, or be another user.
/// (etcd accepts it where only `root` is needed.)
///
/// A newer token proves nothing either. Perhaps this member is behind; the check is then repeated
/// once it has caught up. Or the token is of another history, as after a restored snapshot, and the
/// same name may be another user here. (etcd refuses it for ranges, also on a member that is
/// behind, and accepts it for the rest.)
fn signed(jwt: &Jwt, token: &Shown, view: &View) -> Result<Arc<str>, Error> {
    let claims = match token.claims.get_or_init(|| jwt.read(&token.text)) {
        Ok(claims) if claims.hold_at(jiff::Timestamp::now().as_second()) => claims,
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

impl Context {
    fn tokens(&self) -> MutexGuard<'_, Tokens> {
        self.store.tokens().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Identifies the caller. A token has precedence over a certificate, even if the token is
    /// invalid.
    fn identify(&self, who: &Who, view: &View) -> Result<Caller, Error> {
        let name = match who {
            Who::Member => return Ok(Caller::Member),
            Who::Client { token: Some(token), .. } => match &self.signed_tokens {
                Some(jwt) => signed(jwt, token, view)?,
                None => {
                    let clock = &self.token_clock;
                    let found = self.tokens().find(&token.text, clock.began.elapsed(), clock.ttl);
                    found.ok_or(Error::InvalidAuthToken)?
                }
            },
            Who::Client { token: None, name: Some(name) } => name.clone(),
            Who::Client { token: None, name: None } => return Ok(Caller::Nobody),
        };
        Ok(Caller::User { name, revision: view.auth().revision() })
    }

    /// Checks `access` by the users and roles of `view`. Returns the caller if it is allowed.
    pub(super) fn may(&self, who: &Who, view: &View, access: Access<'_>) -> Result<Caller, Error> {
        if !view.auth().is_enabled() {
            return Ok(who.unasked());
        }
        self.may_with(who, view, access, &self.leases())
    }

    /// Checks `access` by the users and roles of `view`, for a caller that has locked the leases
    /// already.
    pub(super) fn may_with(
        &self,
        who: &Who,
        view: &View,
        access: Access<'_>,
        leases: &LeaseTable,
    ) -> Result<Caller, Error> {
        let caller = match access {
            _ if !view.auth().is_enabled() => who.unasked(),
            Access::Authenticate => Caller::Nobody,
            _ => self.identify(who, view)?,
        };
        authorise(view.auth(), &caller, access, leases)?;
        Ok(caller)
    }

    /// Checks `access` by the newest view. A refusal is checked again after a read barrier, on a
    /// view with everything acknowledged before the call. A serializable call skips that.
    pub(super) async fn permit(
        &self,
        who: &Who,
        access: Access<'_>,
        serializable: bool,
    ) -> Result<Caller, Error> {
        if !self.store.is_auth_enabled() {
            return Ok(who.unasked());
        }
        let refused = match self.may(who, &self.store.view(), access) {
            Err(refused) if !serializable => refused,
            done => return done,
        };
        match self.barrier(false).await {
            Ok(()) => self.may(who, &self.store.view(), access),
            Err(_) => Err(refused),
        }
    }
}

impl From<Caller> for Option<command::Caller> {
    fn from(caller: Caller) -> Self {
        match caller {
            Caller::Nobody => None,
            Caller::Member => command::member(),
            Caller::User { name, revision } => {
                Some(command::Caller { user: name.to_string(), revision, member: false })
            }
        }
    }
}

/// Removes expired tokens, for as long as the node runs.
pub(super) async fn expire_tokens(context: Arc<Context>) {
    let mut look = interval(LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let clock = &context.token_clock;
        context.tokens().expire(clock.began.elapsed(), clock.ttl);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_not_its_gateways_clients() {
        let name = |request: &Request<()>| match Who::of(request) {
            Who::Client { name, .. } => name,
            Who::Member => None,
        };
        let mut request = Request::new(());
        request.extensions_mut().insert(ClientName("some".into()));
        assert_eq!(name(&request).as_deref(), Some("some"));
        request.metadata_mut().insert(BY_GATEWAY, "*/*".parse().unwrap());
        assert_eq!(name(&request), None);
    }
}
