//! Guard between a campaign and its child. If the campaign is killed, its guard ends the child, and
//! all processes that the child has started.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{getpid, getppid, set_child_subreaper};

use super::process_tree::{end_orphans, remove_namespaces, stop};

/// Subcommand of the campaign that runs a guard.
pub const GUARD_COMMAND: &str = "guard";
/// Interval at which the guard looks for the ends of the program and of the campaign.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Exit code of a guard whose campaign has ended. No process reads this code.
const CAMPAIGN_ENDED: u8 = 1;

/// Runs a program until it ends, or until the process `campaign` is no longer this process's
/// parent. Returns the program's exit code, or 128 plus the number of the signal that ended it.
///
/// # Errors
/// If the program can't be started or waited for.
pub fn run_guarded(campaign: u32, program: &Path, arguments: &[String]) -> Result<u8> {
    // If a descendant's parent ends, the descendant becomes a child of this process. So it can
    // still be found and ended.
    set_child_subreaper(Some(getpid()))?;
    let mut child = Command::new(program)
        .args(arguments)
        .spawn()
        .with_context(|| format!("{} can't be started", program.display()))?;
    let code = loop {
        if let Some(status) = child.try_wait()? {
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
            break u8::try_from(code).unwrap_or(u8::MAX);
        }
        if !is_parent(campaign) {
            stop(&mut child);
            break CAMPAIGN_ENDED;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    remove_namespaces(child.id());
    end_orphans();
    Ok(code)
}

fn is_parent(process: u32) -> bool {
    let parent = getppid().map(|parent| parent.as_raw_nonzero().get());
    parent.and_then(|parent| u32::try_from(parent).ok()) == Some(process)
}
