//! Whose data directory is taken, and what may lie in it: the built agent.

#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

const DO_NOT_RESTART: i32 = 3;
const USAGE: i32 = 2;
/// Any user but root.
const SOMEBODY: u32 = 12_345;

fn run(data_dir: &Path) -> Output {
    let mut agent = Command::new(env!("CARGO_BIN_EXE_muster-agent"));
    agent.args(["run", "--node-binary", "/bin/true", "--data-dir"]).arg(data_dir);
    agent.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder as another user would prepare it: links from where the agent is known to write, to a
/// file that only the victim may overwrite.
fn prepare(root: &Path) -> (std::path::PathBuf, std::path::PathBuf) {
    let (prepared, victim) = (root.join("prepared"), root.join("victim"));
    std::fs::write(&victim, "kept").unwrap();
    std::fs::create_dir_all(prepared.join("agent")).unwrap();
    for name in ["status.json", "journal.json", "agent.key"] {
        symlink(&victim, prepared.join(format!("agent/{name}.tmp"))).unwrap();
    }
    symlink(&victim, prepared.join("agent.lock")).unwrap();
    (prepared, victim)
}

#[test]
fn a_folder_that_others_may_write_is_refused_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let (prepared, victim) = prepare(dir.path());
    std::fs::set_permissions(&prepared, std::fs::Permissions::from_mode(0o777)).unwrap();
    let output = run(&prepared);
    assert_eq!(output.status.code(), Some(DO_NOT_RESTART), "{}", said(&output));
    assert!(said(&output).contains("chmod go-w"), "{}", said(&output));
    assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
}

#[test]
fn another_users_folder_is_refused_untouched() {
    if !rustix::process::geteuid().is_root() {
        // Straight to standard error: the test runner keeps what a test that passes has printed.
        let _ = writeln!(std::io::stderr(), "SKIPPED: only root can make another user's folder");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (prepared, victim) = prepare(dir.path());
    std::os::unix::fs::chown(&prepared, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    // Nor one that is reached through a folder of theirs.
    for path in [prepared.clone(), prepared.join("deeper")] {
        let output = run(&path);
        assert_eq!(output.status.code(), Some(DO_NOT_RESTART), "{}", said(&output));
        assert!(said(&output).contains("belongs to user 12345"), "{}", said(&output));
    }
    assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
    assert!(!prepared.join("deeper").exists());
}

/// Even where the folder is ours by now, what was left in it is not written through.
#[test]
fn links_that_were_left_in_the_folder_are_not_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let (prepared, victim) = prepare(dir.path());
    let output = run(&prepared);
    assert_eq!(output.status.code(), Some(DO_NOT_RESTART), "{}", said(&output));
    std::fs::remove_file(prepared.join("agent.lock")).unwrap();
    // It gets as far as saying that it has no bundle.
    let output = run(&prepared);
    assert_eq!(output.status.code(), Some(USAGE), "{}", said(&output));
    assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
}
