//! How a cluster forms: the service's and the agent's state machines, pure.
//!
//! Neither knows crypto, clocks, files, sockets or chance. Whoever calls has verified every
//! signature and hands in what was found: records, hashes, times, what lies in a directory. What
//! comes back is what to save and, once that is durable, what to say.
//!
//! * [`service::step`] applies one event to one cluster, in one transaction under its row lock.
//! * [`agent::Agent::step`] applies one event to one agent; [`agent::at_start`] decides what a
//!   starting one does.
//!
//! # How two clusters are prevented
//!
//! A list of members is decided when every one of them has signed it, so two clusters need two
//! fully signed lists, and a majority of each has to start. What stands in the way:
//!
//! * **Two discovery processes, one database.** Each transaction locks the cluster's row before it
//!   reads it, and a commit is an INSERT under a key that only one can have. No rule here can stand
//!   in for that lock; the exploration shows what happens without it.
//! * **A database that went back in time.** It may freeze a second list although the first is
//!   decided. An agent that signed the first signs no second one before enough members of the first
//!   have *released* it ([`Rule::ReleasesFirst`]); whoever holds the first's document never does
//!   ([`Rule::HeldReleasesNothing`]), and whoever has released never holds
//!   ([`Rule::HoldAboveReleased`]). `size − quorum + 1` releases leave fewer than a quorum that could
//!   still hold, so a second list that shares a host with a running majority is never fully signed.
//!   A second list that shares none is beyond any agent's knowledge: there, only the ledgers and
//!   [`service::Event::DatabaseChanged`] help; [`memory`] says when it is that event's turn.
//! * **A service that lies.** It may show any list to anybody at any time. The same three rules hold
//!   without its help, because agents count signed releases and nothing else.
//! * **A host that starts twice.** The marker and `launching` are durable before the node is
//!   executed ([`Rule::LaunchingBeforeExec`]), so a directory that is blank afterwards is lost data
//!   and never a fresh start. The journal names its machine ([`Rule::SameMachine`]), so a copied disk
//!   is not the same host. A session is a boot counter and a nonce ([`Rule::OneSession`]), so of two
//!   holders of one key one is told to stop.
//! * **A host that promises twice.** Whatever is shown to anybody is in
//!   [`agent::Output::durable`] first: the type has the order in it.
//!
//! # How no cluster at all is prevented
//!
//! Leases lapse before an event is judged ([`Rule::LapseFirst`]), so the dead are not committed.
//! Epochs are frozen above everything that was signed ([`Rule::FreezeAboveFloor`]). Whoever fails
//! twice goes behind the standbys ([`Rule::CountedGoBehind`]), and of two that miss each other one
//! fails ([`Rule::PairsAreCounted`]). A clock that was ahead leaves nothing behind that lasts
//! ([`Rule::ClampStoredTimes`]). A re-made host finds room
//! ([`Rule::UseIsASeat`]), a lost answer is given again ([`Rule::AckAgain`]), and what can't go on
//! can be ended ([`Rule::RetireIsAnExit`]). [`service::explain`] says which of it is missing.
//!
//! # What is explored
//!
//! The `tests` crate runs these very sources over all interleavings of hosts, processes, messages
//! and faults within bounds. Switched off alone, each rule lets its disaster be found again, save
//! five that others stand behind. Of these [`Rule::OneListPerEpoch`] is shown to matter once
//! [`Rule::HoldAboveReleased`] is off as well, and [`Rule::AbandonBeforeCommit`] once there are no
//! ledgers; [`Rule::OneDocument`], [`Rule::HoldWhatWasSigned`]
//! and [`Rule::OneSession`] matter when a disk or a copy has already broken what the others rely
//! on: each says so, and the tests beside the code show what it refuses.
//!
//! # What this crate does not do
//!
//! It verifies no signature, computes no hash, reads no clock, and knows neither HTTP nor SQL.

pub mod agent;
pub mod fitness;
#[cfg(test)]
mod fixtures;
pub mod memory;
pub mod rules;
pub mod service;
pub mod values;

pub use rules::{Rule, Rules};
pub use values::*;
