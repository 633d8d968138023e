//! How a cluster forms: the state machines of the service and of the agent, as pure code.
//!
//! Neither machine knows cryptography, clocks, files, sockets or random numbers. The caller
//! verifies every signature and passes its findings in: records, hashes, times, the kind of a
//! directory. A step returns what to save and, once that is durable, what to send.
//!
//! * [`service::step`] applies one event to one cluster, in one transaction under its row lock.
//! * [`agent::Agent::step`] applies one event to one agent; [`agent::decide_at_start`] decides what
//!   a starting agent does.
//!
//! # How two clusters are prevented
//!
//! A list of members is decided once every one of them has signed it. Two clusters would need two
//! fully signed lists, and a majority of each would have to start. These rules prevent that:
//!
//! * **Two discovery processes, one database.** Each transaction locks the cluster's row before it
//!   reads it, and a commit is an INSERT under a unique key. No rule here can replace that lock;
//!   the exploration shows what happens without it.
//! * **A database that was set back in time.** With it, the service may freeze a second list
//!   although the first is decided. An agent that signed the first list signs no second one before
//!   enough members of the first have *released* it ([`Rule::ReleasesFirst`]). An agent that holds
//!   the first list's document never releases that list ([`Rule::HeldReleasesNothing`]). An agent
//!   that has released a list never holds its document ([`Rule::HoldAboveReleased`]). After
//!   `size − quorum + 1` releases, fewer members than a quorum could still hold the document. So a
//!   second list that shares a host with a running majority is never fully signed. No agent can
//!   know of a second list that shares no host with the first. Only the ledgers and
//!   [`service::ClusterEvent::DatabaseChanged`] help there; [`memory`] decides when that event is
//!   due.
//! * **A service that lies.** It can show any list to anybody at any time. The three rules of the
//!   previous item hold without its help, because agents rely on nothing but signed releases.
//! * **A host that starts twice.** The marker and `launching` are durable before the node is
//!   executed ([`Rule::LaunchingBeforeExec`]). A directory that is blank afterwards has lost its
//!   data and is never a fresh start. The journal names its machine ([`Rule::SameMachine`]), so a
//!   host with a copied disk doesn't count as the same host. A session is a boot counter and a
//!   nonce ([`Rule::OneSession`]), so one of two holders of one key is ordered to stop.
//! * **A host that promises twice.** The caller saves [`agent::AgentOutput::journal`] before it
//!   carries out the output's actions. So each promise is durable before anybody else sees it.
//!
//! # How ending without any cluster is prevented
//!
//! * Leases lapse before an event is judged ([`Rule::LapseFirst`]), so no list with dead members is
//!   committed.
//! * A list is frozen at an epoch above everything that was signed ([`Rule::FreezeAboveFloor`]).
//! * A host that two failed lists were counted against goes behind the standbys
//!   ([`Rule::CountedGoBehind`]).
//! * If two hosts can't reach each other, the failed list is counted against one of them
//!   ([`Rule::PairsAreCounted`]).
//! * Times that a fast clock has stored are corrected ([`Rule::ClampStoredTimes`]).
//! * A re-imaged host still finds a free seat ([`Rule::UseIsASeat`]).
//! * A member that repeats its ack gets the document again, in case the first answer was lost
//!   ([`Rule::AckAgain`]).
//! * A committed cluster that can't go on can be ended ([`Rule::RetireIsAnExit`]).
//!
//! [`service::explain`] says what a cluster waits for.
//!
//! # What is explored
//!
//! The `tests` crate runs these very sources over all interleavings of hosts, processes, messages
//! and faults within bounds. If one rule is switched off, the exploration finds the disaster that
//! the rule prevents. Five rules are exceptions, because other rules back them up:
//!
//! * [`Rule::OneListPerEpoch`] matters only if [`Rule::HoldAboveReleased`] is also off.
//! * [`Rule::AbandonBeforeCommit`] matters only if there are no ledgers.
//! * [`Rule::OneDocument`], [`Rule::HoldWhatWasSigned`] and [`Rule::OneSession`] matter only if a
//!   disk or a copy has broken what the other rules rely on. Each rule's comment says so, and the
//!   unit tests show what the rule refuses.
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
