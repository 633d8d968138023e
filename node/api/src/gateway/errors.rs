//! Errors in grpc-gateway's format: the gRPC code's number and the text, with the HTTP status
//! closest to the code.

use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use serde_json::json;
use tonic::{Code, Status};

/// Response to a unary call that failed.
pub(super) fn refusal(status: &Status) -> Response {
    respond(status, error_object(status).to_string())
}

/// Response to a streaming call that failed before its first answer.
pub(super) fn stream_refusal(status: &Status) -> Response {
    respond(status, error_line(status))
}

/// Line that ends a stream of answers with an error.
pub(super) fn error_line(status: &Status) -> String {
    format!("{}\n", json!({ "error": error_object(status) }))
}

fn error_object(status: &Status) -> serde_json::Value {
    json!({ "code": i32::from(status.code()), "message": status.message() })
}

fn respond(status: &Status, body: String) -> Response {
    (http_status(status.code()), [(CONTENT_TYPE, "application/json")], body).into_response()
}

fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        // Non-standard status of nginx: the client closed the connection.
        Code::Cancelled => StatusCode::from_u16(499).expect("three digits"),
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            StatusCode::BAD_REQUEST
        }
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Unknown | Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
