//! From what crosses the wire to what the state machine speaks in, and back.

mod change;
mod convert;

pub use change::describe;
pub use convert::{
    OutOfRange, epoch_to_row, hash_of, permissions, record_of_verified, session, statement_of,
    wire_proposal,
};
