//! Decompression of request messages that clients have compressed with gzip. It follows grpc-go
//! (`decompress` in its rpc_util.go).
//!
//! Messages are decompressed here and not by tonic, before any other code sees them. So a request
//! is charged with its decompressed length, which can be a thousand times the length on the wire.
//! tonic's own decompression keeps up to twice that length in memory, and can't report it. It also
//! ignores everything after the first of several gzip members.
//!
//! Answers are never compressed. etcd compresses an answer if its request was compressed, but
//! clients must accept both.

use std::io::{self, Read as _};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use flate2::bufread::GzDecoder;
use http::HeaderMap;
use tonic::Status;

use super::half_sent::HEADER;
use crate::rpc;
use crate::shares::{Account, Charge, Part};

/// Header with the compression of a call's messages.
const ENCODING: &str = "grpc-encoding";
const GZIP: &str = "gzip";
/// gRPC flag byte of a compressed message.
const FOLDED: u8 = 1;
/// Maximum number of gzip members in a message. Clients write a single one. Each costs a decoder
/// state, and a message could contain a hundred thousand of them. (etcd has no limit.)
const MAX_MEMBERS: usize = 64;

/// Whether a call's messages may be compressed with gzip. If so, the header is removed, since the
/// reader gets decompressed messages. tonic refuses other compressions.
pub(super) fn is_folded(headers: &mut HeaderMap) -> bool {
    let folded = headers.get(ENCODING).is_some_and(|encoding| encoding == GZIP);
    if folded {
        headers.remove(ENCODING);
    }
    folded
}

/// Charge for a call's decompressed messages, until the call is answered. A connection could send a
/// thousand such messages while a single one is processed.
#[derive(Clone, Debug)]
pub(super) struct Unanswered(Arc<Mutex<Charge>>);

impl Unanswered {
    pub(super) fn new(account: &Arc<Account>) -> Self {
        Self(Arc::new(Mutex::new(Charge::new(account))))
    }

    /// Runs `unfold` and charges the result, if there is room for the largest message. Without room
    /// the message isn't decompressed, so it costs no time either.
    fn take(
        &self,
        largest: usize,
        unfold: impl FnOnce() -> Result<Bytes, Status>,
    ) -> Result<Bytes, Status> {
        let mut charge = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = charge.bytes();
        if !charge.set(before + HEADER + largest, Part::WHOLE) {
            return Err(rpc::Error::TooManyRequests.into());
        }
        let unfolded = unfold();
        let has = unfolded.as_ref().map_or(0, Bytes::len);
        // The new charge is at most the reserved one, so it always fits.
        charge.force(before + has);
        unfolded
    }
}

/// Decompresser for the messages of a request body. Plain messages pass through it.
#[derive(Debug)]
pub(super) struct Unfolder {
    /// Maximum length of a message, both compressed and decompressed.
    largest: usize,
    unanswered: Option<Unanswered>,
    /// Received bytes that were not processed yet.
    rest: Bytes,
    next: Next,
}

/// Next part of a body.
#[derive(Debug)]
enum Next {
    /// Flag and length of a message, of which that many bytes have arrived.
    Header([u8; HEADER], usize),
    /// Plain message, of which that many bytes are missing.
    Plain(usize),
    /// Compressed message: the bytes that have arrived, and the number of missing ones.
    Folded(BytesMut, usize),
}

const START: Next = Next::Header([0; HEADER], 0);

impl Unfolder {
    pub(super) fn new(largest: usize) -> Self {
        Self { largest, unanswered: None, rest: Bytes::new(), next: START }
    }

    /// Charges the decompressed messages to `unanswered`, until the call is answered.
    pub(super) fn keeping(self, unanswered: Unanswered) -> Self {
        Self { unanswered: Some(unanswered), ..self }
    }

    /// Adds received bytes. All earlier bytes must have been processed by [`Self::next`].
    pub(super) fn add(&mut self, data: Bytes) {
        debug_assert!(self.rest.is_empty(), "what came before is gone");
        self.rest = data;
    }

    /// Returns the full length of a compressed message that is incomplete; 0 if there is none.
    pub(super) fn held(&self) -> usize {
        match &self.next {
            Next::Folded(message, left) => HEADER + message.len() + left,
            Next::Header(_, seen) => *seen,
            Next::Plain(_) => 0,
        }
    }

    /// Whether all received bytes were returned.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty() && self.held() == 0
    }

    /// Returns the next bytes for the reader, of at most one message; `None` until more bytes are
    /// added.
    ///
    /// # Errors The errors have the texts of grpc-go.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, Status> {
        while !self.rest.is_empty() {
            match &mut self.next {
                Next::Header(header, seen) => {
                    let part = self.rest.split_to(self.rest.len().min(HEADER - *seen));
                    header[*seen..][..part.len()].copy_from_slice(&part);
                    *seen += part.len();
                    if *seen < HEADER {
                        return Ok(None);
                    }
                    let header = *header;
                    if let Some(ready) = self.begin(header)? {
                        return Ok(Some(ready));
                    }
                }
                Next::Plain(left) => {
                    let part = self.rest.split_to(self.rest.len().min(*left));
                    *left -= part.len();
                    if *left == 0 {
                        self.next = START;
                    }
                    return Ok(Some(part));
                }
                Next::Folded(message, left) => {
                    let part = self.rest.split_to(self.rest.len().min(*left));
                    *left -= part.len();
                    message.extend_from_slice(&part);
                    if *left == 0 {
                        let message = std::mem::take(message);
                        self.next = START;
                        return self.unfolded(&message).map(Some);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Begins a message after its header. Returns the bytes that can be passed on at once.
    fn begin(&mut self, header: [u8; HEADER]) -> Result<Option<Bytes>, Status> {
        let [flag, a, b, c, d] = header;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if flag != FOLDED {
            self.next = if length == 0 { START } else { Next::Plain(length) };
            return Ok(Some(Bytes::copy_from_slice(&header)));
        }
        if length > self.largest {
            return Err(rpc::larger_than_max(length as u64, self.largest));
        }
        if length == 0 {
            return self.unfolded(&[]).map(Some);
        }
        self.next = Next::Folded(BytesMut::with_capacity(length), length);
        Ok(None)
    }

    fn unfolded(&self, message: &[u8]) -> Result<Bytes, Status> {
        let unfold = || unfold(message, self.largest);
        match &self.unanswered {
            Some(unanswered) => unanswered.take(self.largest, unfold),
            None => unfold(),
        }
    }
}

/// Decompresses a message of at most `largest` bytes, and returns it with a header. At most one
/// byte beyond the limit is decompressed.
fn unfold(message: &[u8], largest: usize) -> Result<Bytes, Status> {
    let mut unfolded = vec![0; HEADER];
    let (mut rest, mut members, mut begun) = (message, 0, false);
    while members == 0 || (!rest.is_empty() && unfolded.len() - HEADER <= largest) {
        let mut member = GzDecoder::new(rest);
        begun |= member.header().is_some();
        let room = HEADER + largest + 1 - unfolded.len();
        let read = member.by_ref().take(room as u64).read_to_end(&mut unfolded);
        members += 1;
        let why = match read {
            Ok(_) if members > MAX_MEMBERS => "too many gzip members",
            Ok(_) => {
                rest = member.into_inner();
                continue;
            }
            Err(error) => why(message, &error),
        };
        let what = if begun { "read decompressed data" } else { "decompress the message" };
        return Err(Status::internal(format!("grpc: failed to {what}: {why}")));
    }
    let length = unfolded.len() - HEADER;
    let header = u32::try_from(length).ok().filter(|_| length <= largest);
    let Some(header) = header else {
        let text = format!("grpc: received message after decompression larger than max {largest}");
        return Err(Status::resource_exhausted(text));
    };
    unfolded[1..HEADER].copy_from_slice(&header.to_be_bytes());
    Ok(unfolded.into())
}

/// Returns Go's text for an error, as far as its causes can be distinguished here.
fn why(message: &[u8], error: &io::Error) -> &'static str {
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
