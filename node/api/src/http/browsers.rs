//! Restrictions for browsers.
//!
//! - Pages of the origins in `--cors` may call this server.
//! - A request without TLS must name this server by a host name in `--host-whitelist`. Otherwise
//!   the owner of a domain could make its name resolve to this server's address. Pages of that
//!   domain could then call the server (DNS rebinding, CVE-2018-5702).
//!
//! As in etcd, both rules apply to HTTP and not to gRPC, which browsers don't use.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, HOST,
    ORIGIN, VARY,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};

/// A set of allowed names, from a flag with names separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AllowedNames {
    /// Every name is allowed: the flag's value contains `*` or no name.
    #[default]
    All,
    /// Only these names are allowed.
    Only(BTreeSet<String>),
}

impl AllowedNames {
    /// Parses the value of a flag, in etcd's syntax.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let names: BTreeSet<String> = text
            .split(',')
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
            .collect();
        if names.is_empty() || names.contains("*") { Self::All } else { Self::Only(names) }
    }

    /// Whether the set contains `name`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(names) => names.contains(name),
        }
    }
}

/// Allowed origins of pages, and allowed host names of this server.
#[derive(Clone, Debug, Default)]
pub struct BrowserRules {
    pub origins: AllowedNames,
    pub hosts: AllowedNames,
}

impl BrowserRules {
    /// Adds CORS headers to the answers of `pages`, if the request's origin is allowed.
    pub(super) fn add_cors_headers(&self, pages: Router) -> Router {
        let origins = Arc::new(self.origins.clone());
        pages.layer(from_fn(move |request: Request, next: Next| {
            let origins = Arc::clone(&origins);
            async move {
                let allowed = allowed_origin(&origins, request.headers());
                let mut response = next.run(request).await;
                if let Some(origin) = allowed {
                    insert_cors_headers(origin, response.headers_mut());
                }
                if *origins != AllowedNames::All {
                    response.headers_mut().append(VARY, HeaderValue::from_static("origin"));
                }
                response
            }
        }))
    }

    /// Refuses requests to `pages` whose host name isn't allowed.
    pub(super) fn check_host(&self, pages: Router) -> Router {
        if self.hosts == AllowedNames::All {
            return pages;
        }
        let hosts = Arc::new(self.hosts.clone());
        pages.layer(from_fn(move |request: Request, next: Next| {
            let hosts = Arc::clone(&hosts);
            async move {
                let host = host(&request);
                if hosts.has(&host) { next.run(request).await } else { misdirected(&host) }
            }
        }))
    }
}

/// Returns the value of `Access-Control-Allow-Origin`, if pages of the request's origin are allowed
/// to read the answer.
fn allowed_origin(origins: &AllowedNames, headers: &HeaderMap) -> Option<HeaderValue> {
    if *origins == AllowedNames::All {
        return Some(HeaderValue::from_static("*"));
    }
    let origin = headers.get(ORIGIN)?;
    origins.has(origin.to_str().ok()?).then(|| origin.clone())
}

/// Adds the CORS headers that etcd sends.
fn insert_cors_headers(origin: HeaderValue, headers: &mut HeaderMap) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    let mut insert = |name, value| headers.insert(name, HeaderValue::from_static(value));
    insert(ACCESS_CONTROL_ALLOW_METHODS, "POST, GET, OPTIONS, PUT, DELETE");
    insert(ACCESS_CONTROL_ALLOW_HEADERS, "accept, content-type, authorization");
}

/// Returns the host name in the request, without the port.
fn host(request: &Request) -> String {
    let header = || request.headers().get(HOST)?.to_str().ok()?.parse::<Authority>().ok();
    let authority = request.uri().authority().cloned().or_else(header);
    authority.map(|authority| authority.host().to_owned()).unwrap_or_default()
}

fn misdirected(host: &str) -> Response {
    let text = format!(
        "this server is not called {host:?}: use TLS, or name that host in --host-whitelist\n"
    );
    (StatusCode::MISDIRECTED_REQUEST, text).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::routing::get;
    use tower::ServiceExt as _;

    use super::*;

    fn listed(text: &str) -> AllowedNames {
        AllowedNames::parse(text)
    }

    async fn ask(router: &Router, uri: &str, headers: &[(&str, &str)]) -> Response {
        let mut request = Request::get(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    #[tokio::test]
    async fn only_pages_of_listed_origins_get_cors_headers() {
        let pages = || Router::new().route("/", get(async || "x"));
        let some = BrowserRules {
            origins: listed("https://a.example,https://b.example"),
            ..BrowserRules::default()
        };
        let some = some.add_cors_headers(pages());
        for (origin, allowed) in [
            (Some("https://b.example"), Some("https://b.example")),
            (Some("https://c.example"), None),
            (None, None),
        ] {
            let headers: Vec<_> = origin.map(|origin| ("origin", origin)).into_iter().collect();
            let answer = ask(&some, "/", &headers).await;
            let told = answer.headers().get(ACCESS_CONTROL_ALLOW_ORIGIN);
            assert_eq!(told.map(|value| value.to_str().unwrap()), allowed, "{origin:?}");
        }
        let all = BrowserRules::default().add_cors_headers(pages());
        let answer = ask(&all, "/", &[]).await;
        assert_eq!(answer.headers()[ACCESS_CONTROL_ALLOW_ORIGIN], "*");
    }

    #[tokio::test]
    async fn a_server_without_tls_answers_only_to_its_allowed_names() {
        let pages = || Router::new().route("/", get(async || "x"));
        let named =
            BrowserRules { hosts: listed("good.example,127.0.0.1"), ..BrowserRules::default() };
        let named = named.check_host(pages());
        for (host, status) in [
            ("good.example", 200),
            ("good.example:2379", 200),
            ("127.0.0.1:2379", 200),
            ("evil.example", 421),
            ("good.example.evil.example", 421),
            ("", 421),
        ] {
            let answer = ask(&named, "/", &[("host", host)]).await;
            assert_eq!(answer.status().as_u16(), status, "{host}");
        }
        assert_eq!(ask(&named, "http://good.example/", &[]).await.status(), StatusCode::OK);
        assert_eq!(ask(&named, "/", &[]).await.status(), StatusCode::MISDIRECTED_REQUEST);
        let any = BrowserRules::default().check_host(pages());
        assert_eq!(ask(&any, "/", &[("host", "evil.example")]).await.status(), StatusCode::OK);
    }
}
