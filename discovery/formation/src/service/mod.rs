//! The service's state machine: it applies one event to one cluster in one transaction.

mod admission;
mod adopt;
mod cluster;
mod ends;
mod event;
mod explain;
mod links;
mod outcome;
mod refusal;
mod seats;
mod settings;
mod step;
#[cfg(test)]
mod tests;
mod time;
mod votes;

pub use cluster::{
    Applicant, Cluster, ClusterEnd, EndCause, FrozenList, LastError, Phase, ProbeOutcome,
    ProbeResults, Seating, Split,
};
pub use event::{ClusterEvent, Grant, Poll, Redeem};
pub use explain::{WaitReason, explain};
pub use outcome::{AgentStanding, Alarm, Answer, ClusterChange, ReopenReason, StepOutcome};
pub use refusal::{Refusal, RefusalCode};
pub use settings::{FormationSettings, MAX_EPOCH, MAX_EPOCH_DISTANCE};
pub use step::{StepContext, step, view};
pub use time::next_deadline;
