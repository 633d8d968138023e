//! Calls systemctl: finds the main process of a unit; enables, disables, starts and stops units.

use std::process::Stdio;
use std::time::Duration;

use crate::exit::ExitError;

/// Time limit of one systemctl call, which waits until a unit has started or stopped.
const SYSTEMCTL_DEADLINE: Duration = Duration::from_secs(120);

/// Returns the id of a unit's main process. Fails if the unit runs no process.
pub(crate) async fn main_process(unit: &str) -> Result<u32, ExitError> {
    let printed = systemctl(&["show", "--property=MainPID", "--value", "--", unit]).await?;
    match printed.trim().parse() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err(ExitError::Failed(format!("the unit {unit} runs no process: start it first"))),
    }
}

/// Stops a unit, and keeps it from starting at boot (`systemctl disable --now`).
pub(crate) async fn disable_now(unit: &str) -> Result<(), ExitError> {
    systemctl(&["disable", "--now", "--", unit]).await.map(drop)
}

/// Starts a unit, and enables it for each boot (`systemctl enable --now`).
pub(crate) async fn enable_now(unit: &str) -> Result<(), ExitError> {
    systemctl(&["enable", "--now", "--", unit]).await.map(drop)
}

/// Makes systemd read changed unit files (`systemctl daemon-reload`).
pub(crate) async fn reload() -> Result<(), ExitError> {
    systemctl(&["daemon-reload"]).await.map(drop)
}

async fn systemctl(arguments: &[&str]) -> Result<String, ExitError> {
    let shown = format!("systemctl {}", arguments.join(" "));
    let failed = |what: String| ExitError::Failed(format!("{shown}: {what}"));
    let asked = tokio::process::Command::new("systemctl")
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(SYSTEMCTL_DEADLINE, asked)
        .await
        .map_err(|_| failed(format!("not done within {} s", SYSTEMCTL_DEADLINE.as_secs())))?
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
