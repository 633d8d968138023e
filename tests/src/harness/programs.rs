//! Where the built programs are.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// The path of one of our programs, built by the same cargo call that built the caller.
///
/// # Errors
/// When it has not been built: `cargo test` alone builds no product binaries.
pub fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding the running program")?;
    let mut folder = own.parent().context("a program has a folder")?.to_path_buf();
    // Tests live one folder deeper than binaries.
    if folder.ends_with("deps") {
        folder.pop();
    }
    let path = folder.join(name);
    ensure!(
        path.exists(),
        "{} is not built: run `cargo build --workspace` first (make test does)",
        path.display()
    );
    Ok(path)
}
