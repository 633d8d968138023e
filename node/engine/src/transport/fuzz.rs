//! Fuzz targets (for `fuzz/`) for input from a peer.

use bytes::BytesMut;
use futures_util::FutureExt as _;
use node_consensus::Message;

use super::wire::frame::{self, FrameKind, FrameReader};
use super::wire::hello::{HELLO_BYTES, Hello};

/// Maximum payload of a frame, in bytes.
const MAX_BYTES: usize = 1 << 20;

/// Checks that frames are read exactly as they were sent. A message that can be decoded must be
/// equal after encoding and decoding it again.
pub fn frames(bytes: &[u8]) {
    if let Some(Ok(hello)) = bytes.first_chunk::<HELLO_BYTES>().map(Hello::decode) {
        assert_eq!(hello.encode()[..], bytes[..HELLO_BYTES], "{hello:?}");
    }
    let mut reader = FrameReader::new(bytes, MAX_BYTES);
    let mut sent = BytesMut::new();
    // The reader never has to wait, because all bytes are in memory.
    while let Some(Ok(Some((kind, payload)))) = reader.next().now_or_never() {
        frame::put(&mut sent, kind, &payload);
        if kind != FrameKind::Message {
            continue;
        }
        if let Ok(message) = Message::decode(payload) {
            let mut out = BytesMut::new();
            message.encode(&mut out);
            assert_eq!(Message::decode(out.freeze()).as_ref(), Ok(&message));
        }
    }
    assert!(bytes.starts_with(&sent));
}
