//! Peer streams: how members of one cluster talk, and how nobody else does.
//!
//! A stream begins with TLS (where the URLs say https), then a fixed-size hello in each direction that
//! proves cluster, sender, receiver, incarnation, boot counter and what the disk held at the start; only
//! then is the first frame read. A hello that doesn't fit is answered with the reason and a close.
//!
//! Each member tries to open a message stream to each other one, and one stream is enough for two
//! members: it carries messages, pings, promises and censuses of both. So members work together as long
//! as one of them can connect to the other (a firewall, NAT, a name that one side can't resolve).
//! - `links` says which of several streams carries what this member sends; `link` runs one stream.
//! - `dial` tries to open a stream for as long as there is none that this member has opened, also while
//!   the peer's carries everything: an operator is told which direction fails (log, `/metrics`, status).
//! - Snapshots and requests have streams of their own. A member that can't open one invites the peer, on
//!   the message stream, to open it: see `invite`.
//! - A member that is about to join opens its streams itself: nobody knows it before.
//! - Builds before this one know of one-way streams only. Each end of a message stream learns from the
//!   other's hello or first frame whether it knows of two-way ones, and sends an older build nothing
//!   that it doesn't know. See `hello`.
//!
//! What a caller must know:
//! 1. `Transport::send` never blocks and never keeps more than a peer's bounds: a message to a peer
//!    that is slow or away is dropped and counted. Raft sends again.
//! 2. Messages to one peer arrive in order or not at all, within one connection. The loss of the
//!    connection that carried them is told by `PeerEvents::reachable`, also if another one takes over.
//! 3. A snapshot has a stream of its own, so that it never delays a heartbeat.
//! 4. Connections that have not said whose they are hold one of a few places, which hosts share fairly
//!    (crate `muster-door`).
//! 5. A request of one member to another, and its answer, have a stream of their own too.
//! 6. Each member tells the others who the members are, when a stream begins to carry its messages and
//!    when that has changed: a member that was away may not know.
//! 7. Everything runs on one thread of its own; `PeerEvents` are called there and must not block,
//!    except `snapshot`, which has a thread to itself.
//!
//! What it does not do: order messages across reconnects, retry, or know what a message means.

mod accept;
mod dial;
mod frame;
#[cfg(fuzzing)]
pub(crate) mod fuzz;
mod hello;
mod invite;
mod join;
mod link;
mod links;
mod marks;
mod metrics;
mod peer;
mod registry;
mod request;
mod service;
mod snapshot;
mod stream;
#[cfg(test)]
mod tests;
mod vitals;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fmt, io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::{
    config::PeerUrl,
    identity::{ClusterId, Incarnation, MemberId, NodeKey},
    tls::PeerTls,
    witness::{Appearance, DecodeError, OnDisk, Promise},
};

pub(crate) use self::{
    hello::Refusal,
    join::{JoinError, Source, ask_members, fetch_state},
    marks::{Durable, Marks},
    metrics::{Connections, Counters, CountersSnapshot, PeerTraffic},
    snapshot::{SnapshotReader, SnapshotWriter},
};

/// This member, as its hello states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Local {
    /// The cluster it belongs to.
    pub cluster: ClusterId,
    /// Its id.
    pub member: MemberId,
    /// The incarnation of its data directory.
    pub incarnation: Incarnation,
    /// How often that directory has been started.
    pub boot: u64,
    /// Random for this process: tells a second one on a copy of the directory from a reconnect.
    pub run: u64,
    /// What the directory held when this process began.
    pub disk: OnDisk,
}

impl Local {
    /// The process, as it shows itself.
    fn appearance(&self) -> Appearance {
        let Self { incarnation, boot, run, disk, .. } = *self;
        Appearance { incarnation, boot, run, disk }
    }
}

/// Another member, as the cluster's configuration records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its id.
    pub id: MemberId,
    /// Where it is reached; tried in turn.
    pub urls: Vec<PeerUrl>,
    /// The only incarnation that may act as it; else the first one seen is remembered.
    pub incarnation: Option<Incarnation>,
    /// The only key that may speak for it; else the peer CA decides.
    pub node_key: Option<NodeKey>,
}

/// Who is in the cluster: replaces what was known before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Membership {
    /// Everybody else.
    pub peers: Vec<Peer>,
    /// Those of them that only others say are members.
    pub told: BTreeSet<MemberId>,
    /// Who was a member once and never will be again.
    pub removed: BTreeSet<MemberId>,
    /// Their keys, as far as they are known.
    pub removed_keys: HashSet<NodeKey>,
}

/// Where received things go.
pub(crate) trait PeerEvents: Send + Sync + 'static {
    /// A message from `from`, its bytes not yet decoded. Returns false if it had to be dropped.
    /// Must not block.
    fn message(&self, from: MemberId, message: Bytes) -> bool;

    /// A snapshot from `from`: reads `body` to its end and installs it. May block.
    ///
    /// # Errors
    /// If `body` breaks off or is refused; the sender then learns that it failed.
    fn snapshot(&self, from: MemberId, header: Bytes, body: SnapshotReader) -> io::Result<()>;

    /// Who the members are, for peers that may be behind, and for one that doesn't know yet which of
    /// them it is; `None`: not now. Must not block.
    fn census(&self) -> Option<Bytes>;

    /// `from` says who the members are. Must not block.
    fn counted(&self, from: MemberId, census: Bytes);

    /// Answers a request of `from`; `None` if it can't be.
    fn request(&self, from: MemberId, request: Bytes) -> BoxFuture<'static, Option<Bytes>>;

    /// Writes the whole state to `out`, for the member `to`, which begins with it. May block.
    ///
    /// # Errors
    /// If it can't be read, or the stream broke.
    fn state(&self, to: MemberId, out: SnapshotWriter) -> io::Result<()>;

    /// What this member has promised to others, so far. Must not block.
    fn promised(&self) -> Promise;

    /// Messages go to `peer` and come from it, or no longer both: what is sent can be answered. Told as
    /// false and then true if a stream was lost with what was on it and another one takes over. Must
    /// not block.
    fn reachable(&self, peer: MemberId, reachable: bool);

    /// `by`, a peer that proved who it is, says that this member was removed. Must not block.
    fn removed(&self, by: MemberId);

    /// So many peers refuse this member for its data directory that no quorum will ever take it: that
    /// is not the member's. Must not block.
    fn disowned(&self, why: Refusal);
}

/// What the transport needs to start.
pub(crate) struct Options {
    /// Who this is.
    pub local: Local,
    /// Where it listens; all of them are bound before `start` returns.
    pub listen: Vec<Listen>,
    /// How it proves itself where URLs say https.
    pub tls: Option<Arc<PeerTls>>,
    /// What is remembered of peers.
    pub marks: Arc<Marks>,
    /// Times and bounds.
    pub limits: Limits,
}

/// One address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listen {
    /// The address.
    pub address: SocketAddr,
    /// Whether streams there are TLS.
    pub tls: bool,
}

/// Times and bounds of peer streams.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Messages that may wait for one peer; more are dropped.
    pub queue_messages: usize,
    /// Bytes that may wait for one peer; more are dropped.
    pub queue_bytes: usize,
    /// The longest frame that is read or written.
    pub frame_bytes: usize,
    /// Inbound connections that may wait for their first byte or their turn; more close the oldest
    /// one of the host that has the most of them, or are closed at once if they are that host's.
    pub silent: usize,
    /// Inbound connections that may be in TLS or hello at once, shared likewise; a quarter of them
    /// at most is one host's.
    pub handshakes: usize,
    /// How long TLS and hello may take together; and before them the first byte, and the turn.
    pub handshake_timeout: Duration,
    /// How often a stream is asked whether it lives.
    pub ping_interval: Duration,
    /// How long it may stay silent before it counts as dead.
    pub dead_after: Duration,
    /// Bounds of the jittered wait before a peer is dialled again.
    pub redial: (Duration, Duration),
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            queue_messages: 4096,
            queue_bytes: 64 << 20,
            frame_bytes: 32 << 20,
            silent: 256,
            handshakes: 64,
            handshake_timeout: Duration::from_secs(5),
            ping_interval: Duration::from_secs(1),
            dead_after: Duration::from_secs(5),
            redial: (Duration::from_millis(25), Duration::from_secs(1)),
        }
    }
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SendError {
    /// No member has this id.
    #[error("no such peer")]
    Unknown,
    /// It isn't connected now.
    #[error("the peer is not connected")]
    Away,
    /// It is slower than what is sent to it.
    #[error("the queue to the peer is full")]
    Full,
    /// It could never be sent.
    #[error("the message is longer than a frame may be")]
    TooLong,
}

/// Why the transport can't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address can't be listened on.
    #[error("cannot listen for peers on {address}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The runtime or its thread can't be made.
    #[error("cannot start the transport's thread")]
    Thread(#[source] io::Error),
    /// A URL says https, but there is no certificate.
    #[error("{0} is https, but no peer certificate is configured")]
    NoTls(String),
}

/// Why what is remembered of peers can't be read.
#[derive(Debug, thiserror::Error)]
pub enum MarksError {
    /// The disk refused.
    #[error(transparent)]
    Files(#[from] muster_files::Error),
    /// It can't be understood.
    #[error(transparent)]
    Content(#[from] DecodeError),
}

impl MarksError {
    /// Whether a restart can never help.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            Self::Files(error) => error.is_refusal(),
            Self::Content(_) => true,
        }
    }
}

/// A handle on the running transport; clones are the same one.
#[derive(Clone)]
pub(crate) struct Transport {
    shared: Arc<service::Shared>,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("local", &self.shared.local).finish_non_exhaustive()
    }
}

impl Transport {
    /// Binds every address and starts the thread. Accepts and dials nobody until `set_membership`:
    /// who comes earlier waits, instead of being refused as unknown.
    ///
    /// # Errors
    /// If an address can't be bound.
    pub(crate) fn start(options: Options, events: Arc<dyn PeerEvents>) -> Result<Self, StartError> {
        service::start(options, events).map(|shared| Self { shared })
    }

    /// Tells who is in the cluster now. New peers are dialled, and streams of peers that are gone are
    /// closed. A stream of a peer whose record changed goes on if the process at its other end has
    /// proven what the record now binds. New addresses count from the next dial on.
    pub(crate) fn set_membership(&self, membership: Membership) {
        self.shared.set_membership(membership);
    }

    /// Queues `message` for `to`. Never blocks.
    ///
    /// # Errors
    /// If it was dropped, and why.
    pub(crate) fn send(&self, to: MemberId, message: Bytes) -> Result<(), SendError> {
        self.shared.send(to, message)
    }

    /// Opens a stream for one snapshot to `to`. What is written is sent as it comes; `finish` waits
    /// until the peer has installed it. Blocks, so not on an async thread.
    ///
    /// # Errors
    /// If there is no such peer.
    pub(crate) fn open_snapshot(
        &self,
        to: MemberId,
        header: Bytes,
    ) -> Result<SnapshotWriter, SendError> {
        self.shared.open_snapshot(to, header)
    }

    /// Asks `to` and waits for the answer, for as long as the caller has patience.
    ///
    /// # Errors
    /// If there is no such peer, or the stream broke: then it may have been asked, and have done it.
    pub(crate) async fn ask(&self, to: MemberId, request: Bytes) -> io::Result<Bytes> {
        self.shared.ask(to, request).await
    }

    /// Since when each peer has been connected; those that aren't are absent.
    pub(crate) fn connected(&self) -> BTreeMap<MemberId, Instant> {
        self.shared.connected()
    }

    /// What has happened so far.
    #[must_use]
    pub(crate) fn counters(&self) -> CountersSnapshot {
        self.shared.counters.snapshot()
    }

    /// What went to each peer and came from it, by id.
    #[must_use]
    pub(crate) fn traffic(&self) -> Vec<PeerTraffic> {
        self.shared.traffic()
    }

    /// Which direction fails, of peers that are connected in the other one; for operators.
    #[must_use]
    pub(crate) fn complaints(&self) -> Vec<String> {
        let now = Instant::now();
        self.traffic().iter().filter_map(|it| it.connections.complaint(it.peer, now)).collect()
    }

    /// The addresses that are listened on, ports resolved.
    #[cfg(test)]
    pub(crate) fn local_addresses(&self) -> &[SocketAddr] {
        &self.shared.addresses
    }

    /// Closes every stream and ends the thread; waits for it at most `deadline`. What is queued is
    /// sent first if the peers take it in time.
    pub(crate) fn stop(&self, deadline: Duration) {
        self.shared.stop(deadline);
    }
}
