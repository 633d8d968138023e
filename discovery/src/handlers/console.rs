//! Handler for the links by which browsers sign in to the console.

use actix_web::HttpRequest;
use actix_web::web::{Data, Json};
use discovery_types::api::ConsoleLink;
use discovery_types::problem::{Code, Problem};
use discovery_types::role::Action;

use crate::app::{App, CONSOLE_LINK_LIFE, CONSOLE_SESSION_LIFE};
use crate::auth::authorise;
use crate::domain::BrowserSecret;
use crate::error::ApiError;

/// Makes a link by which a browser signs in to the console as the caller: once, within a minute. It
/// replaces an earlier link of the caller.
#[utoipa::path(post, path = "/v1/console/links", tag = "console",
    responses((status = 200, body = ConsoleLink), (status = "default", body = Problem)))]
pub(crate) async fn links(
    request: HttpRequest,
    app: Data<App>,
) -> Result<Json<ConsoleLink>, ApiError> {
    let caller = authorise(&request, &app, Action::OpenConsole, None).await?;
    let console = app.console.as_ref().ok_or_else(|| {
        let next = "Start the service with `serve --console-listen ADDR:PORT`.";
        ApiError::new(Code::NotFound, "This process of the service has no console.", next)
    })?;
    let code = BrowserSecret::generate();
    let expires_us = app
        .store
        .put_console_link(&caller.key, &caller.name, &code.hash(), CONSOLE_LINK_LIFE)
        .await?;
    tracing::info!(by = caller.name, "made a sign-in link of the console");
    Ok(Json(ConsoleLink {
        url: format!("{}/sign-in/{}", console.url, *code.expose_text()),
        expires_at_ms: expires_us / 1_000,
        session_seconds: CONSOLE_SESSION_LIFE.as_secs(),
        certificate_sha256: console.certificate_sha256,
        uses_service_certificate: console.uses_service_certificate,
    }))
}
