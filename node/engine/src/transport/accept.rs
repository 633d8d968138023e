//! Accepts inbound connections, performs their handshakes, and passes each stream on by its
//! purpose.

use std::{
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use muster_shares::admission::{
    AdmissionControl, AdmissionError, AdmissionLimits, PendingConnection,
};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::sleep,
};

use super::{
    StreamRefusal, invitations,
    link::{self, EndReason, OpenStream},
    links::Opener,
    peer_handle::PeerHandle,
    registry::Proof,
    request,
    service::TransportState,
    snapshot,
    wire::frame::{FrameKind, put},
    wire::hello::{Hello, StreamPurpose},
    wire::stream::{self, PeerStream},
};

/// Pause after the listener failed to accept. The most frequent cause is too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Accepts on `listener` until the transport stops.
pub(super) async fn run(shared: Arc<TransportState>, listener: std::net::TcpListener, tls: bool) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "cannot listen for peers");
            return;
        }
    };
    let limits = &shared.limits;
    let door = AdmissionControl::new(AdmissionLimits {
        silent: limits.waiting_connections,
        handshakes: limits.handshakes,
        max_handshakes_per_network: limits.handshakes.div_ceil(4),
        step_timeout: limits.handshake_timeout,
    });
    loop {
        let accepted = tokio::select! {
            () = shared.stopping.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((tcp, remote)) => match door.register(remote.ip()) {
                Some(pending) => {
                    let task = serve(Arc::clone(&shared), tcp, tls, remote.to_string(), pending);
                    shared.tasks.spawn(task);
                }
                None => {
                    shared.counters.handshakes_over_limit.fetch_add(1, Relaxed);
                }
            },
            Err(error) => {
                tracing::warn!(%error, "cannot accept a peer's connection");
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn serve(
    shared: Arc<TransportState>,
    tcp: TcpStream,
    tls: bool,
    remote: String,
    pending: PendingConnection,
) {
    let handshake = async |tcp| admit(&shared, tcp, tls, &remote).await;
    let admitted = tokio::select! {
        () = shared.stopping.cancelled() => return,
        admitted = pending.admit(tcp, handshake) => admitted,
    };
    let (stream, peer, purpose, proof) = match admitted {
        Ok(Some(admitted)) => admitted,
        Ok(None) => return,
        Err(AdmissionError::Evicted) => {
            shared.counters.handshakes_over_limit.fetch_add(1, Relaxed);
            return;
        }
        Err(error) => return shared.handshake_failed(&error, &remote),
    };
    peer.wake.notify_one();
    let ended = match purpose {
        StreamPurpose::Messages => {
            let (io, opener) = (stream.io, Opener::Remote);
            let opened = OpenStream { io, proof, opener, may_be_two_way: true };
            match link::run(&shared, &peer, opened).await {
                EndReason::Broken(error) => Err(error),
                EndReason::Cancelled | EndReason::ClosedHere(_) | EndReason::Closed => Ok(()),
            }
        }
        StreamPurpose::Snapshot => {
            let receiving = snapshot::receive(&shared, &peer, stream.io);
            run_while_registered(&peer, proof, receiving).await
        }
        // The answer is sent even if the peer is removed meanwhile, because the request may be the
        // one that removes it.
        StreamPurpose::Request => tokio::select! {
            () = shared.stopping.cancelled() => Ok(()),
            ended = request::answer(&shared, &peer, stream.io) => ended,
        },
        StreamPurpose::State => {
            let sending = snapshot::serve(&shared, &peer, stream.io);
            run_while_registered(&peer, proof, sending).await
        }
        StreamPurpose::Members => Ok(()),
        StreamPurpose::TakeSnapshot | StreamPurpose::TakeRequest => tokio::select! {
            () = peer.cancellation.cancelled() => Ok(()),
            ended = invitations::accept_invited_stream(&shared, &peer, purpose, stream) => ended,
        },
    };
    if let Err(error) = ended {
        tracing::warn!(peer.member.id = %peer.id, remote, %error, "a peer's stream broke");
    }
}

/// Runs `work` on a stream. Stops `work` once the process at the other end no longer fits the
/// peer's record.
async fn run_while_registered(
    peer: &PeerHandle,
    proof: Proof,
    work: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let Some(registered) = peer.registry.register(proof) else { return Ok(()) };
    tokio::select! {
        () = registered.cancellation.cancelled() => Ok(()),
        ended = work => ended,
    }
}

/// Performs TLS and exchanges hellos. Returns `None` if the connection needs nothing more: it was
/// refused, or got the list of members.
async fn admit(
    shared: &TransportState,
    tcp: TcpStream,
    tls: bool,
    remote: &str,
) -> io::Result<Option<(PeerStream, Arc<PeerHandle>, StreamPurpose, Proof)>> {
    let tls = if tls { shared.tls.as_ref() } else { None };
    let mut stream = stream::accept(tcp, tls).await?;
    let theirs = Hello::read(&mut stream.io).await?.map_err(|refusal| {
        shared.counters.refuse(refusal);
        io::Error::new(io::ErrorKind::InvalidData, refusal)
    })?;
    if theirs.purpose == StreamPurpose::Members && theirs.answer.is_none() {
        send_member_list(shared, stream, &theirs).await?;
        return Ok(None);
    }
    let admitted = if theirs.answer.is_some() {
        Err(StreamRefusal::Protocol)
    } else {
        shared.admit(&theirs, stream.key, Opener::Remote).await
    };
    let mut ours = Hello::new(&shared.local, theirs.from, theirs.purpose.in_answer());
    ours.answer = admitted.as_ref().err().copied();
    stream.io.write_all(&ours.encode()).await?;
    stream.io.flush().await?;
    match admitted {
        Ok(peer) => {
            let proof = theirs.proof(stream.key);
            Ok(Some((stream, peer, theirs.purpose, proof)))
        }
        Err(refusal) => {
            shared.refuse(refusal, &theirs, remote);
            let _ = stream.io.shutdown().await;
            Ok(None)
        }
    }
}

/// Sends the list of members, whoever the sender of the hello is. On a TLS listener, the TLS
/// handshake has succeeded before. A joining member needs the list before it knows its own id.
async fn send_member_list(
    shared: &TransportState,
    mut stream: PeerStream,
    theirs: &Hello,
) -> io::Result<()> {
    let ours = Hello::new(&shared.local, theirs.from, theirs.purpose);
    stream.io.write_all(&ours.encode()).await?;
    if let Some(members) = shared.events.member_list() {
        write_frame(&mut stream.io, FrameKind::Answer, &members).await?;
    }
    stream.io.shutdown().await
}

pub(super) async fn write_frame<W: AsyncWrite + Unpin>(
    writer: &mut W,
    kind: FrameKind,
    payload: &[u8],
) -> io::Result<()> {
    let mut buffer = bytes::BytesMut::new();
    put(&mut buffer, kind, payload);
    writer.write_all(&buffer).await?;
    writer.flush().await
}
