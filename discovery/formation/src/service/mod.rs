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
    Applicant, Cluster, EndCause, Ended, Frozen, LastError, Phase, Probe, Row, Seating, Split,
};
pub use event::{Event, Grant, Poll, Redeem};
pub use explain::{Line, explain};
pub use outcome::{Alarm, Answer, Change, Outcome, Reopen, Standing};
pub use refusal::{Refusal, RefusalCode};
pub use settings::{EPOCH_DISTANCE, EPOCH_MAX, Settings};
pub use step::{Context, step, view};
pub use time::next_deadline;
