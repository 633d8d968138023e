//! The task that opens streams to one peer.

use std::{
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use backon::{BackoffBuilder, ExponentialBuilder};
use node_state::membership::PeerUrl;
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{
    StreamRefusal,
    link::{self, OpenStream},
    links::Opener,
    peer_handle::PeerHandle,
    service::TransportState,
    wire::hello::{Hello, StreamPurpose},
    wire::stream::{self, PeerStream},
};

/// Minimum life of a lasting stream. If a lasting stream is lost, the peer is dialled again at
/// once, which shows whether the peer's process has ended. After a stream that was lost sooner, the
/// peer is dialled again after the minimum delay, which doubles with each such stream in a row.
const LASTING_STREAM: Duration = Duration::from_secs(1);
/// Time limit for finding out whether a peer's other URLs refuse connections too.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(200);

/// Reason why a peer could not be dialled.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("no answer in time")]
    Timeout,
    #[error("the peer refused this member: {0}")]
    RefusedBy(StreamRefusal),
    #[error("refused the peer: {0}")]
    Refused(StreamRefusal),
}

impl DialError {
    /// Returns whether the peer's host refused the connection, because no process listens.
    fn is_refused_connection(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    }
}

/// Returns whether all `urls` except `refused` refuse connections. If a URL doesn't answer in time,
/// a process may still listen there, so the result is false.
async fn others_refuse(urls: &[PeerUrl], refused: &PeerUrl) -> bool {
    for url in urls.iter().filter(|url| *url != refused) {
        let connecting = TcpStream::connect((url.host(), url.port()));
        match timeout(REFUSAL_TIMEOUT, connecting).await {
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            _ => return false,
        }
    }
    true
}

/// Keeps a message stream to `peer` open until the peer is no longer a member.
pub(super) async fn run(shared: Arc<TransportState>, peer: Arc<PeerHandle>) {
    let policy = ExponentialBuilder::default()
        .with_min_delay(shared.limits.redial.0)
        .with_max_delay(shared.limits.redial.1)
        .with_jitter()
        .without_max_times();
    let mut delays_after_failures = policy.build();
    // A peer may accept streams and end each of them at once. So the delay grows with each short
    // stream in a row, too.
    let mut delays_after_short_streams = policy.build();
    for attempt in 0.. {
        let urls = shared.address_hints.candidates(&peer.registry.record()).await;
        let Some(url) = urls.get(attempt % urls.len().max(1)) else {
            tokio::select! {
                () = peer.cancellation.cancelled() => return,
                () = peer.updated.notified() => continue,
            }
        };
        let dialled = tokio::select! {
            () = peer.cancellation.cancelled() => return,
            () = peer.updated.notified() => continue,
            dialled = open(&shared, &peer, url) => dialled,
        };
        let delay = match dialled {
            Ok(opened) => {
                peer.has_refused_for_good.store(false, Relaxed);
                delays_after_failures = policy.build();
                let two_way = opened.may_be_two_way;
                tracing::info!(peer.member.id = %peer.id, two_way, "established a stream to a peer");
                let opened_at = Instant::now();
                let ended = link::run(&shared, &peer, opened).await;
                if peer.cancellation.is_cancelled() {
                    return;
                }
                tracing::warn!(peer.member.id = %peer.id, url = %url, error = %ended, "lost the stream to a peer");
                if opened_at.elapsed() >= LASTING_STREAM {
                    delays_after_short_streams = policy.build();
                    continue;
                }
                delays_after_short_streams.next()
            }
            Err(error) => {
                log_dial_failure(&peer, url, &error);
                if error.is_refused_connection() && others_refuse(&urls, url).await {
                    peer.connections_refused(&*shared.events);
                }
                match error {
                    DialError::RefusedBy(StreamRefusal::Removed) => {
                        shared.handle_removal_report(&peer);
                    }
                    DialError::RefusedBy(why) if why.is_permanent() => {
                        shared.handle_permanent_refusal(&peer, why);
                    }
                    _ => {}
                }
                delays_after_failures.next()
            }
        };
        let delay = delay.unwrap_or(shared.limits.redial.1);
        tokio::select! {
            () = peer.cancellation.cancelled() => return,
            () = peer.wake.notified() => {}
            () = peer.updated.notified() => {}
            () = sleep(delay) => {}
        }
    }
}

/// Opens a message stream to `peer` at `url`.
async fn open(
    shared: &TransportState,
    peer: &PeerHandle,
    url: &PeerUrl,
) -> Result<OpenStream, DialError> {
    let (stream, theirs) = connect(shared, peer, url, StreamPurpose::Messages).await?;
    Ok(OpenStream {
        proof: theirs.proof(stream.key),
        io: stream.io,
        opener: Opener::Local,
        may_be_two_way: theirs.offers_two_way(),
    })
}

/// Logs that this member can't connect to the peer, unless it has logged this before. The line says
/// whether the peer's own connection replaces the missing one.
fn log_dial_failure(peer: &PeerHandle, url: &PeerUrl, error: &DialError) {
    let text = error.to_string();
    let (inbound, connected) = (peer.has_link(Opener::Remote), peer.connected_since().is_some());
    if !peer.dial_failed(&text) {
        return;
    }
    let id = peer.id;
    if connected {
        tracing::warn!(peer.member.id = %id, url = %url, direction = "outbound", error = %text, "cannot connect to a peer: check that this member reaches the peer's URLs; messages of both go over the connection that the peer has opened");
    } else {
        tracing::warn!(peer.member.id = %id, url = %url, direction = "outbound", inbound, error = %text, "cannot reach a peer yet");
    }
}

/// Tries the peer's URLs in turn. Returns the first connection that succeeds.
pub(super) async fn connect_any(
    shared: &TransportState,
    peer: &PeerHandle,
    purpose: StreamPurpose,
) -> io::Result<PeerStream> {
    let mut stream = Err(io::ErrorKind::NotConnected.into());
    for url in &shared.address_hints.candidates(&peer.registry.record()).await {
        let connected = connect(shared, peer, url, purpose).await;
        stream = connected.map(|(stream, _)| stream).map_err(io::Error::other);
        if stream.is_ok() {
            break;
        }
    }
    stream
}

/// Connects and exchanges hellos within the handshake's time limit. Returns the stream and the
/// peer's hello.
pub(super) async fn connect(
    shared: &TransportState,
    peer: &PeerHandle,
    url: &PeerUrl,
    purpose: StreamPurpose,
) -> Result<(PeerStream, Hello), DialError> {
    let handshake = async {
        let bound = peer.registry.record().node_key;
        let mut stream = stream::dial(url, shared.tls.as_ref(), bound).await?;
        let ours = Hello::new(&shared.local, peer.id, purpose);
        stream.io.write_all(&ours.encode()).await?;
        stream.io.flush().await?;
        let theirs = Hello::read(&mut stream.io).await?.map_err(DialError::Refused)?;
        if theirs.from != peer.id && theirs.answer.is_none() {
            return Err(refuse_peer(shared, StreamRefusal::Sender, &theirs, url));
        }
        // A refusal is accepted only from the dialled member itself. So the hello that refuses must
        // prove its sender, like any other hello.
        match (shared.admit(&theirs, stream.key, Opener::Local).await, theirs.answer) {
            (Ok(_), None) => Ok((stream, theirs)),
            (_, Some(answer @ (StreamRefusal::Cluster | StreamRefusal::Receiver))) => {
                Err(DialError::RefusedBy(answer))
            }
            (Ok(_), Some(answer)) => Err(DialError::RefusedBy(answer)),
            (Err(refusal), _) => Err(refuse_peer(shared, refusal, &theirs, url)),
        }
    };
    timeout(shared.limits.handshake_timeout, handshake).await.unwrap_or(Err(DialError::Timeout))
}

fn refuse_peer(
    shared: &TransportState,
    refusal: StreamRefusal,
    theirs: &Hello,
    url: &PeerUrl,
) -> DialError {
    shared.refuse(refusal, theirs, &url.to_string());
    DialError::Refused(refusal)
}
