//! Requests that have begun and not ended, and what each makes us keep.
//!
//! A message is gathered in memory before anybody looks at it, on each of the streams that a
//! connection may have open: a client that never ends what it begins could fill all memory. So what
//! a request holds is counted from the moment that it is waited for: its stream, and its message as
//! large as the header claims, since the library makes room for that before a byte of it has come.
//! What would be too much is refused as a full queue refuses. A request that is there when it is
//! first asked for costs nothing.

use std::mem;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::BoxError;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tonic::Status;

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
const HEADER: usize = 5;

/// What all connections hold.
#[derive(Clone, Debug)]
pub(super) struct HalfSent {
    room: Arc<Room>,
    /// Claims above this are not believed.
    most: usize,
}

impl HalfSent {
    pub(super) fn new(largest_request: usize) -> Self {
        let most = largest_request.max(LIBRARY_BYTES);
        // What the largest that is not refused on sight holds.
        let least = STREAM_BYTES + HEADER + most;
        let bounds = Bounds { connection: CONNECTION_BYTES, all: ALL_BYTES, least };
        Self { room: Room::new(bounds), most }
    }

    /// The account of one connection.
    pub(super) fn open(&self, address: IpAddr) -> Sender {
        Sender { account: self.room.open(address), most: self.most }
    }
}

/// Who sends requests on one connection.
#[derive(Clone, Debug)]
pub(super) struct Sender {
    account: Arc<Account>,
    most: usize,
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

/// A request's body, counted while it comes.
#[derive(Debug)]
pub(super) struct Counted<B> {
    inner: B,
    messages: Messages,
    charge: Charge,
    refused: bool,
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
            Kind::Values => self.held = self.most.min(self.held + mem::take(&mut data).len()),
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

    /// What the request makes us keep while its next bytes are waited for.
    fn cost(&self) -> usize {
        let between = self.header_seen == 0 && self.largest > 0;
        if self.kind == Kind::Stream && between {
            return if self.largest > SMALL_BYTES { self.largest } else { 0 };
        }
        STREAM_BYTES + self.largest
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
        Self { inner, messages, charge: Charge::new(&sender.account), refused: false }
    }

    /// Charges what the request costs now. False if that is too much.
    fn charge(&mut self) -> bool {
        self.charge.set(self.messages.cost(), Part::WHOLE)
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
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            self.messages.advance(data);
        }
        let goes_on = matches!(polled, Poll::Pending | Poll::Ready(Some(Ok(_))));
        if goes_on && !self.inner.is_end_stream() && !self.charge() {
            self.refused = true;
            return Poll::Ready(Some(Err(Status::from(rpc::Error::TooManyRequests).into())));
        }
        polled.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.refused || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests;
