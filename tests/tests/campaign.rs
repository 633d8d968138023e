//! The command line of `make campaign`.

use std::process::Command;

use anyhow::{Result, ensure};

/// Returns the exit code of the program with these arguments, and what it wrote to standard error.
fn run_campaign(arguments: &[&str]) -> Result<(Option<i32>, String)> {
    let folder = tempfile::tempdir()?;
    let done = Command::new(env!("CARGO_BIN_EXE_campaign"))
        .args(arguments)
        .current_dir(folder.path())
        .output()?;
    Ok((done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned()))
}

#[test]
fn wrong_usage_ends_a_campaign_with_exit_code_2() -> Result<()> {
    for (arguments, says) in [
        (&["--time", "4"][..], "has no unit"),
        (&["--search", "everything"][..], "simulation"),
        (&["--time", "4h"][..], "run it in the workspace's root"),
    ] {
        let (code, said) = run_campaign(arguments)?;
        ensure!(code == Some(2) && said.contains(says), "{arguments:?}: {code:?}, {said}");
    }
    Ok(())
}
