//! Paths of the built programs.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// Returns the path of one of our programs, from the target directory of the running program.
///
/// # Errors
/// If the program is not built: `cargo test` alone doesn't build other packages' binaries.
pub fn program_path(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding the running program")?;
    let mut folder = own.parent().context("a program has a folder")?.to_path_buf();
    // Test programs are in the folder `deps` below the one with the binaries.
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
