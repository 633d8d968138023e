//! Entry point for `fuzz/`: a POST to the gateway.

use axum::body::Body;
use bytes::Bytes;
use futures_util::FutureExt as _;

use super::values::Values;
use super::{json, methods};

/// Maximum length of one JSON object in bytes.
const MAX_BYTES: usize = 1 << 20;

/// Runs one input, which consists of a path, a zero byte, and a body. Checks that each readable
/// message is unchanged after it is written as JSON and read again.
pub fn post(bytes: &[u8]) {
    let Some(end) = bytes.iter().position(|byte| *byte == 0) else { return };
    let (path, body) = (&bytes[..end], &bytes[end + 1..]);
    let Some(method) = std::str::from_utf8(path).ok().and_then(methods::find) else { return };
    let kind = &method.input;
    let mut values = Values::new(Body::from(Bytes::copy_from_slice(body)), MAX_BYTES);
    // The whole body is in memory, so the future is ready at its first poll.
    while let Some(Ok(Some(object))) = values.next().now_or_never() {
        let Ok(message) = json::read(kind, &object) else { continue };
        let written = json::write(kind, message.clone()).expect("it was understood");
        assert_eq!(json::read(kind, &written).expect("we wrote it"), message);
    }
}
