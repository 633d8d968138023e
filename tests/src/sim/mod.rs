//! The seeded simulation of the node: members, network, disks and clients in one thread.
//!
//! What runs is the production code: everything in [`muster_node::driver`] but its threads (the core's
//! mail and rounds, the log's groups, the machine's turns, the bodies of snapshots), with small bounds,
//! and the real store (mvcc over `redb`) over a simulated disk. When each of them runs, and
//! everything around them, is decided by one seed: message loss, duplication, delay and reordering, partitions in one or both
//! directions, crashes at any operation of the disk with unsynced sectors lost or torn, disks that
//! fail or are full at any operation, restarts, pauses, and clocks that run at different speeds. Some
//! faults aim (`faults`): at a leader, at who has just acknowledged something, at the middle of a
//! write or of a snapshot's installation; a member is cut off until the log has gone on without it.
//!
//! In half of the histories there are users and roles, which change while requests are on their way,
//! and clients ask as this user or that one, by name or with a token.
//!
//! In a quarter of the histories some clients do what Kubernetes' API servers do: they keep copies of
//! prefixes by lists and watches (`copies`), change what these show, and race for who compacts.
//!
//! In half of the histories the members change: operators add, promote, move and remove them, at any
//! member, several at once, by what production judges and makes of it; new machines join with the whole
//! state of a member; removed ones are started again and again; some machines forget what they were.
//!
//! After every step the invariants are checked (one file each in [`invariants`]): those of Raft;
//! that every outcome, every read and every store is what a plain [`model`](crate::model) of the committed
//! requests says; that each watch is told all of it once and in order. Then the faults end, and the
//! cluster has to converge and to answer whatever it is asked.
//!
//! A history is a function of its seed: the same seed gives the same trace hash, and a failure
//! says which seed replays it.
//!
//! # It must be able to fail
//!
//! [`Options::guards`] puts one bug back. The weakened values exist only in builds with debug
//! assertions (see `node_consensus::Guards`), so that no release build of any program can hold
//! one; the tests that use them run in the dev profile.

mod amnesia;
mod api_servers;
mod clients;
mod copies;
mod faults;
pub mod invariants;
mod leases;
mod links;
mod members;
mod network;
mod node;
mod operators;
mod plan;
mod ports;
mod requests;
mod run;
mod streams;
mod users;
mod work;
mod world;

pub use node_consensus::Guards;
pub use run::{Campaign, Outcome, campaign, replay};
pub use world::Report;

/// What a history is made of, beside its seed.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Members: 1, 3 or 5; `None` lets the seed choose.
    pub members: Option<u64>,
    /// Virtual microseconds with faults.
    pub duration: u64,
    /// Always [`Guards::ALL`] but in the tests that put a bug back.
    pub guards: Guards,
    /// Members tell each other who the members are: always, but in a test.
    pub censuses: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { members: None, duration: 2_000_000, guards: Guards::ALL, censuses: true }
    }
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which invariant.
    pub invariant: &'static str,
    /// What happened.
    pub what: String,
}

impl Violation {
    pub(crate) fn new(invariant: &'static str, what: impl Into<String>) -> Self {
        Self { invariant, what: what.into() }
    }
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}
