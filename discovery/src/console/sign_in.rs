//! Signing in by a link, and signing out.

use actix_web::http::header::{HOST, HeaderName, LOCATION, ORIGIN, SET_COOKIE};
use actix_web::web::{Data, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use askama::Template;
use discovery_types::problem::Code;
use serde::Deserialize;
use uuid::Uuid;

use super::error::ConsoleError;
use super::layout::{PageFrame, render};
use super::visitor::{COOKIE, Visitor};
use crate::app::{App, CONSOLE_SESSION_LIFE};
use crate::auth::{current_admin, peer};
use crate::domain::BrowserSecret;
use crate::store::console::NewConsoleSession;

/// Header by which a browser says where a request comes from (Fetch Metadata).
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Query of a sign-in link.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SignInQuery {
    /// Cluster whose page to show after the sign-in.
    cluster: Option<Uuid>,
}

#[derive(Template)]
#[template(path = "sign_in.html")]
struct SignInPage {
    layout: PageFrame,
}

#[derive(Template)]
#[template(path = "signed_out.html")]
struct SignedOutPage {
    layout: PageFrame,
}

/// Shows the button that uses a link. The page doesn't tell whether the link is valid, and showing
/// it changes nothing.
pub(super) async fn form(
    code: Path<String>,
    _query: Query<SignInQuery>,
) -> Result<HttpResponse, ConsoleError> {
    BrowserSecret::parse(&code).ok_or_else(ConsoleError::link_refused)?;
    render(&SignInPage { layout: PageFrame::without_visitor("Sign in") })
}

/// Exchanges a link's code for a session.
pub(super) async fn sign_in(
    request: HttpRequest,
    app: Data<App>,
    code: Path<String>,
    query: Query<SignInQuery>,
) -> Result<HttpResponse, ConsoleError> {
    check_origin(&request)?;
    let code = BrowserSecret::parse(&code).ok_or_else(ConsoleError::link_refused)?;
    let key = app.store.take_console_link(&code.hash()).await?;
    let key = key.ok_or_else(ConsoleError::link_refused)?;
    // Check the admin now, because the admin may have been revoked since the link was made.
    let admin = current_admin(&app, &key).await.map_err(|error| match error.problem().code {
        Code::UnknownKey => ConsoleError::revoked(),
        _ => error.into(),
    })?;
    let cookie = BrowserSecret::generate();
    let address = peer(&request)?.address.ip().to_canonical().to_string();
    app.store
        .begin_console_session(NewConsoleSession {
            cookie: &cookie.hash(),
            admin: &key,
            name: admin.name.as_str(),
            address: &address,
            life: CONSOLE_SESSION_LIFE,
        })
        .await?;
    tracing::info!(by = %admin.name, address, "signed in to the console");
    let to = match query.cluster {
        Some(cluster) => format!("/clusters/{cluster}"),
        None => "/clusters".to_owned(),
    };
    let value = cookie.expose_text();
    Ok(see_other(&to, &set_cookie(&value, CONSOLE_SESSION_LIFE.as_secs())))
}

/// Ends the session. Without one, it only removes the cookie.
pub(super) async fn sign_out(
    request: HttpRequest,
    app: Data<App>,
    visitor: Result<Visitor, ConsoleError>,
) -> Result<HttpResponse, ConsoleError> {
    check_origin(&request)?;
    match visitor {
        Ok(visitor) => {
            app.store.end_console_session(&visitor.session, &visitor.name).await?;
            tracing::info!(by = visitor.name, "signed out of the console");
        }
        Err(error) if error.api_error().problem().status == 401 => {}
        Err(error) => return Err(error),
    }
    Ok(see_other("/signed-out", &set_cookie("", 0)))
}

/// Shows that the session is over.
pub(super) async fn signed_out() -> Result<HttpResponse, ConsoleError> {
    render(&SignedOutPage { layout: PageFrame::without_visitor("Signed out") })
}

/// Checks that a form was sent from a page of this console. `SameSite=Strict` keeps the cookie from
/// other sites' forms. This check also refuses forms from other ports and names of the same site.
fn check_origin(request: &HttpRequest) -> Result<(), ConsoleError> {
    let header =
        |name: HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
    let is_own = match header(SEC_FETCH_SITE) {
        Some(site) => site == "same-origin",
        None => header(HOST).is_some_and(|host| header(ORIGIN) == Some(&format!("https://{host}"))),
    };
    if is_own { Ok(()) } else { Err(ConsoleError::other_origin()) }
}

fn set_cookie(value: &str, seconds: u64) -> String {
    format!("{COOKIE}={value}; Path=/; Max-Age={seconds}; Secure; HttpOnly; SameSite=Strict")
}

fn see_other(path: &str, cookie: &str) -> HttpResponse {
    HttpResponse::SeeOther()
        .insert_header((LOCATION, path))
        .insert_header((SET_COOKIE, cookie))
        .finish()
}
