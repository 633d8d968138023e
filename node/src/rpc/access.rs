//! Who makes a call, and whether they may.
//!
//! A call is looked at before anything is done for it, by what this member knows; what that refuses, and
//! a newer state might not, is looked at once more after a read barrier. Reads are looked at again on the
//! view that is read, and entries wherever they are applied.

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

/// Between two looks for tokens that are over, as in etcd.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Where a client shows its token; over HTTP, as a bearer token or by itself.
const TOKEN: [&str; 2] = ["token", "authorization"];
const BEARER: &str = "Bearer ";

/// Whom the certificate names that a client has proved to have: in the extensions of each request on its
/// connection, where `--client-cert-auth` says that certificates name users.
#[derive(Clone, Debug)]
pub(crate) struct ClientName(pub Arc<str>);

/// What grpc-gateway passes on with every request (server/auth/store.go in etcd).
const BY_GATEWAY: &str = "grpcgateway-accept";

/// What comes with a call about who makes it.
#[derive(Clone)]
pub(crate) enum Who {
    /// This member itself.
    Member,
    /// A client, which may have shown a token, or else a certificate.
    Client { token: Option<Shown>, name: Option<Arc<str>> },
}

/// A token that a client has shown.
#[derive(Clone)]
pub(crate) struct Shown {
    text: Zeroizing<String>,
    /// What it says, if it was signed: found out once for each call.
    claims: OnceLock<Result<Claims, TokenError>>,
}

impl Shown {
    pub(super) fn new(text: &str) -> Self {
        Self { text: Zeroizing::new(text.to_owned()), claims: OnceLock::new() }
    }
}

impl Who {
    /// What a client says of itself.
    pub(crate) fn of<Q>(request: &Request<Q>) -> Self {
        let shown = TOKEN.iter().find_map(|name| request.metadata().get(*name));
        let token = shown.map(|value| {
            // What is no text is no token that anybody was given.
            let text = value.to_str().unwrap_or_default();
            Shown::new(text.strip_prefix(BEARER).unwrap_or(text))
        });
        // A gateway of others' making shows its own certificate for whoever asks it, and says so.
        let by_gateway = request.metadata().contains_key(BY_GATEWAY);
        let name = request.extensions().get::<ClientName>().filter(|_| !by_gateway);
        let name = name.map(|ClientName(name)| name.clone());
        Self::Client { token, name }
    }

    /// Where nobody has to say who they are.
    fn unasked(&self) -> Caller {
        match self {
            Self::Member => Caller::Member,
            Self::Client { .. } => Caller::Nobody,
        }
    }
}

/// Time, as tokens count it.
pub(crate) struct TokenClock {
    began: Instant,
    ttl: Duration,
}

impl TokenClock {
    pub(super) fn new(ttl: Duration) -> Self {
        Self { began: Instant::now(), ttl }
    }
}

/// Whose signed token this is. One of before the last change of users and roles proves nothing: its user
/// may have another password since, or be another user. (etcd takes it for what `root` alone may do.)
/// Neither does one of after what `view` shows: either this member is behind, and is asked again once it
/// has caught up, or the token is of another history, as before a restored snapshot, and its user may be
/// anybody here. (etcd refuses it for ranges, on a member that is behind, too, and takes it for the rest.)
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

    /// A token counts before a certificate, also one that proves nothing.
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

    /// Whether `who` may do this by what `view` says of users and roles; then, who that is.
    pub(super) fn may(&self, who: &Who, view: &View, access: Access<'_>) -> Result<Caller, Error> {
        if !view.auth().is_enabled() {
            return Ok(who.unasked());
        }
        self.may_with(who, view, access, &self.leases())
    }

    /// The same, for who holds the leases already.
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

    /// The same by the newest view; where that says no, by one that shows everything acknowledged before
    /// the call, unless the call is content with what this member shows.
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

/// Takes away tokens that are over, for as long as the node runs.
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
