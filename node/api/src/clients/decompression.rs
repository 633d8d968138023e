//! Decompression of request messages that clients have compressed with gzip. It follows grpc-go
//! (`decompress` in its rpc_util.go).
//!
//! Messages are decompressed here and not by tonic, before any other code sees them. So a request
//! is charged with its decompressed length, which can be a thousand times the length on the wire.
//! tonic's own decompression keeps up to twice that length in memory, and can't report how much. It
//! also ignores everything after the first of several gzip members.
//!
//! Answers are never compressed. etcd compresses an answer if its request was compressed, but
//! clients must accept both.

use std::io::{self, Read as _};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use flate2::bufread::GzDecoder;
use http::HeaderMap;
use muster_shares::memory::{BudgetShare, MemoryAccount, MemoryCharge};
use tonic::Status;

use crate::rpc::{self, MESSAGE_HEADER_BYTES};

/// Header that names the compression of a call's messages.
const ENCODING: &str = "grpc-encoding";
const GZIP: &str = "gzip";
/// gRPC flag byte of a compressed message.
const COMPRESSED_FLAG: u8 = 1;
/// Maximum number of gzip members in a message. Clients write a single one. Each costs a decoder
/// state, and a message could contain a hundred thousand of them. (etcd has no limit.)
const MAX_MEMBERS: usize = 64;

/// Whether a call's messages may be compressed with gzip. If so, the header is removed, since the
/// reader gets decompressed messages. tonic refuses other compressions.
pub(super) fn take_gzip_encoding(headers: &mut HeaderMap) -> bool {
    let is_compressed = headers.get(ENCODING).is_some_and(|encoding| encoding == GZIP);
    if is_compressed {
        headers.remove(ENCODING);
    }
    is_compressed
}

/// Charge for the decompressed messages of one call. It lasts until the call is answered, because a
/// connection could send a thousand such messages while only one of them is processed.
#[derive(Clone, Debug)]
pub(super) struct DecompressedCharge(Arc<Mutex<MemoryCharge>>);

impl DecompressedCharge {
    pub(super) fn new(account: &Arc<MemoryAccount>) -> Self {
        Self(Arc::new(Mutex::new(MemoryCharge::new(account))))
    }

    /// Runs `decompress` and charges the result, if there is room for the largest message. Without
    /// room, the message isn't decompressed, so that it costs no processor time.
    fn run_charged(
        &self,
        largest: usize,
        decompress: impl FnOnce() -> Result<Bytes, Status>,
    ) -> Result<Bytes, Status> {
        let mut charge = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = charge.bytes();
        if !charge.try_set(before + MESSAGE_HEADER_BYTES + largest, BudgetShare::WHOLE) {
            return Err(rpc::Error::TooManyRequests.into());
        }
        let decompressed = decompress();
        let has = decompressed.as_ref().map_or(0, Bytes::len);
        // The new charge is at most the reserved one, so it always fits.
        charge.force(before + has);
        decompressed
    }
}

/// Decompressor for the messages of a request body. Plain messages pass through it.
#[derive(Debug)]
pub(super) struct Decompressor {
    /// Maximum length of a message, both compressed and decompressed.
    largest: usize,
    charge: Option<DecompressedCharge>,
    /// Received bytes that were not processed yet.
    rest: Bytes,
    state: DecompressorState,
}

/// Part of a body that a decompressor reads next.
#[derive(Debug)]
enum DecompressorState {
    /// A message's header (flag and length), and the number of its bytes that have arrived.
    Header([u8; MESSAGE_HEADER_BYTES], usize),
    /// Plain message: the number of its bytes that are missing.
    Plain(usize),
    /// Compressed message: the bytes that have arrived, and the number of missing ones.
    Compressed(BytesMut, usize),
}

const START_STATE: DecompressorState = DecompressorState::Header([0; MESSAGE_HEADER_BYTES], 0);

impl Decompressor {
    pub(super) fn new(largest: usize) -> Self {
        Self { largest, charge: None, rest: Bytes::new(), state: START_STATE }
    }

    /// Charges the decompressed messages to `unanswered`, until the call is answered.
    pub(super) fn with_charge(self, unanswered: DecompressedCharge) -> Self {
        Self { charge: Some(unanswered), ..self }
    }

    /// Adds received bytes. All earlier bytes must have been processed by [`Self::next`].
    pub(super) fn add(&mut self, data: Bytes) {
        debug_assert!(self.rest.is_empty(), "what came before is gone");
        self.rest = data;
    }

    /// Returns the full length of a compressed message that is incomplete, or the received length
    /// of an incomplete header; otherwise 0.
    pub(super) fn incomplete_bytes(&self) -> usize {
        match &self.state {
            DecompressorState::Compressed(message, left) => {
                MESSAGE_HEADER_BYTES + message.len() + left
            }
            DecompressorState::Header(_, seen) => *seen,
            DecompressorState::Plain(_) => 0,
        }
    }

    /// Whether all received bytes were returned.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty() && self.incomplete_bytes() == 0
    }

    /// Returns the next bytes for the reader, which belong to one message. Returns `None` if more
    /// bytes must be added first.
    ///
    /// # Errors Fails with grpc-go's text if a message is malformed, or longer than `largest`. Also
    /// fails if the connection's account has no room for a decompressed message.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, Status> {
        while !self.rest.is_empty() {
            match &mut self.state {
                DecompressorState::Header(header, seen) => {
                    let part =
                        self.rest.split_to(self.rest.len().min(MESSAGE_HEADER_BYTES - *seen));
                    header[*seen..][..part.len()].copy_from_slice(&part);
                    *seen += part.len();
                    if *seen < MESSAGE_HEADER_BYTES {
                        return Ok(None);
                    }
                    let header = *header;
                    if let Some(ready) = self.begin(header)? {
                        return Ok(Some(ready));
                    }
                }
                DecompressorState::Plain(left) => {
                    let part = self.rest.split_to(self.rest.len().min(*left));
                    *left -= part.len();
                    if *left == 0 {
                        self.state = START_STATE;
                    }
                    return Ok(Some(part));
                }
                DecompressorState::Compressed(message, left) => {
                    let part = self.rest.split_to(self.rest.len().min(*left));
                    *left -= part.len();
                    message.extend_from_slice(&part);
                    if *left == 0 {
                        let message = std::mem::take(message);
                        self.state = START_STATE;
                        return self.decompress_charged(&message).map(Some);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Begins a message after its header. Returns the bytes that can be passed on at once.
    fn begin(&mut self, header: [u8; MESSAGE_HEADER_BYTES]) -> Result<Option<Bytes>, Status> {
        let [flag, a, b, c, d] = header;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if flag != COMPRESSED_FLAG {
            self.state = if length == 0 { START_STATE } else { DecompressorState::Plain(length) };
            return Ok(Some(Bytes::copy_from_slice(&header)));
        }
        if length > self.largest {
            return Err(rpc::larger_than_max(length as u64, self.largest));
        }
        if length == 0 {
            return self.decompress_charged(&[]).map(Some);
        }
        self.state = DecompressorState::Compressed(BytesMut::with_capacity(length), length);
        Ok(None)
    }

    fn decompress_charged(&self, message: &[u8]) -> Result<Bytes, Status> {
        let decompression = || decompress(message, self.largest);
        match &self.charge {
            Some(unanswered) => unanswered.run_charged(self.largest, decompression),
            None => decompression(),
        }
    }
}

/// Decompresses a message of at most `largest` bytes, and returns it with a header. At most one
/// byte beyond the limit is decompressed.
fn decompress(message: &[u8], largest: usize) -> Result<Bytes, Status> {
    let mut decompressed = vec![0; MESSAGE_HEADER_BYTES];
    let (mut rest, mut members, mut begun) = (message, 0, false);
    while members == 0 || (!rest.is_empty() && decompressed.len() - MESSAGE_HEADER_BYTES <= largest)
    {
        let mut member = GzDecoder::new(rest);
        begun |= member.header().is_some();
        let room = MESSAGE_HEADER_BYTES + largest + 1 - decompressed.len();
        let read = member.by_ref().take(room as u64).read_to_end(&mut decompressed);
        members += 1;
        let why = match read {
            Ok(_) if members > MAX_MEMBERS => "too many gzip members",
            Ok(_) => {
                rest = member.into_inner();
                continue;
            }
            Err(error) => go_error_text(message, &error),
        };
        let what = if begun { "read decompressed data" } else { "decompress the message" };
        return Err(Status::internal(format!("grpc: failed to {what}: {why}")));
    }
    let length = decompressed.len() - MESSAGE_HEADER_BYTES;
    let header = u32::try_from(length).ok().filter(|_| length <= largest);
    let Some(header) = header else {
        let text = format!("grpc: received message after decompression larger than max {largest}");
        return Err(Status::resource_exhausted(text));
    };
    decompressed[1..MESSAGE_HEADER_BYTES].copy_from_slice(&header.to_be_bytes());
    Ok(decompressed.into())
}

/// Returns Go's text for an error, as far as its causes can be distinguished here.
fn go_error_text(message: &[u8], error: &io::Error) -> &'static str {
    match (error.kind(), error.to_string().as_str()) {
        _ if message.is_empty() => "EOF",
        (io::ErrorKind::UnexpectedEof, _) => "unexpected EOF",
        (_, "invalid gzip header") => "gzip: invalid header",
        (_, "corrupt deflate stream") => "flate: corrupt input",
        _ => "gzip: invalid checksum",
    }
}

#[cfg(test)]
mod tests;
