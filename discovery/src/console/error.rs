//! Error pages of the console.

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderValue};
use actix_web::{HttpResponse, ResponseError};
use askama::Template;
use discovery_types::problem::Code;

use super::layout::{PageFrame, html};
use super::text::plain;
use crate::error::ApiError;

/// Command that makes a sign-in link.
const OPEN_COMMAND: &str = "muster-discovery console open";

/// A refused or failed request, as a page.
#[derive(Debug)]
pub(super) struct ConsoleError(ApiError);

#[derive(Template)]
#[template(path = "error.html")]
struct ErrorPage {
    layout: PageFrame,
    status: u16,
    heading: &'static str,
    detail: String,
    next: String,
    /// Command to run on the admin's machine.
    command: Option<&'static str>,
    /// Whether the browser may have a session although it sent no cookie. A browser sends none if a
    /// page of another site led to the requested page.
    may_be_signed_in: bool,
}

impl ConsoleError {
    /// Error for a browser that sends no cookie of a session.
    pub(super) fn not_signed_in() -> Self {
        let detail = "This browser isn't signed in.";
        ConsoleError(ApiError::new(Code::TokenMissing, detail, "Sign in with a link."))
    }

    /// Error for a session that has ended, or never was.
    pub(super) fn session_over() -> Self {
        let detail = "The session has ended. A session lasts eight hours at most. It ends earlier when \
                      you sign out, when the database is restored, or when you begin eight newer \
                      sessions.";
        ConsoleError(ApiError::new(Code::TokenInvalid, detail, "Sign in with a new link."))
    }

    /// Error for the session of an admin who was revoked.
    pub(super) fn revoked() -> Self {
        let detail = "The admin who signed in here is no admin any more.";
        let next = "Ask an owner to add the key with `muster-discovery admin add`.";
        ConsoleError(ApiError::new(Code::UnknownKey, detail, next))
    }

    /// Error for a link that was used, expired, or never made.
    pub(super) fn link_refused() -> Self {
        let detail = "The link was used already, has expired, or was replaced by a newer one.";
        ConsoleError(ApiError::new(Code::TokenInvalid, detail, "Make a new link."))
    }

    /// Error for a form that another site's page has sent.
    pub(super) fn other_origin() -> Self {
        let detail = "The form was not sent from a page of this console.";
        let next = "Open the page of the console again, and use its button.";
        ConsoleError(ApiError::new(Code::Forbidden, detail, next))
    }

    /// Error for an unknown path, or an id in it that can't be read.
    pub(super) fn no_page() -> Self {
        let detail = "There is no page at this address.";
        ConsoleError(ApiError::new(Code::NotFound, detail, "Go on from the list of clusters."))
    }

    /// Error for a query that can't be read.
    pub(super) fn bad_query() -> Self {
        let detail = "The part of the address after the question mark can't be read.";
        let next = "Go on from the list of clusters.";
        ConsoleError(ApiError::new(Code::InvalidRequest, detail, next))
    }

    /// Error for another method than the path has.
    pub(super) fn wrong_method() -> Self {
        let detail = "This address doesn't accept this HTTP method.";
        let next = "Open it in a browser, from a link of the console.";
        ConsoleError(ApiError::new(Code::MethodNotAllowed, detail, next))
    }

    /// Error for a further stream than a session, or the process, may have.
    pub(super) fn too_many_streams() -> Self {
        let detail = "Too many pages are live.";
        ConsoleError(ApiError::new(Code::Overloaded, detail, "Close some, or reload by hand."))
    }

    /// The error as the API would send it.
    pub(super) fn api_error(&self) -> &ApiError {
        &self.0
    }

    fn page(&self) -> String {
        let problem = self.0.problem();
        let is_sign_in = problem.status == 401;
        let page = ErrorPage {
            layout: PageFrame::without_visitor(problem.title.clone()),
            status: problem.status,
            heading: heading(problem.status),
            detail: plain(&problem.detail),
            next: plain(&problem.next),
            command: (is_sign_in && problem.code != Code::UnknownKey).then_some(OPEN_COMMAND),
            may_be_signed_in: problem.code == Code::TokenMissing,
        };
        page.render().unwrap_or_default()
    }
}

fn heading(status: u16) -> &'static str {
    match status {
        401 => "Sign in",
        403 => "Not allowed",
        404 | 405 => "No such page",
        400 => "The address can't be read",
        429 => "Too many requests",
        503 => "Try again soon",
        _ => "A fault of the service",
    }
}

impl<E: Into<ApiError>> From<E> for ConsoleError {
    fn from(error: E) -> Self {
        ConsoleError(error.into())
    }
}

impl std::fmt::Display for ConsoleError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl ResponseError for ConsoleError {
    fn status_code(&self) -> StatusCode {
        self.0.status_code()
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = html(self.status_code(), self.page());
        let headers = response.headers_mut();
        match self.status_code() {
            StatusCode::UNAUTHORIZED => {
                // RFC 9110 requires that a response with status 401 names an authentication scheme.
                // No browser knows the scheme `Muster-Link`, so none asks for a password.
                let scheme = HeaderValue::from_static("Muster-Link realm=\"console\"");
                headers.insert(header::WWW_AUTHENTICATE, scheme);
            }
            StatusCode::METHOD_NOT_ALLOWED => {
                headers.insert(header::ALLOW, HeaderValue::from_static("GET, HEAD, POST"));
            }
            _ => {}
        }
        if let Some(seconds) = self.0.error_response().headers().get(header::RETRY_AFTER) {
            headers.insert(header::RETRY_AFTER, seconds.clone());
        }
        response
    }
}
