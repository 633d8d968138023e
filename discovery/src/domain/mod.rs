//! Small value types and conversions: values of the state machine as rows store them, and secrets
//! of browsers.

mod change;
mod number;
mod secret;

pub(crate) use change::describe;
pub(crate) use number::{OutOfRange, number_to_row};
pub(crate) use secret::BrowserSecret;
