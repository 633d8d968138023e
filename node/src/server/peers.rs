//! Connection between driver and peer streams. It converts messages to bytes and back, and
//! snapshots to files and back.
//!
//! A peer is authenticated, but it may be faulty. Nothing that it sends may stop other members. So
//! a proposal that can't be decoded, or a snapshot that can't be installed, is dropped here.

use std::{
    io::{self, BufReader, Read, Seek, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use muster_files::data;
use node_consensus::Entry;
use node_proto::command::{self, Operation};
use node_proto::musterpb;
use prost::Message as _;
use tokio::sync::watch;

use node_api::rpc::{ApiContext, answer_member};
use node_engine::{
    causes::error_chain,
    driver::{
        IncomingSnapshot, MAX_PROPOSAL_BYTES, Message, MessageKind, OutgoingSnapshot, PeerInbox,
        PeerSender, SendError,
    },
    transport::{
        self, PeerEvents, RequiredDurability, SnapshotReader, SnapshotWriter, StreamRefusal,
        Transport, WitnessFile,
    },
    witness::Promise,
};
use node_state::{
    apply::{check_delete, check_put, check_txn, entry_kind},
    identity::MemberId,
    membership::{Census, Censuses, Member},
    mvcc,
};

/// Maximum length of a snapshot: four times the largest store that etcd recommends.
const MAX_SNAPSHOT_BYTES: u64 = 32 << 30;
/// Bytes that a received snapshot must leave free on the disk, for the log.
const KEEP_FREE_BYTES: u64 = 256 << 20;
/// Number of received bytes between two checks of the free space.
const SPACE_CHECK_INTERVAL_BYTES: u64 = 64 << 20;

/// Sender for the driver. The transport can only start after the driver, so the sender is connected
/// to the transport later. Until then every peer counts as unreachable.
#[derive(Default)]
pub(super) struct PeerMessageSender {
    link: OnceLock<(Transport, PeerInbox)>,
}

impl PeerMessageSender {
    /// Connects the driver to the started transport.
    pub(super) fn connect(&self, transport: Transport, inbox: PeerInbox) {
        // `set` can't fail: `connect` is called once, by the code that starts driver and transport.
        let _ = self.link.set((transport, inbox));
    }
}

impl PeerSender for PeerMessageSender {
    fn try_send(&self, message: Message) -> Result<(), SendError> {
        let (transport, _) = self.link.get().ok_or(SendError::NotConnected)?;
        let mut bytes = BytesMut::with_capacity(message.cost());
        message.encode(&mut bytes);
        match transport.send(MemberId(message.to), bytes.freeze()) {
            Ok(()) => Ok(()),
            Err(transport::SendError::Full | transport::SendError::TooLong) => Err(SendError::Full),
            Err(transport::SendError::Unknown | transport::SendError::NotConnected) => {
                Err(SendError::NotConnected)
            }
        }
    }

    fn send_snapshot(&self, snapshot: OutgoingSnapshot) {
        // If the transport isn't connected yet, no peer can need the snapshot.
        let Some((transport, inbox)) = self.link.get().cloned() else {
            return;
        };
        let peer = snapshot.message.to;
        let reporter = inbox.clone();
        let sending = move || {
            let (bytes, started) = (snapshot.bytes, Instant::now());
            tracing::info!(peer.member.id = %MemberId(peer), bytes, "sending a snapshot");
            let result = send(&transport, snapshot);
            let duration_ms = millis(started);
            match &result {
                Ok(()) => {
                    tracing::info!(peer.member.id = %MemberId(peer), bytes, duration_ms, "the peer has installed the snapshot")
                }
                Err(error) => {
                    tracing::warn!(peer.member.id = %MemberId(peer), %error, duration_ms, "cannot send a snapshot")
                }
            }
            inbox.snapshot_sent(peer, result.is_ok());
        };
        let spawned = std::thread::Builder::new().name("snapshot-out".to_owned()).spawn(sending);
        if let Err(error) = spawned {
            tracing::warn!(peer.member.id = %MemberId(peer), %error, "cannot send a snapshot");
            reporter.snapshot_sent(peer, false);
        }
    }
}

fn send(transport: &Transport, snapshot: OutgoingSnapshot) -> io::Result<()> {
    let OutgoingSnapshot { message, mut body, bytes } = snapshot;
    let mut header = BytesMut::with_capacity(message.cost());
    message.encode(&mut header);
    let mut writer: SnapshotWriter =
        transport.open_snapshot(MemberId(message.to), header.freeze()).map_err(io::Error::other)?;
    body.rewind()?;
    let copied = io::copy(&mut body, &mut writer)?;
    if copied != bytes {
        return Err(io::Error::other("the snapshot's file has another length than it should"));
    }
    writer.finish()
}

impl PeerReports {
    /// Makes the channels for peers' reports about members. Returns the sending half and the two
    /// receivers.
    pub(super) fn channels()
    -> (Self, watch::Receiver<Option<PermanentRefusal>>, watch::Receiver<Censuses>) {
        let (verdict, concluded) = watch::channel(None);
        let (censuses, counted) = watch::channel(Censuses::default());
        (Self { refusal: verdict, censuses }, concluded, counted)
    }
}

/// Receiver of everything that peers send to the driver.
pub(super) struct PeerMessageReceiver {
    inbox: PeerInbox,
    snapshot_dir: PathBuf,
    snapshots: AtomicU64,
    undecodable: AtomicU64,
    reports: PeerReports,
    /// API context with which other members' requests are answered; empty until the services have
    /// started.
    context: OnceLock<Weak<ApiContext>>,
    marks: Arc<WitnessFile>,
    /// This member's peer URLs, from its own flags.
    own_urls: Vec<String>,
}

/// Channels for peers' reports about members.
pub(super) struct PeerReports {
    /// First report by a peer that this member is refused for good.
    pub refusal: watch::Sender<Option<PermanentRefusal>>,
    /// Member lists that peers have sent.
    pub censuses: watch::Sender<Censuses>,
}

/// Reason why peers will never accept this member again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PermanentRefusal {
    /// The peer with this ID reports that this member was removed.
    Removed(MemberId),
    /// This data directory is not the one that belongs to the member.
    Disowned(StreamRefusal),
}

impl PeerMessageReceiver {
    /// Makes the receiver. Incoming snapshots are written to `snapshot_dir`.
    #[must_use]
    pub(super) fn new(
        inbox: PeerInbox,
        snapshot_dir: PathBuf,
        told: PeerReports,
        marks: Arc<WitnessFile>,
        own_urls: Vec<String>,
    ) -> Arc<Self> {
        Arc::new(Self {
            inbox,
            snapshot_dir,
            snapshots: AtomicU64::new(0),
            undecodable: AtomicU64::new(0),
            reports: told,
            context: OnceLock::new(),
            marks,
            own_urls,
        })
    }

    /// Sets the API context with which other members' requests are answered from now on.
    pub(super) fn set_context(&self, context: &Arc<ApiContext>) {
        // `set` can't fail: this is called once, by the code that made the receiver and the
        // context.
        let _ = self.context.set(Arc::downgrade(context));
    }

    fn context(&self) -> Option<Arc<ApiContext>> {
        self.context.get()?.upgrade()
    }

    /// Publishes a peer's final refusal of this member, unless one was published before.
    fn report_refusal(&self, verdict: PermanentRefusal) {
        let verdicts = &self.reports.refusal;
        verdicts.send_if_modified(|known| known.is_none() && known.replace(verdict).is_none());
    }

    fn decode(&self, from: MemberId, bytes: Bytes) -> Option<Message> {
        match Message::decode(bytes) {
            Ok(message) => Some(message),
            Err(error) => {
                self.log_malformed(from, &error);
                None
            }
        }
    }

    /// Logs a peer's malformed message. Only some of these messages are logged, since a faulty peer
    /// may send thousands.
    fn log_malformed(&self, from: MemberId, what: &dyn std::fmt::Display) {
        let seen = self.undecodable.fetch_add(1, Ordering::Relaxed);
        if seen.is_power_of_two() || seen == 0 {
            tracing::error!(peer.member.id = %from, error = %what, seen, "a peer sent an invalid message");
        }
    }

    /// Records the vote or acknowledgement that `from` has sent in `message`. Returns whether the
    /// message may be delivered at once.
    fn note_promise(&self, from: MemberId, message: &Message) -> bool {
        let Some(promise) = Promise::of(message) else { return true };
        let (term, commit) = self.inbox.term_and_commit();
        let durable = self.marks.record_promise(from, promise.with_commit(term, commit));
        durable || message.kind != MessageKind::RequestVoteResponse
    }

    /// Delivers a vote after it is durably recorded. Otherwise this member could forget in a crash
    /// that it has counted the vote.
    fn deliver_once_durable(&self, from: MemberId, message: Message) -> bool {
        let Some(place) = self.marks.reserve_vote_slot() else { return false };
        let (marks, inbox) = (Arc::clone(&self.marks), self.inbox.clone());
        tokio::task::spawn_blocking(move || {
            match marks.write(RequiredDurability::Urgent) {
                // A full queue drops the message, which Raft tolerates.
                Ok(()) => drop(inbox.deliver(from.0, message)),
                Err(error) => {
                    tracing::error!(error = %error_chain(&error), peer.member.id = %from, "cannot remember a vote; it is not counted");
                }
            }
            drop(place);
        });
        true
    }

    /// Removes proposals from `message` that no member could apply once they were committed.
    fn drop_invalid_proposals(&self, from: MemberId, message: &mut Message) {
        if message.kind != MessageKind::Propose {
            return;
        }
        message.entries.retain(|entry| match check_proposal(entry) {
            Ok(()) => true,
            Err(what) => {
                self.log_malformed(from, &what);
                false
            }
        });
    }
}

/// Returns the fields of a member that a joining member needs. Operation IDs are left out: their
/// number grows with each change, and the answer must fit into one frame.
fn shown_to_joiner(member: &Member) -> musterpb::Member {
    musterpb::Member { operations: Vec::new(), ..member.into() }
}

/// Checks a proposal that a peer has forwarded for its clients.
fn check_proposal(entry: &Entry) -> Result<(), String> {
    if entry.data.len() > MAX_PROPOSAL_BYTES {
        return Err(format!("a proposal of {} bytes", entry.data.len()));
    }
    let decoded = command::decode(entry.data.clone());
    let operation = decoded.map_err(|error| error.to_string())?.operation;
    if entry_kind(&operation) != entry.kind {
        return Err(format!("a proposal of kind {:?} that carries another", entry.kind));
    }
    // The API makes the same checks of clients' requests. The maximum number of operations isn't
    // checked here, because it is a flag of each member.
    let checked = match &operation {
        Operation::Put(put) => check_put(put),
        Operation::DeleteRange(delete) => check_delete(delete),
        Operation::Txn(txn) => check_txn(txn, usize::MAX),
        Operation::Compact(_)
        | Operation::Alarm(_)
        | Operation::MarkCorrupt(_)
        | Operation::LeaseGrant(_)
        | Operation::LeaseRevoke(_)
        // An expiry of leases, or a checkpoint, from an earlier leader's term has no effect. So it
        // needs no check.
        | Operation::LeaseExpire(_)
        | Operation::LeaseCheckpoint(_)
        | Operation::ChangeAuth(_)
        | Operation::AssignToken(_)
        | Operation::PublishMember(_)
        | Operation::ChangeMember(_) => Ok(()),
    };
    checked.map_err(|error| format!("a request that no client may make: {error}"))
}

/// Writes `body` durably to `path`. Fails if `body` is too long, or if it would leave too little
/// free space on the disk. Returns the duration of the fsync.
pub(super) fn receive(path: &Path, mut body: impl Read) -> io::Result<Duration> {
    let mut file = data::recreate(path)?;
    let mut received = 0;
    loop {
        if free_bytes(path)? < KEEP_FREE_BYTES {
            let what = format!(
                "the disk of {} is full: with it less than 256 MiB would be free; make room there",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, what));
        }
        let piece = io::copy(&mut body.by_ref().take(SPACE_CHECK_INTERVAL_BYTES), &mut file)?;
        received += piece;
        if received > MAX_SNAPSHOT_BYTES {
            let what = "it is longer than 32 GiB, the longest that is taken";
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        if piece < SPACE_CHECK_INTERVAL_BYTES {
            let began = Instant::now();
            return file.flush().and_then(|()| file.sync_all()).map(|()| began.elapsed());
        }
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn free_bytes(path: &Path) -> io::Result<u64> {
    let system = rustix::fs::statvfs(path)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Checks a received snapshot completely. A snapshot that is damaged, or differs from the announced
/// one, must not reach the store.
fn inspect(path: &Path, message: &Message) -> io::Result<()> {
    let found =
        mvcc::inspect_snapshot(&mut BufReader::new(data::open(path, data::OpenMode::Read)?));
    let found = found.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let (at, members) = found;
    let what = if message.snapshot != Some(at) {
        "the snapshot's body is of another position than it was announced with"
    } else if message.members.as_ref() != Some(&members) {
        "the snapshot's body has other members than it was announced with"
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}

impl PeerEvents for PeerMessageReceiver {
    fn receive_message(&self, from: MemberId, message: Bytes) -> bool {
        let Some(mut message) = self.decode(from, message) else { return false };
        self.drop_invalid_proposals(from, &mut message);
        // A message in another member's name goes to the inbox, which drops it. So its vote or
        // acknowledgement is not recorded.
        if message.from != from.0 || self.note_promise(from, &message) {
            return self.inbox.deliver(from.0, message).is_ok();
        }
        self.deliver_once_durable(from, message)
    }

    fn promised(&self) -> Promise {
        self.inbox.promised()
    }

    fn receive_snapshot(
        &self,
        from: MemberId,
        header: Bytes,
        mut body: SnapshotReader,
    ) -> io::Result<()> {
        let message = self.decode(from, header).ok_or(io::ErrorKind::InvalidData)?;
        if !self.inbox.wants_snapshot(from.0, &message) {
            return Err(io::Error::other("this member is not behind the snapshot"));
        }
        let number = self.snapshots.fetch_add(1, Ordering::Relaxed);
        let path = self.snapshot_dir.join(format!("incoming-{from}-{number}"));
        let (index, started) = (message.snapshot.map(|at| at.index), Instant::now());
        tracing::info!(peer.member.id = %from, index, "receiving a snapshot");
        let saved = receive(&path, &mut body);
        if let (Ok(synced), Some(context)) = (&saved, self.context()) {
            context.metrics.snapshot_saves.record(started.elapsed());
            context.metrics.snapshot_syncs.record(*synced);
        }
        let received = saved.and_then(|_| inspect(&path, &message));
        if let Err(error) = received {
            let _ = data::remove(&path);
            return Err(error);
        }
        // Wait for the result. The sender counts the snapshot as received only after it is
        // installed.
        let ended = self.inbox.deliver_snapshot(IncomingSnapshot { message, body: path });
        match ended.recv() {
            Ok(true) => {
                let duration_ms = millis(started);
                tracing::info!(peer.member.id = %from, index, duration_ms, "installed a snapshot");
                Ok(())
            }
            Ok(false) => Err(io::Error::other("the snapshot was not needed any more")),
            Err(_) => Err(io::Error::other("this member is stopping")),
        }
    }

    fn member_list(&self) -> Option<Bytes> {
        let context = self.context()?;
        let view = context.store.view();
        let census = musterpb::Census {
            cluster_id: context.identity.cluster_id,
            member_id: context.identity.member_id,
            changed: view.members().configuration_index(),
            members: view.members().members().map(shown_to_joiner).collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            own_peer_urls: self.own_urls.clone(),
        };
        Some(census.encode_to_vec().into())
    }

    fn member_list_received(&self, from: MemberId, census: Bytes) {
        let decoded = musterpb::Census::decode(census).map_err(|error| error.to_string());
        let decoded = decoded.and_then(|census| match census.member_id == from.0 {
            true => Census::try_from(census).map_err(|error| error.to_string()),
            false => Err("a census in another member's name".to_owned()),
        });
        match decoded {
            Ok(census) => {
                self.reports.censuses.send_if_modified(|known| known.record(from, census));
            }
            Err(error) => self.log_malformed(from, &error),
        }
    }

    fn request(&self, from: MemberId, request: Bytes) -> BoxFuture<'static, Option<Bytes>> {
        let context = self.context();
        Box::pin(async move {
            let answer = answer_member(context?.as_ref(), from, request).await;
            if answer.is_none() {
                tracing::error!(peer.member.id = %from, "a peer sent a request that can't be decoded");
            }
            answer
        })
    }

    fn state(&self, to: MemberId, mut out: SnapshotWriter) -> io::Result<()> {
        let context = self.context().ok_or(io::ErrorKind::NotConnected)?;
        if context.is_corrupt() {
            return Err(io::Error::other("this member's data is not the cluster's"));
        }
        let (view, started) = (context.store.view(), Instant::now());
        let index = view.applied().index;
        tracing::info!(peer.member.id = %to, index, "sending the whole state to a new member");
        view.write_snapshot(&mut out).map_err(io::Error::other)?;
        // The view is released before the receiver checks the data, so that the store can reuse its
        // pages.
        drop(view);
        out.finish()?;
        let duration_ms = millis(started);
        tracing::info!(peer.member.id = %to, index, duration_ms, "the new member has it");
        Ok(())
    }

    fn reachable(&self, peer: MemberId, reachable: bool) {
        if reachable {
            self.inbox.connected(peer.0);
        } else {
            self.inbox.disconnected(peer.0);
        }
    }

    fn process_ended(&self, peer: MemberId) {
        tracing::info!(peer.member.id = %peer, "the process of a peer has ended: its host refuses connections");
        self.inbox.process_ended(peer.0);
    }

    fn removal_reported(&self, by: MemberId) {
        if self.inbox.accepts_removal_report(by.0) {
            self.report_refusal(PermanentRefusal::Removed(by));
        }
    }

    fn refused_by_quorum(&self, why: StreamRefusal) {
        self.report_refusal(PermanentRefusal::Disowned(why));
    }
}

#[cfg(test)]
mod tests;
