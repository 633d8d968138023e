//! A request larger than gRPC may receive is refused with the words that clients know.
//!
//! The gRPC library refuses it itself, in words and a code of its own, as a response that has
//! nothing but headers: those are rewritten here.

use axum::Router;
use axum::response::Response;
use http::HeaderValue;

/// What the library answers, and the numbers in it.
const THEIRS: &str = "Error, decoded message length too large: found ";
const CODE_THEIRS: &str = "11";
const CODE_OURS: &str = "8";

pub(super) fn layer(router: Router, max: usize) -> Router {
    router.layer(axum::middleware::map_response(move |mut response: Response| {
        rewrite(&mut response, max);
        std::future::ready(response)
    }))
}

fn rewrite(response: &mut Response, max: usize) {
    let headers = response.headers_mut();
    if headers.get("grpc-status").is_none_or(|code| code != CODE_THEIRS) {
        return;
    }
    let Some(found) = headers.get("grpc-message").and_then(found) else { return };
    let text = format!("grpc: received message larger than max ({found} vs. {max})");
    // Percent-encoded as gRPC wants it: only these two characters need it.
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert("grpc-message", value);
        headers.insert("grpc-status", HeaderValue::from_static(CODE_OURS));
    }
}

fn found(message: &HeaderValue) -> Option<u64> {
    let text = message.to_str().ok()?.replace("%20", " ");
    let rest = text.strip_prefix(THEIRS)?;
    rest.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_large_a_message_is_refused_in_known_words() {
        let theirs = format!("{THEIRS}3145736 bytes, the limit is: 2097152 bytes");
        let status = tonic::Status::out_of_range(theirs);
        let mut response: Response = status.into_http::<axum::body::Body>();
        rewrite(&mut response, 2_097_152);
        let headers = response.headers();
        assert_eq!(headers["grpc-status"], "8");
        let text = "grpc: received message larger than max (3145736 vs. 2097152)";
        assert_eq!(headers["grpc-message"], text);
    }

    #[test]
    fn another_refusal_keeps_its_words() {
        let status = tonic::Status::out_of_range("etcdserver: too large lease TTL");
        let mut response: Response = status.into_http::<axum::body::Body>();
        rewrite(&mut response, 1);
        assert_eq!(response.headers()["grpc-status"], "11");
    }
}
