//! Conversions of the state machine's values into what rows store.

mod change;
mod number;
mod secret;

pub(crate) use change::describe;
pub(crate) use number::{OutOfRange, number_to_row};
pub(crate) use secret::BrowserSecret;
