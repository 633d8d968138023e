//! Collects what a connection writes, so that a request and its answer cost one system call.
//!
//! The HTTP library flushes after each group of frames. It would write the acknowledgement of a
//! ping, which Go's clients send with each request, then the answer's headers and message, and then
//! its trailers. Here these bytes are collected in a buffer, which is written once the connection's
//! task has nothing more to do.
//!
//! Each poll of the connection's task is called a turn. A request is answered by a task of its own,
//! which runs after the connection's turn. So if a connection has received bytes in a turn, it
//! writes its buffer two turns later. During the first of these two turns, the thread runs the
//! tasks of all connections that have received bytes. A write at that time would delay those tasks.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum number of collected bytes of a connection. Before a write that would exceed it, the
/// collected bytes are written out. The accounting of unread answers doesn't count this memory.
const MAX_COLLECTED_BYTES: usize = 16 << 10;
/// Length from which a write isn't collected, because the copy would cost more than a system call.
const LARGE_WRITE_BYTES: usize = 8 << 10;
/// Capacity in bytes up to which the buffer is kept after its bytes were written. A larger buffer
/// is freed.
const KEPT_CAPACITY: usize = 4 << 10;

/// Number of turns (polls of the connection) for which collected bytes wait after bytes were
/// received. A client that never stops sending can't postpone them for longer.
const POSTPONED_TURNS: u8 = 2;

/// A connection's stream, with the bytes that were not written to it yet.
#[derive(Debug)]
struct Shared<S> {
    stream: S,
    collected: Vec<u8>,
    /// Number of collected bytes that are written already.
    written: usize,
    /// Whether bytes were received since the end of the connection's last turn.
    has_received: bool,
    /// Number of successive turns after which the collected bytes were not written.
    postponed: u8,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Shared<S> {
    fn poll_write_collected(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.collected.len() {
            let stream = Pin::new(&mut self.stream);
            match ready!(stream.poll_write(context, &self.collected[self.written..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.written += written,
            }
        }
        self.collected.clear();
        self.collected.shrink_to(KEPT_CAPACITY);
        self.written = 0;
        Poll::Ready(Ok(()))
    }

    fn poll_flush_all(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_collected(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }
}

/// Handle with which a connection's task writes the bytes that its stream has collected.
#[derive(Debug)]
pub(super) struct CollectedWrites<S>(Arc<Mutex<Shared<S>>>);

/// Stream whose writes are collected. [`CollectedWrites::poll`] writes them.
#[derive(Debug)]
pub(super) struct CollectingStream<S>(Arc<Mutex<Shared<S>>>);

/// Wraps `stream`. Only the task that owns both results uses them, so their lock is always free.
pub(super) fn collect<S>(stream: S) -> (CollectingStream<S>, CollectedWrites<S>) {
    let collected = Vec::new();
    let shared = Shared { stream, collected, written: 0, has_received: false, postponed: 0 };
    let shared = Arc::new(Mutex::new(shared));
    (CollectingStream(Arc::clone(&shared)), CollectedWrites(shared))
}

fn lock<S>(shared: &Mutex<Shared<S>>) -> MutexGuard<'_, Shared<S>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: AsyncRead + AsyncWrite + Unpin> CollectedWrites<S> {
    /// Polls `connection`, and then writes what it has collected. Ends when `connection` has ended,
    /// after one attempt to write its last bytes, or when bytes can't be written.
    pub(super) fn poll<F: Future>(
        &self,
        connection: Pin<&mut F>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        if connection.poll(context).is_ready() {
            // Write the last bytes here: a connection that ends with an error, or after a request
            // for another protocol, does not flush its stream itself. One attempt is enough,
            // because the socket nearly always has room.
            let _ = lock(&self.0).poll_flush_all(context);
            return Poll::Ready(());
        }
        let mut shared = lock(&self.0);
        let has_received = std::mem::take(&mut shared.has_received);
        let may_postpone = !shared.collected.is_empty() && shared.postponed < POSTPONED_TURNS;
        if may_postpone && (has_received || shared.postponed > 0) {
            shared.postponed += 1;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        shared.postponed = 0;
        // The stream is flushed even if nothing is collected. TLS accepts bytes that the socket
        // doesn't take yet, and sends them only when it is flushed.
        match shared.poll_flush_all(context) {
            Poll::Ready(Err(_)) => Poll::Ready(()),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CollectingStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut shared = lock(&self.0);
        let before = buffer.filled().len();
        ready!(Pin::new(&mut shared.stream).poll_read(context, buffer))?;
        shared.has_received |= buffer.filled().len() > before;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for CollectingStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut shared = lock(&self.0);
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        let is_large = length >= LARGE_WRITE_BYTES;
        if is_large || shared.collected.len() + length > MAX_COLLECTED_BYTES {
            ready!(shared.poll_write_collected(context))?;
        }
        if is_large {
            return Pin::new(&mut shared.stream).poll_write_vectored(context, slices);
        }
        for slice in slices {
            shared.collected.extend_from_slice(slice);
        }
        Poll::Ready(Ok(length))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Returns at once: [`CollectedWrites::poll`] flushes.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = lock(&self.0);
        ready!(shared.poll_flush_all(context))?;
        Pin::new(&mut shared.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests;
