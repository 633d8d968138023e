//! Accounting for answers that clients have not read yet.
//!
//! A client itself determines how much it is ready to receive, and can be ready to receive nothing.
//! So the memory of an answer is charged until its last byte was sent.
//!
//! - The API charges an answer while it gathers the answer's values, and refuses an answer that
//!   would exceed a limit. Its charge is kept here until the encoded answer was sent.
//! - Any other answer is charged piece by piece, as it is written. The next piece is only requested
//!   once there is room for it.
//!
//! A client is disconnected if complete answers wait for it and it reads nothing for long. A client
//! that only leaves the events of its watches unread stays connected. Its watches wait, and read
//! the store once the client reads again.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use muster_shares::memory::{BudgetShare, MemoryAccount, MemoryBounds, MemoryBudget, MemoryCharge};
use tokio::time::{Instant, Sleep, sleep};

use super::direct_calls::MessageBody;
use crate::http::is_grpc;
use crate::rpc::{ClientBytes, answer_share};

/// Maximum bytes of unread answers of one connection.
const CONNECTION_BYTES: usize = 256 << 20;
/// Maximum bytes of unread answers of all connections, shared equally between networks.
const ALL_BYTES: usize = 512 << 20;
/// Bytes of answers that each network can always leave unread, however much the others use.
const LEAST_BYTES: usize = 1 << 20;
/// Bytes reserved for a piece of an answer that is written in pieces.
const PIECE_BYTES: usize = 2 << 20;
/// Bytes passed to the HTTP library at a time. The library takes the next part once the last one
/// has been sent.
const PART_BYTES: usize = 64 << 10;
/// Wait before another attempt to reserve room for a piece.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Error text for a client that leaves too much unread.
const TOO_MUCH_UNREAD: &str = "too many answers wait to be read; read them first\n";

/// Makes the account of unread answers for all connections.
pub(super) fn new_budget() -> Arc<MemoryBudget> {
    let bounds = MemoryBounds {
        per_connection: CONNECTION_BYTES,
        total: ALL_BYTES,
        guaranteed: LEAST_BYTES,
    };
    MemoryBudget::new(bounds)
}

/// Unread answers of one connection.
#[derive(Debug)]
pub(super) struct AnswerAccounting {
    pub(super) account: Arc<MemoryAccount>,
    /// Number of pieces of answers that were written and are not sent yet.
    pieces: AtomicUsize,
    unread: Mutex<UnreadAnswers>,
    bytes: Arc<ClientBytes>,
}

#[derive(Clone, Copy, Debug)]
struct UnreadAnswers {
    /// Number of complete answers that the client has not read yet.
    answers: usize,
    /// Time at which a part of any answer was last read, or at which answers began to wait,
    /// whichever is later.
    last_read: Instant,
}

impl AnswerAccounting {
    /// Makes the accounting for a new connection from `address`.
    pub(super) fn open(
        room: &Arc<MemoryBudget>,
        address: IpAddr,
        bytes: Arc<ClientBytes>,
    ) -> Arc<Self> {
        Arc::new(Self {
            account: room.open_account(address),
            pieces: AtomicUsize::new(0),
            unread: Mutex::new(UnreadAnswers { answers: 0, last_read: Instant::now() }),
            bytes,
        })
    }

    /// Returns once complete answers wait and nothing was read for `patience`.
    pub(super) async fn wait_until_stalled(&self, patience: Duration) {
        loop {
            sleep(patience / 4).await;
            let waits =
                self.with(|waiting| waiting.answers > 0 && waiting.last_read.elapsed() >= patience);
            if waits {
                return;
            }
        }
    }

    fn with<T>(&self, act: impl FnOnce(&mut UnreadAnswers) -> T) -> T {
        act(&mut self.unread.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn record_read(&self) {
        self.with(|waiting| waiting.last_read = Instant::now());
    }

    /// Wraps `response` so that its memory is charged until it is sent. The API's charge is used if
    /// the response has one. Otherwise the response's length is charged, if that is known.
    pub(super) fn count(self: &Arc<Self>, mut response: Response) -> Response<AnswerBody> {
        let bytes = response.body().size_hint().exact().and_then(|n| usize::try_from(n).ok());
        let mut charge = response.extensions_mut().remove::<Arc<MemoryCharge>>();
        if charge.is_none()
            && let Some(bytes) = bytes
        {
            let mut new = MemoryCharge::new(&self.account);
            if !new.try_set(bytes, answer_share(bytes)) {
                response = (StatusCode::SERVICE_UNAVAILABLE, TOO_MUCH_UNREAD).into_response();
            }
            charge = Some(Arc::new(new));
        }
        let whole = charge.map(|charge| CompleteAnswerGuard::new(self, charge));
        let grpc = is_grpc(response.headers());
        response.map(|inner| AnswerBody::Any(ChargedAnswerBody::new(inner, self, grpc, whole)))
    }

    /// Makes the body of a successful gRPC answer with one message. `charge` lasts until the
    /// message is sent.
    pub(super) fn count_message(
        self: &Arc<Self>,
        message: Bytes,
        charge: MemoryCharge,
    ) -> AnswerBody {
        let whole = CompleteAnswerGuard::new(self, Arc::new(charge));
        let body = MessageBody::new(message);
        AnswerBody::Message(ChargedAnswerBody::new(body, self, true, Some(whole)))
    }
}

/// Body of any answer to a client.
#[derive(Debug)]
pub(super) enum AnswerBody {
    /// Body of an answer that the router has made.
    Any(ChargedAnswerBody<axum::body::Body>),
    /// Body of an answer to a KV call that was made without the router.
    Message(ChargedAnswerBody<MessageBody>),
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match self.get_mut() {
            Self::Any(body) => Pin::new(body).poll_frame(context),
            Self::Message(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Any(body) => body.is_end_stream(),
            Self::Message(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Any(body) => body.size_hint(),
            Self::Message(body) => body.size_hint(),
        }
    }
}

/// Guard that lasts until an answer is sent. Until then the answer is charged as a whole, and the
/// client can count as stalled.
#[derive(Debug)]
struct CompleteAnswerGuard {
    answers: Arc<AnswerAccounting>,
    _charge: Arc<MemoryCharge>,
}

impl CompleteAnswerGuard {
    fn new(answers: &Arc<AnswerAccounting>, charge: Arc<MemoryCharge>) -> Arc<Self> {
        answers.with(|waiting| {
            if waiting.answers == 0 {
                waiting.last_read = Instant::now();
            }
            waiting.answers += 1;
        });
        Arc::new(Self { answers: Arc::clone(answers), _charge: charge })
    }
}

impl Drop for CompleteAnswerGuard {
    fn drop(&mut self) {
        self.answers.with(|waiting| {
            waiting.answers -= 1;
            waiting.last_read = Instant::now();
        });
    }
}

/// Guard that lasts until one piece of an answer is sent, for an answer that is written in pieces.
/// Until then the piece is charged.
struct PieceGuard {
    answers: Arc<AnswerAccounting>,
    _charge: MemoryCharge,
}

impl Drop for PieceGuard {
    fn drop(&mut self) {
        self.answers.pieces.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes together with a guard that is kept until they are sent.
struct GuardedBytes<K> {
    bytes: Bytes,
    _kept: K,
}

impl<K> AsRef<[u8]> for GuardedBytes<K> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

fn attach_guard<K: Send + 'static>(bytes: Bytes, kept: K) -> Bytes {
    Bytes::from_owner(GuardedBytes { bytes, _kept: kept })
}

/// Body of an answer, charged until it is sent.
#[derive(Debug)]
pub(super) struct ChargedAnswerBody<B> {
    inner: B,
    answers: Arc<AnswerAccounting>,
    grpc: bool,
    /// Guard of an answer that is charged as a whole; `None` if the answer is charged piece by
    /// piece.
    complete_guard: Option<Arc<CompleteAnswerGuard>>,
    /// Bytes that were written but not passed to the HTTP library yet.
    rest: Bytes,
    /// Timer before the next attempt to reserve room.
    retry_timer: Option<Pin<Box<Sleep>>>,
}

impl<B> ChargedAnswerBody<B> {
    fn new(
        inner: B,
        answers: &Arc<AnswerAccounting>,
        grpc: bool,
        complete_guard: Option<Arc<CompleteAnswerGuard>>,
    ) -> Self {
        let (answers, rest) = (Arc::clone(answers), Bytes::new());
        Self { inner, answers, grpc, complete_guard, rest, retry_timer: None }
    }

    /// Waits until there is room for the next piece. If no piece of the connection waits to be
    /// sent, there is always room.
    fn reserve(&mut self, context: &mut Context<'_>) -> Poll<MemoryCharge> {
        loop {
            if let Some(again) = &mut self.retry_timer {
                ready!(again.as_mut().poll(context));
                self.retry_timer = None;
            }
            let mut charge = MemoryCharge::new(&self.answers.account);
            let first = self.answers.pieces.load(Ordering::Relaxed) == 0;
            if first || charge.try_set(PIECE_BYTES, BudgetShare::WHOLE) {
                return Poll::Ready(charge);
            }
            self.retry_timer = Some(Box::pin(sleep(RETRY_INTERVAL)));
        }
    }

    /// Returns the next part of the response body to send to the client.
    fn part(&mut self) -> Frame<Bytes> {
        let part = self.rest.split_to(self.rest.len().min(PART_BYTES));
        if self.rest.is_empty() {
            // The last part was taken, so drop this body's reference to the guard. The guard then
            // lasts until the returned part is sent.
            self.rest = Bytes::new();
        }
        Frame::data(part)
    }
}

impl<B: Body<Data = Bytes, Error = axum::Error> + Unpin> Body for ChargedAnswerBody<B> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if !this.rest.is_empty() {
            this.answers.record_read();
            return Poll::Ready(Some(Ok(this.part())));
        }
        let reserved = match this.complete_guard {
            Some(_) => None,
            None => Some(ready!(this.reserve(context))),
        };
        let polled = ready!(Pin::new(&mut this.inner).poll_frame(context));
        let Some(Ok(frame)) = polled else { return Poll::Ready(polled) };
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
        };
        if this.grpc {
            this.answers.bytes.sent.fetch_add(data.len() as u64, Ordering::Relaxed);
        }
        this.rest = match (&this.complete_guard, reserved) {
            (Some(whole), _) => attach_guard(data, Arc::clone(whole)),
            (None, None) => data,
            (None, Some(mut charge)) => {
                charge.force(data.len());
                this.answers.pieces.fetch_add(1, Ordering::Relaxed);
                attach_guard(
                    data,
                    PieceGuard { answers: Arc::clone(&this.answers), _charge: charge },
                )
            }
        };
        Poll::Ready(Some(Ok(this.part())))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.len() as u64;
        let inner = self.inner.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

#[cfg(test)]
mod tests;
