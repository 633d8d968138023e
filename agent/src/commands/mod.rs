//! One file per verb.

pub mod reset;
pub mod run;
pub mod status;
