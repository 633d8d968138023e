//! The API's OpenAPI description, and the handler that returns it.

use std::sync::LazyLock;

use actix_web::HttpResponse;
use discovery_types::problem::PROBLEM_JSON;
use utoipa::openapi::RefOr;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::{Modify, OpenApi};

use crate::handlers::{
    access, admins, clusters, console, database, etcd_tokens, events, forming, grants, intents, ops,
};

const JSON: &str = "application/json";

/// Returns the description of this API, as OpenAPI 3.1.
#[utoipa::path(get, path = "/openapi.json", tag = "operations", responses((status = 200)))]
pub(crate) async fn openapi() -> HttpResponse {
    HttpResponse::Ok().content_type(JSON).body(openapi_text())
}

/// OpenAPI description of every route.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Muster discovery",
        description = "Where the members of a Raft cluster meet before it exists.",
        license(name = "Apache-2.0"),
        contact(name = "The Muster maintainers")
    ),
    paths(
        access::token,
        access::context,
        access::jwks,
        admins::list,
        admins::put,
        console::links,
        clusters::draft,
        clusters::make_cas,
        clusters::restore_statements,
        clusters::addresses,
        clusters::rotation,
        clusters::list,
        clusters::show_one,
        clusters::statement,
        clusters::statements,
        clusters::explain,
        clusters::document,
        clusters::abandon,
        clusters::approve,
        clusters::retire,
        clusters::unretire,
        clusters::reopen,
        clusters::credentials,
        etcd_tokens::list,
        etcd_tokens::put,
        etcd_tokens::revoke,
        etcd_tokens::show,
        events::checkpoint,
        events::list,
        grants::put,
        grants::list_all,
        grants::list,
        grants::show,
        grants::redemptions,
        grants::confirm,
        grants::revoke,
        forming::redeem,
        forming::poll,
        forming::watch,
        forming::ack,
        forming::nack,
        forming::probes,
        forming::release,
        forming::report,
        forming::trouble,
        forming::adopt,
        intents::readmit,
        intents::join,
        intents::order,
        intents::list,
        intents::show,
        intents::outcome,
        intents::wait,
        intents::withdraw,
        intents::directory,
        intents::recoveries,
        intents::service,
        intents::leaves,
        intents::export,
        database::accept,
        database::list,
        database::forget,
        ops::livez,
        ops::readyz,
        ops::metrics,
        openapi,
        ops::membership
    ),
    modifiers(&Conventions)
)]
struct Api;

/// Adds to every operation how errors are sent and how a caller authenticates.
struct Conventions;

/// Paths that need no access token. `/v1/redeem`, `/v1/join`, `adopt` and `readmit` authenticate in
/// their own ways.
const TOKENLESS_PATHS: [&str; 12] = [
    "/v1/token",
    "/v1/context",
    "/v1/jwks",
    "/v1/redeem",
    "/v1/join",
    "/v1/clusters/{id}/adopt",
    "/v1/clusters/{id}/readmit",
    "/v1/clusters/{id}/members",
    "/livez",
    "/readyz",
    "/metrics",
    "/openapi.json",
];

impl Modify for Conventions {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("JWT");
        let bearer = bearer.description(Some(
            "An access token of /v1/token, bound to the key of the TLS client certificate.",
        ));
        let components = api.components.get_or_insert_default();
        components.add_security_scheme("access_token", SecurityScheme::Http(bearer.build()));
        let needed = SecurityRequirement::new("access_token", [""; 0]);
        for (path, item) in &mut api.paths.paths {
            let operations =
                [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
            for operation in operations.into_iter().flatten() {
                if path.ends_with("/members") {
                    // One handler answers all four methods. Its operation id would appear four
                    // times, but ids must be unique.
                    operation.operation_id = None;
                }
                if !TOKENLESS_PATHS.contains(&path.as_str()) {
                    operation.security = Some(vec![needed.clone()]);
                }
                for (status, response) in &mut operation.responses.responses {
                    let RefOr::T(response) = response else { continue };
                    let error = status == "default" || status.starts_with(['4', '5']);
                    if error && let Some(content) = response.content.shift_remove(JSON) {
                        response.content.insert(PROBLEM_JSON.into(), content);
                    }
                }
            }
        }
    }
}

/// Returns the OpenAPI description as JSON, which is made once.
pub(crate) fn openapi_text() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        Api::openapi().to_pretty_json().expect("a description made of plain values encodes")
    });
    &TEXT
}
