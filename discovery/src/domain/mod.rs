//! What the state machine says, as it is stored.

mod change;
mod number;

pub use change::describe;
pub use number::{OutOfRange, epoch_to_row};
