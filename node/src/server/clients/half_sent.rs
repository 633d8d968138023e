//! Requests that have begun and not ended, and what each makes us keep.
//!
//! A message is gathered in memory before anybody looks at it, on each of the streams that a
//! connection may have open: a client that never ends what it begins could fill all memory. So what
//! a request holds is counted from the moment that it is waited for: its stream, and its message as
//! large as the header claims, since the library makes room for that before a byte of it has come.
//! What would be too much is refused as a full queue refuses. A request that is there when it is
//! first asked for costs nothing. A message that is compressed costs what it has on the wire until it is all
//! there, and from then on what it is, until the call is answered (`unfold`).

use std::mem;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use axum::BoxError;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tonic::Status;

use super::unfold::{Unanswered, Unfolder};
use crate::gateway;
use crate::rpc;
use crate::shares::{Account, Bounds, Charge, Part, Room};

/// For one connection.
const CONNECTION_BYTES: usize = 32 << 20;
/// For all of them, in shares that are never less than the largest request takes.
const ALL_BYTES: usize = 128 << 20;
/// What a stream keeps beside its message: headers, the library's first buffer, its task.
const STREAM_BYTES: usize = 16 << 10;
/// A stream of messages that has all of those that it began is somebody's, and no longer counted,
/// unless one of them took more than this: the buffer stays as large.
const SMALL_BYTES: usize = 4 << 10;
/// What the library takes where we don't say how much. It makes no room for a larger message,
/// nor for one larger than the largest request, but refuses it.
const LIBRARY_BYTES: usize = 4 << 20;
/// A message's flag and length.
pub(super) const HEADER: usize = 5;

/// As the library says it of a message that isn't compressed.
const BROKEN_OFF: &str = "Unexpected EOF decoding stream.";

/// What all connections hold.
#[derive(Clone, Debug)]
pub(super) struct HalfSent {
    room: Arc<Room>,
    largest_request: usize,
    /// Claims above this are not believed.
    most: usize,
    /// What came of it.
    bytes: Arc<rpc::ClientBytes>,
}

impl HalfSent {
    pub(super) fn new(largest_request: usize) -> Self {
        let most = largest_request.max(LIBRARY_BYTES);
        // What the largest that is not refused on sight holds.
        let least = STREAM_BYTES + HEADER + most;
        let bounds = Bounds { connection: CONNECTION_BYTES, all: ALL_BYTES, least };
        Self { room: Room::new(bounds), largest_request, most, bytes: Arc::default() }
    }

    /// Adds what comes over gRPC to these.
    pub(super) fn counted(self, bytes: &Arc<rpc::ClientBytes>) -> Self {
        Self { bytes: Arc::clone(bytes), ..self }
    }

    /// The account of one connection.
    pub(super) fn open(&self, address: IpAddr) -> Sender {
        Sender {
            account: self.room.open(address),
            largest_request: self.largest_request,
            most: self.most,
            bytes: Arc::clone(&self.bytes),
        }
    }
}

/// Who sends requests on one connection.
#[derive(Clone, Debug)]
pub(super) struct Sender {
    account: Arc<Account>,
    largest_request: usize,
    most: usize,
    bytes: Arc<rpc::ClientBytes>,
}

/// What a request's body consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Bytes, gathered until the request ends.
    Plain,
    /// Values, each served when it is there: what was served is gone.
    Values,
    /// A message of gRPC's, kept until the request ends.
    Unary,
    /// Messages, of which each is served when it is there.
    Stream,
}

impl Sender {
    /// What compressed messages become is charged to this one as well.
    pub(super) fn unanswered(&self) -> Unanswered {
        Unanswered::new(&self.account)
    }
}

/// A request's body, counted while it comes.
#[derive(Debug)]
pub(super) struct Counted<B> {
    inner: B,
    /// Where messages may be compressed.
    unfolder: Option<Unfolder>,
    messages: Messages,
    charge: Charge,
    refused: bool,
    bytes: Arc<rpc::ClientBytes>,
}

/// What has come of a request's messages, and what they claimed.
#[derive(Debug)]
struct Messages {
    kind: Kind,
    /// Claims above this are not believed.
    most: usize,
    header: [u8; HEADER],
    header_seen: usize,
    left: usize,
    /// What the message that is coming, or came last, has or will have; of a unary request all.
    held: usize,
    /// The most that was held.
    largest: usize,
}

impl Messages {
    fn advance(&mut self, mut data: &[u8]) {
        match self.kind {
            Kind::Plain => self.held += mem::take(&mut data).len(),
            // Nobody here knows where they end. There is no more than one of the largest.
            Kind::Values => {
                let largest = self.most * gateway::REQUEST_GROWTH;
                self.held = largest.min(self.held + mem::take(&mut data).len());
            }
            Kind::Unary | Kind::Stream => {}
        }
        while let Some(first) = data.first() {
            if self.header_seen < HEADER {
                if self.header_seen == 0 && self.kind == Kind::Stream {
                    self.held = 0;
                }
                self.header[self.header_seen] = *first;
                self.header_seen += 1;
                self.held += 1;
                data = &data[1..];
                if self.header_seen == HEADER {
                    let [_, a, b, c, d] = self.header;
                    self.left = u32::from_be_bytes([a, b, c, d]) as usize;
                    self.held += if self.left <= self.most { self.left } else { 0 };
                }
            } else {
                let part = self.left.min(data.len());
                self.left -= part;
                data = &data[part..];
            }
            if self.header_seen == HEADER && self.left == 0 {
                self.header_seen = 0;
            }
            self.largest = self.largest.max(self.held);
        }
        self.largest = self.largest.max(self.held);
    }

    /// What the request makes us keep while its next bytes are waited for, of which so many are there, or
    /// will be, of a compressed message.
    fn cost(&self, folded: usize) -> usize {
        let between = self.header_seen == 0 && self.largest > 0 && folded == 0;
        if self.kind == Kind::Stream && between {
            return if self.largest > SMALL_BYTES { self.largest } else { 0 };
        }
        STREAM_BYTES + self.largest + folded
    }
}

impl<B> Counted<B> {
    /// Counts `inner`, which `sender` sends.
    pub(super) fn new(inner: B, sender: &Sender, kind: Kind) -> Self {
        let messages = Messages {
            kind,
            most: sender.most,
            header: [0; HEADER],
            header_seen: 0,
            left: 0,
            held: 0,
            largest: 0,
        };
        let charge = Charge::new(&sender.account);
        let bytes = Arc::clone(&sender.bytes);
        Self { inner, unfolder: None, messages, charge, refused: false, bytes }
    }

    /// The same where messages may be compressed: who reads them has them as they are.
    pub(super) fn unfolded(self, sender: &Sender) -> Self {
        Self { unfolder: Some(Unfolder::new(sender.largest_request)), ..self }
    }

    /// And where they are kept until the call is answered.
    pub(super) fn keeping(mut self, unanswered: Unanswered) -> Self {
        self.unfolder = self.unfolder.map(|unfolder| unfolder.keeping(unanswered));
        self
    }

    /// Charges what the request costs now. False if that is too much.
    fn charge(&mut self) -> bool {
        let folded = self.unfolder.as_ref().map_or(0, Unfolder::held);
        self.charge.set(self.messages.cost(folded), Part::WHOLE)
    }
}

impl<B> Counted<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    /// The next frame, as whoever reads the request will have it.
    fn poll_unfolded(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if let Some(unfolder) = &mut self.unfolder
                && let Some(ready) = unfolder.next()?
            {
                return Poll::Ready(Some(Ok(Frame::data(ready))));
            }
            let polled = Pin::new(&mut self.inner).poll_frame(context).map_err(Into::into)?;
            let Some(frame) = ready!(polled) else {
                // Half a message, which nobody else has seen anything of.
                let broken = self.unfolder.take().is_some_and(|unfolder| !unfolder.is_empty());
                return Poll::Ready(broken.then(|| Err(Status::internal(BROKEN_OFF).into())));
            };
            let data = match frame.into_data() {
                Ok(data) => data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            };
            if matches!(self.messages.kind, Kind::Unary | Kind::Stream) {
                self.bytes.received.fetch_add(data.len() as u64, Ordering::Relaxed);
            }
            match &mut self.unfolder {
                Some(unfolder) => unfolder.add(data),
                None => return Poll::Ready(Some(Ok(Frame::data(data)))),
            }
        }
    }
}

impl<B> Body for Counted<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.refused {
            return Poll::Ready(None);
        }
        let polled = self.poll_unfolded(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            self.messages.advance(data);
        }
        let goes_on = matches!(polled, Poll::Pending | Poll::Ready(Some(Ok(_))));
        if goes_on && !self.is_end_stream() && !self.charge() {
            self.refused = true;
            return Poll::Ready(Some(Err(Status::from(rpc::Error::TooManyRequests).into())));
        }
        self.refused |= matches!(polled, Poll::Ready(Some(Err(_))));
        polled
    }

    fn is_end_stream(&self) -> bool {
        let unread = self.unfolder.as_ref().is_some_and(|unfolder| !unfolder.is_empty());
        self.refused || (!unread && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.unfolder {
            Some(_) => SizeHint::default(),
            None => self.inner.size_hint(),
        }
    }
}

#[cfg(test)]
mod tests;
