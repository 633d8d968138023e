//! Scripts that run in place of a program.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// Writes an executable script, by a child process. If this process wrote it, a child that another
/// test starts meanwhile would inherit the open descriptor. Until that child executes its own
/// program, executing the script would fail with ETXTBSY.
///
/// # Errors
///
/// Fails if the shell can't be started or can't write the file.
pub fn write_script(path: &Path, text: &str) -> Result<()> {
    let write = r#"printf %s "$0" >"$1" && chmod 755 "$1""#;
    let mut command = Command::new("sh");
    command.args(["-c", write, text]).arg(path);
    let status = command.status().with_context(|| format!("writing {}", path.display()))?;
    ensure!(status.success(), "writing {}: {status}", path.display());
    Ok(())
}
