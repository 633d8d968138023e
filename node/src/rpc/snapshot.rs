//! `Maintenance.Snapshot`: the store as etcd's file, piece by piece.
//!
//! A thread writes the file straight into the stream, from a store that it froze: nothing is copied to
//! the disk, and writes go on. What a frozen store costs is space, since pages that are freed meanwhile
//! can't be used again; so there are only so many at a time, a client that takes nothing is left, and
//! none goes on for ever.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use node_proto::etcdserverpb::SnapshotResponse;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::context::Context;
use super::error::Error;
use super::metrics::Method;
use crate::etcd_file::{Export, ExportError};

/// Snapshots at a time; the next one is refused.
const AT_ONCE: usize = 2;
/// Bytes of the file in one response, as in etcd.
const CHUNK_BYTES: usize = 32 * 1024;
/// Responses that wait for the client; the file is written no further meanwhile.
const CHUNKS_WAITING: usize = 8;
/// So long the whole may take.
const PATIENCE: Duration = Duration::from_secs(60 * 60);

pub(super) type Chunks = BoxStream<'static, Result<SnapshotResponse, Status>>;

/// The places for snapshots.
pub(super) fn places() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(AT_ONCE))
}

/// A snapshot of the store as it is now, if there is a place for one.
pub(super) fn send(context: Arc<Context>, places: &Arc<Semaphore>) -> Result<Chunks, Error> {
    let place = places.clone().try_acquire_owned().map_err(|_| Error::TooManyRequests)?;
    let (sender, mut chunks) = mpsc::channel(CHUNKS_WAITING);
    let client = Client {
        runtime: Handle::current(),
        sender,
        stop: context.stop.clone(),
        patience: context.limits.snapshot_patience,
        until: Instant::now() + PATIENCE,
    };
    tokio::task::spawn_blocking(move || run(&context, client, place));
    Ok(stream::poll_fn(move |task| chunks.poll_recv(task)).boxed())
}

fn run(context: &Context, client: Client, _place: OwnedSemaphorePermit) {
    let call = context.metrics.start(Method::Snapshot);
    let mut out = Out { client, left: 0, version: "", chunk: BytesMut::new() };
    let error = match out.run(context) {
        Ok(()) => return call.end(None),
        Err(ExportError::Store(error)) => Error::from(error),
        Err(ExportError::Unwanted | ExportError::Write(_)) => match out.client.gone() {
            Some(why) => why,
            // Only the stream can fail, and only because nobody is there.
            None => return,
        },
    };
    let status = Status::from(error);
    call.end(Some(&status));
    let _ = out.client.send(Err(status));
}

/// Who takes what is sent.
struct Client {
    runtime: Handle,
    sender: mpsc::Sender<Result<SnapshotResponse, Status>>,
    stop: CancellationToken,
    patience: Duration,
    until: Instant,
}

impl Client {
    /// Whether it is worth going on.
    fn is_there(&self) -> bool {
        !self.sender.is_closed() && self.gone().is_none()
    }

    /// Why it is not, but for the client.
    fn gone(&self) -> Option<Error> {
        if self.stop.is_cancelled() {
            return Some(Error::Stopped);
        }
        (Instant::now() >= self.until).then_some(Error::Timeout)
    }

    fn send(&self, response: Result<SnapshotResponse, Status>) -> io::Result<()> {
        let sent = async {
            tokio::select! {
                sent = self.sender.send_timeout(response, self.patience) => sent.is_ok(),
                () = self.stop.cancelled() => false,
            }
        };
        if self.runtime.block_on(sent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    }
}

/// The file, cut into responses.
struct Out {
    client: Client,
    /// Bytes of the file that are still to come.
    left: u64,
    version: &'static str,
    chunk: BytesMut,
}

impl Out {
    fn run(&mut self, context: &Context) -> Result<(), ExportError> {
        let export = Export::new(&context.store, &|| self.client.is_there())?;
        self.left = export.file_bytes();
        self.version = export.storage_version();
        tracing::info!(bytes = self.left, revision = export.revision(), "sending a snapshot");
        export.write(self)
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = CHUNK_BYTES - self.chunk.len();
        // The hash behind the file has a response of its own.
        let of_file = usize::try_from(self.left).unwrap_or(usize::MAX);
        let most = if of_file == 0 { room } else { room.min(of_file) };
        let taken = bytes.len().min(most);
        self.chunk.extend_from_slice(&bytes[..taken]);
        let was_file = self.left > 0;
        self.left = self.left.saturating_sub(taken as u64);
        if self.chunk.len() == CHUNK_BYTES || (was_file && self.left == 0) {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        if !self.client.is_there() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.client.send(Ok(SnapshotResponse {
            header: None,
            remaining_bytes: self.left,
            blob: self.chunk.split().freeze(),
            version: self.version.to_owned(),
        }))
    }
}
