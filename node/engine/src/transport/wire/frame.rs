//! Frames of a stream. A frame consists of a length (u32, big endian), a kind and a payload. The
//! length is that of kind and payload together.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes before a frame's payload: its length and its kind.
pub(in crate::transport) const HEADER_BYTES: usize = 5;
/// Maximum bytes that the buffer allocates beyond received data. So a peer can't use memory by only
/// announcing a long frame.
const GROW_BYTES: usize = 64 * 1024;
/// Bytes that one read requests, unless a longer frame is being received.
const READ_BYTES: usize = 8 * 1024;
/// Maximum size of a payload that is copied out of the buffer. Payloads stay in the cache of
/// consensus for long. A slice of a few bytes would keep the whole buffer in memory.
const COPY_BYTES: usize = 32 * 1024;

/// Kind of a frame. The numbers are those of the wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::transport) enum FrameKind {
    /// Asks the receiver to answer with a pong.
    Ping = 0,
    /// Answers the oldest unanswered ping.
    Pong = 1,
    /// Carries one encoded consensus message.
    Message = 2,
    /// Header of a snapshot, which precedes its chunks.
    SnapshotHeader = 3,
    /// Part of a snapshot's body.
    SnapshotChunk = 4,
    /// End of a snapshot: its length (u64) and CRC-32C (u32).
    SnapshotEnd = 5,
    /// Result of the installation: one byte, 1 for success and 0 for failure.
    SnapshotAnswer = 6,
    /// Request of one member to another.
    Request = 7,
    /// Answer to a request.
    Answer = 8,
    /// Promises of members (their votes and acknowledgements), as far as the sender knows them.
    Promises = 9,
    /// List of members in the sender's table.
    MemberList = 10,
    /// Says that the opener of this stream also accepts messages on it.
    TwoWay = 11,
    /// Asks the receiver to open a stream: its purpose (one byte) and a token (u64).
    Invite = 12,
    /// Token of the invitation on which this stream was opened.
    InvitationToken = 13,
}

impl FrameKind {
    fn from_wire(byte: u8) -> Option<Self> {
        [
            Self::Ping,
            Self::Pong,
            Self::Message,
            Self::SnapshotHeader,
            Self::SnapshotChunk,
            Self::SnapshotEnd,
            Self::SnapshotAnswer,
            Self::Request,
            Self::Answer,
            Self::Promises,
            Self::MemberList,
            Self::TwoWay,
            Self::Invite,
            Self::InvitationToken,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }
}

/// Appends one frame to `out`. The caller must have checked that the payload isn't too long.
pub(in crate::transport) fn put(out: &mut BytesMut, kind: FrameKind, payload: &[u8]) {
    let len = u32::try_from(payload.len() + 1).expect("frames are bounded far below 4 GiB");
    out.reserve(HEADER_BYTES + payload.len());
    out.put_u32(len);
    out.put_u8(kind as u8);
    out.put_slice(payload);
}

/// Reader of frames whose payload has at most `max` bytes.
pub(in crate::transport) struct FrameReader<R> {
    inner: R,
    buffer: BytesMut,
    max: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(in crate::transport) fn new(inner: R, max: usize) -> Self {
        Self { inner, buffer: BytesMut::new(), max }
    }

    /// Returns the next frame, or `None` if the stream ended after a complete frame. Cancel-safe:
    /// received bytes stay in the buffer.
    pub(in crate::transport) async fn next(&mut self) -> io::Result<Option<(FrameKind, Bytes)>> {
        loop {
            let missing = match self.parse()? {
                ParseResult::Frame(kind, payload) => return Ok(Some((kind, payload))),
                ParseResult::Missing(bytes) => bytes,
            };
            self.buffer.reserve(missing.clamp(READ_BYTES, GROW_BYTES));
            if self.inner.read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    fn parse(&mut self) -> io::Result<ParseResult> {
        let Some(header) = self.buffer.get(..HEADER_BYTES) else {
            return Ok(ParseResult::Missing(HEADER_BYTES - self.buffer.len()));
        };
        let len = u32::from_be_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        if len == 0 || len - 1 > self.max {
            return Err(wrong("a frame's length is out of bounds"));
        }
        let kind =
            FrameKind::from_wire(header[4]).ok_or_else(|| wrong("a frame of unknown kind"))?;
        let whole = HEADER_BYTES + len - 1;
        if self.buffer.len() < whole {
            return Ok(ParseResult::Missing(whole - self.buffer.len()));
        }
        self.buffer.advance(HEADER_BYTES);
        if len - 1 > COPY_BYTES {
            return Ok(ParseResult::Frame(kind, self.buffer.split_to(len - 1).freeze()));
        }
        let payload = Bytes::copy_from_slice(&self.buffer[..len - 1]);
        self.buffer.advance(len - 1);
        Ok(ParseResult::Frame(kind, payload))
    }
}

enum ParseResult {
    Frame(FrameKind, Bytes),
    Missing(usize),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
    }

    async fn read_all(bytes: &[u8], max: usize) -> (Vec<(FrameKind, Bytes)>, io::Result<()>) {
        let mut reader = FrameReader::new(bytes, max);
        let mut frames = Vec::new();
        loop {
            match reader.next().await {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => return (frames, Ok(())),
                Err(e) => return (frames, Err(e)),
            }
        }
    }

    #[test]
    fn frames_read_back_as_written() {
        let mut bytes = BytesMut::new();
        put(&mut bytes, FrameKind::Ping, b"");
        put(&mut bytes, FrameKind::Message, &[7; 100_000]);
        put(&mut bytes, FrameKind::Pong, b"x");
        let (frames, end) = run(read_all(&bytes, 1 << 20));
        assert!(end.is_ok());
        assert_eq!(frames[0], (FrameKind::Ping, Bytes::new()));
        assert_eq!(frames[1].1.len(), 100_000);
        assert_eq!(frames[2], (FrameKind::Pong, Bytes::from_static(b"x")));
    }

    #[test]
    fn a_frame_longer_than_allowed_is_refused_before_its_payload() {
        let mut bytes = BytesMut::new();
        bytes.put_u32(1 << 30);
        bytes.put_u8(2);
        let (frames, end) = run(read_all(&bytes, 1 << 20));
        assert!(frames.is_empty());
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn the_longest_frame_is_read_and_one_byte_more_is_refused() {
        for (length, is_read) in [(100, true), (101, false)] {
            let mut bytes = BytesMut::new();
            put(&mut bytes, FrameKind::Message, &vec![7; length]);
            let (frames, end) = run(read_all(&bytes, 100));
            assert_eq!((frames.len() == 1, end.is_ok()), (is_read, is_read), "{length} bytes");
        }
    }

    #[test]
    fn a_claimed_length_alone_allocates_next_to_nothing() {
        let mut bytes = BytesMut::new();
        bytes.put_u32(1 << 29);
        bytes.put_u8(2);
        run(async {
            let mut reader = FrameReader::new(&bytes[..], 1 << 30);
            let end = reader.next().await;
            assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            assert!(reader.buffer.capacity() <= 4 * GROW_BYTES);
        });
    }

    #[test]
    fn a_small_payload_does_not_keep_the_buffer_alive() {
        let mut bytes = BytesMut::new();
        for n in 0..100u8 {
            put(&mut bytes, FrameKind::Message, &[n; 40]);
        }
        let (frames, _) = run(read_all(&bytes, 1 << 20));
        assert_eq!(frames.len(), 100);
        for (_, payload) in frames {
            let alone = payload.try_into_mut().expect("its memory is nobody else's");
            assert!(alone.capacity() < 64, "{} bytes for 40", alone.capacity());
        }
    }

    #[test]
    fn a_stream_that_breaks_off_inside_a_frame_is_an_error() {
        let mut bytes = BytesMut::new();
        put(&mut bytes, FrameKind::Message, b"hello");
        let (_, end) = run(read_all(&bytes[..7], 1024));
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    proptest! {
        #[test]
        fn junk_never_panics_nor_yields_more_than_it_holds(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let (frames, _) = run(read_all(&bytes, 64));
            let total: usize = frames.iter().map(|(_, payload)| payload.len() + HEADER_BYTES).sum();
            prop_assert!(total <= bytes.len());
        }
    }
}
