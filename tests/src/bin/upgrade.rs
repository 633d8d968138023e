//! `make test-upgrade`: see [`muster_tests::upgrade`].

use std::process::ExitCode;

use clap::Parser;
use muster_tests::upgrade::{self, UpgradeOptions};

#[allow(clippy::print_stderr, reason = "an error of a program")]
fn main() -> ExitCode {
    match upgrade::run(&UpgradeOptions::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("upgrade: failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}
