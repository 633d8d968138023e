//! Tests of the built agent: with a tombstone, or an empty or damaged directory, the agent doesn't
//! bootstrap again until a reset. The tests offer it a bundle and a service, which it must not
//! contact.

#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;

use discovery_types::bundle::Bundle;
use discovery_types::digest::Digest;
use discovery_types::grant::TokenKind;
use discovery_types::token::Token;
use muster_agent::state::journal;
use muster_agent::state::node_dir::{self, Tombstone};
use muster_agent::state::{Layout, lock};
use secrecy::ExposeSecret as _;

const FAILED: i32 = 1;
const DO_NOT_RESTART: i32 = 3;

struct AgentFixture {
    dir: tempfile::TempDir,
    layout: Layout,
    service: TcpListener,
}

impl AgentFixture {
    /// Makes a host on which an agent has made its key and journal.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(&dir.path().join("data")).unwrap();
        layout.create().unwrap();
        journal::create(&layout, discovery_formation::MachineIdentity::default()).unwrap();
        let service = TcpListener::bind("127.0.0.1:0").unwrap();
        service.set_nonblocking(true).unwrap();
        Self { dir, layout, service }
    }

    fn bundle(&self, kind: TokenKind) -> PathBuf {
        let url = format!("https://{}", self.service.local_addr().unwrap());
        let bundle = Bundle {
            urls: vec![url.parse().unwrap()],
            pins: vec![Digest([1; 32])],
            cluster: uuid::Uuid::now_v7(),
            statement: Digest([2; 32]),
            token: Token::generate(kind),
        };
        let path = self.dir.path().join("bundle");
        std::fs::write(&path, bundle.expose().expose_secret()).unwrap();
        path
    }

    /// Starts the agent without a bundle and with each kind of bundle. Returns the exit code and
    /// the error text. Asserts that the exit code is the same each time, and that the service was
    /// not contacted.
    fn run_and_check_exit(&self) -> (i32, String) {
        let mut ends = Vec::new();
        for kind in [None, Some(TokenKind::Boot), Some(TokenKind::Join)] {
            let mut agent = Command::new(env!("CARGO_BIN_EXE_muster-agent"));
            agent.args(["run", "--node-binary", "/bin/true", "--advertise-address", "127.0.0.1"]);
            agent.arg("--data-dir").arg(self.layout.root());
            if let Some(kind) = kind {
                agent.arg("--bundle-file").arg(self.bundle(kind));
            }
            let output = agent.output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ends.push((output.status.code().unwrap(), said));
        }
        let asked = self.service.accept().map(|_| ()).map_err(|error| error.kind());
        assert_eq!(asked, Err(std::io::ErrorKind::WouldBlock), "discovery was asked");
        assert!(ends.iter().all(|(code, _)| *code == ends[0].0), "{ends:?}");
        assert!(lock::holder(&self.layout.node_lock()).unwrap().is_none());
        ends.swap_remove(0)
    }

    fn status(&self) -> String {
        let mut agent = Command::new(env!("CARGO_BIN_EXE_muster-agent"));
        let output = agent.arg("status").arg("--data-dir").arg(self.layout.root()).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    }

    fn tombstone() -> Tombstone {
        let at = "2026-01-02T03:04:05Z".to_owned();
        Tombstone { version: 1, at, by: "ada".to_owned(), ..Tombstone::default() }
    }

    fn write_tombstone(&self) {
        std::fs::create_dir_all(self.layout.node()).unwrap();
        node_dir::write_tombstone(&self.layout.node(), &Self::tombstone()).unwrap();
    }

    fn journal_removal(&self) {
        let (_, mut loaded) = journal::read(&self.layout).unwrap().unwrap();
        loaded.journal.is_removed = true;
        loaded.extras.removed = Some(Self::tombstone());
        journal::write(&self.layout, &loaded.journal, &loaded.extras).unwrap();
    }
}

#[test]
fn a_tombstone_ends_every_start_and_is_copied_into_the_journal() {
    let host = AgentFixture::new();
    host.write_tombstone();
    let (code, said) = host.run_and_check_exit();
    assert_eq!(code, DO_NOT_RESTART, "{said}");
    assert!(said.contains("removed from the cluster at 2026-01-02T03:04:05Z by ada"), "{said}");
    assert!(said.contains("muster-agent reset"), "{said}");
    // Wiping the node's directory removes the tombstone in it, but the journal has its copy.
    std::fs::remove_dir_all(host.layout.node()).unwrap();
    assert_eq!(host.run_and_check_exit().0, DO_NOT_RESTART);
    assert!(host.status().contains("removed from the cluster at 2026-01-02T03:04:05Z by ada"));
}

#[test]
fn a_tombstone_that_only_the_journal_contains_ends_every_start() {
    let host = AgentFixture::new();
    host.journal_removal();
    let (code, said) = host.run_and_check_exit();
    assert_eq!(code, DO_NOT_RESTART, "{said}");
    assert!(said.contains("at 2026-01-02T03:04:05Z by ada"), "{said}");
}

#[test]
fn a_tombstone_without_an_agents_state_ends_every_start() {
    let host = AgentFixture::new();
    host.write_tombstone();
    std::fs::remove_dir_all(host.layout.agent()).unwrap();
    assert_eq!(host.run_and_check_exit().0, DO_NOT_RESTART);
}

#[test]
fn an_agent_without_state_does_not_begin_on_a_nodes_data() {
    let host = AgentFixture::new();
    std::fs::create_dir_all(host.layout.node().join("member/wal")).unwrap();
    std::fs::remove_dir_all(host.layout.agent()).unwrap();
    let (code, said) = host.run_and_check_exit();
    assert_eq!(code, FAILED, "{said}");
    assert!(said.contains("Nothing was touched"), "{said}");
    assert!(!host.layout.journal().exists(), "it began anew");
}

#[test]
fn a_journal_that_was_cut_is_refused_and_left_unchanged() {
    let host = AgentFixture::new();
    let whole = std::fs::read(host.layout.journal()).unwrap();
    for length in [0, 1, whole.len() / 2, whole.len() - 2] {
        std::fs::write(host.layout.journal(), &whole[..length]).unwrap();
        let (code, said) = host.run_and_check_exit();
        assert_eq!(code, DO_NOT_RESTART, "{said}");
        assert!(said.contains("damaged"), "{said}");
        assert_eq!(std::fs::read(host.layout.journal()).unwrap(), &whole[..length]);
    }
}

#[test]
fn after_a_reset_a_removed_host_can_begin_again() {
    let host = AgentFixture::new();
    host.write_tombstone();
    assert_eq!(host.run_and_check_exit().0, DO_NOT_RESTART);
    let mut agent = Command::new(env!("CARGO_BIN_EXE_muster-agent"));
    agent.args(["reset", "--yes"]).arg("--data-dir").arg(host.layout.root());
    assert!(agent.status().unwrap().success());
    // A usage error (exit code 2): the agent needs a bundle now.
    let mut agent = Command::new(env!("CARGO_BIN_EXE_muster-agent"));
    agent.args(["run", "--node-binary", "/bin/true"]).arg("--data-dir").arg(host.layout.root());
    assert_eq!(agent.output().unwrap().status.code(), Some(2));
}
