//! Raft, sans-I/O: ticks and messages in, [`Ready`] out.
//!
//! The crate `raft` implements the algorithm; this crate wraps it. No type of that library appears
//! in this crate's interface, so another implementation can take its place under the same
//! simulation. The library never decodes bytes, because its protobuf recurses on unknown fields
//! (RUSTSEC-2024-0437). [`Message::decode`] reads what peers send, the log's own codec reads the
//! disk, and values are converted field by field.
//!
//! # What the caller owes
//!
//! 1. After each round of inputs, take [`Consensus::ready`] until [`Consensus::has_ready`] is
//!    false.
//! 2. Send [`Ready::messages`] at any time. Send [`Ready::after_persist`] only after this
//!    [`Ready::persist`] and all earlier ones are durable, without exception.
//! 3. Then call [`Consensus::report_persisted`], in ascending order of [`Ready::number`].
//! 4. Apply [`Ready::committed`] in order, and call [`Consensus::report_applied`]. For an applied
//!    entry of kind [`EntryKind::ConfChange`] that the state machine did not refuse, call
//!    [`Consensus::change_members`] first.
//! 5. Read the entries of [`Ready::fetches`] from the log, and pass them to
//!    [`Consensus::supply_fetched`].
//! 6. Build a snapshot when [`Ready::snapshot_wanted`] names a peer, and announce it with
//!    [`Consensus::set_snapshot`]. Report how its transfer ended with
//!    [`Consensus::report_snapshot`].
//! 7. While [`Consensus::has_unsent_commit`] is true, a follower may not know what is committed
//!    until the next heartbeat. To tell it sooner, call [`Consensus::send_commit_index`].
//!
//! # What this crate guards against in the library
//!
//! * Election time-outs come from a seed, not from the library's generator.
//! * A read's context is (member, boot counter, sequence) and is never reused. So acknowledgements
//!   of an older read can't confirm a newer one.
//! * A message that would fail one of the library's assertions is refused. Examples are a commit
//!   index beyond the log, and an entry that contradicts a committed one.
//! * `next > match` holds for every peer. Version 0.7.0 breaks this when a rejection arrives late.
//! * A message that depends on a term or vote is never sent before these are durable. The library
//!   would let a single voter with learners send at once.
//!
//! # What it does not do
//!
//! It does not define what a change of members means. It starts with [`InitialState::members`], and
//! follows each change once that is applied. The state machine decides whether a change is
//! sensible, and knows the members' other properties. Only one change is under way at a time, and
//! it is a single step.

mod config;
mod consensus;
mod convert;
mod entry;
mod guards;
mod members;
mod message;
mod ready;
mod storage;
mod terms;

pub use config::{Config, ConfigError, InitialState};
pub use consensus::{Consensus, ProposeError, StepError, Turn};
pub use entry::{Entry, EntryKind, Position};
pub use guards::Guards;
pub use members::{ConfChange, Members};
pub use message::{
    HardState, MAX_ENTRIES_PER_MESSAGE, MAX_INDEX, Message, MessageDecodeError, MessageKind,
    ReadContext,
};
pub use ready::{
    FetchRequest, PeerState, PeerStatus, PersistRequest, ReadState, Ready, Role, Status,
};
pub use terms::Terms;
