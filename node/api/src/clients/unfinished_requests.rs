//! Accounting for requests that have begun and not ended.
//!
//! A message is gathered in memory before it is processed. A connection can open many streams, and
//! each gathers its own message. So a client that never ends its requests could fill all memory.
//! Therefore a request is charged as soon as the server waits for the rest of it:
//!
//! - The charge covers the stream, and the message with the length that its header states. tonic
//!   allocates that memory before the first byte arrives.
//! - A request that would exceed a limit is refused with the same error as if a queue were full.
//! - A request that is complete when it is first read costs nothing.
//! - A compressed message costs its compressed length until it is complete. Then it costs its
//!   decompressed length until the call is answered (module `decompression`).

use std::mem;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use axum::BoxError;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use muster_shares::memory::{BudgetShare, MemoryAccount, MemoryBounds, MemoryBudget, MemoryCharge};
use tonic::Status;

use super::decompression::{DecompressedCharge, Decompressor};
use crate::gateway;
use crate::rpc::{self, MESSAGE_HEADER_BYTES};

/// Maximum bytes of unfinished requests of one connection.
const CONNECTION_BYTES: usize = 32 << 20;
/// Maximum bytes of unfinished requests of all connections, shared equally between networks. Each
/// network is always granted as much as the largest request needs.
const ALL_BYTES: usize = 128 << 20;
/// Bytes of a stream besides its message: headers, tonic's first buffer, its task.
const STREAM_BYTES: usize = 16 << 10;
/// Message length up to which a message stream isn't charged while it waits for its next message.
/// If the stream has had a longer message, it stays charged for that length, because tonic's buffer
/// keeps the size of the longest message.
const SMALL_BYTES: usize = 4 << 10;
/// tonic's own message limit, which applies where we set none. A message longer than the applicable
/// limit is refused by tonic before it allocates memory.
const TONIC_MAX_MESSAGE_BYTES: usize = 4 << 20;

/// tonic's error text for a message that ends too early. It is used here for compressed messages.
const TRUNCATED_MESSAGE: &str = "Unexpected EOF decoding stream.";

/// Accounting for the unfinished requests of all connections.
#[derive(Clone, Debug)]
pub(super) struct RequestAccounting {
    room: Arc<MemoryBudget>,
    largest_request: usize,
    /// Maximum message length for which tonic would allocate memory.
    max_allocated_bytes: usize,
    /// Counters of received bytes, for the metrics.
    bytes: Arc<rpc::ClientBytes>,
}

impl RequestAccounting {
    pub(super) fn new(largest_request: usize) -> Self {
        let most = largest_request.max(TONIC_MAX_MESSAGE_BYTES);
        // Each network is always granted the memory for one request of the largest allowed length.
        let least = STREAM_BYTES + MESSAGE_HEADER_BYTES + most;
        let bounds =
            MemoryBounds { per_connection: CONNECTION_BYTES, total: ALL_BYTES, guaranteed: least };
        Self {
            room: MemoryBudget::new(bounds),
            largest_request,
            max_allocated_bytes: most,
            bytes: Arc::default(),
        }
    }

    /// Sets the counters to which bytes received over gRPC are added.
    pub(super) fn with_counters(self, bytes: &Arc<rpc::ClientBytes>) -> Self {
        Self { bytes: Arc::clone(bytes), ..self }
    }

    /// Opens the account of a new connection.
    pub(super) fn open(&self, address: IpAddr) -> ConnectionAccount {
        ConnectionAccount {
            account: self.room.open_account(address),
            largest_request: self.largest_request,
            max_allocated_bytes: self.max_allocated_bytes,
            bytes: Arc::clone(&self.bytes),
        }
    }
}

/// Account and limits of one connection for the requests that it sends.
#[derive(Clone, Debug)]
pub(super) struct ConnectionAccount {
    account: Arc<MemoryAccount>,
    largest_request: usize,
    max_allocated_bytes: usize,
    bytes: Arc<rpc::ClientBytes>,
}

/// Kind of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyKind {
    /// Bytes that are gathered until the request ends.
    Plain,
    /// JSON values, each of which is served and freed once it is complete.
    Values,
    /// A gRPC message, kept until the request ends.
    Unary,
    /// gRPC messages, each of which is served once it is complete.
    Stream,
}

impl ConnectionAccount {
    /// Returns an empty charge to this connection's account, for the decompressed messages of one
    /// call.
    pub(super) fn decompressed_charge(&self) -> DecompressedCharge {
        DecompressedCharge::new(&self.account)
    }
}

/// Body of a request, charged while it is received.
#[derive(Debug)]
pub(super) struct Counted<B> {
    inner: B,
    /// Decompressor, if the request's messages may be compressed.
    decompressor: Option<Decompressor>,
    messages: MessageTracker,
    charge: MemoryCharge,
    refused: bool,
    bytes: Arc<rpc::ClientBytes>,
}

/// Counter of the received bytes of a request, and of the message lengths in its gRPC headers.
#[derive(Debug)]
struct MessageTracker {
    kind: BodyKind,
    /// Maximum message length for which tonic would allocate memory.
    max_allocated_bytes: usize,
    header: [u8; MESSAGE_HEADER_BYTES],
    header_seen: usize,
    left: usize,
    /// Length of the current or last message with its header. For a unary request, the length of
    /// all its bytes.
    held: usize,
    /// Highest value of `held` so far.
    largest: usize,
}

impl MessageTracker {
    fn advance(&mut self, mut data: &[u8]) {
        match self.kind {
            BodyKind::Plain => self.held += mem::take(&mut data).len(),
            // This code can't tell where one JSON value ends. So all received bytes count, up to
            // the maximum size of a value: at most one value is in memory.
            BodyKind::Values => {
                let largest = self.max_allocated_bytes * gateway::REQUEST_GROWTH;
                self.held = largest.min(self.held + mem::take(&mut data).len());
            }
            BodyKind::Unary | BodyKind::Stream => {}
        }
        while let Some(first) = data.first() {
            if self.header_seen < MESSAGE_HEADER_BYTES {
                if self.header_seen == 0 && self.kind == BodyKind::Stream {
                    self.held = 0;
                }
                self.header[self.header_seen] = *first;
                self.header_seen += 1;
                self.held += 1;
                data = &data[1..];
                if self.header_seen == MESSAGE_HEADER_BYTES {
                    let [_, a, b, c, d] = self.header;
                    self.left = u32::from_be_bytes([a, b, c, d]) as usize;
                    self.held += if self.left <= self.max_allocated_bytes { self.left } else { 0 };
                }
            } else {
                let part = self.left.min(data.len());
                self.left -= part;
                data = &data[part..];
            }
            if self.header_seen == MESSAGE_HEADER_BYTES && self.left == 0 {
                self.header_seen = 0;
            }
            self.largest = self.largest.max(self.held);
        }
        self.largest = self.largest.max(self.held);
    }

    /// Returns the number of bytes to charge while the rest of the request is awaited. `compressed`
    /// is the result of [`Decompressor::incomplete_bytes`], or 0 without a decompressor.
    fn cost(&self, compressed: usize) -> usize {
        let between = self.header_seen == 0 && self.largest > 0 && compressed == 0;
        if self.kind == BodyKind::Stream && between {
            return if self.largest > SMALL_BYTES { self.largest } else { 0 };
        }
        STREAM_BYTES + self.largest + compressed
    }
}

impl<B> Counted<B> {
    /// Wraps the body `inner` of a request that `sender` sends.
    pub(super) fn new(inner: B, sender: &ConnectionAccount, kind: BodyKind) -> Self {
        let messages = MessageTracker {
            kind,
            max_allocated_bytes: sender.max_allocated_bytes,
            header: [0; MESSAGE_HEADER_BYTES],
            header_seen: 0,
            left: 0,
            held: 0,
            largest: 0,
        };
        let charge = MemoryCharge::new(&sender.account);
        let bytes = Arc::clone(&sender.bytes);
        Self { inner, decompressor: None, messages, charge, refused: false, bytes }
    }

    /// Decompresses the body's messages, so that the reader gets plain ones.
    pub(super) fn with_decompression(self, sender: &ConnectionAccount) -> Self {
        Self { decompressor: Some(Decompressor::new(sender.largest_request)), ..self }
    }

    /// Charges the decompressed messages to `unanswered`, until the call is answered.
    pub(super) fn with_decompressed_charge(mut self, unanswered: DecompressedCharge) -> Self {
        self.decompressor =
            self.decompressor.map(|decompressor| decompressor.with_charge(unanswered));
        self
    }

    /// Charges the request's current cost. Returns false if that would exceed a limit.
    fn charge(&mut self) -> bool {
        let compressed = self.decompressor.as_ref().map_or(0, Decompressor::incomplete_bytes);
        self.charge.try_set(self.messages.cost(compressed), BudgetShare::WHOLE)
    }
}

impl<B> Counted<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    /// Returns the next frame with decompressed messages.
    fn poll_decompressed(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if let Some(decompressor) = &mut self.decompressor
                && let Some(ready) = decompressor.next()?
            {
                return Poll::Ready(Some(Ok(Frame::data(ready))));
            }
            let polled = Pin::new(&mut self.inner).poll_frame(context).map_err(Into::into)?;
            let Some(frame) = ready!(polled) else {
                // The body ends within a compressed message. tonic has received no byte of that
                // message and can't report the error, so it is returned here.
                let broken =
                    self.decompressor.take().is_some_and(|decompressor| !decompressor.is_empty());
                return Poll::Ready(
                    broken.then(|| Err(Status::internal(TRUNCATED_MESSAGE).into())),
                );
            };
            let data = match frame.into_data() {
                Ok(data) => data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            };
            if matches!(self.messages.kind, BodyKind::Unary | BodyKind::Stream) {
                self.bytes.received.fetch_add(data.len() as u64, Ordering::Relaxed);
            }
            match &mut self.decompressor {
                Some(decompressor) => decompressor.add(data),
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
        let polled = self.poll_decompressed(context);
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
        let unread =
            self.decompressor.as_ref().is_some_and(|decompressor| !decompressor.is_empty());
        self.refused || (!unread && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.decompressor {
            Some(_) => SizeHint::default(),
            None => self.inner.size_hint(),
        }
    }
}

#[cfg(test)]
mod tests;
