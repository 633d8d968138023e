//! The one owner of consensus.
//!
//! [`Handle`] is what the API side holds; [`PeerSender`] and [`PeerInbox`] are the seam to the
//! transport. What is decided is decided by types without thread, lock or clock, and both the
//! threads of production and the events of the simulation (`tests/src/sim`) run them:
//!
//! | type | owns | thread |
//! |---|---|---|
//! | [`Mail`] | what waits for consensus, and its bounds | all put in, **core** takes out |
//! | [`Core`] | [`Driver`]: consensus, timers, barriers; who is told what was lost | **core** |
//! | [`LogWriter`] | the log: what becomes one write and one sync, what is done when idle | **wal** |
//! | [`Applier`] | the state machine: what shares a transaction, who is answered when | **apply** |
//! | [`Snapshots`] | the bodies of snapshots: which one counts, when a file goes | core, apply, **back** |
//! | [`run_fetch`] | nothing: reads old entries | **fetch** |
//!
//! `run`, `apply_thread`, `log_thread`, `back_threads` and `mailbox` are the channels, locks and waits
//! around them, and hold no decision that isn't about waiting.

mod apply;
mod apply_thread;
mod back_threads;
mod core;
mod error;
mod fatal;
mod handle;
mod log_thread;
mod mail;
mod mailbox;
mod metrics;
mod outgoing;
mod peers;
mod proposals;
mod reads;
mod round;
mod run;
mod snapshots;
mod start;
mod status;
mod wal;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

pub use apply::{Applier, ApplyJob, ApplyOutlets, CheckpointPolicy, Turn, TurnError};
pub use core::{Driver, DriverOptions, Effects};
pub use error::{ProposeError, ReadError, TransferError};
pub(crate) use fatal::defragmentation_failed;
pub use handle::Handle;
pub use mail::{
    MAX_QUEUED_MESSAGE_BYTES, MAX_QUEUED_PROPOSAL_BYTES, MAX_QUEUED_PROPOSALS, MAX_QUEUED_READS,
    Mail, MailBounds, Notice, Proposal, ReadToken, Refused,
};
pub use metrics::{Metrics, SLOW_APPLY};
pub use node_consensus::{Message, MessageKind, PeerState, PeerStatus, Position, Role};
#[cfg(test)]
pub(crate) use peers::recorded;
pub use peers::{
    InboxFull, IncomingSnapshot, OutgoingSnapshot, PeerInbox, PeerSender, SendError, is_wanted,
};
pub use round::{Core, Outlets};
pub use run::{Parts, Running, start};
pub use snapshots::{Bodies, Files, Snapshots};
pub use start::{StartError, recover};
pub use status::{NodeStatus, ends_at_word_of};
pub use wal::{LogJob, LogWriter, gather, run_fetch};

/// Jobs that wait for the log or the state machine, and those that one of them takes at once. The
/// driver's bound on bytes that are not applied comes first; if this one is reached, the core waits.
const QUEUED_JOBS: usize = 4096;

/// The largest proposal; etcd's default request limit is 1.5 MiB, its hard one above that is ours.
pub const MAX_PROPOSAL_BYTES: usize = 10 * 1024 * 1024;

/// What the driver is told at its start.
#[derive(Clone, Debug)]
pub struct Options {
    /// This member's id.
    pub member: u64,
    /// One tick; a leader's heartbeats go out each tick (`--heartbeat-interval`).
    pub tick: Duration,
    /// Ticks without a leader before an election (`--election-timeout` in ticks).
    pub election_ticks: usize,
    /// How long a request may wait; etcd: 5 s and two election time-outs.
    pub request_timeout: Duration,
    /// First start of seat 1: campaign as soon as a quorum of peers is connected.
    pub campaign_when_connected: bool,
    /// Any start: shorten the wait for the first election once a quorum is connected.
    pub hasten_first_election: bool,
    /// Where snapshots on their way in and out lie; the transport writes incoming ones here.
    pub snapshot_dir: PathBuf,
    /// Entries kept in the log behind the store's durable position, for followers that lag.
    pub catch_up_entries: u64,
}

impl Options {
    /// etcd's defaults: 100 ms heartbeats, 1 s election time-out.
    pub fn new(member: u64, snapshot_dir: PathBuf) -> Self {
        let tick = Duration::from_millis(100);
        let election_ticks = 10;
        Self {
            member,
            tick,
            election_ticks,
            request_timeout: Duration::from_secs(5) + tick * 20,
            campaign_when_connected: false,
            hasten_first_election: true,
            snapshot_dir,
            catch_up_entries: 5_000,
        }
    }

    fn transfer_timeout(&self) -> Duration {
        self.tick * u32::try_from(self.election_ticks).unwrap_or(u32::MAX)
    }
}
