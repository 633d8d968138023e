//! The transport's thread, and the state that its tasks share.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError, RwLock, atomic::Ordering::Relaxed, mpsc as std_mpsc},
    time::{Duration, Instant},
};

use bytes::Bytes;
use node_state::identity::{MemberId, NodeKey};
use tokio::{
    runtime,
    sync::Notify,
    time::{MissedTickBehavior, interval},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use super::{
    Counters, LocalMember, PeerEvents, PeerMembership, PeerTraffic, SendError, SnapshotWriter,
    StreamRefusal, TransportLimits, TransportOptions, TransportStartError, accept,
    address_hints::AddressHints,
    dial,
    links::Opener,
    peer_handle::PeerHandle,
    request, snapshot,
    wire::frame::FrameKind,
    wire::hello::{Hello, StreamPurpose},
    wire::stream,
    witness_file::{AdmitError, RequiredDurability, WitnessFile},
};
use crate::{causes::error_chain, log_limit::LogLimit, tls::PeerTls};

/// Interval at which the witness file is written. Peers' acknowledgements are durable in it after
/// at most this time.
const WITNESS_WRITE_INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct TransportState {
    pub local: LocalMember,
    pub limits: TransportLimits,
    pub tls: Option<Arc<PeerTls>>,
    pub counters: Arc<Counters>,
    pub events: Arc<dyn PeerEvents>,
    #[cfg(test)]
    pub addresses: Vec<SocketAddr>,
    pub tasks: TaskTracker,
    pub stopping: CancellationToken,
    members: RwLock<PeerTable>,
    /// Bound sockets. Connections on them are accepted only after the members are known.
    listeners: Mutex<Vec<(std::net::TcpListener, SocketAddr, bool)>>,
    witness_file: Arc<WitnessFile>,
    pub address_hints: AddressHints,
    /// Notified when the witness has changed, so that each stream checks whether its process is
    /// still accepted as the member.
    witness_changed: Notify,
    refusals: LogLimit<{ StreamRefusal::ALL.len() + 1 }>,
    runtime: runtime::Handle,
    thread: Mutex<Option<std_mpsc::Receiver<()>>>,
}

#[derive(Default)]
struct PeerTable {
    peers: BTreeMap<MemberId, Arc<PeerHandle>>,
    reported_by_others: BTreeSet<MemberId>,
    removed: BTreeSet<MemberId>,
    removed_keys: HashSet<NodeKey>,
}

impl PeerTable {
    /// Returns whether the sender of a hello was removed: its id or its key is that of a removed
    /// member.
    fn was_removed(&self, from: MemberId, key: Option<NodeKey>) -> bool {
        self.removed.contains(&from) || key.is_some_and(|key| self.removed_keys.contains(&key))
    }

    /// Returns those peers that are in this member's own member table, not only in the tables of
    /// others.
    fn own_peers(&self) -> impl Iterator<Item = &Arc<PeerHandle>> {
        let own = self.peers.iter().filter(|(id, _)| !self.reported_by_others.contains(id));
        own.map(|(_, peer)| peer)
    }
}

pub(super) fn start(
    options: TransportOptions,
    events: Arc<dyn PeerEvents>,
) -> Result<Arc<TransportState>, TransportStartError> {
    let mut listeners = Vec::new();
    for listen in &options.listen {
        if listen.tls && options.tls.is_none() {
            return Err(TransportStartError::NoTls(listen.address.to_string()));
        }
        let failed = |source| TransportStartError::Listen { address: listen.address, source };
        let listener = stream::listen(listen.address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        listeners.push((listener, address, listen.tls));
    }
    let stopping = CancellationToken::new();
    let tasks = TaskTracker::new();
    let (runtime, thread) = spawn_thread(stopping.clone(), tasks.clone())?;
    let shared = Arc::new(TransportState {
        local: options.local,
        limits: options.limits,
        tls: options.tls,
        counters: Arc::new(Counters::default()),
        events,
        #[cfg(test)]
        addresses: listeners.iter().map(|(_, address, _)| *address).collect(),
        listeners: Mutex::new(listeners),
        tasks,
        stopping,
        members: RwLock::default(),
        witness_file: options.witness_file,
        address_hints: AddressHints::new(options.address_hints),
        witness_changed: Notify::new(),
        refusals: LogLimit::new(),
        runtime,
        thread: Mutex::new(Some(thread)),
    });
    Ok(shared)
}

/// Starts the transport's thread. It runs all tasks until `stopping` is cancelled, and then waits
/// for those in `tasks`. The returned channel reports that the thread has ended.
fn spawn_thread(
    stopping: CancellationToken,
    tasks: TaskTracker,
) -> Result<(runtime::Handle, std_mpsc::Receiver<()>), TransportStartError> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("peer-blocking")
        .build()
        .map_err(TransportStartError::Thread)?;
    let handle = runtime.handle().clone();
    let (ended, thread) = std_mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("peers".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                stopping.cancelled().await;
                tasks.close();
                tasks.wait().await;
            });
            // Don't wait for a snapshot that is being installed. The thread that installs it ends
            // by itself.
            runtime.shutdown_background();
            let _ = ended.send(());
        })
        .map_err(TransportStartError::Thread)?;
    Ok((handle, thread))
}

impl TransportState {
    pub(super) fn set_membership(self: &Arc<Self>, membership: PeerMembership) {
        if let Some(tls) = &self.tls {
            // An expired certificate is accepted only if this member's own member table binds its
            // key.
            let own = membership
                .peers
                .iter()
                .filter(|peer| !membership.reported_by_others.contains(&peer.id));
            let keys: HashSet<NodeKey> = own.filter_map(|peer| peer.node_key).collect();
            tls.bind(keys);
        }
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let mut before = std::mem::take(&mut members.peers);
        members.reported_by_others = membership.reported_by_others;
        members.removed = membership.removed;
        members.removed_keys = membership.removed_keys;
        self.witness_file.witness().forget(|member| members.removed.contains(&member));
        for record in membership.peers {
            let id = record.id;
            let handle = match before.remove(&id) {
                Some(known) => {
                    known.update(record);
                    known
                }
                None => self.start_peer(record),
            };
            members.peers.insert(id, handle);
        }
        for handle in before.values() {
            handle.cancellation.cancel();
        }
        drop(members);
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        if !listeners.is_empty() {
            self.tasks.spawn_on(Arc::clone(self).run_witness_writer(), &self.runtime);
        }
        for (listener, address, tls) in listeners.drain(..) {
            let task = accept::run(Arc::clone(self), listener, tls);
            self.tasks.spawn_on(task, &self.runtime);
            tracing::info!(%address, tls, "listening for peers");
        }
    }

    fn start_peer(self: &Arc<Self>, record: super::PeerRecord) -> Arc<PeerHandle> {
        let gone = self.stopping.child_token();
        let handle = Arc::new(PeerHandle::new(record, &self.limits, gone));
        let task = dial::run(Arc::clone(self), Arc::clone(&handle));
        self.tasks.spawn_on(task, &self.runtime);
        handle
    }

    fn peer(&self, id: MemberId) -> Option<Arc<PeerHandle>> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.peers.get(&id).cloned()
    }

    pub(super) fn send(&self, to: MemberId, message: Bytes) -> Result<(), SendError> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let peer = members.peers.get(&to).ok_or(SendError::Unknown)?;
        let result = peer.push(FrameKind::Message, message);
        if result.is_err() {
            peer.traffic.send_failures.fetch_add(1, Relaxed);
        }
        match result {
            Err(SendError::NotConnected) => {
                self.counters.dropped_not_connected.fetch_add(1, Relaxed)
            }
            Err(_) => self.counters.dropped_full.fetch_add(1, Relaxed),
            Ok(()) => 0,
        };
        result
    }

    pub(super) fn open_snapshot(
        self: &Arc<Self>,
        to: MemberId,
        header: Bytes,
    ) -> Result<SnapshotWriter, SendError> {
        let peer = self.peer(to).ok_or(SendError::Unknown)?;
        let permit =
            Arc::clone(&peer.snapshot_out).try_acquire_owned().map_err(|_| SendError::Full)?;
        let (writer, task) = snapshot::send(Arc::clone(self), peer, header, permit);
        self.tasks.spawn_on(task, &self.runtime);
        Ok(writer)
    }

    pub(super) async fn ask(self: &Arc<Self>, to: MemberId, request: Bytes) -> io::Result<Bytes> {
        let peer = self.peer(to).ok_or_else(|| io::Error::other(SendError::Unknown))?;
        let task = request::ask(Arc::clone(self), peer, request);
        // The caller may be on any thread, but the task must run on the transport's thread.
        let asked = AbortOnDropHandle::new(self.tasks.spawn_on(task, &self.runtime));
        asked.await.map_err(io::Error::other)?
    }

    pub(super) fn connected(&self) -> BTreeMap<MemberId, Instant> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.peers.iter().filter_map(|(id, peer)| Some((*id, peer.connected_since()?))).collect()
    }

    pub(super) fn traffic(&self) -> Vec<PeerTraffic> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let of = |(id, peer): (&MemberId, &Arc<PeerHandle>)| {
            peer.traffic.snapshot(*id, peer.connections())
        };
        members.peers.iter().map(of).collect()
    }

    pub(super) fn stop(&self, deadline: Duration) {
        self.stopping.cancel();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(ended) = thread
            && ended.recv_timeout(deadline).is_err()
        {
            tracing::warn!("peer streams did not close in time");
        }
    }

    /// Checks a received hello against the members and the witness file, and durably records the
    /// sender's process. `opener` is the side that opened the stream. The sender may act as the
    /// member only if this succeeds.
    pub(super) async fn admit(
        &self,
        hello: &Hello,
        key: Option<NodeKey>,
        opener: Opener,
    ) -> Result<Arc<PeerHandle>, StreamRefusal> {
        let peer = {
            let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
            let was_removed = members.was_removed(hello.from, key);
            let peer = members.peers.get(&hello.from).filter(|_| !was_removed).cloned();
            let record = peer.as_ref().map(|peer| peer.registry.record());
            hello.check(&self.local, record.as_deref().ok_or(was_removed), key)?;
            if members.reported_by_others.contains(&hello.from) {
                self.check_reported_peer(hello, opener)?;
            }
            peer.ok_or(StreamRefusal::Sender)?
        };
        let (from, shown) = (hello.from, hello.process_claim());
        // A process that is refused must not be recorded. So whether another process of the member
        // may still run is checked before the record is written.
        let is_new =
            self.witness_file.witness().is_new(from, &shown).map_err(StreamRefusal::from)?;
        let objection = peer.objection_to(shown.run);
        if let Some(refusal) = objection.filter(|_| is_new) {
            return Err(refusal);
        }
        let marks = Arc::clone(&self.witness_file);
        match tokio::task::spawn_blocking(move || marks.admit(from, &shown)).await {
            Ok(Ok(())) => {
                // The tasks of the peer's streams are woken, so that streams of an older process
                // end now.
                self.witness_changed.notify_waiters();
                Ok(peer)
            }
            Ok(Err(AdmitError::Refused(refusal))) => Err(refusal),
            Ok(Err(AdmitError::Files(error))) => {
                tracing::error!(error = %error_chain(&error), "cannot remember a peer's boot counter; it is refused");
                Err(StreamRefusal::Unavailable)
            }
            Err(error) => {
                tracing::error!(%error, "remembering a peer's boot counter was cut short");
                Err(StreamRefusal::Unavailable)
            }
        }
    }

    /// Checks a peer that only other members' lists contain. The peer is refused if the stream
    /// can't bring this member up to date. It is also refused if this member's memory of its peers
    /// (`Witness`) has no room for the peer.
    fn check_reported_peer(&self, hello: &Hello, opener: Opener) -> Result<(), StreamRefusal> {
        let is_invited = opener == Opener::Local && hello.purpose == StreamPurpose::TakeSnapshot;
        if !is_invited
            && !matches!(hello.purpose, StreamPurpose::Messages | StreamPurpose::Snapshot)
        {
            return Err(StreamRefusal::Sender);
        }
        let has_room = self.witness_file.witness().has_room(hello.from);
        if has_room { Ok(()) } else { Err(StreamRefusal::Unavailable) }
    }

    /// Returns the encoded promises of all members, as far as this member knows them. Its own
    /// promises are included.
    pub(super) fn encoded_promises(&self) -> Vec<u8> {
        let promised = self.events.promised();
        self.witness_file.witness().report(self.local.member, &self.local.process_claim(), promised)
    }

    /// Merges the promises that a peer has reported into this member's memory of promises
    /// (`Witness`).
    pub(super) fn merge_report(&self, report: &[u8]) -> io::Result<()> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let mut witness = self.witness_file.witness();
        let told = witness.merge_report(report, |member, has_room| {
            members.peers.contains_key(&member)
                && (has_room || !members.reported_by_others.contains(&member))
        });
        drop(witness);
        told.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        self.witness_changed.notify_waiters();
        Ok(())
    }

    /// Returns once the process `run` of `peer`, which was accepted, would no longer be accepted.
    pub(super) async fn wait_until_refused(&self, peer: &PeerHandle, run: u64) {
        loop {
            let news = self.witness_changed.notified();
            if self.witness_file.witness().is_refused_now(peer.id, run) {
                return;
            }
            news.await;
        }
    }

    /// Writes the witness file at regular intervals until the transport stops.
    async fn run_witness_writer(self: Arc<Self>) {
        let mut every = interval(WITNESS_WRITE_INTERVAL);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut going = true;
        while going {
            going = self.stopping.run_until_cancelled(every.tick()).await.is_some();
            let marks = Arc::clone(&self.witness_file);
            let written =
                tokio::task::spawn_blocking(move || marks.write(RequiredDurability::All)).await;
            if let Ok(Err(error)) = written {
                tracing::error!(error = %error_chain(&error), "cannot remember what peers have promised; trying again");
            }
        }
    }

    /// Handles the report of `peer` that this member was removed. The report is ignored if `peer`
    /// isn't in this member's own member table.
    pub(super) fn handle_removal_report(&self, peer: &PeerHandle) {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        if !members.reported_by_others.contains(&peer.id) {
            self.events.removal_reported(peer.id);
        }
    }

    /// Records that `peer` refuses this member's data directory. One wrong or lying peer must not
    /// end this member. So the refusal is reported only when so many peers refuse that no quorum
    /// can include this member.
    pub(super) fn handle_permanent_refusal(&self, peer: &PeerHandle, why: StreamRefusal) {
        peer.has_refused_for_good.store(true, Relaxed);
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let by = members.own_peers().filter(|peer| peer.has_refused_for_good.load(Relaxed)).count();
        let peers = members.own_peers().count();
        let quorum = peers.div_ceil(2) + 1;
        if by > 0 && by >= quorum.min(peers) {
            self.events.refused_by_quorum(why);
        }
    }

    /// Counts a refusal, and logs it with a rate limit.
    pub(super) fn refuse(&self, refusal: StreamRefusal, hello: &Hello, remote: &str) {
        self.counters.refuse(refusal);
        if let Some(suppressed) = self.refusals.pass(refusal as usize, Instant::now()) {
            tracing::warn!(
                reason = %refusal,
                remote,
                peer.member.id = %hello.from,
                peer.cluster.id = %hello.cluster,
                cluster.id = %self.local.cluster,
                member.id = %self.local.member,
                suppressed,
                "refused a peer stream"
            );
        }
    }

    /// Logs, with a rate limit, an inbound handshake that failed before the sender was known.
    pub(super) fn handshake_failed(&self, error: &dyn std::fmt::Display, remote: &str) {
        self.counters.handshakes_failed.fetch_add(1, Relaxed);
        if let Some(suppressed) = self.refusals.pass(0, Instant::now()) {
            tracing::warn!(%error, remote, suppressed, "rejected connection on peer endpoint");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_member_is_recognised_by_its_id_or_its_key() {
        let (id, key) = (MemberId(1), NodeKey([1; 32]));
        let members =
            PeerTable { removed: [id].into(), removed_keys: [key].into(), ..PeerTable::default() };
        for (from, shown, was_removed) in [
            (MemberId(1), None, true),
            (MemberId(2), Some(key), true),
            (MemberId(2), Some(NodeKey([2; 32])), false),
            (MemberId(2), None, false),
        ] {
            assert_eq!(members.was_removed(from, shown), was_removed, "{from} {shown:?}");
        }
    }
}
