//! What the state machine says, as it is stored.

mod change;
mod number;

pub(crate) use change::describe;
pub(crate) use number::{OutOfRange, epoch_to_row};
