//! Requests whose messages a client has compressed with gzip, as grpc-go takes them (`decompress` in its
//! rpc_util.go).
//!
//! A message is unfolded here and not by the library, before anything behind this sees it: so what a request
//! holds is counted in bytes that it has, once it has them, and not in those that it took on the wire, of which
//! each may become a thousand. The library's own unfolding keeps up to twice that, says to nobody how much, and
//! looks at nothing behind the first of several gzip members.
//!
//! Answers are never compressed: etcd's are, if the request was, but a client has to take both.

use std::io::{self, Read as _};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use flate2::bufread::GzDecoder;
use http::HeaderMap;
use tonic::Status;

use super::half_sent::HEADER;
use crate::rpc;
use crate::shares::{Account, Charge, Part};

/// Says how a call's messages are compressed, those that are.
const ENCODING: &str = "grpc-encoding";
const GZIP: &str = "gzip";
/// The flag of a message that is.
const FOLDED: u8 = 1;
/// What a message may be made of, while clients make it of one. Each costs a state of its own, and a message
/// has room for a hundred thousand. (etcd has no limit.)
const MAX_MEMBERS: usize = 64;

/// Whether a call's messages may be compressed with gzip. Then it says so no longer: whoever comes next has
/// them as they are. What is compressed in another way the library refuses.
pub(super) fn is_folded(headers: &mut HeaderMap) -> bool {
    let folded = headers.get(ENCODING).is_some_and(|encoding| encoding == GZIP);
    if folded {
        headers.remove(ENCODING);
    }
    folded
}

/// What a call's compressed messages became, charged to who sent them until the call is answered: a connection
/// can send a thousand of them in the time in which one is served.
#[derive(Clone, Debug)]
pub(super) struct Unanswered(Arc<Mutex<Charge>>);

impl Unanswered {
    pub(super) fn new(account: &Arc<Account>) -> Self {
        Self(Arc::new(Mutex::new(Charge::new(account))))
    }

    /// Unfolds one more, if there is room for the largest: what has none costs no time either.
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
        // It was as much at least.
        charge.force(before + has);
        unfolded
    }
}

/// A body's messages, of which those that are compressed are replaced by what they are.
#[derive(Debug)]
pub(super) struct Unfolder {
    /// What a message may take, compressed or not.
    largest: usize,
    unanswered: Option<Unanswered>,
    /// What has come and was not looked at.
    rest: Bytes,
    next: Next,
}

/// What comes next in a body.
#[derive(Debug)]
enum Next {
    /// A message's flag and length, of which so many bytes are there.
    Header([u8; HEADER], usize),
    /// So many bytes of a message that is as it is.
    Plain(usize),
    /// So many bytes of a compressed one, after these.
    Folded(BytesMut, usize),
}

const START: Next = Next::Header([0; HEADER], 0);

impl Unfolder {
    pub(super) fn new(largest: usize) -> Self {
        Self { largest, unanswered: None, rest: Bytes::new(), next: START }
    }

    /// The same for a call whose messages are kept until it is answered.
    pub(super) fn keeping(self, unanswered: Unanswered) -> Self {
        Self { unanswered: Some(unanswered), ..self }
    }

    /// Takes what has come, once all that came before was asked for.
    pub(super) fn add(&mut self, data: Bytes) {
        debug_assert!(self.rest.is_empty(), "what came before is gone");
        self.rest = data;
    }

    /// What a compressed message that isn't all there has or will have.
    pub(super) fn held(&self) -> usize {
        match &self.next {
            Next::Folded(message, left) => HEADER + message.len() + left,
            Next::Header(_, seen) => *seen,
            Next::Plain(_) => 0,
        }
    }

    /// Whether everything that came was handed on.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty() && self.held() == 0
    }

    /// What is there to hand on, no more than one message at a time; `None` until more has come.
    ///
    /// # Errors
    /// In the words of grpc-go.
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

    /// A message begins: what of it can be handed on at once.
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

/// A compressed message as the one that it is, its header included, if it takes no more than `largest`: no more
/// than one byte beyond that is unfolded.
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

/// As Go says it, as far as it is told apart here.
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
