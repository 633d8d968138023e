//! Answers that wait until the client takes them, and what each makes us keep.
//!
//! A client says itself how much it is ready to receive, and may say: nothing. So what an answer
//! holds is counted until the last byte of it has gone out. The API counts what it gathers, before
//! the answer is whole, and refuses what would be too much; the bytes that it was written as stand
//! for the same here. Of any other answer each piece is counted as it is written, and the next one
//! is not asked for before there is room.
//!
//! A client that has whole answers to take, and takes nothing of any for long, is sent away. Not so
//! one that doesn't read its watches: they wait, and read the store when it goes on.

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
use tokio::time::{Instant, Sleep, sleep};

use crate::http::is_grpc;
use crate::rpc::ClientBytes;
use crate::shares::{Account, Bounds, Charge, Part, Room};

/// For one connection.
const CONNECTION_BYTES: usize = 256 << 20;
/// For all of them, in shares.
const ALL_BYTES: usize = 512 << 20;
/// So much anybody may leave unread, whatever the others do.
const LEAST_BYTES: usize = 1 << 20;
/// A piece of an answer that is written as it goes.
const PIECE_BYTES: usize = 2 << 20;
/// What is handed on at a time: the client has taken the last such part when it gets the next.
const PART_BYTES: usize = 64 << 10;
/// After there was no room for a piece.
const AGAIN: Duration = Duration::from_millis(50);
/// To who leaves too much unread.
const UNREAD: &str = "too many answers wait to be read; read them first\n";

/// What all connections have not taken yet.
pub(super) fn room() -> Arc<Room> {
    let bounds = Bounds { connection: CONNECTION_BYTES, all: ALL_BYTES, least: LEAST_BYTES };
    Room::new(bounds)
}

/// What one connection has not taken yet.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) account: Arc<Account>,
    /// Pieces that were written and have not gone out.
    pieces: AtomicUsize,
    waiting: Mutex<Waiting>,
    bytes: Arc<ClientBytes>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// Whole answers.
    answers: usize,
    /// When something of any was taken last, or the first of them came.
    taken: Instant,
}

impl Answers {
    /// None yet, of a connection from `address`.
    pub(super) fn open(room: &Arc<Room>, address: IpAddr, bytes: Arc<ClientBytes>) -> Arc<Self> {
        Arc::new(Self {
            account: room.open(address),
            pieces: AtomicUsize::new(0),
            waiting: Mutex::new(Waiting { answers: 0, taken: Instant::now() }),
            bytes,
        })
    }

    /// Returns once answers wait of which nothing was taken for `patience`.
    pub(super) async fn unread(&self, patience: Duration) {
        loop {
            sleep(patience / 4).await;
            let waits =
                self.with(|waiting| waiting.answers > 0 && waiting.taken.elapsed() >= patience);
            if waits {
                return;
            }
        }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Waiting) -> T) -> T {
        act(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn taken(&self) {
        self.with(|waiting| waiting.taken = Instant::now());
    }

    /// Counts what leaves with `response`: what the API has charged for it, else its bytes, if it
    /// is known how many.
    pub(super) fn count(self: &Arc<Self>, mut response: Response) -> Response<Counted> {
        let bytes = response.body().size_hint().exact().and_then(|n| usize::try_from(n).ok());
        let mut charge = response.extensions_mut().remove::<Arc<Charge>>();
        if charge.is_none()
            && let Some(bytes) = bytes
        {
            let mut new = Charge::new(&self.account);
            if !new.set(bytes, Part::of_answer(bytes)) {
                response = (StatusCode::SERVICE_UNAVAILABLE, UNREAD).into_response();
            }
            charge = Some(Arc::new(new));
        }
        let whole = charge.map(|charge| Whole::new(self, charge));
        let answers = Arc::clone(self);
        let rest = Bytes::new();
        let grpc = is_grpc(response.headers());
        response.map(|inner| Counted { inner, answers, grpc, whole, rest, again: None })
    }
}

/// An answer that was there as a whole before the first byte was taken.
#[derive(Debug)]
struct Whole {
    answers: Arc<Answers>,
    _charge: Arc<Charge>,
}

impl Whole {
    fn new(answers: &Arc<Answers>, charge: Arc<Charge>) -> Arc<Self> {
        answers.with(|waiting| {
            if waiting.answers == 0 {
                waiting.taken = Instant::now();
            }
            waiting.answers += 1;
        });
        Arc::new(Self { answers: Arc::clone(answers), _charge: charge })
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        self.answers.with(|waiting| {
            waiting.answers -= 1;
            waiting.taken = Instant::now();
        });
    }
}

/// A piece of an answer that is written as it goes.
struct Piece {
    answers: Arc<Answers>,
    _charge: Charge,
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.answers.pieces.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes, and what is to be kept until they have gone out.
struct Held<K> {
    bytes: Bytes,
    _kept: K,
}

impl<K> AsRef<[u8]> for Held<K> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

fn hold<K: Send + 'static>(bytes: Bytes, kept: K) -> Bytes {
    Bytes::from_owner(Held { bytes, _kept: kept })
}

/// An answer's body, counted until it has gone out.
#[derive(Debug)]
pub(super) struct Counted {
    inner: axum::body::Body,
    answers: Arc<Answers>,
    grpc: bool,
    /// `None` if it is written piece by piece.
    whole: Option<Arc<Whole>>,
    /// Written, and not handed on yet.
    rest: Bytes,
    /// Waits for room.
    again: Option<Pin<Box<Sleep>>>,
}

impl Counted {
    /// Room for the next piece, when there is some. A connection of which no piece waits always
    /// gets on by one.
    fn reserve(&mut self, context: &mut Context<'_>) -> Poll<Charge> {
        loop {
            if let Some(again) = &mut self.again {
                ready!(again.as_mut().poll(context));
                self.again = None;
            }
            let mut charge = Charge::new(&self.answers.account);
            let first = self.answers.pieces.load(Ordering::Relaxed) == 0;
            if first || charge.set(PIECE_BYTES, Part::WHOLE) {
                return Poll::Ready(charge);
            }
            self.again = Some(Box::pin(sleep(AGAIN)));
        }
    }

    /// The next part of what was written.
    fn part(&mut self) -> Frame<Bytes> {
        let part = self.rest.split_to(self.rest.len().min(PART_BYTES));
        if self.rest.is_empty() {
            // The part alone holds what is kept from here on.
            self.rest = Bytes::new();
        }
        Frame::data(part)
    }
}

impl Body for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if !this.rest.is_empty() {
            this.answers.taken();
            return Poll::Ready(Some(Ok(this.part())));
        }
        let reserved = match this.whole {
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
        this.rest = match (&this.whole, reserved) {
            (Some(whole), _) => hold(data, Arc::clone(whole)),
            (None, None) => data,
            (None, Some(mut charge)) => {
                charge.force(data.len());
                this.answers.pieces.fetch_add(1, Ordering::Relaxed);
                hold(data, Piece { answers: Arc::clone(&this.answers), _charge: charge })
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
