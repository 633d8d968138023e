//! Replaces two errors of tonic by etcd's, which clients know: for requests above the size limit,
//! and for messages with an unknown compression.
//!
//! tonic refuses such a request itself, with a code and text of its own. The refusal is a response
//! with only headers, or an error for the code that reads a stream. Both forms are rewritten here.

use axum::Router;
use axum::response::Response;
use http::HeaderValue;
use tonic::{Code, Status};

/// Beginning of tonic's text for a message that is too large. The sizes follow.
const TONIC_TOO_LARGE: &str = "Error, decoded message length too large: found ";
const TONIC_UNKNOWN_ENCODING: (&str, &str) =
    ("Content is compressed with `", "` which isn't supported");
/// Encodings that a request's messages may have.
const ACCEPTED: &str = "gzip,identity";

pub(super) fn layer(router: Router, max: usize) -> Router {
    router.layer(axum::middleware::map_response(move |mut response: Response| {
        rewrite(&mut response, max);
        std::future::ready(response)
    }))
}

fn rewrite(response: &mut Response, max: usize) {
    let headers = response.headers_mut();
    let Some(theirs) = Status::from_header_map(headers) else { return };
    let Some(ours) = etcd_status(&theirs, max) else { return };
    if ours.code() == Code::Unimplemented {
        headers.insert("grpc-accept-encoding", HeaderValue::from_static(ACCEPTED));
    }
    // Adding the status only fails for malformed details, and this status has none.
    let _ = ours.add_header(headers);
}

/// Rewords the status that ended a stream of requests, if it is one of tonic's.
pub(super) fn reword_status(status: Status, max: usize) -> Status {
    etcd_status(&status, max).unwrap_or(status)
}

fn etcd_status(theirs: &Status, max: usize) -> Option<Status> {
    let text = theirs.message();
    match theirs.code() {
        Code::OutOfRange => {
            let found = text.strip_prefix(TONIC_TOO_LARGE)?.split(' ').next()?;
            Some(larger_than_max(found.parse().ok()?, max))
        }
        Code::Unimplemented => {
            let encoding = text
                .strip_prefix(TONIC_UNKNOWN_ENCODING.0)?
                .strip_suffix(TONIC_UNKNOWN_ENCODING.1)?;
            let text =
                format!("grpc: Decompressor is not installed for grpc-encoding {encoding:?}");
            Some(Status::unimplemented(text))
        }
        _ => None,
    }
}

/// Returns the status for a message of `bytes` bytes, if at most `max` are allowed.
pub(crate) fn larger_than_max(bytes: u64, max: usize) -> Status {
    let text = format!("grpc: received message larger than max ({bytes} vs. {max})");
    Status::resource_exhausted(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_too_large_message_is_refused_with_grpc_gos_text() {
        let theirs = format!("{TONIC_TOO_LARGE}3145736 bytes, the limit is: 2097152 bytes");
        let status = tonic::Status::out_of_range(theirs);
        let mut response: Response = status.into_http::<axum::body::Body>();
        rewrite(&mut response, 2_097_152);
        let headers = response.headers();
        assert_eq!(headers["grpc-status"], "8");
        let text = "grpc: received message larger than max (3145736 vs. 2097152)";
        assert_eq!(Status::from_header_map(headers).unwrap().message(), text);
    }

    #[test]
    fn an_unknown_compression_is_refused_with_grpc_gos_text() {
        let theirs = format!("{}br{}", TONIC_UNKNOWN_ENCODING.0, TONIC_UNKNOWN_ENCODING.1);
        let mut theirs = Status::unimplemented(theirs);
        theirs.metadata_mut().insert("grpc-accept-encoding", "identity".parse().unwrap());
        let mut response: Response = theirs.into_http::<axum::body::Body>();
        rewrite(&mut response, 1);
        let headers = response.headers();
        let told = Status::from_header_map(headers).unwrap();
        let text = "grpc: Decompressor is not installed for grpc-encoding \"br\"";
        assert_eq!((told.code(), told.message()), (Code::Unimplemented, text));
        assert_eq!(headers["grpc-accept-encoding"], ACCEPTED);
    }

    #[test]
    fn another_error_keeps_its_code() {
        let status = tonic::Status::out_of_range("etcdserver: too large lease TTL");
        let mut response: Response = status.into_http::<axum::body::Body>();
        rewrite(&mut response, 1);
        assert_eq!(response.headers()["grpc-status"], "11");
    }
}
