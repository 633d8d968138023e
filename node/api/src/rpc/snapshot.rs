//! `Maintenance.Snapshot`: the store as an etcd file, sent in chunks.
//!
//! A thread writes the file straight into the stream, from a frozen view of the store. Nothing is
//! copied to the disk, and writes continue.
//!
//! A frozen view costs disk space, since pages that are freed meanwhile can't be reused. So the
//! number of snapshots at a time is bounded, a client that stalls is disconnected, and the total
//! time is limited.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use futures_util::stream::{self, BoxStream, Stream, StreamExt as _};
use node_bbolt::BboltWriteError;
use node_proto::etcdserverpb::SnapshotResponse;
use node_state::etcd_file::{Export, ExportError};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::context::ApiContext;
use super::error::Error;
use super::metrics::Method;

/// Maximum number of snapshots at a time. A further one is refused.
const MAX_CONCURRENT_SNAPSHOTS: usize = 2;
/// Bytes of the snapshot file in one response, as in etcd.
const CHUNK_BYTES: usize = 32 * 1024;
/// Maximum number of responses that wait for the client. No more of the snapshot file is written
/// meanwhile.
const MAX_WAITING_CHUNKS: usize = 8;
/// Maximum time for a whole snapshot.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(60 * 60);

pub(super) type SnapshotStream = BoxStream<'static, Result<SnapshotResponse, Status>>;

/// Makes the permits for snapshots.
pub(super) fn snapshot_permits() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(MAX_CONCURRENT_SNAPSHOTS))
}

/// Starts to send a snapshot of the current store. Refused if too many are being sent.
pub(super) fn send(
    context: Arc<ApiContext>,
    places: &Arc<Semaphore>,
) -> Result<SnapshotStream, Error> {
    let place = places.clone().try_acquire_owned().map_err(|_| Error::TooManyRequests)?;
    let (sender, chunks) = mpsc::channel(MAX_WAITING_CHUNKS);
    let end = Arc::new(OnceLock::new());
    let client = SnapshotClient {
        runtime: Handle::current(),
        sender,
        stop: context.stop.clone(),
        stall_timeout: context.limits.snapshot_stall_timeout,
        deadline: Instant::now() + SNAPSHOT_TIMEOUT,
        sent: AtomicU64::new(0),
    };
    let ended = Arc::clone(&end);
    tokio::task::spawn_blocking(move || {
        // `run` records the result before the sender is dropped. So the result is known when the
        // client sees the end of the stream.
        let SnapshotClient { sender, .. } = run(&context, client, place, &ended);
        drop(sender);
    });
    Ok(answer(chunks, end).boxed())
}

/// Returns the client's stream of the snapshot's chunks. If the snapshot is truncated, the stream
/// never ends with the status OK.
fn answer(
    chunks: mpsc::Receiver<SnapshotResponse>,
    end: Arc<OnceLock<Result<(), Status>>>,
) -> impl Stream<Item = Result<SnapshotResponse, Status>> {
    stream::unfold(Some(chunks), move |open| {
        let end = Arc::clone(&end);
        async move {
            let mut chunks = open?;
            match chunks.recv().await {
                Some(chunk) => Some((Ok(chunk), Some(chunks))),
                None => match end.get() {
                    Some(Ok(())) => None,
                    Some(Err(status)) => Some((Err(status.clone()), None)),
                    None => Some((Err(Error::StoreFailed.into()), None)),
                },
            }
        }
    })
}

fn run(
    context: &ApiContext,
    client: SnapshotClient,
    _place: OwnedSemaphorePermit,
    ended: &OnceLock<Result<(), Status>>,
) -> SnapshotClient {
    let call = context.metrics.start(Method::Snapshot);
    let began = Instant::now();
    let mut out = ChunkWriter { client, remaining_bytes: 0, version: "", chunk: BytesMut::new() };
    let error = match out.run(context) {
        Ok(()) => None,
        Err(ExportError::Store(error)) => Some(Error::from(error)),
        Err(ExportError::Cancelled | ExportError::Write(BboltWriteError::Io(_))) => {
            // A write fails only if the stream was ended or the client stalled.
            Some(out.client.abort_error().unwrap_or(Error::Timeout))
        }
        Err(ExportError::Write(error)) => {
            tracing::error!(%error, "the store can't be written as a snapshot");
            Some(Error::StoreFailed)
        }
    };
    let result = error.map_or(Ok(()), |error| Err(Status::from(error)));
    context.metrics.snapshots.record(began.elapsed());
    let sent = out.client.sent.load(Ordering::Relaxed);
    context.metrics.calls(Method::Snapshot).count_out(sent);
    if out.client.sender.is_closed() {
        // Dropping the guard counts the call as cancelled, since the client has left.
        drop(call);
    } else {
        call.end(result.as_ref().err());
    }
    let _ = ended.set(result);
    out.client
}

/// Connection to the client that receives a snapshot.
struct SnapshotClient {
    runtime: Handle,
    sender: mpsc::Sender<SnapshotResponse>,
    stop: CancellationToken,
    stall_timeout: Duration,
    deadline: Instant,
    sent: AtomicU64,
}

impl SnapshotClient {
    /// Whether the snapshot goes on: the client is connected, the node isn't stopping, and the
    /// deadline has not passed.
    fn is_active(&self) -> bool {
        !self.sender.is_closed() && self.abort_error().is_none()
    }

    /// Returns an error if the node is stopping, or if the snapshot's deadline has passed.
    fn abort_error(&self) -> Option<Error> {
        if self.stop.is_cancelled() {
            return Some(Error::Stopped);
        }
        (Instant::now() >= self.deadline).then_some(Error::Timeout)
    }

    fn send(&self, response: SnapshotResponse) -> io::Result<()> {
        let sent = async {
            tokio::select! {
                sent = self.sender.send_timeout(response, self.stall_timeout) => sent.is_ok(),
                () = self.stop.cancelled() => false,
            }
        };
        if !self.runtime.block_on(sent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.sent.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Writer that cuts the snapshot file into responses.
struct ChunkWriter {
    client: SnapshotClient,
    /// Number of bytes of the snapshot file that are not written yet.
    remaining_bytes: u64,
    version: &'static str,
    chunk: BytesMut,
}

impl ChunkWriter {
    fn run(&mut self, context: &ApiContext) -> Result<(), ExportError> {
        let export = Export::new(&context.store, &|| self.client.is_active())?;
        self.remaining_bytes = export.file_bytes();
        self.version = export.storage_version();
        tracing::info!(
            bytes = self.remaining_bytes,
            revision = export.revision(),
            "sending a snapshot"
        );
        export.write(self)
    }
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = CHUNK_BYTES - self.chunk.len();
        // The hash that follows the file is sent in a response of its own.
        let of_file = usize::try_from(self.remaining_bytes).unwrap_or(usize::MAX);
        let most = if of_file == 0 { room } else { room.min(of_file) };
        let taken = bytes.len().min(most);
        self.chunk.extend_from_slice(&bytes[..taken]);
        let was_file = self.remaining_bytes > 0;
        self.remaining_bytes = self.remaining_bytes.saturating_sub(taken as u64);
        if self.chunk.len() == CHUNK_BYTES || (was_file && self.remaining_bytes == 0) {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        if !self.client.is_active() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.client.send(SnapshotResponse {
            header: None,
            remaining_bytes: self.remaining_bytes,
            blob: self.chunk.split().freeze(),
            version: self.version.to_owned(),
        })
    }
}
