//! Tests of the built agent: which data directories it accepts, and which content.

#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

const DO_NOT_RESTART: i32 = 3;
const USAGE: i32 = 2;
/// Id of any user but root.
const OTHER_USER_ID: u32 = 12_345;

fn run(data_dir: &Path) -> Output {
    let mut agent = Command::new(env!("CARGO_BIN_EXE_muster-agent"));
    agent.args(["run", "--node-binary", "/bin/true", "--data-dir"]).arg(data_dir);
    agent.output().unwrap()
}

fn error_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Prepares a data directory as an attacker would. At the paths of files that the agent writes, it
/// has links to a file that only the agent's user can overwrite. Returns the directory and that
/// file.
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

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

/// Gives the group access to `path` and everything below it. kubelet does this to a volume before
/// each start of a pod with `fsGroup`.
fn open_to_group(path: &Path) {
    let is_folder = path.symlink_metadata().unwrap().is_dir();
    let opened = mode(path) | if is_folder { 0o2770 } else { 0o660 };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(opened)).unwrap();
    if is_folder {
        path.read_dir().unwrap().for_each(|entry| open_to_group(&entry.unwrap().path()));
    }
}

#[test]
fn a_shared_volume_is_accepted_with_a_warning_and_its_state_stays_private() {
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path().join("volume");
    std::fs::create_dir(&volume).unwrap();
    for _ in 0..2 {
        open_to_group(&volume);
        let output = run(&volume);
        // This error means that the data directory was accepted: the agent goes on to ask for a
        // bundle.
        assert_eq!(output.status.code(), Some(USAGE), "{}", error_text(&output));
        assert!(
            error_text(&output).contains("other users can delete or replace"),
            "{}",
            error_text(&output)
        );
        for private in ["agent", "agent/tls", "agent.lock"] {
            assert_eq!(mode(&volume.join(private)) & 0o077, 0, "{private}");
        }
        assert_eq!(mode(&volume), 0o2775);
    }
}

#[test]
fn state_of_another_user_is_refused_with_its_path() {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: only root can make another user's folder");
        return;
    }
    for name in ["agent", "agent/journal.json", "node", "agent.lock"] {
        let dir = tempfile::tempdir().unwrap();
        let theirs = dir.path().join(name);
        std::fs::create_dir_all(theirs.parent().unwrap()).unwrap();
        if name.contains('.') {
            std::fs::write(&theirs, "").unwrap();
        } else {
            std::fs::create_dir(&theirs).unwrap();
        }
        std::os::unix::fs::chown(&theirs, Some(OTHER_USER_ID), Some(OTHER_USER_ID)).unwrap();
        let output = run(dir.path());
        assert_eq!(output.status.code(), Some(DO_NOT_RESTART), "{}", error_text(&output));
        let words = format!("{} belongs to user 12345", theirs.display());
        assert!(error_text(&output).contains(&words), "{}", error_text(&output));
    }
}

#[test]
fn a_link_in_a_folder_that_others_may_write_to_is_refused_and_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (prepared, victim) = prepare(dir.path());
    std::fs::set_permissions(&prepared, std::fs::Permissions::from_mode(0o777)).unwrap();
    let output = run(&prepared);
    assert_eq!(output.status.code(), Some(DO_NOT_RESTART), "{}", error_text(&output));
    assert!(error_text(&output).contains("chmod go-w"), "{}", error_text(&output));
    assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
}

#[test]
fn another_users_folder_is_refused_and_left_unchanged() {
    if !rustix::process::geteuid().is_root() {
        // Written straight to standard error, since the test runner hides the output of a passing
        // test.
        let _ = writeln!(std::io::stderr(), "SKIPPED: only root can make another user's folder");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (prepared, victim) = prepare(dir.path());
    std::os::unix::fs::chown(&prepared, Some(OTHER_USER_ID), Some(OTHER_USER_ID)).unwrap();
    // Tests two cases: a directory with links in it, and a path through another user's directory.
    for path in [prepared.clone(), prepared.join("deeper")] {
        let output = run(&path);
        assert_eq!(output.status.code(), Some(DO_NOT_RESTART), "{}", error_text(&output));
        assert!(error_text(&output).contains("belongs to user 12345"), "{}", error_text(&output));
    }
    assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
    assert!(!prepared.join("deeper").exists());
}

/// The agent doesn't write through links that another user left in a directory, even if the
/// directory now belongs to the agent's user.
#[test]
fn links_that_were_left_in_a_folder_are_not_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let (prepared, victim) = prepare(dir.path());
    let output = run(&prepared);
    assert_eq!(output.status.code(), Some(DO_NOT_RESTART), "{}", error_text(&output));
    std::fs::remove_file(prepared.join("agent.lock")).unwrap();
    // This error means that the data directory was accepted: the agent goes on to ask for a bundle.
    let output = run(&prepared);
    assert_eq!(output.status.code(), Some(USAGE), "{}", error_text(&output));
    assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
}
