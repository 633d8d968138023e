//! The API's routing table, and the wrapper around every request.

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::http::header::{CACHE_CONTROL, DATE, HeaderValue};
use actix_web::middleware::Next;
use actix_web::web::{self, Data, PathConfig, QueryConfig, ServiceConfig, get, head, post, put};
use actix_web::{Error, HttpRequest, Resource, Scope};
use discovery_types::api::PREFER;
use discovery_types::features::AGENT_BUILD;
use discovery_types::key::PublicKey;

use crate::app::App;
use crate::error::ApiError;
use crate::etcd_tokens::v2;
use crate::handlers::body::unreadable_request;
use crate::handlers::{
    access, admins, clusters, console, database, etcd_tokens, events, forming, grants, intents, ops,
};
use crate::metrics::RequestLabels;
use crate::openapi;
use crate::refusals::is_because_of_caller;
use crate::server::ConnectionPeer;

/// Registers every route of the API.
#[expect(clippy::too_many_lines, reason = "the whole table in one place, a line for each route")]
pub(crate) fn configure(config: &mut ServiceConfig) {
    config
        .app_data(PathConfig::default().error_handler(|_, _| {
            unreadable_request(
                &"An id in the path can't be read: clusters and processes have a UUID, tokens 16 \
                 characters of a-z and 2-7, operations 32 hexadecimal digits.",
            )
            .into()
        }))
        .app_data(
            QueryConfig::default().error_handler(|error, _| unreadable_request(&error).into()),
        )
        // Access.
        .service(resource_at("/v1/token", "POST").route(post().to(access::token)))
        .service(
            resource_at("/v1/context", "GET, HEAD")
                .route(get().to(access::context))
                .route(head().to(access::context)),
        )
        .service(
            resource_at("/v1/jwks", "GET, HEAD")
                .route(get().to(access::jwks))
                .route(head().to(access::jwks)),
        )
        .service(
            resource_at("/v1/admins", "GET, HEAD, PUT")
                .route(get().to(admins::list))
                .route(head().to(admins::list))
                .route(put().to(admins::put)),
        )
        .service(resource_at("/v1/console/links", "POST").route(post().to(console::links)))
        // Clusters.
        .service(resource_at("/v1/drafts", "POST").route(post().to(clusters::draft)))
        .service(
            resource_at("/v1/clusters", "GET, HEAD")
                .route(get().to(clusters::list))
                .route(head().to(clusters::list)),
        )
        .service(one_cluster())
        // Tokens.
        .service(
            resource_at("/v1/grants", "GET, HEAD, PUT")
                .route(put().to(grants::put))
                .route(get().to(grants::list_all))
                .route(head().to(grants::list_all)),
        )
        .service(
            resource_at("/v1/grants/{id}", "GET, HEAD")
                .route(get().to(grants::show))
                .route(head().to(grants::show)),
        )
        .service(
            resource_at("/v1/grants/{id}/redemptions", "GET, HEAD")
                .route(get().to(grants::redemptions))
                .route(head().to(grants::redemptions)),
        )
        .service(resource_at("/v1/grants/{id}/confirm", "POST").route(post().to(grants::confirm)))
        .service(resource_at("/v1/grants/{id}/revoke", "POST").route(post().to(grants::revoke)))
        // Stock etcd.
        .service(
            resource_at("/v1/etcd-tokens", "GET, HEAD, PUT")
                .route(put().to(etcd_tokens::put))
                .route(get().to(etcd_tokens::list))
                .route(head().to(etcd_tokens::list)),
        )
        .service(
            resource_at("/v1/etcd-tokens/{id}", "GET, HEAD")
                .route(get().to(etcd_tokens::show))
                .route(head().to(etcd_tokens::show)),
        )
        .service(
            resource_at("/v1/etcd-tokens/{id}/revoke", "POST")
                .route(post().to(etcd_tokens::revoke)),
        )
        .service(etcd_v2_resource("/v2/{token}"))
        .service(etcd_v2_resource("/v2/{token}/{key:.*}"))
        // Forming.
        .service(resource_at("/v1/redeem", "POST").route(post().to(forming::redeem)))
        // Changes of a running cluster.
        .service(resource_at("/v1/join", "POST").route(post().to(intents::join)))
        .service(resource_at("/v1/orders", "PUT").route(put().to(intents::order)))
        // The database.
        .service(resource_at("/v1/db/accept", "POST").route(post().to(database::accept)))
        .service(
            resource_at("/v1/processes", "GET, HEAD")
                .route(get().to(database::list))
                .route(head().to(database::list)),
        )
        .service(
            resource_at("/v1/processes/{id}/forget", "POST").route(post().to(database::forget)),
        )
        // Audit.
        .service(
            resource_at("/v1/events", "GET, HEAD")
                .route(get().to(events::list))
                .route(head().to(events::list)),
        )
        // Operations.
        .service(
            resource_at("/livez", "GET, HEAD")
                .route(get().to(ops::livez))
                .route(head().to(ops::livez)),
        )
        .service(
            resource_at("/readyz", "GET, HEAD")
                .route(get().to(ops::readyz))
                .route(head().to(ops::readyz)),
        )
        .service(
            resource_at("/metrics", "GET, HEAD")
                .route(get().to(ops::metrics))
                .route(head().to(ops::metrics)),
        )
        .service(
            resource_at("/openapi.json", "GET, HEAD")
                .route(get().to(openapi::openapi))
                .route(head().to(openapi::openapi)),
        )
        .default_service(web::to(ops::not_found));
}

/// Path of one cluster. The paths of everything that belongs to the cluster begin with it.
const ONE_CLUSTER: &str = "/v1/clusters/{id}";
/// Beginning of the paths of requests for one cluster.
const CLUSTERS: &str = "/v1/clusters/";

/// Routes of one cluster.
///
/// The router compares a request with one route after the other, and uses a regular expression for
/// each path with an id. Matching the id anew for each route would take longer than the rest of a
/// poll. In this scope the id is matched once, and the rest of most paths is a constant text.
#[expect(clippy::too_many_lines, reason = "the whole table in one place, a line for each route")]
fn one_cluster() -> Scope {
    web::scope(ONE_CLUSTER)
        .service(
            cluster_resource_at("/v1/clusters/{id}", "GET, HEAD")
                .route(get().to(clusters::show_one))
                .route(head().to(clusters::show_one)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/statement", "PUT")
                .route(put().to(clusters::statement)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/statements", "GET, HEAD, POST")
                .route(post().to(clusters::restore_statements))
                .route(get().to(clusters::statements))
                .route(head().to(clusters::statements)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/cas", "GET, HEAD, POST")
                .route(get().to(clusters::rotation))
                .route(head().to(clusters::rotation))
                .route(post().to(clusters::make_cas)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/service", "PUT")
                .route(put().to(intents::service)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/explain", "GET, HEAD")
                .route(get().to(clusters::explain))
                .route(head().to(clusters::explain)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/document", "GET, HEAD")
                .route(get().to(clusters::document))
                .route(head().to(clusters::document)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/approvals", "POST")
                .route(post().to(clusters::approve)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/abandon", "POST")
                .route(post().to(clusters::abandon)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/retire", "POST")
                .route(post().to(clusters::retire)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/unretire", "POST")
                .route(post().to(clusters::unretire)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/reopen", "POST")
                .route(post().to(clusters::reopen)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/credentials", "POST")
                .route(post().to(clusters::credentials)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/grants", "GET, HEAD")
                .route(get().to(grants::list))
                .route(head().to(grants::list)),
        )
        // Forming.
        .service(
            cluster_resource_at("/v1/clusters/{id}/poll", "GET, HEAD, POST")
                .route(post().to(forming::poll))
                .route(get().to(forming::watch))
                .route(head().to(forming::watch)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/ack", "POST").route(post().to(forming::ack)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/nack", "POST").route(post().to(forming::nack)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/probes", "POST")
                .route(post().to(forming::probes)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/release", "POST")
                .route(post().to(forming::release)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/report", "POST")
                .route(post().to(forming::report)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/addresses", "POST")
                .route(post().to(clusters::addresses)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/checkpoint", "GET, HEAD")
                .route(get().to(events::checkpoint))
                .route(head().to(events::checkpoint)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/trouble", "POST")
                .route(post().to(forming::trouble)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/adopt", "POST").route(post().to(forming::adopt)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/readmit", "POST")
                .route(post().to(intents::readmit)),
        )
        // Changes of a running cluster. Its own agents fetch them; discovery never connects to the
        // cluster.
        .service(
            cluster_resource_at("/v1/clusters/{id}/intents", "GET, HEAD")
                .route(get().to(intents::list))
                .route(head().to(intents::list)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/intents/{operation}", "GET, HEAD")
                .route(get().to(intents::show))
                .route(head().to(intents::show)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/intents/{operation}/outcome", "POST")
                .route(post().to(intents::outcome)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/intents/{operation}/wait", "POST")
                .route(post().to(intents::wait)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/intents/{operation}/withdraw", "POST")
                .route(post().to(intents::withdraw)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/directory", "GET, HEAD")
                .route(get().to(intents::directory))
                .route(head().to(intents::directory)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/recoveries", "POST")
                .route(post().to(intents::recoveries)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/leaves", "POST")
                .route(post().to(intents::leaves)),
        )
        .service(
            cluster_resource_at("/v1/clusters/{id}/export", "GET, HEAD")
                .route(get().to(intents::export))
                .route(head().to(intents::export)),
        )
        // Membership of a running cluster. These routes refuse every method, because only the
        // cluster itself changes its members.
        .service(membership_resource("/v1/clusters/{id}/members"))
        .service(membership_resource("/v1/clusters/{id}/members/{rest:.*}"))
}

/// Headers of a request for one cluster that its authorisation and its handler read. All others are
/// removed.
const READ_HEADERS: [&str; 4] = ["authorization", "content-type", PREFER, AGENT_BUILD];

/// Removes all headers except [`READ_HEADERS`] from a request for one cluster. Such a request may
/// wait for a long time, and actix-web reserves 7 KB for the headers of each request.
fn keep_read_headers(request: &mut ServiceRequest) {
    if !request.path().starts_with(CLUSTERS) {
        return;
    }
    let all = std::mem::take(request.headers_mut());
    let kept = request.headers_mut();
    for (name, value) in all {
        if READ_HEADERS.contains(&name.as_str()) {
            kept.append(name, value);
        }
    }
}

/// Path of the resource that a request was routed to, as the table names it.
#[derive(Clone, Copy)]
struct RoutePattern(&'static str);

/// Makes a resource at `path`. Methods that aren't in `allow` get status 405.
fn resource_at(path: &'static str, allow: &'static str) -> Resource {
    resource_with_pattern(path, path)
        .default_service(web::to(move || ops::method_not_allowed(allow)))
}

/// Makes the resource for `path`, which begins with [`ONE_CLUSTER`], as [`resource_at`] does.
fn cluster_resource_at(path: &'static str, allow: &'static str) -> Resource {
    resource_with_pattern(path_in_cluster(path), path)
        .default_service(web::to(move || ops::method_not_allowed(allow)))
}

/// Makes a resource at `path` within its scope. `pattern` is its whole path.
fn resource_with_pattern(path: &str, pattern: &'static str) -> Resource {
    web::resource(path).app_data(RoutePattern(pattern))
}

/// Makes a resource of etcd's discovery protocol v2.
fn etcd_v2_resource(path: &'static str) -> Resource {
    resource_with_pattern(path, path)
        .route(get().to(v2::get))
        .route(head().to(v2::get))
        .route(put().to(v2::put))
        .default_service(web::to(v2::method_not_allowed))
}

fn membership_resource(path: &'static str) -> Resource {
    resource_with_pattern(path_in_cluster(path), path).default_service(web::to(ops::membership))
}

/// Returns the part of `path` after [`ONE_CLUSTER`].
fn path_in_cluster(path: &str) -> &str {
    path.strip_prefix(ONE_CLUSTER).expect("the table names whole paths")
}

/// Wraps every request. Before the handler, it checks the address's rate limit and refuses a
/// request over it. A registration by etcd's discovery protocol v2 isn't refused at once: it waits
/// until the limit allows it. After the handler, it sets the `Date` header to the service's time
/// and counts the request.
pub(crate) async fn wrap_request(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    keep_read_headers(&mut request);
    let app = request.app_data::<Data<App>>().cloned().expect("every App is built with it");
    let started = std::time::Instant::now();
    let peer = request.conn_data::<ConnectionPeer>().cloned();
    let address = peer.as_ref().map(|peer| peer.address.ip());
    let is_v2 = request.path().starts_with(v2::V2_PREFIX)
        && request.match_pattern().is_some_and(|path| path.starts_with(v2::V2_PREFIX));
    let is_registration = is_v2 && *request.method() == Method::PUT;
    let limited = match address {
        None => Ok(()),
        Some(address) if is_registration => v2::wait_for_turn(&app.request_limit, address).await,
        Some(address) => app.request_limit.check(address),
    };
    let mut response = match (limited, address) {
        (Err(wait), Some(address)) => {
            let error = app.rate_limited(address, wait);
            match is_v2 {
                true => request.into_response(v2::overloaded()),
                false => request.error_response(error).map_into_boxed_body(),
            }
        }
        _ => next.call(request).await?.map_into_boxed_body(),
    };
    let pattern = route_of(response.request());
    log_fault(&response, &pattern);
    if let Some(peer) = &peer {
        note_refusal(&app, &response, &pattern, peer);
    }
    let headers = response.headers_mut();
    if let Ok(date) = HeaderValue::from_str(&app.clock.http_date()) {
        headers.insert(DATE, date);
    }
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let metrics = &app.metrics;
    let may_park = ["/poll", "/intents", "/intents/{operation}", "/v2/{token}"];
    if !may_park.iter().any(|end| pattern.ends_with(end)) {
        metrics.duration.observe(started.elapsed().as_secs_f64());
    }
    let status = response.status().as_u16();
    metrics.requests.get_or_create(&RequestLabels { route: pattern, status }).inc();
    Ok(response)
}

/// Returns the path of the resource that a request was routed to, as the table names it.
fn route_of(request: &HttpRequest) -> String {
    if let Some(RoutePattern(path)) = request.app_data() {
        return (*path).to_owned();
    }
    // A request that was answered before it was routed has no `RoutePattern`. Search the table for
    // its path, which takes longer.
    request.match_pattern().unwrap_or_else(|| "unmatched".into())
}

/// Counts a request that was refused because of its caller, for the event chain.
fn note_refusal(
    app: &App,
    response: &ServiceResponse<impl MessageBody>,
    route: &str,
    peer: &ConnectionPeer,
) {
    let error = response.response().error().and_then(|error| error.as_error::<ApiError>());
    let Some(problem) = error.map(ApiError::problem) else { return };
    if is_because_of_caller(problem.code, problem.status) {
        let key = peer.certificate.as_ref().and_then(|certificate| certificate.ed25519);
        let key = key.and_then(|key| PublicKey::try_from(key).ok()).map(|key| key.key_id());
        app.refusals.note(route, problem.code, peer.address.ip(), key);
    }
}

/// Logs each response of status 500 and above once, with its cause.
fn log_fault(response: &ServiceResponse<impl MessageBody>, route: &str) {
    let status = response.status();
    // The paths of stock etcd contain tokens, and `etcd_tokens` logs its own faults.
    if !status.is_server_error() || route.starts_with(v2::V2_PREFIX) {
        return;
    }
    let method = response.request().method();
    let error = response.response().error();
    let text = match error.map(|error| (error.as_error::<ApiError>(), error)) {
        Some((Some(error), _)) => error.to_string(),
        Some((None, error)) => error.to_string(),
        None => String::new(),
    };
    let path = response.request().path();
    match status.as_u16() {
        // Log 503 as a warning, not as an error: the next request may succeed.
        503 => tracing::warn!(%method, route, path, error = text, "a request was not served"),
        status => tracing::error!(%method, route, path, status, error = text, "a request failed"),
    }
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    #[test]
    fn a_waiting_request_keeps_only_the_headers_that_are_read() {
        let request = |path: &str| {
            let mut request = TestRequest::with_uri(path);
            for name in READ_HEADERS {
                request = request.append_header((name, "read")).append_header((name, "again"));
            }
            for number in 0..28 {
                request = request.append_header((format!("x-{number}"), "not read"));
            }
            request.to_srv_request()
        };
        let mut waiting = request("/v1/clusters/00000000-0000-0000-0000-000000000001/poll");
        keep_read_headers(&mut waiting);
        let headers = waiting.headers();
        for name in READ_HEADERS {
            let values: Vec<_> = headers.get_all(name).collect();
            assert_eq!(values, ["read", "again"], "{name}");
        }
        assert_eq!(headers.len_keys(), READ_HEADERS.len());
        assert!(headers.capacity() < 8, "{}", headers.capacity());
        let mut other = request("/v1/redeem");
        keep_read_headers(&mut other);
        assert_eq!(other.headers().len_keys(), READ_HEADERS.len() + 28);
    }
}
