//! The agent's life once its node may start: supervision, the node's log, the first sight of its
//! data, and the report to discovery.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use discovery_formation::agent::{Event, Start};
use discovery_types::api::{AdoptRequest, ClusterState, Session};
use discovery_types::client::{Client, ClientConfig};
use discovery_types::document::VerifiedDocument;
use discovery_types::statement::StatementChain;
use tokio_util::sync::CancellationToken;

use crate::crash::{self, Step};
use crate::door::Door;
use crate::exit::{End, chain};
use crate::node_command::{AskedKind, NodeCommand, NodeKind};
use crate::protocol::{Protocol, state_end};
use crate::removal;
use crate::report::Report;
use crate::settings::{Listen, Settings};
use crate::state::node_dir::Tombstone;
use crate::state::{Layout, node_dir};
use crate::status::{Board, NodeStatus, Phase};
use crate::supervisor::{
    Observer, Outcome, Program, Running, STOP_DEADLINE, Supervisor, environment,
};
use crate::tail::{self, Tail};

/// How often the node's directory is looked at for its log, at its first start.
const LOOK_FOR_LOG: Duration = Duration::from_millis(20);

/// What is executed.
pub(crate) struct Programs<'a> {
    /// This program, which is also the launcher.
    pub own: &'a Path,
    /// Which node the node's program is.
    pub node_kind: AskedKind,
}

/// Runs and looks after the node of a held document until told to stop, or for good.
pub(crate) async fn run(
    mut protocol: Protocol,
    settings: &Settings,
    programs: Programs<'_>,
    board: &Board,
    stop: &CancellationToken,
) -> Result<(), End> {
    let kind = programs.node_kind.await.map_err(End::Failed)?;
    check_maker(&settings.layout, kind)?;
    let withheld = environment::withheld();
    if !withheld.is_empty() {
        tracing::warn!(
            "{} are in the environment and not passed to the node: say flags for it after --",
            withheld.join(", ")
        );
    }
    let plan = Plan::of(&protocol, settings, kind)?;
    plan.show(board);
    let layout = &settings.layout;
    let launcher =
        Program { path: programs.own.to_owned(), arguments: vec!["launch-node".to_owned()] };
    let supervisor =
        Supervisor { layout, launcher, node: plan.program.clone(), stop_deadline: STOP_DEADLINE };
    let tail_stop = CancellationToken::new();
    let tail = Tail::new(layout.node_log(), layout.tail_position());
    let tail = tokio::spawn(tail.follow(tail_stop.clone(), pass_on));
    let mut observer = Shown { board: board.clone(), program: plan.program.path.clone() };
    let outcome = {
        let supervision = supervisor.run(stop, &mut observer);
        attend(supervision, &mut protocol, &plan, board).await
    };
    tail_stop.cancel();
    // It passes on what is left and ends.
    let _ = tail.await;
    conclude(outcome?, &plan, &mut protocol)
}

/// The node's own log lines go into the agent's log, marked as the node's, with their level where
/// they say it as muster-node and etcd do.
fn pass_on(line: &str) {
    match tail::level(line) {
        Some(tracing::Level::ERROR) => tracing::error!(target: "node", "node: {line}"),
        Some(_) => tracing::warn!(target: "node", "node: {line}"),
        None => tracing::info!(target: "node", "node: {line}"),
    }
}

/// The two programs take each other's directories for empty or broken ones.
fn check_maker(layout: &Layout, kind: NodeKind) -> Result<(), End> {
    let made_by_own = layout.node().join(OWN_NODE_FILE).exists();
    if !node_dir::has_log(&layout.node()) || made_by_own == (kind == NodeKind::Muster) {
        return Ok(());
    }
    let maker = if made_by_own { "muster-node" } else { "etcd" };
    Err(End::Usage(format!(
        "{} was made by {maker}, and --node-binary is another program: give it the one that made \
         it",
        layout.node().display()
    )))
}

/// A file that muster-node makes in its data directory at its first start, and etcd does not.
const OWN_NODE_FILE: &str = "muster-boot";

/// Everything that a start of the node depends on.
struct Plan {
    document: VerifiedDocument,
    program: Program,
    listen: Listen,
    client_host: String,
    seat: u8,
    name: String,
    cluster_name: String,
    peer_url: String,
    client_url: String,
}

impl Plan {
    fn of(protocol: &Protocol, settings: &Settings, kind: NodeKind) -> Result<Self, End> {
        let missing = |what: &str| {
            End::DoNotRestart(format!(
                "the journal holds no {what}: the node can't be started from it"
            ))
        };
        let keepsakes = &protocol.keepsakes;
        let document = protocol.document.clone().ok_or_else(|| missing("document"))?;
        let leaves = keepsakes.leaves.as_ref().ok_or_else(|| missing("certificates"))?;
        let join = keepsakes.join.as_ref().ok_or_else(|| missing("cluster"))?;
        let mut listen = keepsakes.listen.ok_or_else(|| missing("listen address"))?;
        if let Some(address) = settings.addressing.listen {
            listen.peer.set_ip(address);
            listen.client.set_ip(address);
        }
        let chain_of = StatementChain::verify_from_pin(&keepsakes.statements, &join.statement)
            .map_err(|error| End::DoNotRestart(chain(&error)))?;
        let command = NodeCommand {
            layout: &settings.layout,
            document: &document,
            statement: chain_of.newest(),
            leaves,
            own: protocol.key.public(),
            listen,
        };
        command.write_files()?;
        let program = command.program(&settings.node_binary, kind, &settings.node_flags)?;
        let (seat, record) = command.seat()?;
        let client_url = record.client_urls.first().ok_or_else(|| missing("client URL"))?;
        Ok(Self {
            program,
            listen,
            client_host: client_url.host().to_string(),
            seat,
            name: record.name.to_string(),
            cluster_name: chain_of.newest().name.to_string(),
            peer_url: record.peer_urls.first().map(ToString::to_string).unwrap_or_default(),
            client_url: client_url.to_string(),
            document,
        })
    }

    /// For a node that writes none.
    fn tombstone(&self, protocol: &Protocol) -> Tombstone {
        Tombstone {
            version: 1,
            incarnation: protocol.agent.journal.incarnation.to_string(),
            at: jiff::Timestamp::now().to_string(),
            ..Tombstone::default()
        }
    }

    fn show(&self, board: &Board) {
        board.phase(Phase::Launching, None);
        board.update(|status| {
            status.explain.clear();
            status.cluster_id = Some(self.document.proposal().proposal().cluster.to_string());
            status.cluster_name = Some(self.cluster_name.clone());
            status.epoch = Some(self.document.epoch());
            status.document = Some(self.document.hash().to_string());
            status.seat = Some(self.seat);
            status.name = Some(self.name.clone());
            status.peer_url = Some(self.peer_url.clone());
            status.client_url = Some(self.client_url.clone());
            status.client_listen = Some(self.listen.client.to_string());
        });
    }

    /// A report to discovery; nothing if it can't be made (which costs nothing but the report).
    fn report(&self, protocol: &Protocol, layout: &Layout) -> Option<Report> {
        let join = protocol.keepsakes.join.as_ref()?;
        let config = ClientConfig {
            urls: join.urls.clone(),
            pins: join.pins.clone(),
            key: Some(Arc::clone(&protocol.key)),
        };
        let client = Client::new(config).inspect_err(|error| tracing::warn!("{}", chain(error)));
        let door = Door::own(&layout.tls(), self.listen.client, &self.client_host)
            .inspect_err(|error| tracing::warn!("{}", chain(error)));
        Some(Report {
            client: Arc::new(client.ok()?),
            cluster: join.cluster,
            session: Session { boot: protocol.agent.session.boot, nonce: protocol.nonce() },
            h: self.document.hash(),
            adopt: AdoptRequest {
                cluster: join.cluster,
                document: self.document.jws().clone(),
                statements: protocol.keepsakes.statements.clone(),
            },
            door: door.ok()?,
            log: layout.node_log(),
        })
    }
}

/// Supervises, and meanwhile journals the first sight of the node's log and reports it.
async fn attend(
    supervision: impl Future<Output = Outcome>,
    protocol: &mut Protocol,
    plan: &Plan,
    board: &Board,
) -> Result<Outcome, End> {
    let layout = protocol.layout.clone();
    let mut ran = protocol.agent.journal.start == Start::Ran;
    let mut report = Box::pin(deliver(plan.report(protocol, &layout), board.clone()));
    let mut supervision = std::pin::pin!(supervision);
    loop {
        tokio::select! {
            outcome = &mut supervision => return Ok(outcome),
            () = tokio::time::sleep(LOOK_FOR_LOG), if !ran => {
                if node_dir::has_log(&layout.node()) {
                    crash::at(Step::Exec);
                    protocol.step(Event::LogSeen)?;
                    ran = true;
                    tracing::info!("the node has its own log: from now on it starts from that");
                }
            }
            never = &mut report, if ran => match never {},
        }
    }
}

async fn deliver(report: Option<Report>, board: Board) -> Infallible {
    let show = |state: ClusterState| {
        board.update(|status| status.cluster_phase = Some(state.to_string()));
    };
    match report {
        Some(report) => report.deliver(show).await,
        None => std::future::pending().await,
    }
}

fn conclude(outcome: Outcome, plan: &Plan, protocol: &mut Protocol) -> Result<(), End> {
    match outcome {
        Outcome::Stopped => Ok(()),
        Outcome::Ended(end) => Err(end),
        Outcome::Removed(_) => Err(removed(protocol)),
        Outcome::SaysRemoved => {
            node_dir::bury(&protocol.layout.node(), &plan.tombstone(protocol))
                .map_err(state_end)?;
            Err(removed(protocol))
        }
    }
}

fn removed(protocol: &mut Protocol) -> End {
    let tombstone = removal::note(&protocol.layout, &mut protocol.keepsakes);
    // The tombstone in its directory already keeps the node from starting; this is the second.
    if let Err(end) = protocol.step(Event::TombstoneSeen) {
        tracing::warn!("can't journal the removal: {end}");
    }
    removal::end(&tombstone)
}

/// Shows the node's process in the status.
struct Shown {
    board: Board,
    program: std::path::PathBuf,
}

impl Observer for Shown {
    fn running(&mut self, node: &Running) {
        let pid = node.identity.pid;
        if node.is_adopted() {
            tracing::info!(pid, "the node runs already: adopted");
        } else {
            tracing::info!(pid, "the node was started");
        }
        self.board.phase(Phase::Running, None);
        self.board.update(|status| {
            let before = status.node.take().unwrap_or_default();
            status.node = Some(NodeStatus {
                program: self.program.display().to_string(),
                pid: Some(pid),
                adopted: node.is_adopted(),
                starts: before.starts + 1,
                last_death: before.last_death,
            });
        });
        // Whatever went wrong before, it runs; how it last died stands in its own line.
        self.board.healed();
    }

    fn died(&mut self, reason: &str, pause: Duration) {
        tracing::warn!("the node died ({reason}); it is started again in {} ms", pause.as_millis());
        let at = jiff::Timestamp::now() + jiff::SignedDuration::try_from(pause).unwrap_or_default();
        self.board.error(format!("the node died: {reason}"), Some(at));
        self.board.phase(Phase::Restarting, format!("the node died: {reason}"));
        self.board.update(|status| {
            if let Some(node) = &mut status.node {
                node.pid = None;
                node.last_death = Some(reason.to_owned());
            }
        });
    }

    fn stopping(&mut self) {
        self.board.phase(Phase::Stopping, "waiting for the node to stop".to_owned());
    }
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
        assert!(matches!(check_maker(&layout, own), Err(End::Usage(_))), "etcd's data");
        std::fs::write(layout.node().join(OWN_NODE_FILE), "1\n").unwrap();
        assert!(check_maker(&layout, own).is_ok());
        assert!(matches!(check_maker(&layout, etcd), Err(End::Usage(_))), "muster-node's data");
    }
}
