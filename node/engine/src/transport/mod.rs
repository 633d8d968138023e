//! Peer streams: the connections between members of one cluster, closed to everyone else.
//!
//! A stream begins with TLS (if the URL says https), then a fixed-size hello in each direction. The
//! hello proves cluster, sender, receiver, incarnation and boot counter, and states what the disk
//! held at the start. Only then is the first frame read. A hello that doesn't fit is answered with
//! the reason, and the stream is closed. TLS proves the sender's key. If its record binds a key, it
//! must be that one.
//!
//! Each member tries to open a message stream to each other one. One stream is enough for two
//! members: it carries messages, pings, promises and censuses (lists of members) of both. So two
//! members work together as long as either can connect to the other. A firewall, NAT, or a name
//! that one side can't resolve doesn't separate them.
//!
//! - `links` decides which of several streams carries what this member sends; `link` runs one
//!   stream.
//! - `dial` keeps trying to open a stream until this member has opened one, even if the peer's
//!   stream carries everything. Operators thus learn which direction fails (log, `/metrics`,
//!   status).
//! - Snapshots and requests have streams of their own. A member that can't open one invites the
//!   peer, on the message stream, to open it: see `invite`.
//! - A joining member opens its streams itself, because no other member knows it yet.
//! - Older builds know one-way streams only. Each end of a message stream learns from the other's
//!   hello or first frame whether it knows two-way streams. An older build is sent nothing that it
//!   doesn't know. See `hello`.
//!
//! What a caller must know:
//! 1. `Transport::send` never blocks, and queues no more than a peer's limits. A message to a peer
//!    that is slow or not connected is dropped and counted. Raft sends again.
//! 2. Within one connection, messages to one peer arrive in order or not at all.
//!    `PeerEvents::reachable` reports the loss of the connection that carried them, even if another
//!    one takes over.
//! 3. A snapshot has a stream of its own, so that it never delays a heartbeat.
//! 4. Connections that have not identified themselves hold one of a few places, shared fairly
//!    between hosts (`muster_shares::admission`).
//! 5. A request of one member to another, and its answer, also have a stream of their own.
//! 6. Each member sends the others its list of members when a stream begins to carry its messages,
//!    and when the list changes. A member that was offline may not know the current one.
//! 7. Everything runs on one thread. `PeerEvents` are called there and must not block, except
//!    `snapshot` and `state`, which run on threads of their own.
//!
//! What it does not do: order messages across reconnects, retry, or interpret messages.

mod accept;
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

/// Identity of this member, as its hello states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalMember {
    /// Cluster that this member belongs to.
    pub cluster: ClusterId,
    pub member: MemberId,
    /// Incarnation of its data directory.
    pub incarnation: Incarnation,
    /// Number of starts of that directory.
    pub boot: u64,
    /// Random number of this process. It tells a second process on a copy of the directory from a
    /// reconnect.
    pub run: u64,
    /// State of the directory when this process began.
    pub disk: DiskState,
}

impl LocalMember {
    /// Returns this process as its hello presents it to peers.
    fn process_claim(&self) -> ProcessClaim {
        let Self { incarnation, boot, run, disk, .. } = *self;
        ProcessClaim { incarnation, boot, run, disk }
    }
}

/// Another member, as the member table records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRecord {
    pub id: MemberId,
    /// Peer URLs; a dialler tries them in turn.
    pub urls: Vec<PeerUrl>,
    /// The only incarnation that may act as this member. If `None`, the first one seen is
    /// remembered.
    pub incarnation: Option<Incarnation>,
    /// The only key that may authenticate this member. If `None`, the peer CA decides.
    pub node_key: Option<NodeKey>,
}

/// Other members of the cluster. A new value replaces the previous one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerMembership {
    /// All other members, including those in `reported_by_others`.
    pub peers: Vec<PeerRecord>,
    /// Members in `peers` that are known from other members' censuses only.
    pub reported_by_others: BTreeSet<MemberId>,
    /// Members that were removed, and may never return.
    pub removed: BTreeSet<MemberId>,
    /// Known keys of removed members.
    pub removed_keys: HashSet<NodeKey>,
}

/// Receiver of the transport's events and incoming data.
pub trait PeerEvents: Send + Sync + 'static {
    /// Takes a message from `from`, not yet decoded. Returns false if it had to be dropped. Must
    /// not block.
    fn message(&self, from: MemberId, message: Bytes) -> bool;

    /// Reads `body`, a snapshot from `from`, to its end and installs it. May block.
    ///
    /// # Errors
    /// If `body` breaks off or is refused. The sender is then told of the failure.
    fn snapshot(&self, from: MemberId, header: Bytes, body: SnapshotReader) -> io::Result<()>;

    /// Returns the encoded list of members, or `None` if it isn't known now. It is for peers that
    /// may have an older list, and for a joining member that doesn't know its own id yet. Must not
    /// block.
    fn member_list(&self) -> Option<Bytes>;

    /// Takes the encoded list of members that `from` sent. Must not block.
    fn member_list_received(&self, from: MemberId, census: Bytes);

    /// Answers a request of `from`. The future yields `None` if the request can't be answered.
    fn request(&self, from: MemberId, request: Bytes) -> BoxFuture<'static, Option<Bytes>>;

    /// Writes the whole state to `out`, for the joining member `to`. May block.
    ///
    /// # Errors
    /// If the state can't be read, or the stream broke.
    fn state(&self, to: MemberId, out: SnapshotWriter) -> io::Result<()>;

    /// Returns all promises that this member has made so far. Must not block.
    fn promised(&self) -> Promise;

    /// Reports that `peer` became reachable, or no longer is: that messages can be both sent to it
    /// and received from it. If a stream was lost with its messages and another one takes over,
    /// this is called with false and then true. Must not block.
    fn reachable(&self, peer: MemberId, reachable: bool);

    /// Reports that `by`, an authenticated peer, says that this member was removed. Must not block.
    fn removal_reported(&self, by: MemberId);

    /// Reports that this member can never have a quorum again, because too many peers refuse its
    /// data directory. That directory is not the member's. Must not block.
    fn refused_by_quorum(&self, why: StreamRefusal);
}

/// Start parameters of the transport.
pub struct TransportOptions {
    pub local: LocalMember,
    /// Addresses to listen on; all of them are bound before `start` returns.
    pub listen: Vec<ListenAddress>,
    /// TLS configuration for https URLs.
    pub tls: Option<Arc<PeerTls>>,
    /// Memory of peers' promises and processes.
    pub witness_file: Arc<WitnessFile>,
    pub limits: TransportLimits,
}

/// One address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    pub address: SocketAddr,
    /// Whether streams to this address use TLS.
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
    /// Maximum number of inbound connections that wait for their first byte or for a handshake
    /// slot. Above it, the oldest waiting connection of the host with the most of them is closed.
    /// If the newcomer is from that host, the newcomer is closed.
    pub waiting_connections: usize,
    /// Maximum number of inbound connections in TLS or hello at a time, shared fairly between
    /// hosts. One host may have a quarter of them at most.
    pub handshakes: usize,
    /// Time limit for TLS and hello together. The same limit applies before them to the first byte,
    /// and to the wait for a handshake slot.
    pub handshake_timeout: Duration,
    /// Interval between pings on a stream.
    pub ping_interval: Duration,
    /// Time without any frame after which a stream counts as dead.
    pub dead_after: Duration,
    /// Minimum and maximum of the jittered wait before a peer is dialled again.
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

/// Reason why the file of peers' promises can't be read.
#[derive(Debug, thiserror::Error)]
pub enum WitnessFileError {
    /// The file system refused access to the file.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// The content can't be decoded.
    #[error(transparent)]
    Content(#[from] WitnessDecodeError),
}

impl WitnessFileError {
    /// Returns whether a restart can never help.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Files(error) => error.is_refusal(),
            Self::Content(_) => true,
        }
    }
}

/// Handle of the running transport. Clones refer to the same transport.
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
    /// Binds every address and starts the thread. Until `set_membership` is called, it accepts and
    /// dials nobody. Early connections wait, instead of being refused as unknown.
    ///
    /// # Errors
    /// If an address can't be bound.
    pub fn start(
        options: TransportOptions,
        events: Arc<dyn PeerEvents>,
    ) -> Result<Self, TransportStartError> {
        service::start(options, events).map(|shared| Self { shared })
    }

    /// Sets the current members. New peers are dialled, and streams of peers that are gone are
    /// closed. If a peer's record changed, a stream survives if the process at its other end has
    /// proven what the record now binds. New addresses are used from the next dial on.
    pub fn set_membership(&self, membership: PeerMembership) {
        self.shared.set_membership(membership);
    }

    /// Queues `message` for `to`. Never blocks.
    ///
    /// # Errors
    /// If the message was dropped; the error says why.
    pub fn send(&self, to: MemberId, message: Bytes) -> Result<(), SendError> {
        self.shared.send(to, message)
    }

    /// Opens a stream for one snapshot to `to`. Written data is sent as it comes, and `finish`
    /// waits until the peer has installed the snapshot. Blocks, so not to be used on an async
    /// thread.
    ///
    /// # Errors
    /// If there is no such peer, or another snapshot to it is under way.
    pub fn open_snapshot(&self, to: MemberId, header: Bytes) -> Result<SnapshotWriter, SendError> {
        self.shared.open_snapshot(to, header)
    }

    /// Sends a request to `to` and waits for the answer. There is no time-out here: the caller
    /// decides how long to wait.
    ///
    /// # Errors
    /// If there is no such peer, or the stream broke. In the latter case the peer may have executed
    /// the request.
    pub async fn ask(&self, to: MemberId, request: Bytes) -> io::Result<Bytes> {
        self.shared.ask(to, request).await
    }

    /// Returns the time since when each peer has been connected; peers that aren't connected are
    /// absent.
    pub fn connected(&self) -> BTreeMap<MemberId, Instant> {
        self.shared.connected()
    }

    /// Returns the transport's counters.
    #[must_use]
    pub fn counters(&self) -> CountersSnapshot {
        self.shared.counters.snapshot()
    }

    /// Returns the traffic of each peer, by id.
    #[must_use]
    pub fn traffic(&self) -> Vec<PeerTraffic> {
        self.shared.traffic()
    }

    /// Returns a text for operators for each peer that is connected in one direction only, naming
    /// the one that fails.
    #[must_use]
    pub fn one_way_warnings(&self) -> Vec<String> {
        let now = Instant::now();
        self.traffic()
            .iter()
            .filter_map(|it| it.connections.one_way_warning(it.peer, now))
            .collect()
    }

    /// Returns the addresses that it listens on, with ports resolved.
    #[cfg(test)]
    pub(crate) fn local_addresses(&self) -> &[SocketAddr] {
        &self.shared.addresses
    }

    /// Closes every stream and ends the thread, and waits for that up to `deadline`. Queued
    /// messages are sent first if the peers receive them in time.
    pub fn stop(&self, deadline: Duration) {
        self.shared.stop(deadline);
    }
}
