use std::process::ExitCode;

fn main() -> ExitCode {
    muster_agent::main()
}
