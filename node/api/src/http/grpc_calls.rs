//! Filter for gRPC calls: they must use HTTP/2, POST and a gRPC media type, and end at their
//! deadline.
//!
//! Other requests are answered with "not found". Without a preflight request, any web page can make
//! a browser post bytes here, over HTTP/1 or as plain text. The browser then presents its user's
//! certificate. So a certificate must name a user only in a gRPC call over HTTP/2.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{ALLOW, CONTENT_TYPE, HeaderMap, HeaderValue};
use axum::http::{Method, StatusCode, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::{Code, Status};

use crate::rpc::{Deadline, MalformedTimeout, deadline_exceeded};

const GRPC: &[u8] = b"application/grpc";
const STATUS: &str = "grpc-status";
const MESSAGE: &str = "grpc-message";

/// Whether a request's media type is gRPC's, with any message format.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let rest = headers.get(CONTENT_TYPE).and_then(|kind| kind.as_bytes().strip_prefix(GRPC));
    rest.is_some_and(|rest| matches!(rest, [] | [b'+' | b';', ..]))
}

/// Lets only gRPC calls through, and ends each at its deadline.
pub(super) async fn calls_only(request: Request, next: Next) -> Response {
    if request.version() != Version::HTTP_2 || !is_grpc(request.headers()) {
        return super::no_such_page();
    }
    if request.method() != Method::POST {
        return (StatusCode::METHOD_NOT_ALLOWED, [(ALLOW, "POST")]).into_response();
    }
    let deadline = match Deadline::of(request.headers()) {
        Ok(deadline) => deadline,
        Err(MalformedTimeout(value)) => {
            return Status::internal(format!("malformed grpc-timeout: {value:?}")).into_http();
        }
    };
    let path = request.uri().path().to_owned();
    let response = match deadline.end() {
        None => next.run(request).await,
        Some(end) if end <= Instant::now() => deadline_exceeded().into_http(),
        Some(end) => respond_until(next.run(request), end).await,
    };
    describe_unknown_method(response, &path)
}

/// Awaits the response of `answering` until `end`, and ends the response's body then.
async fn respond_until(answering: impl Future<Output = Response>, end: Instant) -> Response {
    let mut over = Box::pin(sleep_until(end));
    let response = tokio::select! {
        biased;
        response = answering => response,
        () = over.as_mut() => return deadline_exceeded().into_http(),
    };
    if response.body().is_end_stream() {
        return response;
    }
    response.map(|body| Body::new(DeadlineBody { body: Some(body), deadline: over }))
}

/// Adds a text to the error for an unknown method, since a service sends none.
fn describe_unknown_method(mut response: Response, path: &str) -> Response {
    let unimplemented = HeaderValue::from(Code::Unimplemented as i32);
    let headers = response.headers_mut();
    if headers.get(STATUS) == Some(&unimplemented) && !headers.contains_key(MESSAGE) {
        let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or((path, ""));
        let text = format!("unknown method {method} for service {service}");
        return Status::unimplemented(text).into_http();
    }
    response
}

/// Response body that ends at the call's deadline, with gRPC's status for that.
struct DeadlineBody {
    /// The wrapped body; `None` once it has ended.
    body: Option<Body>,
    deadline: Pin<Box<Sleep>>,
}

impl hyper::body::Body for DeadlineBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, deadline: over } = &mut *self;
        let Some(open) = body else { return Poll::Ready(None) };
        // The deadline is checked first, since the body possibly never runs out of data.
        if over.as_mut().poll(context).is_ready() {
            // Dropping the body frees the call's resources now, not when the connection ends.
            *body = None;
            let mut trailers = HeaderMap::new();
            let written = deadline_exceeded().add_header(&mut trailers);
            debug_assert!(written.is_ok(), "its text is ASCII");
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        Pin::new(open).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(hyper::body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), hyper::body::Body::size_hint)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use axum::Router;
    use axum::routing::any;
    use futures_util::stream;
    use tower::ServiceExt as _;

    use super::*;

    const TYPE: (&str, &str) = ("content-type", "application/grpc");

    /// Makes a service with three methods: `Ever` answers without end, `Never` doesn't answer, and
    /// `None` doesn't exist.
    fn service(gone: &Arc<()>) -> Router {
        let gone = Arc::clone(gone);
        let ever = move || async move {
            let part = stream::unfold(gone, async |gone| {
                tokio::task::yield_now().await;
                Some((Ok::<_, axum::Error>(Bytes::from_static(b"x")), gone))
            });
            Body::from_stream(part).into_response()
        };
        let none = async || [(STATUS, "12")].into_response();
        Router::new()
            .route("/s.S/Ever", any(ever))
            .route("/s.S/Never", any(std::future::pending::<()>))
            .route("/s.S/None", any(none))
            .route_layer(axum::middleware::from_fn(calls_only))
    }

    async fn call(path: &str, headers: &[(&str, &str)], version: Version) -> Response {
        let mut request = Request::post(path).version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).unwrap();
        service(&Arc::default()).oneshot(request).await.unwrap()
    }

    fn said(headers: &HeaderMap) -> (&str, &str) {
        let text = |name| headers.get(name).map_or("", |value| value.to_str().unwrap());
        (text(STATUS), text(MESSAGE))
    }

    #[tokio::test]
    async fn a_request_that_a_browser_can_post_without_preflight_is_no_call() {
        let types = ["text/plain", "application/x-www-form-urlencoded", "application/grpcx", ""];
        for kind in types {
            let answer = call("/s.S/None", &[("content-type", kind)], Version::HTTP_2).await;
            assert_eq!(answer.status(), StatusCode::NOT_FOUND, "{kind}");
        }
        assert_eq!(call("/s.S/None", &[], Version::HTTP_2).await.status(), StatusCode::NOT_FOUND);
        let answer = call("/s.S/None", &[TYPE], Version::HTTP_11).await;
        assert_eq!(answer.status(), StatusCode::NOT_FOUND);
        for kind in ["application/grpc", "application/grpc+proto", "application/grpc;x=y"] {
            let answer = call("/s.S/None", &[("content-type", kind)], Version::HTTP_2).await;
            let text = "unknown%20method%20None%20for%20service%20s.S";
            assert_eq!(said(answer.headers()), ("12", text), "{kind}");
        }
        let get = Request::get("/s.S/None").version(Version::HTTP_2).header(TYPE.0, TYPE.1);
        let answer = service(&Arc::default()).oneshot(get.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.unwrap().status(), StatusCode::METHOD_NOT_ALLOWED);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_ends_at_its_deadline() {
        let began = Instant::now();
        let answer = call("/s.S/Never", &[TYPE, ("grpc-timeout", "500m")], Version::HTTP_2).await;
        assert_eq!(said(answer.headers()), ("4", "context%20deadline%20exceeded"));
        assert_eq!(began.elapsed(), Duration::from_millis(500));
        let answer = call("/s.S/Never", &[TYPE, ("grpc-timeout", "0S")], Version::HTTP_2).await;
        assert_eq!(said(answer.headers()).0, "4");
        let answer = call("/s.S/Never", &[TYPE, ("grpc-timeout", "1x")], Version::HTTP_2).await;
        assert_eq!(said(answer.headers()).0, "13");
    }

    #[tokio::test]
    async fn an_endless_answer_ends_at_the_deadline_and_frees_its_resources() {
        let gone = Arc::new(());
        let request = Request::post("/s.S/Ever").version(Version::HTTP_2);
        let request = request.header(TYPE.0, TYPE.1).header("grpc-timeout", "50m");
        let router = service(&gone);
        let answer = router.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let mut body = answer.into_body();
        let to_the_end = async {
            loop {
                let frame = std::future::poll_fn(|c| Pin::new(&mut body).poll_frame(c)).await;
                if let Ok(trailers) = frame.unwrap().unwrap().into_trailers() {
                    return trailers;
                }
            }
        };
        let trailers = tokio::time::timeout(Duration::from_secs(30), to_the_end).await;
        let trailers = trailers.expect("it has an end");
        assert_eq!(said(&trailers), ("4", "context%20deadline%20exceeded"));
        assert_eq!(Arc::strong_count(&gone), 1, "what it was made of is gone");
        let end = std::future::poll_fn(|c| Pin::new(&mut body).poll_frame(c)).await;
        assert!(body.is_end_stream() && end.is_none());
    }
}
