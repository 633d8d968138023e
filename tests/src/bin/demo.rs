//! `make demo`: three hosts with unknown addresses become one secure cluster, and stay one.

use std::process::ExitCode;

use clap::Parser;
use muster_tests::demo::{self, DemoOptions};

fn main() -> ExitCode {
    match demo::run(&DemoOptions::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            demo::printer::DemoPrinter::print_error(&format!("the demo failed: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
