//! Paths of the built programs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Returns the path of one of our programs: in `folder`, or as [`program_path`] finds it if
/// `folder` is `None`.
pub fn program_in(folder: Option<&Path>, name: &str) -> Result<PathBuf> {
    match folder {
        Some(folder) => Ok(folder.join(name)),
        None => program_path(name),
    }
}

/// Returns the path of one of our programs, from the target directory of the running program.
///
/// # Errors
/// If the program is not built: `cargo test` alone doesn't build other packages' binaries.
pub fn program_path(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding the running program")?;
    let mut folder = own.parent().context("a program has a folder")?.to_path_buf();
    // A test's own program is in the folder `deps`. The folder above that one has the binaries.
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
