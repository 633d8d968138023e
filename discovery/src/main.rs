use std::process::ExitCode;

fn main() -> ExitCode {
    muster_discovery::cli::main()
}
