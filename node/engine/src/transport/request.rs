//! One request of a member to another, and its answer, on a stream of its own.

use std::{io, sync::Arc};

use bytes::Bytes;
use tokio::{
    io::{AsyncRead, AsyncWriteExt},
    time::timeout,
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

/// Maximum size of a request or an answer. The largest content is a list of members.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// Sends a request to `peer`, and returns its answer.
pub(super) async fn ask(
    shared: Arc<TransportState>,
    peer: Arc<PeerHandle>,
    request: Bytes,
) -> io::Result<Bytes> {
    let asked = async {
        let mut stream = invitations::open(&shared, &peer, StreamPurpose::Request).await?;
        write_frame(&mut stream.io, FrameKind::Request, &request).await?;
        read(stream.io, FrameKind::Answer).await
    };
    tokio::select! {
        () = shared.stopping.cancelled() => Err(io::ErrorKind::ConnectionAborted.into()),
        asked = asked => asked,
    }
}

/// Reads the only frame that the other end sends. Any other kind than `kind` is an error.
pub(super) async fn read<R: AsyncRead + Unpin>(io: R, kind: FrameKind) -> io::Result<Bytes> {
    match FrameReader::new(io, MAX_BYTES).next().await? {
        Some((found, payload)) if found == kind => Ok(payload),
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Answers one request, on the stream that `peer` has opened for it.
pub(super) async fn answer(
    shared: &TransportState,
    peer: &PeerHandle,
    io: Box<dyn Duplex>,
) -> io::Result<()> {
    let Ok(_permit) = peer.requests.try_acquire() else {
        return Err(io::Error::other(SendError::Full));
    };
    let step = shared.limits.dead_after;
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let (reader, mut writer) = tokio::io::split(io);
    let request = timeout(step, read(reader, FrameKind::Request)).await.map_err(late)??;
    let Some(answer) = shared.events.request(peer.id, request).await else {
        return Err(io::Error::other("the request can't be answered"));
    };
    let told = async {
        write_frame(&mut writer, FrameKind::Answer, &answer).await?;
        writer.shutdown().await
    };
    timeout(step, told).await.map_err(late)?
}
