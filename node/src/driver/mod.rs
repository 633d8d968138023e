//! The one owner of consensus.
//!
//! [`Handle`] is what the API side holds; [`PeerSender`] and [`PeerInbox`] are the seam to the
//! transport. Threads, as in ARCHITECTURE.md: **core** owns consensus, timers and barriers; **wal**
//! turns everything queued into one write and one sync; **apply** is the only writer of the state
//! machine and answers who waits; **fetch** and **back** read old entries and write snapshots. What
//! they run ([`Driver`], [`Applier`], [`run_group`], [`run_fetch`]) is what the simulation runs in
//! one thread.

mod apply;
mod apply_thread;
mod back_threads;
mod core;
mod error;
mod fatal;
mod handle;
mod log_thread;
mod mailbox;
mod metrics;
mod outgoing;
mod peers;
mod proposals;
mod reads;
mod run;
mod start;
mod wal;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

pub use apply::{Applier, CheckpointPolicy};
pub use core::{Driver, DriverOptions, Effects};
pub use error::{ProposeError, ReadError, TransferError};
pub use handle::{Handle, NodeStatus};
pub use mailbox::{
    MAX_QUEUED_MESSAGE_BYTES, MAX_QUEUED_PROPOSAL_BYTES, MAX_QUEUED_PROPOSALS, MAX_QUEUED_READS,
    Notice, Proposal, ReadToken,
};
pub use metrics::{Durations, Metrics};
pub use node_consensus::{Message, MessageKind, PeerState, PeerStatus, Position, Role};
#[cfg(test)]
pub(crate) use peers::recorded;
pub use peers::{InboxFull, IncomingSnapshot, OutgoingSnapshot, PeerInbox, PeerSender, SendError};
pub use proposals::Refusal;
pub use run::{Parts, Running, start};
pub use start::{StartError, recover};
pub use wal::{LogJob, run_fetch, run_group};

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
            snapshot_dir,
            catch_up_entries: 5_000,
        }
    }

    fn transfer_timeout(&self) -> Duration {
        self.tick * u32::try_from(self.election_ticks).unwrap_or(u32::MAX)
    }
}
