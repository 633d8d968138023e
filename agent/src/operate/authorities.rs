//! Follows a replacement of the cluster's CAs: which CAs this member's node trusts, and which CAs
//! issued its certificates.
//!
//! The newest statement names the CAs. The agent writes their certificates where the node reads
//! them, and reports to discovery which step this member has taken. An owner takes the next step of
//! the replacement only after all members have taken the step before.
//!
//! muster-node reads changed CA files by itself. Stock etcd reads them only when it starts. So this
//! module keeps a file with the statement that was the newest when the running process was started.

use std::time::Duration;

use discovery_types::api::MemberCas;
use discovery_types::leaves::Leaves;
use discovery_types::statement::{Statement, StatementChain};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::exit::{ExitError, error_chain};
use crate::launch::node_command::{NodeKind, serves_own_certificates, write_certificates};
use crate::launch::process::ProcessIdentity;
use crate::observe::status::StatusHandle;
use crate::state::{self, Layout};

/// Text in the status while stock etcd has to be restarted.
const RESTART_WANTED: &str = "the cluster's CAs have changed, and etcd reads them only when it starts: \
     stop muster-agent on this host, which stops etcd, and start it again, one member after the other";

/// How often the agent checks whether an adopted etcd serves new certificates.
const EXCHANGE_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Keeps this member's files up to date with the CAs that the newest statement names.
#[derive(Clone)]
pub(crate) struct OwnCas {
    layout: Layout,
    kind: NodeKind,
    board: StatusHandle,
    facts: watch::Sender<CaFacts>,
}

/// Facts about this member's CAs. A statement's number is its position in the statement chain.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CaFacts {
    /// Number of the earliest statement from which on the CAs in this member's files have been
    /// trusted.
    written: u64,
    /// Number of the earliest statement from which on the present issuing CAs have issued
    /// certificates.
    issuing: u64,
    /// Number of the earliest statement from which on the CAs that the node's process read at its
    /// start have been trusted. `None` if that isn't known.
    at_start: Option<u64>,
    /// Whether the CAs that issue now signed the certificates that the member serves.
    are_certificates_new: bool,
    /// Whether the cluster has ever trusted other CAs than its first ones.
    was_replaced: bool,
}

/// Content of the file about the start of the node's process.
#[derive(Serialize, Deserialize)]
struct StartFile {
    process: ProcessIdentity,
    trusted: u64,
}

impl OwnCas {
    /// Derives the facts from the statements and certificates with which the node is started. The
    /// caller has written the certificate files already.
    pub(crate) fn new(
        layout: &Layout,
        kind: NodeKind,
        chain: &StatementChain,
        leaves: &Leaves,
        board: &StatusHandle,
    ) -> Self {
        let facts = CaFacts {
            written: chain.trusted_since(),
            issuing: chain.issuing_since(),
            at_start: None,
            are_certificates_new: are_certificates_new(layout, leaves, chain.newest()),
            was_replaced: was_replaced(chain),
        };
        let facts = watch::Sender::new(facts);
        Self { layout: layout.clone(), kind, board: board.clone(), facts }
    }

    /// Whether the CA files, and the report to discovery, correspond to the newest statement of
    /// `chain`.
    pub(crate) fn is_following(&self, chain: &StatementChain) -> bool {
        let facts = self.facts.borrow();
        (facts.written, facts.issuing) == (chain.trusted_since(), chain.issuing_since())
    }

    /// Writes the CAs that the newest statement of a longer chain names. `leaves` are the member's
    /// present certificates.
    pub(crate) fn follow(&self, chain: &StatementChain, leaves: &Leaves) -> Result<(), ExitError> {
        write_certificates(&self.layout, leaves, chain.newest())?;
        tracing::info!("the cluster's owners have changed its CAs: the new files are written");
        self.facts.send_modify(|facts| {
            facts.written = chain.trusted_since();
            facts.issuing = chain.issuing_since();
            facts.are_certificates_new = are_certificates_new(&self.layout, leaves, chain.newest());
            facts.was_replaced = was_replaced(chain);
        });
        self.show_restart();
        Ok(())
    }

    /// Notes the certificates that the member has now.
    pub(crate) fn note_certificates(&self, leaves: &Leaves, statement: &Statement) {
        let are_certificates_new = are_certificates_new(&self.layout, leaves, statement);
        self.facts.send_modify(|facts| facts.are_certificates_new = are_certificates_new);
    }

    /// Returns the number of the earliest statement from which on the CAs in the files have been
    /// trusted. [`OwnCas::note_start`] takes this number.
    pub(crate) fn written(&self) -> u64 {
        self.facts.borrow().written
    }

    /// Notes that the node's process has been started. `written` is the value of
    /// [`OwnCas::written`] right before the start.
    pub(crate) fn note_start(&self, process: &ProcessIdentity, written: u64) {
        self.facts.send_modify(|facts| facts.at_start = Some(written));
        if self.kind != NodeKind::Muster {
            let file = StartFile { process: process.clone(), trusted: written };
            let text = serde_json::to_vec(&file).expect("plain structs always serialise");
            let path = self.layout.node_start();
            if let Err(error) = muster_files::data::replace_volatile(&path, &text) {
                // Without this file, a later agent doesn't know which CAs the node's process
                // trusts. It then asks for a restart of the node.
                tracing::warn!(
                    "the start of the node can't be written down: {}",
                    error_chain(&error)
                );
            }
        }
        self.show_restart();
    }

    /// Notes that the agent has found the node's process running.
    pub(crate) fn note_adopted(&self, process: &ProcessIdentity) {
        let bytes = state::read(&self.layout.node_start()).ok().flatten();
        let file: Option<StartFile> = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let found = file.filter(|file| file.process == *process).map(|file| file.trusted);
        self.facts.send_modify(|facts| facts.at_start = found);
        self.show_restart();
    }

    /// Returns what to report to discovery. `None` in a cluster whose CAs were never replaced.
    pub(crate) fn report(&self) -> Option<MemberCas> {
        let facts = self.facts.borrow();
        facts.was_replaced.then(|| MemberCas {
            trusted: self.trusted(&facts),
            certified: facts.are_certificates_new.then_some(facts.issuing),
        })
    }

    /// Waits until [`OwnCas::report`] returns another value than `reported`.
    pub(crate) async fn wait_for_change(&self, reported: Option<MemberCas>) {
        let mut facts = self.facts.subscribe();
        while self.report() == reported {
            if facts.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Returns the number of the earliest statement from which on the CAs of the node's process
    /// have been trusted. Returns 0 if that isn't known.
    fn trusted(&self, facts: &CaFacts) -> u64 {
        match self.kind {
            NodeKind::Muster => facts.written,
            NodeKind::Etcd { .. } => facts.at_start.unwrap_or(0),
        }
    }

    fn show_restart(&self) {
        let is_wanted = {
            let facts = self.facts.borrow();
            self.trusted(&facts) < facts.written
        };
        let text = is_wanted.then(|| RESTART_WANTED.to_owned());
        if let Some(text) = &text {
            tracing::warn!("{text}");
        }
        self.board.update(|status| status.restart_wanted = text);
    }
}

/// Whether the CAs that issue now signed the certificates that the member's node serves. An adopted
/// etcd serves its earlier certificates until `adopt certificates` exchanges them.
fn are_certificates_new(layout: &Layout, leaves: &Leaves, statement: &Statement) -> bool {
    serves_own_certificates(layout).unwrap_or(true) && leaves.are_by_issuing_cas(statement)
}

fn was_replaced(chain: &StatementChain) -> bool {
    chain.statements().any(|statement| statement.also_trusted.is_some())
}

/// Waits until an adopted etcd serves certificates of the cluster's own CAs. Waits for ever if the
/// node does so already.
pub(super) async fn certificates_exchanged(layout: &Layout) {
    if serves_own_certificates(layout) != Some(false) {
        return std::future::pending().await;
    }
    while serves_own_certificates(layout) == Some(false) {
        tokio::time::sleep(EXCHANGE_CHECK_INTERVAL).await;
    }
    tracing::info!("the etcd serves certificates of the cluster's own CAs");
}

#[cfg(test)]
mod tests {
    use discovery_types::fixtures::{ClusterFixture, TestCa};
    use discovery_types::statement::CaPair;

    use super::*;

    const ETCD: NodeKind = NodeKind::Etcd { major: 3, minor: 7 };

    struct CasFixture {
        world: ClusterFixture,
        chain: StatementChain,
        dir: tempfile::TempDir,
        board: StatusHandle,
    }

    impl CasFixture {
        fn new() -> Self {
            let (world, dir) = (ClusterFixture::new(1), tempfile::tempdir().unwrap());
            Layout::new(dir.path()).unwrap().create().unwrap();
            let chain = world.chain();
            Self { world, chain, dir, board: StatusHandle::default() }
        }

        fn cas(&self, kind: NodeKind) -> OwnCas {
            let layout = Layout::new(self.dir.path()).unwrap();
            OwnCas::new(&layout, kind, &self.chain, &self.world.leaves(0), &self.board)
        }

        /// Appends a statement that differs from the newest one by its number and by `change`.
        fn append(&mut self, change: impl FnOnce(&mut Statement)) {
            let last = self.chain.newest();
            let previous = Some(self.chain.newest_hash());
            let mut next = Statement { seq: last.seq + 1, previous, ..last.clone() };
            change(&mut next);
            self.chain.append(&next.sign(&self.world.owner)).unwrap();
        }

        /// Appends a statement that names new CAs as trusted, too.
        fn begin(&mut self) {
            let new = CaPair { peer: TestCa::new("p").pem, client: TestCa::new("c").pem };
            self.append(|next| (next.version, next.also_trusted) = (2, Some(new)));
        }

        /// Appends a statement that makes the additional CAs issue.
        fn switch(&mut self) {
            self.append(|next| {
                let old = next.issuing_cas();
                let other = next.also_trusted.replace(old).unwrap();
                (next.peer_ca, next.client_ca) = (other.peer, other.client);
            });
        }

        fn tls_file(&self, name: &str) -> String {
            std::fs::read_to_string(self.dir.path().join("agent/tls").join(name)).unwrap()
        }

        fn follow(&self, cas: &OwnCas) {
            cas.follow(&self.chain, &self.world.leaves(0)).unwrap();
        }

        fn is_restart_wanted(&self) -> bool {
            self.board.read().restart_wanted.is_some()
        }
    }

    fn process(pid: i32) -> ProcessIdentity {
        ProcessIdentity { pid, start_ticks: 1, boot_id: "boot".to_owned(), program: "etcd".into() }
    }

    fn reported(trusted: u64, certified: Option<u64>) -> Option<MemberCas> {
        Some(MemberCas { trusted, certified })
    }

    #[test]
    fn muster_node_trusts_what_is_written() {
        let mut fixture = CasFixture::new();
        let cas = fixture.cas(NodeKind::Muster);
        cas.note_start(&process(7), cas.written());
        assert_eq!(cas.report(), None, "nothing was ever replaced");
        fixture.begin();
        fixture.follow(&cas);
        assert_eq!(cas.report(), reported(1, Some(0)));
        assert!(!fixture.is_restart_wanted());
        assert_eq!(fixture.tls_file("peer-ca.crt"), fixture.chain.newest().peer_bundle());
        assert_eq!(fixture.tls_file("client-ca.crt"), fixture.chain.newest().client_bundle());
    }

    #[test]
    fn a_switch_is_followed_although_the_same_cas_stay_trusted() {
        let mut fixture = CasFixture::new();
        fixture.begin();
        let cas = fixture.cas(NodeKind::Muster);
        assert!(cas.is_following(&fixture.chain));
        fixture.switch();
        assert!(!cas.is_following(&fixture.chain));
        fixture.follow(&cas);
        assert!(cas.is_following(&fixture.chain));
        assert_eq!(cas.report(), reported(1, None), "the old CAs signed the certificates");
    }

    #[test]
    fn cas_that_can_not_be_written_are_not_reported_as_trusted() {
        let mut fixture = CasFixture::new();
        fixture.begin();
        let cas = fixture.cas(NodeKind::Muster);
        fixture.append(|next| (next.version, next.also_trusted) = (1, None));
        fixture.begin();
        std::fs::remove_dir_all(fixture.dir.path().join("agent/tls")).unwrap();
        assert!(cas.follow(&fixture.chain, &fixture.world.leaves(0)).is_err());
        assert!(!cas.is_following(&fixture.chain), "it is tried again");
        assert_eq!(cas.report(), reported(1, Some(0)));
    }

    #[test]
    fn etcd_trusts_what_was_written_when_it_was_started() {
        let mut fixture = CasFixture::new();
        let cas = fixture.cas(ETCD);
        cas.note_start(&process(7), cas.written());
        fixture.begin();
        fixture.follow(&cas);
        assert_eq!(cas.report(), reported(0, Some(0)));
        assert!(fixture.is_restart_wanted());
        // A later agent finds the node's process running, and then restarts it.
        let cas = fixture.cas(ETCD);
        cas.note_adopted(&process(7));
        assert_eq!(cas.report(), reported(0, Some(0)));
        let before = cas.written();
        cas.note_start(&process(8), before);
        assert_eq!(cas.report(), reported(1, Some(0)));
        assert!(!fixture.is_restart_wanted());
        let cas = fixture.cas(ETCD);
        cas.note_adopted(&process(8));
        assert_eq!(cas.report(), reported(1, Some(0)));
        // The agent doesn't know which CAs an unknown process trusts.
        cas.note_adopted(&process(9));
        assert_eq!(cas.report(), reported(0, Some(0)));
        assert!(fixture.is_restart_wanted());
    }

    #[test]
    fn files_that_change_while_etcd_starts_count_as_unread() {
        let mut fixture = CasFixture::new();
        let cas = fixture.cas(ETCD);
        let before = cas.written();
        fixture.begin();
        fixture.follow(&cas);
        cas.note_start(&process(7), before);
        assert_eq!(cas.report(), reported(0, Some(0)));
        // The next agent reads from the file what this process trusts.
        let cas = fixture.cas(ETCD);
        cas.note_adopted(&process(7));
        assert_eq!(cas.report(), reported(0, Some(0)));
        assert!(fixture.is_restart_wanted());
    }

    #[tokio::test]
    async fn a_change_of_the_certificates_is_reported() {
        let mut fixture = CasFixture::new();
        fixture.begin();
        let cas = fixture.cas(NodeKind::Muster);
        let last = cas.report();
        let other = Statement { peer_ca: TestCa::new("p").pem, ..fixture.chain.newest().clone() };
        let note = async { cas.note_certificates(&fixture.world.leaves(0), &other) };
        tokio::join!(cas.wait_for_change(last), note);
        assert_eq!(cas.report(), reported(1, None));
    }
}
