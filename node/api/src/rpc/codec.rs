//! Encoding of watch responses. Events were encoded once, when they happened, and are copied into
//! the response of each watcher.

use std::ops::Range;
use std::sync::Arc;

use bytes::BufMut as _;
use node_proto::etcdserverpb::{WatchRequest, WatchResponse};
use prost::Message as _;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic_prost::ProstDecoder;

use muster_shares::memory::MemoryCharge;
use node_state::mvcc::Store;
use node_state::mvcc::watch::EventSelection;

/// Watch response that is ready to be encoded.
pub(super) struct Frame {
    /// The response without its events.
    pub(super) head: WatchResponse,
    pub(super) events: Option<FrameEvents>,
}

/// Consecutive events for one watch response. Events that arrive together may be split into several
/// responses.
#[derive(Clone)]
pub(super) struct FrameEvents {
    pub(super) selection: Arc<EventSelection>,
    pub(super) part: Range<usize>,
    /// Store from which previous values are read, if the client wants them.
    pub(super) previous: Option<Store>,
    /// Charge to the client's account for the memory of all events that arrived together.
    pub(super) _held: Arc<MemoryCharge>,
}

impl FrameEvents {
    pub(super) fn pieces(&self) -> &[bytes::Bytes] {
        let all = match &self.previous {
            Some(store) => self.selection.encoded_with_previous(store),
            None => self.selection.encoded(),
        };
        &all[self.part.clone()]
    }
}

impl From<WatchResponse> for Frame {
    fn from(head: WatchResponse) -> Self {
        Self { head, events: None }
    }
}

#[derive(Clone, Copy, Default)]
pub(super) struct WatchCodec;

impl Codec for WatchCodec {
    type Encode = Frame;
    type Decode = WatchRequest;
    type Encoder = FrameEncoder;
    type Decoder = ProstDecoder<WatchRequest>;

    fn encoder(&mut self) -> FrameEncoder {
        FrameEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::default())
    }
}

pub(super) struct FrameEncoder;

impl Encoder for FrameEncoder {
    type Item = Frame;
    type Error = Status;

    fn encode(&mut self, frame: Frame, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        frame.head.encode_raw(out);
        if let Some(events) = &frame.events {
            for piece in events.pieces() {
                out.reserve(piece.len());
                out.put_slice(piece);
            }
        }
        Ok(())
    }
}
