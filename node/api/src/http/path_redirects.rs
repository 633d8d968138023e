//! Redirects for paths with empty segments or dots, as Go's `ServeMux` does.

use axum::http::header::LOCATION;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};

/// Returns a redirect to the clean path of `uri`, if its path isn't clean. Its status makes the
/// client repeat the request with the same method and body.
pub(super) fn redirect(uri: &Uri) -> Option<Response> {
    let path = clean(uri.path());
    if path == uri.path() {
        return None;
    }
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    Some((StatusCode::TEMPORARY_REDIRECT, [(LOCATION, target)]).into_response())
}

/// Returns `path` without empty segments and `.`. Each `..` removes the segment before it.
fn clean(path: &str) -> String {
    let mut segments: Vec<&str> = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    let end = if path.ends_with('/') && !segments.is_empty() { "/" } else { "" };
    format!("/{}{end}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_cleaned_as_go_cleans_them() {
        for (path, cleaned) in [
            ("/", "/"),
            ("//", "/"),
            ("//v3/kv/range", "/v3/kv/range"),
            ("/v3//kv///range", "/v3/kv/range"),
            ("/v3/./kv/../kv/range", "/v3/kv/range"),
            ("/../health", "/health"),
            ("/health/", "/health/"),
            ("//health//", "/health/"),
            ("//example.com/health", "/example.com/health"),
        ] {
            assert_eq!(clean(path), cleaned, "{path}");
        }
    }

    #[test]
    fn only_a_path_that_is_not_clean_is_redirected_with_its_query() {
        assert!(redirect(&Uri::from_static("/v3/kv/range")).is_none());
        let uri = Uri::builder().path_and_query("//health?serializable=true").build().unwrap();
        let response = redirect(&uri).unwrap();
        assert_eq!(response.status(), StatusCode::TEMPORARY_REDIRECT);
        assert_eq!(response.headers()[LOCATION], "/health?serializable=true");
    }
}
