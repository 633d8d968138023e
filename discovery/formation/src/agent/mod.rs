//! The agent's state machine, from the new key to the running node.

mod directory;
mod documents;
mod event;
mod journal;
mod offers;
mod sign;
mod start;
mod step;
#[cfg(test)]
mod tests;

pub use directory::{Directory, LOST_AND_FOUND, Listing, MARKER, MEMBER, TOMBSTONE, classify};
pub use event::{Action, Event, From, Objection, Offer, Output, ProbeAnswer, Shown, Target};
pub use journal::{Bound, Journal, Member, Start};
pub use start::{Decision, at_start};
pub use step::{Agent, SKEW_ALLOWED, patience};
