//! Visitors of a page: the session that the browser's cookie names, and its admin as of now.

use std::future::Future;
use std::pin::Pin;

use actix_web::dev::Payload;
use actix_web::web::Data;
use actix_web::{FromRequest, HttpRequest};
use discovery_types::digest::Digest;
use discovery_types::problem::Code;
use discovery_types::role::{Action, Principal, Role, roles_allow};
use uuid::Uuid;

use super::error::ConsoleError;
use crate::app::App;
use crate::auth::{check_allowed, current_admin};
use crate::domain::BrowserSecret;
use crate::store::UnixMicros;

/// Name of the session's cookie. The prefix `__Host-` makes browsers require TLS, the path `/` and
/// this exact host.
pub(super) const COOKIE: &str = "__Host-muster-console";

/// An admin who has signed in with a browser.
#[derive(Clone, Debug)]
pub(super) struct Visitor {
    /// Name of the admin.
    pub(super) name: String,
    /// Hash of the cookie's secret, which identifies the session.
    pub(super) session: Digest,
    /// Time at which the session ends.
    pub(super) expires_us: UnixMicros,
    roles: Vec<Role>,
}

impl Visitor {
    /// Checks that the visitor may do `action` on `cluster`, by the rules of the API.
    pub(super) fn check(&self, action: Action, cluster: Option<Uuid>) -> Result<(), ConsoleError> {
        let principal = Principal::Admin { roles: self.roles.clone() };
        Ok(check_allowed(&principal, action, cluster)?)
    }

    pub(super) fn may(&self, action: Action) -> bool {
        roles_allow(&self.roles, action)
    }

    /// Returns the names of the visitor's roles.
    pub(super) fn role_names(&self) -> String {
        self.roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(", ")
    }

    async fn find(request: &HttpRequest) -> Result<Self, ConsoleError> {
        let app = request.app_data::<Data<App>>().expect("every App is built with it");
        let cookie = session_cookie(request).ok_or_else(ConsoleError::not_signed_in)?;
        let secret = BrowserSecret::parse(&cookie).ok_or_else(ConsoleError::session_over)?;
        let session = secret.hash();
        let found = app.store.console_session(&session).await?;
        let stored = found.ok_or_else(ConsoleError::session_over)?;
        let admin = current_admin(app, &stored.admin).await.map_err(|error| {
            match error.problem().code {
                Code::UnknownKey => ConsoleError::revoked(),
                _ => error.into(),
            }
        })?;
        Ok(Visitor {
            name: admin.name.to_string(),
            session,
            expires_us: stored.expires_us,
            roles: admin.roles,
        })
    }
}

impl FromRequest for Visitor {
    type Error = ConsoleError;
    type Future = Pin<Box<dyn Future<Output = Result<Self, ConsoleError>>>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let request = request.clone();
        Box::pin(async move { Visitor::find(&request).await })
    }
}

/// Returns the value of the session's cookie.
fn session_cookie(request: &HttpRequest) -> Option<String> {
    let headers = request.headers().get_all(actix_web::http::header::COOKIE);
    let texts = headers.filter_map(|value| value.to_str().ok());
    let mut pairs = texts.flat_map(|text| text.split(';')).filter_map(|pair| pair.split_once('='));
    pairs.find(|(name, _)| name.trim() == COOKIE).map(|(_, value)| value.trim().to_owned())
}
