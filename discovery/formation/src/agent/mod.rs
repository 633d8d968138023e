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

pub use directory::{
    DirectoryKind, DirectoryListing, LOST_AND_FOUND, MARKER, MEMBER_FOLDER, TOMBSTONE, classify,
};
pub use event::{
    AgentAction, AgentEvent, AgentOutput, ClusterStatus, ExaminedProposal, ProbeAnswer,
    ProbeTarget, ProposalObjection, StartSource,
};
pub use journal::{Journal, LaunchState, SignedList, SignedListMember};
pub use start::{StartDecision, decide_at_start};
pub use step::{Agent, MAX_CLOCK_SKEW, release_wait_limit};
