//! The task that keeps one peer connected and sends to it.

use std::{
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use backon::{BackoffBuilder, ExponentialBuilder};
use bytes::BytesMut;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::mpsc,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{
    Refusal,
    frame::{self, FrameReader, Kind},
    hello::{Hello, Purpose},
    peer::{PeerHandle, Queued, Vitals},
    registry::Proof,
    request,
    service::Shared,
    stream::{self, PeerStream},
};
use crate::config::PeerUrl;

/// Messages taken from the queue for one write.
const BATCH_MESSAGES: usize = 256;
/// A batch is written once it is this long.
const BATCH_BYTES: usize = 256 * 1024;
/// What is queued at the stop may take this long to leave.
const FAREWELL: Duration = Duration::from_millis(500);

/// Why a peer could not be dialled.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("no answer in time")]
    Timeout,
    #[error("the peer refused this member: {0}")]
    RefusedBy(Refusal),
    #[error("refused the peer: {0}")]
    Refused(Refusal),
}

/// Dials `peer` for as long as it is one; sends what comes out of `queue`.
pub(super) async fn run(
    shared: Arc<Shared>,
    peer: Arc<PeerHandle>,
    mut queue: mpsc::Receiver<Queued>,
) {
    let policy = ExponentialBuilder::default()
        .with_min_delay(shared.limits.redial.0)
        .with_max_delay(shared.limits.redial.1)
        .with_jitter()
        .without_max_times();
    let mut delays = policy.build();
    let mut last_error = String::new();
    for attempt in 0.. {
        let record = peer.registry.record();
        let Some(url) = record.urls.get(attempt % record.urls.len().max(1)) else {
            tokio::select! {
                () = peer.gone.cancelled() => return,
                () = peer.updated.notified() => continue,
            }
        };
        let dialled = tokio::select! {
            () = peer.gone.cancelled() => return,
            () = peer.updated.notified() => continue,
            dialled = connect(&shared, &peer, url, Purpose::Messages) => dialled,
        };
        match dialled {
            Ok(stream) => {
                peer.disowns.store(false, Relaxed);
                delays = policy.build();
                last_error.clear();
                let end = serve(&shared, &peer, stream, &mut queue).await;
                if peer.gone.is_cancelled() {
                    return;
                }
                tracing::warn!(peer.member.id = %peer.id, url = %url, error = %end, "lost the stream to a peer");
            }
            Err(error) => {
                let text = error.to_string();
                if text != last_error {
                    tracing::warn!(peer.member.id = %peer.id, url = %url, error = %text, "cannot reach a peer yet");
                    last_error = text;
                }
                match error {
                    DialError::RefusedBy(Refusal::Removed) => {
                        shared.removed(&peer);
                    }
                    DialError::RefusedBy(why) if why.is_for_good() => {
                        shared.disowned(&peer, why);
                    }
                    _ => {}
                }
            }
        }
        let delay = delays.next().unwrap_or(shared.limits.redial.1);
        tokio::select! {
            () = peer.gone.cancelled() => return,
            () = peer.wake.notified() => {}
            () = peer.updated.notified() => {}
            () = sleep(delay) => {}
        }
    }
}

/// Connects to any of the peer's URLs.
pub(super) async fn connect_any(
    shared: &Shared,
    peer: &PeerHandle,
    purpose: Purpose,
) -> io::Result<(PeerStream, Proof)> {
    let mut stream = Err(io::ErrorKind::NotConnected.into());
    for url in &peer.registry.record().urls {
        stream = connect(shared, peer, url, purpose).await.map_err(io::Error::other);
        if stream.is_ok() {
            break;
        }
    }
    stream
}

/// Connects, and exchanges hellos, within the handshake's time.
pub(super) async fn connect(
    shared: &Shared,
    peer: &PeerHandle,
    url: &PeerUrl,
    purpose: Purpose,
) -> Result<(PeerStream, Proof), DialError> {
    let handshake = async {
        let bound = peer.registry.record().node_key;
        let mut stream = stream::dial(url, shared.tls.as_ref(), bound).await?;
        let ours = Hello::new(&shared.local, peer.id, purpose);
        stream.io.write_all(&ours.encode()).await?;
        stream.io.flush().await?;
        let theirs = Hello::read(&mut stream.io).await?.map_err(DialError::Refused)?;
        if theirs.from != peer.id && theirs.answer.is_none() {
            return Err(refused(shared, Refusal::Sender, &theirs, url));
        }
        // A refusal counts only from the member that was dialled, proven as in any other hello.
        match (shared.admit(&theirs, stream.key).await, theirs.answer) {
            (Ok(_), None) => {
                let proof = theirs.proof(stream.key);
                Ok((stream, proof))
            }
            (_, Some(answer @ (Refusal::Cluster | Refusal::Receiver))) => {
                Err(DialError::RefusedBy(answer))
            }
            (Ok(_), Some(answer)) => Err(DialError::RefusedBy(answer)),
            (Err(refusal), _) => Err(refused(shared, refusal, &theirs, url)),
        }
    };
    timeout(shared.limits.handshake_timeout, handshake).await.unwrap_or(Err(DialError::Timeout))
}

fn refused(shared: &Shared, refusal: Refusal, theirs: &Hello, url: &PeerUrl) -> DialError {
    shared.refuse(refusal, theirs, &url.to_string());
    DialError::Refused(refusal)
}

/// Sends until the stream breaks or the peer is gone; returns why it ended.
async fn serve(
    shared: &Shared,
    peer: &PeerHandle,
    (stream, proof): (PeerStream, Proof),
    queue: &mut mpsc::Receiver<Queued>,
) -> io::Error {
    let id = peer.id;
    let Some(registered) = peer.registry.enter(proof) else {
        return io::Error::other("its record has changed meanwhile");
    };
    let (reader, mut writer) = tokio::io::split(stream.io);
    tracing::info!(peer.member.id = %id, "established a stream to a peer");
    peer.set_vitals(Some(Vitals::of(proof.run)));
    peer.set_outbound(Some(Instant::now()), &*shared.events);
    let end = tokio::select! {
        biased;
        () = peer.gone.cancelled() => None,
        () = registered.ends.cancelled() => Some(io::Error::other("it has not proven what its record binds now")),
        () = shared.found_out(peer, proof.run) => Some(io::Error::other("it is not the member, as was found out since")),
        end = write(shared, peer, &mut writer, queue) => Some(end),
        end = read_pongs(shared, peer, reader) => Some(end),
    };
    peer.set_outbound(None, &*shared.events);
    peer.set_vitals(None);
    peer.traffic.disconnects.fetch_add(1, Relaxed);
    if end.is_none() {
        let _ = timeout(FAREWELL, farewell(&mut writer, queue)).await;
    }
    // What waited for this stream is out of date by the time there is another.
    while queue.try_recv().is_ok() {
        shared.counters.dropped_away.fetch_add(1, Relaxed);
        peer.traffic.send_failures.fetch_add(1, Relaxed);
    }
    end.unwrap_or_else(|| io::ErrorKind::Interrupted.into())
}

async fn write<W: AsyncWrite + Unpin>(
    shared: &Shared,
    peer: &PeerHandle,
    writer: &mut W,
    queue: &mut mpsc::Receiver<Queued>,
) -> io::Error {
    let mut ping = interval(shared.limits.ping_interval);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut batch = Vec::with_capacity(BATCH_MESSAGES);
    let mut buffer = BytesMut::with_capacity(BATCH_BYTES);
    let mut told = Vec::new();
    let mut counted = None;
    loop {
        let received = tokio::select! {
            received = queue.recv_many(&mut batch, BATCH_MESSAGES) => received,
            _ = ping.tick() => {
                frame::put(&mut buffer, Kind::Ping, &[]);
                peer.with_vitals(|vitals| vitals.asks(Instant::now()));
                let report = shared.report();
                if report != told {
                    frame::put(&mut buffer, Kind::Promises, &report);
                    told = report;
                }
                let census = shared.events.census().filter(|it| it.len() <= request::MAX_BYTES);
                if let Some(census) = census.filter(|it| counted.as_ref() != Some(it)) {
                    frame::put(&mut buffer, Kind::Census, &census);
                    counted = Some(census);
                }
                0
            }
        };
        for message in batch.drain(..) {
            frame::put(&mut buffer, Kind::Message, message.payload());
            if buffer.len() >= BATCH_BYTES
                && let Err(error) = flush(shared, peer, writer, &mut buffer).await
            {
                return error;
            }
        }
        shared.counters.sent_messages.fetch_add(received as u64, Relaxed);
        if let Err(error) = flush(shared, peer, writer, &mut buffer).await {
            return error;
        }
    }
}

async fn flush<W: AsyncWrite + Unpin>(
    shared: &Shared,
    peer: &PeerHandle,
    writer: &mut W,
    buffer: &mut BytesMut,
) -> io::Result<()> {
    writer.write_all(buffer).await?;
    writer.flush().await?;
    shared.counters.sent_bytes.fetch_add(buffer.len() as u64, Relaxed);
    peer.traffic.sent_bytes.fetch_add(buffer.len() as u64, Relaxed);
    buffer.clear();
    if buffer.capacity() > 4 * BATCH_BYTES {
        *buffer = BytesMut::with_capacity(BATCH_BYTES);
    }
    Ok(())
}

async fn farewell<W: AsyncWrite + Unpin>(
    writer: &mut W,
    queue: &mut mpsc::Receiver<Queued>,
) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    while let Ok(message) = queue.try_recv() {
        frame::put(&mut buffer, Kind::Message, message.payload());
    }
    writer.write_all(&buffer).await?;
    writer.shutdown().await
}

/// The peer sends nothing on this stream but pongs; a silence means that it is dead.
async fn read_pongs<R: AsyncRead + Unpin>(
    shared: &Shared,
    peer: &PeerHandle,
    reader: R,
) -> io::Error {
    let mut frames = FrameReader::new(reader, 0);
    loop {
        match timeout(shared.limits.dead_after, frames.next()).await {
            Ok(Ok(Some((Kind::Pong, _)))) => {
                let took = peer.with_vitals(|vitals| vitals.answers(Instant::now())).flatten();
                took.iter().for_each(|took| peer.traffic.round_trips.record(*took));
            }
            Ok(Ok(Some(_))) => return io::ErrorKind::InvalidData.into(),
            Ok(Ok(None)) => return io::ErrorKind::ConnectionReset.into(),
            Ok(Err(error)) => return error,
            Err(_) => return io::ErrorKind::TimedOut.into(),
        }
    }
}
