//! The console: read-only pages in a browser, on a listener of its own.
//!
//! - **Sign-in.** An admin's key authorises a link (`POST /v1/console/links`, in `handlers`). The
//!   link shows a button, and the button exchanges the link's code for a session's cookie. Both are
//!   random secrets, and only their hashes are stored. If a mail or chat program previews the link,
//!   it only loads the page and doesn't use the link up.
//! - **Rights.** Each request looks the session and its admin up, and checks the role by `auth`,
//!   with the actions of the API. So a revoked admin reads nothing more, and a page shows what the
//!   API shows.
//! - **Reading.** Pages call the store, and the functions that make the API's answers. Only the two
//!   forms, to sign in and to sign out, change anything. They are accepted from the console's own
//!   pages alone.
//! - **Live pages.** A stream of server-sent events says that something has changed, at most once a
//!   second; the script then fetches the page again. So a page is rendered in one way only, and
//!   works without the script, by reloading. While it waits, a stream doesn't query the database:
//!   it uses the wake-ups of the long polls.
//! - **Text of hosts** is made printable here, and escaped by the templates.
//!
//! Dependencies point from here to `handlers`, `auth` and `store`. Nothing but the listener calls
//! this module.

mod assets;
mod audit;
mod cluster;
mod clusters;
mod error;
mod events;
mod layout;
mod live;
mod sign_in;
mod text;
mod tokens;
mod visitor;

use actix_web::body::BoxBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use actix_web::middleware::Next;
use actix_web::web::{self, Data, PathConfig, QueryConfig, ServiceConfig, get, head, post};
use actix_web::{Error, HttpResponse, Resource};
use discovery_types::problem::Code;

use self::error::ConsoleError;
use crate::app::App;
use crate::error::ApiError;
use crate::metrics::RequestLabels;
use crate::refusals::is_because_of_caller;
use crate::server::ConnectionPeer;

/// Maximum number of rows of a list on one page.
const PAGE_ROWS: u16 = 50;

/// Registers every route of the console.
pub(crate) fn configure(config: &mut ServiceConfig) {
    config
        .app_data(PathConfig::default().error_handler(|_, _| ConsoleError::no_page().into()))
        .app_data(QueryConfig::default().error_handler(|_, _| ConsoleError::bad_query().into()))
        .service(page_at("/").route(get().to(clusters::home)).route(head().to(clusters::home)))
        .service(
            page_at("/clusters").route(get().to(clusters::list)).route(head().to(clusters::list)),
        )
        .service(
            page_at("/clusters/{id}")
                .route(get().to(cluster::show))
                .route(head().to(cluster::show)),
        )
        .service(page_at("/tokens").route(get().to(tokens::list)).route(head().to(tokens::list)))
        .service(
            page_at("/tokens/{id}").route(get().to(tokens::show)).route(head().to(tokens::show)),
        )
        .service(page_at("/audit").route(get().to(audit::show)).route(head().to(audit::show)))
        .service(page_at(live::ALL_CLUSTERS).route(get().to(live::all)))
        .service(page_at("/live/{id}").route(get().to(live::one)))
        .service(
            page_at("/sign-in/{code}")
                .route(get().to(sign_in::form))
                .route(head().to(sign_in::form))
                .route(post().to(sign_in::sign_in)),
        )
        .service(page_at("/sign-out").route(post().to(sign_in::sign_out)))
        .service(
            page_at("/signed-out")
                .route(get().to(sign_in::signed_out))
                .route(head().to(sign_in::signed_out)),
        )
        .service(
            page_at("/assets/{name}").route(get().to(assets::get)).route(head().to(assets::get)),
        )
        .default_service(web::to(no_page));
}

/// A resource at `path`. Methods without a route get status 405.
fn page_at(path: &str) -> Resource {
    web::resource(path).default_service(web::to(wrong_method))
}

async fn no_page() -> Result<HttpResponse, ConsoleError> {
    Err(ConsoleError::no_page())
}

async fn wrong_method() -> Result<HttpResponse, ConsoleError> {
    Err(ConsoleError::wrong_method())
}

/// Headers of every response. They allow scripts and styles only from this listener, and no other
/// page may frame, embed or open the console.
const HEADERS: [(HeaderName, HeaderValue); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; \
             connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
        ),
    ),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    (header::CROSS_ORIGIN_OPENER_POLICY, HeaderValue::from_static("same-origin")),
    (header::CROSS_ORIGIN_RESOURCE_POLICY, HeaderValue::from_static("same-origin")),
];

/// Wraps every request. Before the handler, it checks the API's rate limit for the address. After
/// the handler, it sets the response's headers and counts the request.
pub(crate) async fn wrap_request(
    request: ServiceRequest,
    next: Next<BoxBody>,
) -> Result<ServiceResponse, Error> {
    let app = request.app_data::<Data<App>>().cloned().expect("every App is built with it");
    let started = std::time::Instant::now();
    let peer = request.conn_data::<ConnectionPeer>().cloned();
    let address = peer.as_ref().map(|peer| peer.address.ip());
    let limited = address.map_or(Ok(()), |address| {
        app.request_limit.check(address).map_err(|wait| app.rate_limited(address, wait))
    });
    let pattern = request.match_pattern().unwrap_or_else(|| "unmatched".into());
    let mut response = match limited {
        Ok(()) => next.call(request).await?,
        Err(error) => request.error_response(ConsoleError::from(error)),
    };
    if let Some(error) = api_error(&response) {
        log_fault(error, &pattern);
        let problem = error.problem();
        // A request without a session isn't an attempt to get in, so it isn't recorded as a
        // refusal.
        let is_attempt = problem.code != Code::TokenMissing;
        if is_attempt
            && is_because_of_caller(problem.code, problem.status)
            && let Some(address) = address
        {
            app.refusals.note(&pattern, problem.code, address, None);
        }
    }
    set_headers(response.headers_mut());
    if !pattern.starts_with("/live/") {
        app.metrics.duration.observe(started.elapsed().as_secs_f64());
    }
    let status = response.status().as_u16();
    app.metrics.requests.get_or_create(&RequestLabels { route: pattern, status }).inc();
    Ok(response)
}

fn api_error(response: &ServiceResponse) -> Option<&ApiError> {
    let error = response.response().error()?;
    error.as_error::<ConsoleError>().map(ConsoleError::api_error)
}

/// Logs each response of status 500 and above once. The path isn't logged, because it can contain
/// the code of a sign-in link.
fn log_fault(error: &ApiError, route: &str) {
    match error.problem().status {
        503 => tracing::warn!(route, %error, "a page of the console was not served"),
        500.. => tracing::error!(route, %error, "a page of the console failed"),
        _ => {}
    }
}

fn set_headers(headers: &mut HeaderMap) {
    for (name, value) in HEADERS {
        headers.insert(name, value);
    }
    if !headers.contains_key(header::CACHE_CONTROL) {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
}
