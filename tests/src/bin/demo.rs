//! `make demo`: three hosts with unknown addresses become one secure cluster, and stay one.

use std::process::ExitCode;

use clap::Parser;
use muster_tests::demo::{self, Options};

fn main() -> ExitCode {
    match demo::run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            demo::story::Story::complain(&format!("the demo failed: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
