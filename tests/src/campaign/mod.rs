//! `make campaign`: runs all searches for faults in turns until a time is over. Its report is for
//! readers who have never seen this repository.
//!
//! The searches are other programs of this package, test binaries and fuzz targets. [`plan`]
//! decides how long each one runs, and [`searches`] which command it runs. [`child`] runs a command
//! behind a [`guard`], and [`outcome`] reads its output. At the end [`bugs`] puts known bugs back,
//! which the tests must find. [`report`] turns all of it into text. [`run`] connects these parts.

pub mod bugs;
pub mod child;
pub mod guard;
pub mod machine;
pub mod outcome;
pub mod plan;
pub mod process_tree;
pub mod programs;
pub mod report;
pub mod run;
pub mod searches;
mod texts;
