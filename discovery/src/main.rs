use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // Switch huge pages off, which the allocator asks for: with them, a single used byte takes 2
    // MiB of memory. Ignore the error, because older kernels can't do this.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    muster_discovery::cli::main()
}
