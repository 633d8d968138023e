//! One file per verb.

pub mod reset;
pub mod status;
