//! Peer streams: the connections between members of one cluster, closed to everyone else.
//!
//! A stream begins with TLS (if the URL says https), then a fixed-size hello in each direction. The
//! hello proves cluster, sender, receiver, incarnation and boot counter, and states what the disk
//! held at the start. Only then is the first frame read. A hello that doesn't fit is answered with
//! the reason, and the stream is closed. TLS proves the sender's key. If the sender's record binds
//! a key, the two keys must be equal.
//!
//! Each member tries to open a message stream to each other member. One stream is enough for two
//! members: it carries messages, pings, promises and lists of members in both directions. So two
//! members work together as long as either can connect to the other. A firewall, NAT, or a name
//! that one side can't resolve doesn't separate them.
//!
//! - `links` decides which of several streams carries this member's messages; `link` runs one
//!   stream.
//! - `dial` keeps trying to open a stream until this member has opened one, even if the peer's
//!   stream carries everything. Operators thus learn which direction fails (log, `/metrics`,
//!   status).
//! - Snapshots and requests have streams of their own. A member that can't open such a stream
//!   invites the peer, on the message stream, to open it: see `invitations`.
//! - `address_hints` adds addresses of peers that have moved, if the member table lacks them.
//! - A joining member opens its streams itself, because no other member knows it yet.
//! - Older builds know one-way streams only. Each end of a message stream learns from the other
//!   end's hello or first frame whether the other end knows two-way streams. An older build is sent
//!   nothing that it doesn't know. See `hello`.
//!
//! What a caller must know:
//! 1. `Transport::send` never blocks, and queues no more than a peer's limits. A message to a peer
//!    that is slow or not connected is dropped and counted. Raft sends again.
//! 2. Within one connection, messages to one peer arrive in order or not at all.
//!    `PeerEvents::reachable` reports the loss of the connection that carried them, even if another
//!    connection replaces it.
//! 3. A snapshot has a stream of its own, so that it never delays a heartbeat.
//! 4. Only a few connections that have not identified themselves may be open at a time, and one
//!    host may have only some of them (`muster_shares::admission`).
//! 5. A request of one member to another, and its answer, also have a stream of their own.
//! 6. Each member sends the others its list of members when a stream begins to carry its messages,
//!    and when the list changes. A member that was offline may not know the current one.
//! 7. Everything runs on one thread. `PeerEvents` are called there and must not block, except
//!    `receive_snapshot` and `state`, which run on threads of their own.
//!
//! What it does not do: order messages across reconnects, retry, or interpret messages.

mod accept;
pub mod address_hints;
mod dial;
#[cfg(fuzzing)]
pub mod fuzz;
mod invitations;
mod join;
mod link;
mod links;
mod metrics;
mod peer_handle;
mod process_liveness;
mod registry;
mod request;
mod service;
mod snapshot;
#[cfg(test)]
mod tests;
mod wire;
mod witness_file;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fmt, io,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use node_state::identity::{ClusterId, Incarnation, MemberId, NodeKey};
use node_state::membership::PeerUrl;

use crate::{
    tls::PeerTls,
    witness::{DiskState, ProcessClaim, Promise, WitnessDecodeError},
};

pub use self::{
    join::{JoinError, StateSource, ask_members, fetch_state},
    metrics::{Connections, Counters, CountersSnapshot, PeerTraffic},
    snapshot::{SnapshotReader, SnapshotWriter},
    wire::hello::StreamRefusal,
    witness_file::{RequiredDurability, WitnessFile},
};

/// Identity of this member, as stated in its hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalMember {
    /// Cluster that this member belongs to.
    pub cluster: ClusterId,
    pub member: MemberId,
    /// Incarnation of the member's data directory.
    pub incarnation: Incarnation,
    /// Number of times that the data directory was started.
    pub boot: u64,
    /// Random number of this process. It distinguishes a second process on a copy of the data
    /// directory from a reconnect.
    pub run: u64,
    /// Term, vote and last index on the disk when this process began.
    pub disk: DiskState,
}

impl LocalMember {
    /// Returns the identity of this process, as other members record it.
    fn process_claim(&self) -> ProcessClaim {
        let Self { incarnation, boot, run, disk, .. } = *self;
        ProcessClaim { incarnation, boot, run, disk }
    }
}

/// Another member, as the member table records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRecord {
    pub id: MemberId,
    /// Peer URLs, in the order in which they are dialled.
    pub urls: Vec<PeerUrl>,
    /// The only incarnation that may act as this member. If `None`, the first incarnation that
    /// connects is remembered.
    pub incarnation: Option<Incarnation>,
    /// The only key with which this member may authenticate. If `None`, any certificate of the peer
    /// CA is accepted.
    pub node_key: Option<NodeKey>,
}

/// Current members of the cluster other than this one. Each new value replaces the previous one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerMembership {
    /// All other members of the cluster, including those in `reported_by_others`.
    pub peers: Vec<PeerRecord>,
    /// Ids of those `peers` that are not in this member's own member table, but that other members
    /// have reported.
    pub reported_by_others: BTreeSet<MemberId>,
    /// Members that were removed. Their ids are never accepted again.
    pub removed: BTreeSet<MemberId>,
    /// Known keys of removed members.
    pub removed_keys: HashSet<NodeKey>,
}

/// Receiver of the transport's events and incoming data.
pub trait PeerEvents: Send + Sync + 'static {
    /// Takes an encoded message from the peer `from`. Returns false if the message had to be
    /// dropped. Must not block.
    fn receive_message(&self, from: MemberId, message: Bytes) -> bool;

    /// Reads the snapshot `body` from the peer `from` to its end, and installs it. May block.
    ///
    /// # Errors
    /// If `body` breaks off or is refused. The sender then learns that the transfer failed.
    fn receive_snapshot(
        &self,
        from: MemberId,
        header: Bytes,
        body: SnapshotReader,
    ) -> io::Result<()>;

    /// Returns the encoded list of members, or `None` if it isn't known now. The list is sent to
    /// peers whose own list may be older, and to joining members. Must not block.
    fn member_list(&self) -> Option<Bytes>;

    /// Takes the encoded list of members that `from` sent. Must not block.
    fn member_list_received(&self, from: MemberId, census: Bytes);

    /// Answers a request of the peer `from`. The future yields `None` if the request can't be
    /// answered.
    fn request(&self, from: MemberId, request: Bytes) -> BoxFuture<'static, Option<Bytes>>;

    /// Writes the whole state to `out`, for the joining member `to`. May block.
    ///
    /// # Errors
    /// If the state can't be read, or the stream broke.
    fn state(&self, to: MemberId, out: SnapshotWriter) -> io::Result<()>;

    /// Returns all promises (votes and acknowledgements) that this member has made so far. Must not
    /// block.
    fn promised(&self) -> Promise;

    /// Reports whether `peer` is reachable, that is, whether messages can be sent to it and
    /// received from it. Called after each change. If another stream replaces one that was lost,
    /// called with false and then with true, because messages may be lost. Must not block.
    fn reachable(&self, peer: MemberId, reachable: bool);

    /// Reports that the process of `peer` has ended: its streams have ended, and its host refuses
    /// connections to all its URLs. Called once for each end, after [`reachable`](Self::reachable)
    /// with false. A network that resets and refuses connections causes a wrong report. Must not
    /// block.
    fn process_ended(&self, peer: MemberId);

    /// Reports that the authenticated peer `by` says that this member was removed. Must not block.
    fn removal_reported(&self, by: MemberId);

    /// Reports that too many peers refuse this member's data directory, so this member can never
    /// have a quorum again. The directory is a wrong one or an old copy. Must not block.
    fn refused_by_quorum(&self, why: StreamRefusal);
}

/// Start parameters of the transport.
pub struct TransportOptions {
    pub local: LocalMember,
    /// Addresses to listen on; all of them are bound before `start` returns.
    pub listen: Vec<ListenAddress>,
    /// TLS configuration for https URLs.
    pub tls: Option<Arc<PeerTls>>,
    /// File with this member's memory of its peers' promises and processes.
    pub witness_file: Arc<WitnessFile>,
    /// File with addresses of peers that the member table doesn't have: see [`address_hints`].
    pub address_hints: Option<PathBuf>,
    pub limits: TransportLimits,
}

/// One address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    pub address: SocketAddr,
    /// Whether peers must use TLS to connect to this address.
    pub tls: bool,
}

/// Time-outs and limits of peer streams.
#[derive(Clone, Debug)]
pub struct TransportLimits {
    /// Maximum number of messages queued for one peer; more are dropped.
    pub queue_messages: usize,
    /// Maximum bytes queued for one peer; more are dropped.
    pub queue_bytes: usize,
    /// Maximum payload of a frame that is read or written, in bytes.
    pub frame_bytes: usize,
    /// Maximum number of inbound connections that wait for their first byte or for the start of
    /// their handshake. Above the maximum, the host with the most waiting connections loses its
    /// oldest one. If the newest connection is from that host, the newest one is closed instead.
    pub waiting_connections: usize,
    /// Maximum number of inbound connections that perform TLS or the hello at the same time. One
    /// host may have at most a quarter of them.
    pub handshakes: usize,
    /// Time limit for TLS and hello together. The wait for the first byte and the wait for the
    /// start of the handshake each have the same limit.
    pub handshake_timeout: Duration,
    /// Interval between pings on a stream.
    pub ping_interval: Duration,
    /// Time without any received frame after which a stream counts as dead.
    pub dead_after: Duration,
    /// Minimum and maximum of the random wait before the next attempt to open a stream.
    pub redial: (Duration, Duration),
}

impl Default for TransportLimits {
    fn default() -> Self {
        Self {
            queue_messages: 4096,
            queue_bytes: 64 << 20,
            frame_bytes: 32 << 20,
            waiting_connections: 256,
            handshakes: 64,
            handshake_timeout: Duration::from_secs(5),
            ping_interval: Duration::from_secs(1),
            dead_after: Duration::from_secs(5),
            redial: (Duration::from_millis(25), Duration::from_secs(1)),
        }
    }
}

/// Reason why a message was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// There is no peer with this id.
    #[error("no such peer")]
    Unknown,
    /// No stream to the peer is connected.
    #[error("the peer is not connected")]
    NotConnected,
    /// The peer receives more slowly than messages are sent, so its queue is full.
    #[error("the queue to the peer is full")]
    Full,
    /// The message exceeds the frame limit, so it can never be sent.
    #[error("the message is longer than a frame may be")]
    TooLong,
}

/// Reason why the transport can't start.
#[derive(Debug, thiserror::Error)]
pub enum TransportStartError {
    /// The process can't listen on an address.
    #[error("cannot listen for peers on {address}")]
    Listen {
        address: SocketAddr,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The runtime or its thread can't be created.
    #[error("cannot start the transport's thread")]
    Thread(#[source] io::Error),
    /// A listen URL says https, but there is no certificate.
    #[error("{0} is https, but no peer certificate is configured")]
    NoTls(String),
}

/// Reason why the witness file can't be read.
#[derive(Debug, thiserror::Error)]
pub enum WitnessFileError {
    /// The file system refused access to the witness file.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// The content of the witness file can't be decoded.
    #[error(transparent)]
    Content(#[from] WitnessDecodeError),
}

impl WitnessFileError {
    /// Returns whether every restart would fail in the same way.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Files(error) => error.is_refusal(),
            Self::Content(_) => true,
        }
    }
}

/// Handle of the running transport. All clones refer to one transport.
#[derive(Clone)]
pub struct Transport {
    shared: Arc<service::TransportState>,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("local", &self.shared.local).finish_non_exhaustive()
    }
}

impl Transport {
    /// Binds all addresses and starts the thread. Until `set_membership` is called, no peer is
    /// dialled, and inbound connections wait. If these connections did not wait, they would be
    /// refused as unknown.
    ///
    /// # Errors
    /// If an address can't be bound.
    pub fn start(
        options: TransportOptions,
        events: Arc<dyn PeerEvents>,
    ) -> Result<Self, TransportStartError> {
        service::start(options, events).map(|shared| Self { shared })
    }

    /// Sets the current members. New peers are dialled, and the streams of removed peers are
    /// closed. If a peer's record changed, its streams stay open if their process still fits the
    /// record. New addresses are used for the next dial.
    pub fn set_membership(&self, membership: PeerMembership) {
        self.shared.set_membership(membership);
    }

    /// Queues `message` for the peer `to`. Never blocks.
    ///
    /// # Errors
    /// If the message was dropped. The error gives the reason.
    pub fn send(&self, to: MemberId, message: Bytes) -> Result<(), SendError> {
        self.shared.send(to, message)
    }

    /// Opens a stream that sends one snapshot to the peer `to`. Data is sent as it is written.
    /// `finish` waits until the peer has installed the snapshot. These calls block, so they must
    /// not run on an async thread.
    ///
    /// # Errors
    /// If there is no such peer, or another snapshot to it is under way.
    pub fn open_snapshot(&self, to: MemberId, header: Bytes) -> Result<SnapshotWriter, SendError> {
        self.shared.open_snapshot(to, header)
    }

    /// Sends a request to the peer `to` and waits for the answer, without a time limit. The caller
    /// should set one.
    ///
    /// # Errors
    /// If there is no such peer, or the stream broke. If it broke, the peer may have executed the
    /// request.
    pub async fn ask(&self, to: MemberId, request: Bytes) -> io::Result<Bytes> {
        self.shared.ask(to, request).await
    }

    /// Returns the peers to which this member can send, each with the start of the current
    /// connection.
    pub fn connected(&self) -> BTreeMap<MemberId, Instant> {
        self.shared.connected()
    }

    /// Returns the transport's counters.
    #[must_use]
    pub fn counters(&self) -> CountersSnapshot {
        self.shared.counters.snapshot()
    }

    /// Returns the traffic of each peer, ordered by the peers' ids.
    #[must_use]
    pub fn traffic(&self) -> Vec<PeerTraffic> {
        self.shared.traffic()
    }

    /// Returns one warning for each connected peer for which one side can't connect to the other.
    #[must_use]
    pub fn one_way_warnings(&self) -> Vec<String> {
        let now = Instant::now();
        self.traffic()
            .iter()
            .filter_map(|it| it.connections.one_way_warning(it.peer, now))
            .collect()
    }

    /// Returns the addresses that the transport listens on, with the ports that were assigned.
    #[cfg(test)]
    pub(crate) fn local_addresses(&self) -> &[SocketAddr] {
        &self.shared.addresses
    }

    /// Ends the transport: queued messages are sent if their peers receive them in time, and all
    /// streams are closed. Waits for the end of the thread, but at most `deadline`.
    pub fn stop(&self, deadline: Duration) {
        self.shared.stop(deadline);
    }
}
