//! From a configuration to a running node, and back down in order.

pub mod clients;
pub mod logging;
mod peers;

use std::fmt::Write as _;

pub use peers::{Inbound, Outbound};

/// An error and its causes, on one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    text
}
