//! Seeded simulation of the node: members, network, disks and clients in one thread.
//!
//! The simulation runs production code:
//! - Everything in [`node_engine::driver`] except its threads, with small bounds: the core's mail
//!   and rounds, the log's groups, the machine's turns, and snapshot bodies.
//! - The real store (mvcc over `redb`), over a simulated disk.
//!
//! One seed decides when each part of this code runs, and everything around the code:
//! - Messages are lost, duplicated, delayed and reordered. Partitions cut one or both directions.
//! - Processes crash at any disk operation, and unsynced sectors are lost or torn.
//! - Disks fail or are full at any operation.
//! - Members restart and pause, and their clocks run at different speeds.
//! - Some faults are aimed (`faults`): at a leader, at a member that has just sent an
//!   acknowledgement, or at the middle of a write or a snapshot installation. A member may be cut
//!   off until a peer has compacted entries that it lacks.
//!
//! In half of the histories there are users and roles. They change while requests are under way,
//! and clients authenticate as different users, by name or with a token.
//!
//! In a quarter of the histories some clients behave as Kubernetes' API servers do. They keep
//! copies of prefixes by lists and watches (`prefix_copy`), change keys as their copies show them,
//! and race for the right to compact.
//!
//! In half of the histories the members change. Operators add, promote, move and remove members,
//! through any member and concurrently. Production code judges and carries out each change. New
//! machines join with the whole state of a member. Removed members are started again and again.
//! Some machines lose what their member has promised.
//!
//! After every step the invariants are checked (one file each in [`invariants`]):
//! - Raft's own invariants.
//! - Every outcome, every read and every store equals that of a plain [`model`](crate::model),
//!   which applies the committed requests.
//! - Each watch receives all its events once and in order.
//!
//! Then the faults end, and the cluster has to converge and to answer every request.
//!
//! A history is a function of its seed: the same seed gives the same trace hash. A failure names
//! the seed that replays it.
//!
//! # The simulation must be able to fail
//!
//! [`SimulationOptions::guards`] can put one bug back. The weakened values exist only in builds
//! with debug assertions (see `node_consensus::Guards`), so no release build of any program
//! contains one. The tests that use them run in the dev profile.

mod amnesia;
mod api_servers;
mod clients;
mod faults;
pub mod invariants;
mod leases;
mod members;
mod network;
mod node;
mod operators;
mod peer_streams;
mod plan;
mod ports;
mod prefix_copy;
mod process_steps;
mod requests;
mod run;
mod simulation;
mod users;
mod watch_streams;

pub use node_consensus::Guards;
pub use run::{Campaign, HistoryResult, campaign, replay};
pub use simulation::SimulationReport;

/// Parameters of a history, besides its seed.
#[derive(Clone, Copy, Debug)]
pub struct SimulationOptions {
    /// Number of members that the cluster begins with: 1, 3 or 5. `None` lets the seed choose.
    pub members: Option<u64>,
    /// Virtual microseconds during which faults happen.
    pub duration: u64,
    /// Safety rules of the production code that are on. A test can switch one off to put a bug
    /// back; other runs use [`Guards::ALL`].
    pub guards: Guards,
    /// Whether members send each other their member tables. Only one test switches this off.
    pub censuses: bool,
}

impl Default for SimulationOptions {
    fn default() -> Self {
        Self { members: None, duration: 2_000_000, guards: Guards::ALL, censuses: true }
    }
}

/// An invariant that was violated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvariantViolation {
    /// Name of the invariant.
    pub invariant: &'static str,
    /// Description of what happened.
    pub what: String,
}

impl InvariantViolation {
    pub(crate) fn new(invariant: &'static str, what: impl Into<String>) -> Self {
        Self { invariant, what: what.into() }
    }
}

impl std::fmt::Display for InvariantViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}
