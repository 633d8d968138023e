//! One message stream of a peer, opened by either side. The stream's task passes received frames
//! on. While the stream is the carrier, the task also sends everything that is queued for the peer.
//! See [`links`](super::links).

use std::{
    future::pending,
    io,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::{MutexGuard, Notify, mpsc},
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{
    invitations,
    links::Opener,
    peer_handle::{PeerHandle, QueuedFrame},
    registry::Proof,
    request,
    service::TransportState,
    wire::frame::{self, FrameKind, FrameReader},
    wire::stream::Duplex,
};

/// Maximum number of messages taken from the queue for one write.
const BATCH_MESSAGES: usize = 256;
/// Size of a write buffer in bytes above which it is written.
const BATCH_BYTES: usize = 256 * 1024;
/// Time limit for sending the queued messages when the transport stops.
const FINAL_FLUSH_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of a peer's pings that wait for an answer. A peer that sends more pings but reads
/// no answers is disconnected.
const MAX_PINGS: usize = 64;
/// Time after which a warning says that the peer can't connect to this member, if only this member
/// has opened a stream.
pub(super) const ONE_WAY_AFTER: Duration = Duration::from_secs(10);

/// A stream whose hello was accepted.
pub(super) struct OpenStream {
    pub io: Box<dyn Duplex>,
    pub proof: Proof,
    pub opener: Opener,
    /// Whether the build at the accepting end knows two-way streams.
    pub may_be_two_way: bool,
}

/// Reason why a stream has ended.
#[derive(Debug)]
pub(super) enum EndReason {
    /// The peer is no longer a member, or this member stops.
    Cancelled,
    /// This end closed the stream, for the given reason.
    ClosedHere(&'static str),
    /// The other end closed the stream.
    Closed,
    Broken(io::Error),
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cancelled => f.write_str("the peer is no member any more, or this member stops"),
            Self::ClosedHere(why) => f.write_str(why),
            Self::Closed => f.write_str("the peer has closed it"),
            Self::Broken(error) => std::fmt::Display::fmt(error, f),
        }
    }
}

impl From<io::ErrorKind> for EndReason {
    fn from(kind: io::ErrorKind) -> Self {
        Self::Broken(kind.into())
    }
}

/// Runs a message stream until it ends.
pub(super) async fn run(
    shared: &Arc<TransportState>,
    peer: &Arc<PeerHandle>,
    opened: OpenStream,
) -> EndReason {
    let OpenStream { io, proof, opener, may_be_two_way } = opened;
    let Some(registered) = peer.registry.register(proof) else {
        return EndReason::ClosedHere("the peer's record has changed meanwhile");
    };
    let (reader, mut writer) = tokio::io::split(io);
    let number = registered.number();
    let standing =
        peer.add_link(number, opener, proof.run, &registered.cancellation, &*shared.events);
    let link = LinkTask {
        shared,
        peer,
        number,
        opener,
        is_two_way: AtomicBool::new(false),
        pings: AtomicUsize::new(0),
        work: Notify::new(),
    };
    if opener == Opener::Local && may_be_two_way {
        link.make_two_way();
    }
    let ended = tokio::select! {
        biased;
        () = peer.cancellation.cancelled() => EndReason::Cancelled,
        () = registered.cancellation.cancelled() => EndReason::ClosedHere("a newer stream has taken its place, or the peer has not proven what its record binds now"),
        () = shared.wait_until_refused(peer, proof.run) => EndReason::ClosedHere("it is not the member, as was found out since"),
        error = link.write(&mut writer) => EndReason::Broken(error),
        ended = link.read(reader) => ended,
        ended = link.watch_other_direction() => ended,
    };
    if matches!(ended, EndReason::Cancelled) {
        let _ = timeout(FINAL_FLUSH_TIMEOUT, flush_and_close(peer, &mut writer)).await;
    }
    drop(standing);
    // If no other stream can send, the queued messages are dropped. They would be out of date when
    // the next stream opens.
    if peer.connected_since().is_none()
        && let Some(mut queue) = peer.try_take_queue()
    {
        while queue.try_recv().is_ok() {
            shared.counters.dropped_not_connected.fetch_add(1, Relaxed);
            peer.traffic.send_failures.fetch_add(1, Relaxed);
        }
    }
    ended
}

/// Sends the consensus messages in the queue, then closes the stream.
async fn flush_and_close<W: AsyncWrite + Unpin>(
    peer: &PeerHandle,
    writer: &mut W,
) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    if let Some(mut queue) = peer.try_take_queue() {
        while let Ok(message) = queue.try_recv() {
            if message.kind == FrameKind::Message {
                frame::put(&mut buffer, message.kind, message.payload());
            }
        }
    }
    writer.write_all(&buffer).await?;
    writer.shutdown().await
}

struct LinkTask<'a> {
    shared: &'a Arc<TransportState>,
    peer: &'a Arc<PeerHandle>,
    number: u64,
    opener: Opener,
    is_two_way: AtomicBool,
    /// Number of pings from the peer that still need an answer.
    pings: AtomicUsize,
    /// Wakes the writing half when the reading half has received something to answer.
    work: Notify,
}

/// The right to send the frames queued for the peer. At most one stream has it.
struct Carrier<'a> {
    queue: MutexGuard<'a, mpsc::Receiver<QueuedFrame>>,
    batch: Vec<QueuedFrame>,
    /// Promises that were last sent on this stream.
    sent_promises: Vec<u8>,
    sent_member_list: Option<Bytes>,
}

impl<'a> Carrier<'a> {
    fn new(queue: MutexGuard<'a, mpsc::Receiver<QueuedFrame>>) -> Self {
        Self {
            queue,
            batch: Vec::with_capacity(BATCH_MESSAGES),
            sent_promises: Vec::new(),
            sent_member_list: None,
        }
    }
}

/// Waits for the next queued frames, which `carrier` may send. Never returns if `carrier` is
/// `None`.
async fn next_batch(carrier: &mut Option<Carrier<'_>>) {
    match carrier {
        Some(carrier) => {
            carrier.queue.recv_many(&mut carrier.batch, BATCH_MESSAGES).await;
        }
        None => pending().await,
    }
}

impl LinkTask<'_> {
    fn is_two_way(&self) -> bool {
        self.is_two_way.load(SeqCst)
    }

    fn make_two_way(&self) {
        self.is_two_way.store(true, SeqCst);
        self.peer.make_two_way(self.number, &*self.shared.events);
    }

    /// Returns whether this member sends messages on this stream.
    fn sends_messages(&self) -> bool {
        self.opener == Opener::Local || self.is_two_way()
    }

    /// Returns whether this member receives messages on this stream.
    fn receives_messages(&self) -> bool {
        self.opener == Opener::Remote || self.is_two_way()
    }

    async fn write<W: AsyncWrite + Unpin>(&self, writer: &mut W) -> io::Error {
        let mut ping = interval(self.shared.limits.ping_interval);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut buffer = BytesMut::new();
        if self.opener == Opener::Local && self.is_two_way() {
            frame::put(&mut buffer, FrameKind::TwoWay, &[]);
        }
        let turn = self.peer.take_queue();
        tokio::pin!(turn);
        let mut carrier: Option<Carrier<'_>> = None;
        loop {
            let takes = self.sends_messages();
            tokio::select! {
                biased;
                () = self.work.notified() => self.put_pongs(&mut buffer),
                queue = &mut turn, if takes && carrier.is_none() => {
                    self.peer.make_carrier(self.number);
                    carrier = Some(Carrier::new(queue));
                    ping.reset_immediately();
                }
                _ = ping.tick(), if takes => self.put_ping(&mut buffer, carrier.as_mut()),
                () = next_batch(&mut carrier), if carrier.is_some() => {}
            }
            if let Err(error) = self.send(writer, &mut buffer, carrier.as_mut()).await {
                return error;
            }
        }
    }

    fn put_pongs(&self, buffer: &mut BytesMut) {
        for _ in 0..self.pings.swap(0, SeqCst) {
            frame::put(buffer, FrameKind::Pong, &[]);
        }
    }

    /// Appends a ping to `buffer`. If this stream sends the peer's queued frames (`carrier`), also
    /// appends the promises and the list of members, if they have changed.
    fn put_ping(&self, buffer: &mut BytesMut, carrier: Option<&mut Carrier<'_>>) {
        frame::put(buffer, FrameKind::Ping, &[]);
        self.peer.with_liveness(self.number, |liveness| liveness.record_ping(Instant::now()));
        let Some(Carrier { sent_promises: told, sent_member_list: counted, .. }) = carrier else {
            return;
        };
        let report = self.shared.encoded_promises();
        if report != *told {
            frame::put(buffer, FrameKind::Promises, &report);
            *told = report;
        }
        let census = self.shared.events.member_list().filter(|it| it.len() <= request::MAX_BYTES);
        if let Some(census) = census.filter(|it| counted.as_ref() != Some(it)) {
            frame::put(buffer, FrameKind::MemberList, &census);
            *counted = Some(census);
        }
    }

    async fn send<W: AsyncWrite + Unpin>(
        &self,
        writer: &mut W,
        buffer: &mut BytesMut,
        carrier: Option<&mut Carrier<'_>>,
    ) -> io::Result<()> {
        let messages = carrier.into_iter().flat_map(|carrier| carrier.batch.drain(..));
        for message in messages {
            if message.kind == FrameKind::Message {
                self.shared.counters.sent_messages.fetch_add(1, Relaxed);
            } else if !self.is_two_way() {
                // The peer's build doesn't know two-way streams, so it doesn't know this kind of
                // frame either.
                continue;
            }
            frame::put(buffer, message.kind, message.payload());
            drop(message);
            if buffer.len() >= BATCH_BYTES {
                self.flush(writer, buffer).await?;
            }
        }
        self.flush(writer, buffer).await
    }

    async fn flush<W: AsyncWrite + Unpin>(
        &self,
        writer: &mut W,
        buffer: &mut BytesMut,
    ) -> io::Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        writer.write_all(buffer).await?;
        writer.flush().await?;
        let bytes = buffer.len() as u64;
        self.shared.counters.sent_bytes.fetch_add(bytes, Relaxed);
        self.peer.traffic.sent_bytes.fetch_add(bytes, Relaxed);
        buffer.clear();
        if buffer.capacity() > 4 * BATCH_BYTES {
            *buffer = BytesMut::with_capacity(BATCH_BYTES);
        }
        Ok(())
    }

    /// Reads frames until the stream ends. Pings and pongs arrive regularly, so a peer that is
    /// silent for long counts as dead.
    async fn read<R: AsyncRead + Unpin>(&self, reader: R) -> EndReason {
        let longest = if self.receives_messages() { self.shared.limits.frame_bytes } else { 0 };
        let mut frames = FrameReader::new(reader, longest);
        loop {
            match timeout(self.shared.limits.dead_after, frames.next()).await {
                Ok(Ok(Some((kind, payload)))) => {
                    if let Err(error) = self.handle_frame(kind, payload) {
                        return EndReason::Broken(error);
                    }
                }
                Ok(Ok(None)) => return EndReason::Closed,
                Ok(Err(error)) => return EndReason::Broken(error),
                Err(_) => return io::ErrorKind::TimedOut.into(),
            }
        }
    }

    fn handle_frame(&self, kind: FrameKind, payload: Bytes) -> io::Result<()> {
        let (brings, takes) = (self.receives_messages(), self.sends_messages());
        match kind {
            FrameKind::Ping if brings => {
                if self.pings.fetch_add(1, SeqCst) >= MAX_PINGS {
                    return Err(io::Error::other("the peer sends pings and reads no answers"));
                }
                self.work.notify_one();
            }
            FrameKind::Pong if takes => self.handle_pong(),
            FrameKind::TwoWay if self.opener == Opener::Remote => {
                self.make_two_way();
                self.work.notify_one();
            }
            FrameKind::Message if brings => self.handle_message(payload),
            FrameKind::Promises if brings => self.shared.merge_report(&payload)?,
            FrameKind::MemberList if brings && payload.len() <= request::MAX_BYTES => {
                self.shared.events.member_list_received(self.peer.id, payload);
            }
            FrameKind::Invite if self.is_two_way() => {
                invitations::follow_invitation(self.shared, self.peer, &payload)?
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        Ok(())
    }

    fn handle_pong(&self) {
        let now = Instant::now();
        let took =
            self.peer.with_liveness(self.number, |liveness| liveness.record_pong(now)).flatten();
        took.iter().for_each(|took| self.peer.traffic.round_trips.record(*took));
    }

    fn handle_message(&self, message: Bytes) {
        let (shared, peer, bytes) = (self.shared, self.peer, message.len() as u64);
        peer.receive_on(self.number);
        shared.counters.received_messages.fetch_add(1, Relaxed);
        shared.counters.received_bytes.fetch_add(bytes, Relaxed);
        peer.traffic.received_bytes.fetch_add(bytes, Relaxed);
        if !shared.events.receive_message(peer.id, message) {
            shared.counters.dropped_inbound.fetch_add(1, Relaxed);
            peer.traffic.receive_failures.fetch_add(1, Relaxed);
        }
    }

    /// Logs a warning if the peer has opened no stream to this member within [`ONE_WAY_AFTER`].
    /// Never returns.
    async fn watch_other_direction(&self) -> EndReason {
        sleep(ONE_WAY_AFTER).await;
        if self.opener == Opener::Local && !self.peer.has_link(Opener::Remote) {
            let two_way = self.is_two_way();
            tracing::warn!(
                peer.member.id = %self.peer.id,
                direction = "inbound",
                two_way,
                "the peer has not connected to this member: check that it reaches this member's peer URLs; messages of both go over this member's connection if it is a two-way one"
            );
        }
        pending().await
    }
}
