use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // The allocator asks for huge pages, of which a touched byte takes 2 MiB. Older kernels can't
    // switch them off.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    muster_discovery::cli::main()
}
