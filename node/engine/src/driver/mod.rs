//! The driver: the one owner of consensus.
//!
//! API calls use a [`Handle`]. The transport is connected through [`PeerSender`] and [`PeerInbox`].
//! All decisions are made by types without thread, lock or clock. Threads run these types in
//! production, and simulated events run them in the simulation (`tests/simulation/src/sim`):
//!
//! | type | owns | thread |
//! |---|---|---|
//! | [`Mail`] | inputs that wait for consensus, and their limits | filled by all, emptied by **core** |
//! | [`RoundRunner`] | [`DriverCore`] (consensus, timers, barriers); reports of lost messages | **core** |
//! | [`LogWriter`] | the log: grouping of writes into one sync, work when idle | **wal** |
//! | [`Applier`] | the state machine: grouping into batches, answers to requests | **apply** |
//! | [`run_checkpoint`] | nothing; it makes the store durable | **checkpoint** |
//! | [`SnapshotStore`] | bodies of snapshots: the current one, removal of files | core, apply, **back** |
//! | [`run_fetch`] | nothing; it reads old entries | **fetch** |
//!
//! The modules `running_driver`, `apply_thread`, `log_thread`, `back_threads` and `mailbox` hold
//! the channels, locks and waits around these types. They make no decision that isn't about
//! waiting.

mod applier;
mod apply_thread;
mod back_threads;
mod driver_core;
mod driver_options;
mod error;
mod fatal;
mod handle;
mod initial_state;
mod log_thread;
mod log_writer;
mod mail;
mod mailbox;
mod metrics;
mod node_status;
mod outgoing_snapshot_body;
mod peers;
mod proposal_queue;
mod proposed_requests;
mod read_heartbeats;
mod read_queue;
mod round_runner;
mod running_driver;
mod snapshot_store;
mod waiters;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

pub use applier::{
    Applier, ApplierError, ApplyBatch, ApplyJob, ApplySink, CheckpointPolicy, run_checkpoint,
};
pub use driver_core::{DriverCore, Effects};
pub use driver_options::DriverOptions;
pub use error::{ProposeError, ReadBarrierError, TransferError};
pub use fatal::exit_on_defragmentation_failure;
pub use handle::Handle;
pub use initial_state::{StartError, recover_initial_state};
pub use log_writer::{LogJob, LogWriter, collect_log_jobs, run_fetch};
pub use mail::{
    ClientProposal, MAX_QUEUED_MESSAGE_BYTES, MAX_QUEUED_PROPOSAL_BYTES, MAX_QUEUED_PROPOSALS,
    MAX_QUEUED_READS, Mail, MailBounds, Notice, QueueError, ReadToken,
};
pub use metrics::{DriverMetrics, SLOW_APPLY};
pub use node_consensus::{Message, MessageKind, PeerState, PeerStatus, Position, Role};
pub use node_status::{NodeStatus, accepts_removal_report};
#[cfg(any(test, feature = "testing"))]
pub use peers::test_inbox;
pub use peers::{
    InboxFull, IncomingSnapshot, OutgoingSnapshot, PeerInbox, PeerSender, SendError,
    is_snapshot_wanted,
};
pub use round_runner::{EffectSink, RoundRunner};
pub use running_driver::{MemberParts, RunningDriver, start};
pub use snapshot_store::{SnapshotFiles, SnapshotStorage, SnapshotStore};

/// Time for which a leader with a new commit index waits for an append that carries the index to
/// its peers. Then it sends the index alone. A client of another member may see a write later by up
/// to this time, unless the write was made through the same member.
pub const COMMIT_INDEX_DELAY: Duration = Duration::from_millis(1);

/// Time for which a leader waits for the answers of the quickest quorum, before it asks the other
/// members whether it still leads, so that reads can be answered.
pub const READ_HEARTBEAT_DELAY: Duration = Duration::from_millis(2);

/// Time for which a round of reads is delayed at most, so that more reads share it. Rounds are
/// delayed only while [`MIN_SHARED_READS`] reads or more wait at the same time.
pub const READ_ROUND_DELAY: Duration = Duration::from_micros(700);

/// Number of reads at the same time from which on a round of reads is delayed. With fewer, a round
/// for each read costs little, and the delay would be felt.
pub const MIN_SHARED_READS: usize = 12;

/// Capacity of the queue to the log thread, and of that to the apply thread. It is also the maximum
/// number of jobs that such a thread takes from its queue at once. Normally the driver's limit on
/// unapplied bytes is reached first. If a queue is full, the core thread blocks.
const QUEUED_JOBS: usize = 4096;

/// Maximum size of one proposal in bytes. etcd's default request limit is 1.5 MiB; this hard limit
/// is our own.
pub const MAX_PROPOSAL_BYTES: usize = 10 * 1024 * 1024;

/// Options of one member: for its driver and for consensus.
#[derive(Clone, Debug)]
pub struct MemberOptions {
    pub member: u64,
    /// Length of one tick. A leader sends heartbeats every tick (`--heartbeat-interval`).
    pub tick: Duration,
    /// Ticks without a leader before an election (`--election-timeout` in ticks).
    pub election_ticks: usize,
    /// Maximum time that a request waits for its outcome: 5 s plus two election time-outs, as in
    /// etcd.
    pub request_timeout: Duration,
    /// Whether this member campaigns as soon as it has connected to a quorum. True only at the
    /// first start of the cluster's first member.
    pub campaign_when_connected: bool,
    /// Whether to shorten the wait for the first election after each start of this member, once a
    /// quorum is connected.
    pub hasten_first_election: bool,
    /// Directory of incoming and outgoing snapshots. The transport writes incoming ones here.
    pub snapshot_dir: PathBuf,
    /// Number of entries that the log keeps for followers that lag, although the store already
    /// holds them durably.
    pub catch_up_entries: u64,
}

impl MemberOptions {
    /// Returns etcd's defaults: 100 ms heartbeats, and a 1 s election time-out.
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
