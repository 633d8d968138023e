//! `muster-node`: parses its command line, runs a node or another command, and exits with a code
//! that gives the reason.

use std::{io::Write as _, process::ExitCode};

use muster_node::{
    commands,
    config::{self, CommandError, Config, Invocation, Remark},
    logging::Logging,
    server,
};
use node_engine::causes::error_chain;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code of a failure that a restart may cure.
const FAILED: u8 = 1;
/// Exit code of a wrong command line or configuration.
const USAGE: u8 = 2;
/// Exit code of a failure that every further start would meet again.
const DO_NOT_RESTART: u8 = 3;

fn main() -> ExitCode {
    // Switch huge pages off, which the allocator asks for: with them, a single used byte takes 2
    // MiB of memory. Without them, a node needs half the memory, and no more time. Ignore the
    // error, because older kernels can't do this.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    let args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    let args: Vec<String> = args.collect();
    if let Some(code) = commands::run(&args) {
        return ExitCode::from(code);
    }
    // All variables of the node have UTF-8 names and values. Variables that are not UTF-8 are
    // ignored.
    let environment = std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    match config::parse(args, environment) {
        Ok(Invocation::Help) => print(&config::help()),
        Ok(Invocation::Version) => print(&config::version()),
        Ok(Invocation::Run(config, remarks)) => run(&config, &remarks),
        Err(error @ CommandError::Usage(_)) => {
            print_error(&format!("{error}\nmuster-node --help shows the flags."));
            ExitCode::from(USAGE)
        }
        Err(CommandError::Config(error)) => {
            print_error(&format!("failed to verify flags: {}", error_chain(&error)));
            ExitCode::from(USAGE)
        }
    }
}

fn run(config: &Config, remarks: &[Remark]) -> ExitCode {
    let _logging = match Logging::start(config.log_level, config.log_format, &config.log_outputs) {
        Ok(logging) => logging,
        Err(error) => {
            print_error(&format!("cannot open the log output: {}", error_chain(&error)));
            return ExitCode::from(if error.is_refusal() { USAGE } else { FAILED });
        }
    };
    server::log_remarks(remarks);
    server::limit_process();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::from(FAILED);
        }
    };
    let result = runtime.block_on(server::run(config));
    // A signal may have interrupted the start while one of its threads reads or writes files. The
    // process does not wait for that thread: the next start does its work again from the beginning.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = error_chain(&error), next = error.advice(), "server error");
            ExitCode::from(match &error {
                error if error.is_final() => DO_NOT_RESTART,
                error if error.is_usage() => USAGE,
                _ => FAILED,
            })
        }
    }
}

fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(FAILED),
    }
}

fn print_error(text: &str) {
    // A failure to print can't be reported anywhere.
    let _ = writeln!(std::io::stderr(), "muster-node: {text}");
}
