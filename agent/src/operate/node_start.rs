//! Everything that starting a member's node requires, from the journal: identity, certificates,
//! addresses and command line.

use std::collections::BTreeSet;

use discovery_formation::agent::{AgentEvent, Journal};
use discovery_types::convert;
use discovery_types::digest::{Incarnation, MemberId};
use discovery_types::document::VerifiedDocument;
use discovery_types::jws::JwsType;
use discovery_types::key::PublicKey;
use discovery_types::leaves::Leaves;
use discovery_types::record::Record;
use discovery_types::recovery::{Recovery, RecoveryChain};
use discovery_types::statement::StatementChain;
use discovery_types::url::NodeUrl;

use super::addresses::{journalled_addresses, missing_in_journal};
use super::renewal;
use crate::backup::keeper::BackupKeeper;
use crate::cli::settings::RunSettings;
use crate::cluster;
use crate::crash::{self, Failpoint};
use crate::endpoint::ClientEndpoint;
use crate::enrol::protocol::Protocol;
use crate::exit::{ExitError, error_chain};
use crate::launch::node_command::{NodeCommand, NodeKind, Origin};
use crate::launch::running_node::CommandLine;
use crate::observe::status::{Phase, StatusHandle};
use crate::state::Layout;
use crate::state::addresses::Addresses;
use crate::state::journal::{self, signed_record};
use crate::state::node_dir::Tombstone;

/// Refuses to start a node on the other program's data. muster-node and etcd each consider the
/// other program's directory empty or broken.
pub(super) fn check_maker(layout: &Layout, kind: NodeKind) -> Result<(), ExitError> {
    let made_by_own = layout.node().join(MUSTER_NODE_FILE).exists();
    if !layout.has_log() || made_by_own == (kind == NodeKind::Muster) {
        return Ok(());
    }
    let maker = if made_by_own { "muster-node" } else { "etcd" };
    Err(ExitError::Usage(format!(
        "{} was made by {maker}, and --node-binary is another program: give it the one that made \
         it",
        layout.node().display()
    )))
}

/// Journals that the node has created its log. Returns whether it has.
pub(super) fn journal_log(layout: &Layout, protocol: &mut Protocol) -> Result<bool, ExitError> {
    if !layout.has_log() {
        return Ok(false);
    }
    crash::at(Failpoint::Exec);
    protocol.step(AgentEvent::LogSeen)?;
    tracing::info!("the node has its own log: from now on it starts from that");
    Ok(true)
}

/// Whether the node's data was made by stock etcd.
pub(crate) fn is_stock_etcd(layout: &Layout) -> bool {
    layout.has_log() && !layout.node().join(MUSTER_NODE_FILE).exists()
}

/// A file that muster-node creates in its data directory at its first start, and etcd never
/// creates.
const MUSTER_NODE_FILE: &str = "muster-boot";

/// Verifies and returns the record that this host signed about itself.
pub(crate) fn own_record(journal: &Journal, own: &PublicKey) -> Result<Record, ExitError> {
    let signed = journal.record.as_deref().map(signed_record);
    let signed = signed.ok_or_else(|| missing_in_journal("record"))?;
    signed
        .record
        .verify(JwsType::Record, own)
        .map_err(|error| ExitError::DoNotRestart(error_chain(&error)))
}

/// The node's identity, derived from signed statements.
pub(super) struct RaftIdentity {
    /// Id of the Raft cluster. A recovery makes a new Raft cluster, whose id differs from the
    /// founded cluster's id.
    pub(super) cluster: u64,
    /// The member's id in that Raft cluster.
    pub(super) member: MemberId,
    pub(super) incarnation: Incarnation,
    /// The chain of recoveries from the founded cluster to the present one.
    pub(super) recoveries: RecoveryChain,
}

impl RaftIdentity {
    /// Derives the identity from the journal.
    pub(super) fn of(protocol: &Protocol) -> Result<Self, ExitError> {
        let (extras, key) = (&protocol.extras, protocol.key.public());
        let refused = |error: &dyn std::error::Error| ExitError::DoNotRestart(error_chain(error));
        let document = protocol.document.as_ref().ok_or_else(|| missing_in_journal("document"))?;
        let join = extras.join.as_ref().ok_or_else(|| missing_in_journal("cluster"))?;
        let statements = StatementChain::verify_from_pin(&extras.statements, &join.statement)
            .map_err(|error| refused(&error))?;
        let founded = cluster::founded_cluster_id(document);
        let recoveries = RecoveryChain::verify(&extras.recoveries, &statements, founded)
            .map_err(|error| refused(&error))?;
        let (member, incarnation) = match journal::own_recovery(&recoveries, key) {
            Some(Recovery { is, .. }) => {
                let id = u64::from_str_radix(&is.member_id, 16).map_err(|error| refused(&error))?;
                (MemberId::new(id), is.incarnation)
            }
            None => {
                let incarnation = protocol.agent.journal.incarnation;
                let admitted = extras.admission.as_ref().map(|admission| admission.member);
                let record = own_record(&protocol.agent.journal, key)?;
                let founder = || document.founder_id(&record);
                (admitted.unwrap_or_else(founder), convert::wire_incarnation(incarnation))
            }
        };
        let cluster = recoveries.raft_cluster().unwrap_or(founded);
        Ok(Self { cluster, member, incarnation, recoveries })
    }
}

/// Everything that starting the node requires.
pub(super) struct NodeStart {
    pub(super) document: VerifiedDocument,
    pub(super) statements: StatementChain,
    pub(super) record: Record,
    pub(super) leaves: Leaves,
    /// The host's seat in the commit document; `None` for a member that joined later.
    pub(super) seat: Option<u8>,
    /// The node's identity in its Raft cluster.
    pub(super) identity: RaftIdentity,
    pub(super) program: CommandLine,
    /// Kind of the node's program.
    pub(super) kind: NodeKind,
    /// The member's URLs and listen addresses.
    pub(super) addresses: Addresses,
    /// Client URLs of the members in the journal.
    pub(super) client_urls: BTreeSet<String>,
}

impl NodeStart {
    /// Gathers what the start of the node requires from the journal, and writes the files that the
    /// node reads.
    pub(super) fn of(
        protocol: &Protocol,
        settings: &RunSettings,
        kind: NodeKind,
    ) -> Result<Self, ExitError> {
        let extras = &protocol.extras;
        let document = protocol.document.clone().ok_or_else(|| missing_in_journal("document"))?;
        let leaves = extras.leaves.as_ref().ok_or_else(|| missing_in_journal("certificates"))?;
        let join = extras.join.as_ref().ok_or_else(|| missing_in_journal("cluster"))?;
        let refused = |error: &dyn std::error::Error| ExitError::DoNotRestart(error_chain(error));
        let statements = StatementChain::verify_from_pin(&extras.statements, &join.statement)
            .map_err(|error| refused(&error))?;
        let record = own_record(&protocol.agent.journal, protocol.key.public())?;
        let at = journalled_addresses(extras, &record, &settings.addressing)?;
        let node_key = record.csr.verify().map_err(|error| refused(&error))?.node_key;
        let leaves =
            renewal::newest_certificates(&settings.layout, leaves, &node_key, statements.newest());
        let admission = extras.admission.as_ref();
        let seat = document.proposal().seat_of(protocol.key.public());
        let origin = match (admission, seat) {
            (Some(admission), _) => Origin::Newcomer(&admission.members),
            (None, Some(seat)) => Origin::Founder(seat),
            (None, None) => return Err(missing_in_journal("seat for this host's key")),
        };
        let command = NodeCommand {
            layout: &settings.layout,
            document: &document,
            record: &record,
            origin,
            statement: statements.newest(),
            leaves: &leaves,
            addresses: &at,
        };
        command.write_files()?;
        let program = command.command_line(&settings.node_binary, kind, &settings.node_flags);
        let founders = document.records().iter().flat_map(|record| &record.client_urls);
        let mut client_urls: BTreeSet<String> = founders.map(NodeUrl::to_string).collect();
        client_urls.extend(admission.into_iter().flat_map(|known| known.client_urls.clone()));
        let seat = if admission.is_some() { None } else { seat };
        let life = RaftIdentity::of(protocol)?;
        Ok(Self {
            program,
            kind,
            addresses: at,
            seat,
            identity: life,
            client_urls,
            statements,
            record,
            leaves,
            document,
        })
    }

    /// Returns the tombstone that the agent writes for a node that writes none itself (stock etcd).
    pub(super) fn tombstone(&self) -> Tombstone {
        Tombstone {
            version: 1,
            incarnation: self.identity.incarnation.to_string(),
            member_id: self.identity.member.to_string(),
            cluster_id: format!("{:016x}", self.identity.cluster),
            at: jiff::Timestamp::now().to_string(),
            ..Tombstone::default()
        }
    }

    /// Shows the member in the agent's status.
    pub(super) fn show(&self, board: &StatusHandle) {
        board.set_phase(Phase::Launching, None);
        board.update(|status| {
            status.explain.clear();
            status.cluster_id = Some(self.document.proposal().proposal().cluster.to_string());
            status.cluster_name = Some(self.statements.newest().name.to_string());
            status.epoch = Some(self.document.epoch());
            status.document = Some(self.document.hash().to_string());
            status.seat = self.seat;
            status.name = Some(self.record.name.to_string());
            status.peer_url = Some(self.addresses.peer_url.to_string());
            status.client_url = Some(self.addresses.client_url.to_string());
            status.client_listen = Some(self.addresses.listen.client.to_string());
        });
        show_certificate_expiry(&self.leaves, board);
    }

    /// Builds the task that saves backups on schedule.
    pub(super) fn backup_keeper(
        &self,
        settings: &RunSettings,
        protocol: &Protocol,
        board: &StatusHandle,
    ) -> Option<BackupKeeper> {
        let settings = settings.backup.clone()?;
        let cluster = protocol.extras.join.as_ref()?.cluster;
        let name = self.statements.newest().name.to_string();
        let (layout, listen) = (protocol.layout.clone(), self.addresses.listen.client);
        Some(BackupKeeper::new(settings, layout, listen, (cluster, name), board.clone()))
    }

    /// Returns the client port of the node to be started, with the certificates on disk.
    pub(super) fn client_endpoint(&self, layout: &Layout) -> Option<ClientEndpoint> {
        let endpoint = ClientEndpoint::own_node(&layout.tls(), self.addresses.listen.client);
        endpoint.inspect_err(|error| tracing::warn!("{}", error_chain(error))).ok()
    }
}

/// Shows in the agent's status when the certificates expire.
pub(super) fn show_certificate_expiry(leaves: &Leaves, board: &StatusHandle) {
    let ends = leaves.validity().and_then(|life| jiff::Timestamp::from_second(life.ends).ok());
    board.update(|status| status.certificates_until = ends);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_starts_only_on_data_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        let (own, etcd) = (NodeKind::Muster, NodeKind::Etcd { major: 3, minor: 7 });
        assert!(check_maker(&layout, own).is_ok() && check_maker(&layout, etcd).is_ok());
        std::fs::create_dir_all(layout.node().join("member/wal")).unwrap();
        assert!(check_maker(&layout, etcd).is_ok());
        assert!(matches!(check_maker(&layout, own), Err(ExitError::Usage(_))), "etcd's data");
        std::fs::write(layout.node().join(MUSTER_NODE_FILE), "1\n").unwrap();
        assert!(check_maker(&layout, own).is_ok());
        assert!(
            matches!(check_maker(&layout, etcd), Err(ExitError::Usage(_))),
            "muster-node's data"
        );
    }
}
