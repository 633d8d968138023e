//! Snapshots: one stream each, in chunks, with back-pressure from disk to disk.
//!
//! A stream carries `SnapshotHeader`, then `SnapshotChunk`s, then `SnapshotEnd` (length and CRC-32C
//! of all chunks). The receiver answers once it has installed the snapshot. During a long
//! installation it sends pings. A receiver that sends nothing counts as dead.
//!
//! Neither end waits for ever. Each step has a time limit. The whole transfer has a limit of its
//! own, which depends on its length. The limits matter because the sender keeps a read view of its
//! store during the transfer. The store can't reuse freed space until that view is dropped.

use std::{
    io::{self, Read, Write},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::{OwnedSemaphorePermit, mpsc, oneshot},
    time::{interval, timeout_at},
};

use super::{
    SendError,
    accept::write_frame,
    invitations,
    peer_handle::PeerHandle,
    service::TransportState,
    wire::frame::{FrameKind, FrameReader},
    wire::hello::StreamPurpose,
    wire::stream::Duplex,
};

const CHUNK_BYTES: usize = 256 * 1024;
/// Maximum number of chunks between disk and network. At this number, reading from disk or network
/// pauses.
const CHUNKS_IN_FLIGHT: usize = 4;
/// Time limit for the other end's next frame, long enough for a slow disk. While the other end
/// installs the snapshot, it sends pings, which count as frames.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum average speed of a transfer, and also of the installation after it. Below this speed the
/// transfer fails. A link of 1 Mbit/s is too slow for a cluster.
const MIN_BYTES_PER_SECOND: u64 = 128 * 1024;
/// Maximum size of a frame on a snapshot stream: a chunk or a header.
const FRAME_BYTES: usize = 1 << 20;

enum SnapshotPart {
    Chunk(Bytes),
    End { len: u64, crc: u32 },
}

/// Sending end of one snapshot. Dropping it before `finish` aborts the transfer.
pub struct SnapshotWriter {
    pieces: mpsc::Sender<SnapshotPart>,
    answer: oneshot::Receiver<io::Result<()>>,
    buffer: BytesMut,
    len: u64,
    crc: u32,
}

impl SnapshotWriter {
    /// Sends the remaining data, and waits until the peer has installed the snapshot.
    ///
    /// # Errors
    /// If the stream broke, or the peer could not install the snapshot.
    pub fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        let end = SnapshotPart::End { len: self.len, crc: self.crc };
        if self.pieces.blocking_send(end).is_err() {
            return Err(self.failure());
        }
        self.answer.blocking_recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
    }

    fn failure(&mut self) -> io::Error {
        match self.answer.try_recv() {
            Ok(Err(error)) => error,
            _ => io::ErrorKind::BrokenPipe.into(),
        }
    }
}

impl Write for SnapshotWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK_BYTES - self.buffer.len());
        self.buffer.put_slice(&bytes[..taken]);
        if self.buffer.len() == CHUNK_BYTES {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let chunk = self.buffer.split().freeze();
        self.len += chunk.len() as u64;
        self.crc = crc32c::crc32c_append(self.crc, &chunk);
        match self.pieces.blocking_send(SnapshotPart::Chunk(chunk)) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.failure()),
        }
    }
}

/// Receiving end of one snapshot. Reading reaches the end only if all data arrived and its checksum
/// is right.
pub struct SnapshotReader {
    pieces: mpsc::Receiver<SnapshotPart>,
    current: Bytes,
    len: u64,
    crc: u32,
    ended: bool,
}

#[cfg(any(test, feature = "testing"))]
impl SnapshotReader {
    /// Returns a reader for a snapshot whose complete content is `body`.
    pub fn arrived(body: &[u8]) -> Self {
        let (sender, pieces) = mpsc::channel(2);
        let end = SnapshotPart::End { len: body.len() as u64, crc: crc32c::crc32c(body) };
        for piece in [SnapshotPart::Chunk(Bytes::copy_from_slice(body)), end] {
            sender.try_send(piece).unwrap_or_else(|_| unreachable!("there is room for both"));
        }
        Self { pieces, current: Bytes::new(), len: 0, crc: 0, ended: false }
    }
}

impl Read for SnapshotReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            if self.ended || out.is_empty() {
                return Ok(0);
            }
            match self.pieces.blocking_recv() {
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(SnapshotPart::Chunk(chunk)) => {
                    self.len += chunk.len() as u64;
                    self.crc = crc32c::crc32c_append(self.crc, &chunk);
                    self.current = chunk;
                }
                Some(SnapshotPart::End { len, crc }) if (len, crc) == (self.len, self.crc) => {
                    self.ended = true;
                }
                Some(SnapshotPart::End { .. }) => {
                    let what = "the snapshot's length or checksum is wrong";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
            }
        }
        let taken = out.len().min(self.current.len());
        self.current.copy_to_slice(&mut out[..taken]);
        Ok(taken)
    }
}

/// Returns the writer for the snapshot's data, and the task that sends what is written.
pub(super) fn send(
    shared: Arc<TransportState>,
    peer: Arc<PeerHandle>,
    header: Bytes,
    permit: OwnedSemaphorePermit,
) -> (SnapshotWriter, impl Future<Output = ()> + Send + 'static) {
    let (writer, mut pieces, answered) = writer();
    let task = async move {
        let _permit = permit;
        let transfer = peer.traffic.snapshots_out.begin();
        let sent = async {
            let mut stream = invitations::open(&shared, &peer, StreamPurpose::Snapshot).await?;
            let header = write_frame(&mut stream.io, FrameKind::SnapshotHeader, &header);
            TransferProgress::new(0).run_in_time(header).await?;
            send_body(stream.io, &mut pieces).await
        };
        let result = tokio::select! {
            () = peer.cancellation.cancelled() => Err(io::ErrorKind::ConnectionAborted.into()),
            result = sent => result,
        };
        transfer.end(&result);
        let _ = answered.send(result);
        // Dropping the channel wakes a writer that waits for room in it. The writer then reads the
        // result that was sent above.
        drop(pieces);
    };
    (writer, task)
}

type AnswerSender = oneshot::Sender<io::Result<()>>;

fn writer() -> (SnapshotWriter, mpsc::Receiver<SnapshotPart>, AnswerSender) {
    let (sender, pieces) = mpsc::channel(CHUNKS_IN_FLIGHT);
    let (answered, answer) = oneshot::channel();
    let buffer = BytesMut::with_capacity(CHUNK_BYTES);
    (SnapshotWriter { pieces: sender, answer, buffer, len: 0, crc: 0 }, pieces, answered)
}

/// Sends the whole state to the joining member `peer`, on the stream that it has opened for this.
pub(super) async fn serve(
    shared: &Arc<TransportState>,
    peer: &PeerHandle,
    io: Box<dyn Duplex>,
) -> io::Result<()> {
    let Ok(_permit) = Arc::clone(&peer.snapshot_out).try_acquire_owned() else {
        return Err(io::Error::other(SendError::Full));
    };
    let (writer, mut pieces, answered) = writer();
    let (events, to) = (Arc::clone(&shared.events), peer.id);
    let writing = tokio::task::spawn_blocking(move || events.state(to, writer));
    let transfer = peer.traffic.snapshots_out.begin();
    let result = send_body(io, &mut pieces).await;
    transfer.end(&result);
    let _ = answered.send(result);
    drop(pieces);
    writing.await.map_err(io::Error::other)?
}

async fn send_body(
    io: Box<dyn Duplex>,
    pieces: &mut mpsc::Receiver<SnapshotPart>,
) -> io::Result<()> {
    let (reader, mut writer) = tokio::io::split(io);
    let mut frames = FrameReader::new(reader, FRAME_BYTES);
    let mut sent = TransferProgress::new(0);
    loop {
        match pieces.recv().await {
            None => return Err(io::ErrorKind::ConnectionAborted.into()),
            Some(SnapshotPart::Chunk(chunk)) => {
                sent.run_in_time(write_frame(&mut writer, FrameKind::SnapshotChunk, &chunk))
                    .await?;
                sent.bytes += chunk.len() as u64;
            }
            Some(SnapshotPart::End { len, crc }) => {
                let mut end = BytesMut::new();
                end.put_u64(len);
                end.put_u32(crc);
                sent.run_in_time(write_frame(&mut writer, FrameKind::SnapshotEnd, &end)).await?;
                break;
            }
        }
    }
    // The other end now installs the snapshot, which may take as long as the transfer did.
    let installed = TransferProgress::new(sent.bytes);
    loop {
        match installed.run_in_time(frames.next()).await? {
            Some((FrameKind::Ping, _)) => {}
            Some((FrameKind::SnapshotAnswer, answer)) if answer.as_ref() == [1] => return Ok(()),
            Some((FrameKind::SnapshotAnswer, _)) => {
                return Err(io::Error::other("the peer could not install the snapshot"));
            }
            Some(_) => return Err(io::ErrorKind::InvalidData.into()),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Receives one snapshot from `peer` and passes it to `PeerEvents::receive_snapshot`.
pub(super) async fn receive(
    shared: &Arc<TransportState>,
    peer: &PeerHandle,
    io: Box<dyn Duplex>,
) -> io::Result<()> {
    let Ok(_permit) = Arc::clone(&peer.snapshot_in).try_acquire_owned() else {
        return Err(io::Error::other(SendError::Full));
    };
    let transfer = peer.traffic.snapshots_in.begin();
    let (reader, writer) = tokio::io::split(io);
    let mut frames = FrameReader::new(reader, FRAME_BYTES);
    let header = match TransferProgress::new(0).run_in_time(frames.next()).await? {
        Some((FrameKind::SnapshotHeader, header)) => header,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    let (events, from) = (Arc::clone(&shared.events), peer.id);
    let install = move |body| events.receive_snapshot(from, header, body);
    let result = receive_body(frames, writer, shared.limits.ping_interval, install).await;
    transfer.end(&result);
    result
}

/// Receives the whole state on a stream that the joining member has opened, and installs it.
pub(super) async fn receive_state<T: Send + 'static>(
    io: Box<dyn Duplex>,
    ping_interval: Duration,
    install: impl FnOnce(SnapshotReader) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (reader, writer) = tokio::io::split(io);
    let frames = FrameReader::new(reader, FRAME_BYTES);
    receive_body(frames, writer, ping_interval, install).await
}

async fn receive_body<T: Send + 'static>(
    mut frames: FrameReader<impl AsyncRead + Unpin>,
    mut writer: impl AsyncWrite + Unpin,
    ping_interval: Duration,
    install: impl FnOnce(SnapshotReader) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, pieces) = mpsc::channel(CHUNKS_IN_FLIGHT);
    let body = SnapshotReader { pieces, current: Bytes::new(), len: 0, crc: 0, ended: false };
    let mut install = tokio::task::spawn_blocking(move || install(body));
    let mut tick = interval(ping_interval);
    let mut received = TransferProgress::new(0);
    let pump = async {
        loop {
            let piece = match received.run_in_time(frames.next()).await? {
                Some((FrameKind::SnapshotChunk, chunk)) => {
                    received.bytes += chunk.len() as u64;
                    SnapshotPart::Chunk(chunk)
                }
                Some((FrameKind::SnapshotEnd, mut end)) if end.len() == 12 => {
                    SnapshotPart::End { len: end.get_u64(), crc: end.get_u32() }
                }
                Some(_) => return Err(io::Error::from(io::ErrorKind::InvalidData)),
                None => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            };
            let last = matches!(piece, SnapshotPart::End { .. });
            // A failed send means that the installer has ended; its result gives the reason.
            if sender.send(piece).await.is_err() || last {
                return Ok(());
            }
        }
    };
    pump.await?;
    let installed = loop {
        tokio::select! {
            installed = &mut install => break installed.map_err(io::Error::other)?,
            _ = tick.tick() => {
                TransferProgress::new(0).run_in_time(write_frame(&mut writer, FrameKind::Ping, &[])).await?;
            }
        }
    };
    let answer = [u8::from(installed.is_ok())];
    let answer = async {
        write_frame(&mut writer, FrameKind::SnapshotAnswer, &answer).await?;
        writer.shutdown().await
    };
    TransferProgress::new(0).run_in_time(answer).await?;
    installed
}

/// Progress of a snapshot transfer. It determines the deadline for the other end's next frame or
/// ping.
struct TransferProgress {
    began: Instant,
    bytes: u64,
}

impl TransferProgress {
    fn new(bytes: u64) -> Self {
        Self { began: Instant::now(), bytes }
    }

    /// Returns the deadline for the other end's next frame or ping, and the error text for a missed
    /// deadline.
    fn limit(&self, now: Instant) -> (Instant, &'static str) {
        let in_all =
            self.began + STEP_TIMEOUT + Duration::from_secs(self.bytes / MIN_BYTES_PER_SECOND);
        let step = now + STEP_TIMEOUT;
        if in_all < step {
            (in_all, "the other end is too slow: less than 128 KiB a second in all")
        } else {
            (step, "the other end has stalled: nothing for 30 seconds")
        }
    }

    async fn run_in_time<T>(&self, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let (until, else_what) = self.limit(Instant::now());
        let late = |_| Err(io::Error::new(io::ErrorKind::TimedOut, else_what));
        timeout_at(until.into(), step).await.unwrap_or_else(late)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_and_the_whole_transfer_have_a_time_limit() {
        let mut pace = TransferProgress::new(0);
        let at = |seconds| pace.began + Duration::from_secs(seconds);
        let (until, what) = pace.limit(at(0));
        assert!(until == at(30) && what.contains("stalled"), "{what}");
        let (until, what) = pace.limit(at(20));
        assert!(
            until == at(30) && what.contains("too slow"),
            "nothing came in the first 20: {what}"
        );
        let (began, gigabyte) = (pace.began, 1 << 30);
        pace.bytes = gigabyte;
        let after = |seconds| began + Duration::from_secs(seconds);
        for (seconds, until, what) in
            [(60, 90, "stalled"), (8192, 8222, "stalled"), (8193, 8222, "too slow")]
        {
            let limit = pace.limit(after(seconds));
            assert!(limit.0 == after(until) && limit.1.contains(what), "{seconds}: {}", limit.1);
        }
    }
}
