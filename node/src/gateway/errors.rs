//! Refusals, as grpc-gateway gives them: the code's number and the text, under the HTTP status that is
//! nearest to the code.

use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use serde_json::json;
use tonic::{Code, Status};

/// Instead of an answer.
pub(super) fn refusal(status: &Status) -> Response {
    respond(status, object(status).to_string())
}

/// Instead of the first of several answers.
pub(super) fn stream_refusal(status: &Status) -> Response {
    respond(status, line(status))
}

/// Instead of another answer.
pub(super) fn line(status: &Status) -> String {
    format!("{}\n", json!({ "error": object(status) }))
}

fn object(status: &Status) -> serde_json::Value {
    json!({ "code": i32::from(status.code()), "message": status.message() })
}

fn respond(status: &Status, body: String) -> Response {
    (http_status(status.code()), [(CONTENT_TYPE, "application/json")], body).into_response()
}

fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        // nginx' own: the client went away.
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
