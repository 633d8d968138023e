//! Raft, sans-I/O: ticks and messages in, [`Ready`] out.
//!
//! The algorithm is the crate `raft`'s; this crate is the wall around it. No type of that library
//! passes the wall, so that another core can take its place under the same simulation, and the
//! library never sees a byte that it would have to decode: its protobuf recurses on unknown fields
//! (RUSTSEC-2024-0437), so peers and disk are read by [`Message::decode`] and the log's own codec,
//! and values cross the wall field by field.
//!
//! # What the caller owes
//!
//! 1. Take [`Consensus::ready`] until there is none after each round of inputs.
//! 2. [`Ready::messages`] may leave at once. [`Ready::after_persist`] may leave only when
//!    everything in this and all earlier [`Ready::persist`] is durable. No exception.
//! 3. Say [`Consensus::persisted`] when that is so, in the order of the numbers.
//! 4. Apply [`Ready::committed`] in order, and say [`Consensus::applied`]. For each entry of kind
//!    [`EntryKind::ConfChange`] that was not refused there, [`Consensus::change_members`] first.
//! 5. Read what [`Ready::fetches`] asks for from the log, and give it to [`Consensus::fetched`].
//! 6. Build a snapshot when [`Ready::snapshot_wanted`] names a peer, and say so with
//!    [`Consensus::snapshot_built`]; report how its transfer ended.
//!
//! # What this crate guards against in the library
//!
//! * Election time-outs come from a seed, not from the library's generator.
//! * A read's context is (member, boot counter, sequence) and is never used twice: acknowledgements
//!   of an older read can't confirm a newer one.
//! * A message that would trip one of the library's assertions (a commit index beyond the log, an
//!   entry that contradicts a committed one) is refused, not stepped.
//! * `next > match` for every peer, which 0.7.0 breaks when a rejection arrives late.
//! * A message that depends on a term or vote which isn't durable yet never leaves, also where the
//!   library would let a leader speak at once (a single voter with learners).
//!
//! # What it does not do
//!
//! It does not say what a change of members means. It starts with [`Initial::members`] and follows
//! each change once that is applied; whether one is sensible, and who the members are beside their
//! ids, is the state machine's matter. One change is under way at a time, and is one step.

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

pub use config::{Config, ConfigError, Initial};
pub use consensus::{Consensus, ProposeError, StepError};
pub use entry::{Entry, EntryKind, Position};
pub use guards::Guards;
pub use members::{ConfChange, Members};
pub use message::{
    DecodeError, HardState, MAX_ENTRIES_PER_MESSAGE, MAX_INDEX, Message, MessageKind, ReadContext,
};
pub use ready::{Fetch, PeerState, PeerStatus, Persist, ReadState, Ready, Role, Status};
pub use terms::Terms;
