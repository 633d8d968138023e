//! The agent's work once its node may start. The agent supervises the node, follows the node's log,
//! journals that the node has created its data, and reports to discovery.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use discovery_formation::agent::{AgentEvent, LaunchState};
use discovery_types::api::{AdoptRequest, ClusterState, Session};
use discovery_types::client::DiscoveryClient;
use discovery_types::jws::Jws;
use discovery_types::leaves::Leaves;
use discovery_types::member_proof::MemberProof;
use discovery_types::statement::{Statement, StatementChain};
use futures_util::FutureExt;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::addresses::{self, HostAddressWatch, usable_addresses};
use super::authorities::{OwnCas, certificates_exchanged};
use super::history::HistoryWatch;
use super::node_start::{
    NodeStart, RaftIdentity, check_maker, journal_log, own_record, show_certificate_expiry,
};
use super::relocation::Relocation;
use super::renewal::Renewal;
use super::report::NodeReporter;
use super::service::{FinderStart, ServiceFinder, make_client};
use super::{issued, removal};
use crate::backup::keeper::BackupKeeper;
use crate::cli::addressing::is_lost;
use crate::cli::settings::RunSettings;
use crate::cluster::{ClusterApiClient, ClusterMember, MemberId};
use crate::enrol::protocol::Protocol;
use crate::enrol::{join, redeem};
use crate::exit::{ExitError, error_chain};
use crate::host::Host;
use crate::launch::environment;
use crate::launch::node_command::{NodeKind, NodeKindFuture, write_certificates};
use crate::launch::running_node::{CommandLine, RunningNode};
use crate::launch::supervisor::{Observer, STOP_DEADLINE, SupervisionOutcome, Supervisor};
use crate::observe::node_log::Tail;
use crate::observe::status::{NodeProcessStatus, Phase, StatusHandle};
use crate::observe::{contact, logging};
use crate::state::addresses::Addresses;
use crate::state::journal::Join;
use crate::state::{self, Layout, journal, known, node_dir, state_exit_error};
use crate::steward::{
    BuildKeeper, ReplacementKeeper, Statements, Steward, StewardParts, VoterObserver,
};

/// How often the agent checks whether a node has created its log, at the node's first start.
const LOG_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Pause before another attempt to write files that could not be written.
const FILE_RETRY_PAUSE: Duration = Duration::from_secs(5);
/// How long a removed member's agent tries to report the removal to discovery.
const REMOVAL_REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Parts of this machine that the node's supervision uses.
pub(crate) struct SupervisionContext<'a> {
    /// Path of this program, which is also the launcher.
    pub own_program: &'a Path,
    /// Kind of the node's program: muster-node or etcd.
    pub node_kind: NodeKindFuture,
    pub host: Arc<dyn Host>,
}

/// Why the supervision of a node ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeEnd {
    /// The agent was told to stop.
    Stopped,
    /// The host's addresses have changed. The node must be restarted with the journalled ones.
    Moved,
}

/// Runs and supervises this member's node, as the journal describes it. Returns when told to stop,
/// when the host has moved, when the member is removed, or when the node can't run.
pub(crate) async fn run(
    protocol: &mut Protocol,
    settings: &RunSettings,
    context: SupervisionContext<'_>,
    board: &StatusHandle,
    stop: &CancellationToken,
) -> Result<NodeEnd, ExitError> {
    let SupervisionContext { own_program, node_kind, host } = context;
    let kind = node_kind.await.map_err(ExitError::Failed)?;
    check_maker(&settings.layout, kind)?;
    let withheld = environment::withheld_variables();
    if !withheld.is_empty() {
        tracing::warn!(
            "{} are in the environment and not passed to the node: say flags for it after --",
            withheld.join(", ")
        );
    }
    issued::take_statements(protocol)?;
    refresh_admission(protocol).await;
    let plan = NodeStart::of(protocol, settings, kind)?;
    plan.show(board);
    let layout = &settings.layout;
    let launcher =
        CommandLine { path: own_program.to_owned(), arguments: vec!["launch-node".to_owned()] };
    let is_lost = |address| is_lost(address, &usable_addresses(&*host, &[address]));
    let supervisor = Supervisor {
        layout,
        launcher,
        node: plan.program.clone(),
        stop_deadline: STOP_DEADLINE,
        is_lost: &is_lost,
    };
    let tail_stop = CancellationToken::new();
    let tail = Tail::new(layout.node_log(), layout.tail_position());
    let tail = tokio::spawn(tail.follow(tail_stop.clone(), logging::pass_on_node_line));
    let cas = OwnCas::new(layout, kind, &plan.statements, &plan.leaves, board);
    let known = SharedFacts::at_start(protocol, &plan.statements, cas.clone());
    let program = plan.program.path.clone();
    let mut observer = StatusObserver { board: board.clone(), program, cas, cas_at_start: 0 };
    let watch =
        HostAddressWatch::of(&host, layout, &protocol.extras, &plan.record, &settings.addressing);
    let node_stop = stop.child_token();
    let outcome = {
        let supervision = supervisor.run(&node_stop, &mut observer);
        let backups = plan.backup_keeper(settings, protocol, board);
        let parts = WatchedNode { plan: &plan, watch: watch.as_ref(), stop: &node_stop, backups };
        supervise_and_journal(supervision, protocol, parts, board, &known).await
    };
    tail_stop.cancel();
    // Wait until the task that follows the node's log has passed on the last lines.
    let _ = tail.await;
    let is_stopped_to_move = node_stop.is_cancelled() && !stop.is_cancelled();
    handle_outcome(outcome?, &plan, protocol, &known).await?;
    Ok(if is_stopped_to_move { NodeEnd::Moved } else { NodeEnd::Stopped })
}

/// A node under supervision.
struct WatchedNode<'a> {
    plan: &'a NodeStart,
    watch: Option<&'a HostAddressWatch>,
    /// Token whose cancellation stops the node.
    stop: &'a CancellationToken,
    /// Task that saves backups of the node; `None` once this task runs.
    backups: Option<BackupKeeper>,
}

impl WatchedNode<'_> {
    /// Waits until the host has other addresses than those on which the node listens. Returns the
    /// old ones and the new ones.
    async fn wait_for_move(&self) -> (Addresses, Addresses) {
        match self.watch {
            Some(watch) if !self.stop.is_cancelled() => {
                (watch.journalled.clone(), watch.wait_for_move().await)
            }
            _ => std::future::pending().await,
        }
    }
}

/// Facts that the concurrent tasks learn. The tasks share them with each other and with the
/// journal.
struct SharedFacts {
    /// The members as last seen.
    members: watch::Sender<Vec<ClusterMember>>,
    /// Signals that the members may have changed.
    hint: Arc<Notify>,
    /// The longest statement chain.
    statements: watch::Sender<Vec<Jws>>,
    /// The service statement (discovery's URLs and TLS keys) that discovery sent last.
    announced: watch::Sender<Option<Jws>>,
    /// The client of discovery, which all tasks share. `None` if none can be built.
    client: Option<Arc<DiscoveryClient>>,
    /// CAs of this member.
    cas: OwnCas,
    /// Number of the last address of this member that the cluster has recorded.
    recorded_address: watch::Sender<u64>,
}

impl SharedFacts {
    fn at_start(protocol: &Protocol, chain: &StatementChain, cas: OwnCas) -> Self {
        let service = state::service::read_known(&protocol.layout, chain);
        let join = protocol.extras.join.as_ref();
        Self {
            members: watch::Sender::new(known::read(&protocol.layout)),
            hint: Arc::default(),
            statements: watch::Sender::new(protocol.extras.statements.clone()),
            announced: watch::Sender::new(None),
            client: join.and_then(|join| make_client(join, &protocol.key, service.as_ref())),
            cas,
            recorded_address: watch::Sender::default(),
        }
    }
}

/// Updates a newcomer's member list from the cluster before its node's first start. Members may
/// have been added or removed since the newcomer was admitted.
async fn refresh_admission(protocol: &mut Protocol) {
    let (layout, Ok(life)) = (&protocol.layout, RaftIdentity::of(protocol)) else { return };
    let (Some(admission), false) = (&mut protocol.extras.admission, layout.has_log()) else {
        return;
    };
    let Ok(record) = own_record(&protocol.agent.journal, protocol.key.public()) else { return };
    if let Some(members) =
        join::current_initial_members(layout, admission, life.cluster, &record).await
    {
        admission.members = members;
    }
}

impl NodeStart {
    /// Builds the task that does a voter's duties for its cluster.
    fn steward(
        &self,
        protocol: &Protocol,
        board: &StatusHandle,
        known: &SharedFacts,
    ) -> Option<Steward> {
        let join = protocol.extras.join.as_ref()?;
        let document = self.document.jws().clone();
        let (longest, recoveries) = (known.statements.clone(), self.identity.recoveries.jws());
        let journalled = &protocol.extras.statements;
        let journalled = StatementChain::verify_from_pin(journalled, &join.statement).ok()?;
        let statements = Statements::new(join.statement, journalled, document, recoveries, longest);
        let endpoint = self.client_endpoint(&protocol.layout)?;
        let node = ClusterApiClient::new(vec![endpoint.clone()]);
        let observer = own_proof(protocol, join).map(|proof| VoterObserver {
            cluster: join.cluster,
            key: Arc::clone(&protocol.key),
            proof,
            document: self.document.clone(),
            is_recovered: !self.identity.recoveries.jws().is_empty(),
        });
        let (client, hint) = (known.client.clone()?, Arc::clone(&known.hint));
        let announced = known.announced.clone();
        let replacement = ReplacementKeeper::new(observer, endpoint, board.clone());
        Some(Steward::new(
            client,
            join.cluster,
            node,
            StewardParts {
                statements,
                list: self.document.hash(),
                announced,
                hint,
                replacement,
                builds: BuildKeeper::new(board.clone()),
            },
        ))
    }

    /// Builds the task that follows the newest service statement.
    fn finder(
        &self,
        protocol: &Protocol,
        board: &StatusHandle,
        known: &SharedFacts,
    ) -> Option<ServiceFinder> {
        ServiceFinder::new(FinderStart {
            client: known.client.clone()?,
            node: ClusterApiClient::new(vec![self.client_endpoint(&protocol.layout)?]),
            layout: protocol.layout.clone(),
            join: protocol.extras.join.clone()?,
            statements: known.statements.subscribe(),
            announced: known.announced.subscribe(),
            board: board.clone(),
        })
    }

    /// Builds the task that gets a moved member's address recorded, and finds other members that
    /// have moved.
    fn relocation(
        &self,
        protocol: &Protocol,
        board: &StatusHandle,
        known: &SharedFacts,
    ) -> Option<Relocation> {
        let join = protocol.extras.join.as_ref()?;
        Some(Relocation {
            client: known.client.clone()?,
            cluster: join.cluster,
            node: ClusterApiClient::new(vec![self.client_endpoint(&protocol.layout)?]),
            layout: protocol.layout.clone(),
            key: Arc::clone(&protocol.key),
            proof: own_proof(protocol, join)?,
            node_key: self.record.csr.verify().ok()?.node_key,
            pin: join.statement,
            statements: known.statements.subscribe(),
            peer_url: self.addresses.peer_url.clone(),
            former: protocol.extras.former_peer_urls.clone(),
            number: protocol.extras.address_number,
            recorded: known.recorded_address.clone(),
            readmit: redeem::readmission(protocol, join),
            reads_addresses: self.kind == NodeKind::Muster,
            board: board.clone(),
        })
    }

    fn renewal(
        &self,
        protocol: &Protocol,
        board: &StatusHandle,
        known: &SharedFacts,
    ) -> Option<Renewal> {
        Some(Renewal {
            client: known.client.clone()?,
            cluster: protocol.extras.join.as_ref()?.cluster,
            csr: self.record.csr.clone(),
            addresses: self.addresses.clone(),
            statement: self.statements.newest().clone(),
            board: board.clone(),
        })
    }

    /// Returns the statement chain in the journal. If that chain can't be verified, returns the
    /// chain that was known when the node was started.
    fn journalled_chain(&self, protocol: &Protocol) -> StatementChain {
        let join = protocol.extras.join.as_ref();
        let journalled = &protocol.extras.statements;
        let chain =
            join.and_then(|join| StatementChain::verify_from_pin(journalled, &join.statement).ok());
        chain.unwrap_or_else(|| self.statements.clone())
    }

    /// Writes the CAs of the journalled chain if they differ from those in the files. Returns the
    /// newest statement if it wrote them.
    fn follow_statements(
        &self,
        protocol: &Protocol,
        known: &SharedFacts,
        leaves: &Leaves,
    ) -> Result<Option<Statement>, ExitError> {
        let chain = self.journalled_chain(protocol);
        if known.cas.is_following(&chain) {
            return Ok(None);
        }
        known.cas.follow(&chain, leaves)?;
        Ok(Some(chain.newest().clone()))
    }

    /// Journals new certificates and writes them where the node reads them. Returns whether they
    /// are in place.
    fn install_certificates(
        &self,
        leaves: &Leaves,
        statement: &Statement,
        protocol: &mut Protocol,
        board: &StatusHandle,
    ) -> bool {
        protocol.extras.leaves = Some(leaves.clone());
        let kept = protocol
            .persist_extras()
            .and_then(|()| write_certificates(&protocol.layout, leaves, statement));
        match kept {
            Ok(()) => {
                show_certificate_expiry(leaves, board);
                tracing::info!("the certificates are renewed");
                true
            }
            Err(end) => {
                tracing::warn!("the new certificates can't be put in place: {end}");
                false
            }
        }
    }

    /// Builds the task that reports to discovery. With a `board`, the task also checks discovery's
    /// history of the cluster, and shows contradictions in that status. `None` if the task can't be
    /// built; the agent then runs without reports.
    fn report(
        &self,
        protocol: &Protocol,
        known: &SharedFacts,
        board: Option<&StatusHandle>,
    ) -> Option<NodeReporter> {
        let join = protocol.extras.join.as_ref()?;
        let client = known.client.clone()?;
        let (layout, cluster) = (&protocol.layout, join.cluster);
        let history = board.map(|board| {
            HistoryWatch::new(Arc::clone(&client), cluster, layout.clone(), board.clone())
        });
        Some(NodeReporter {
            client,
            cluster: join.cluster,
            session: Session { boot: protocol.agent.session.boot, nonce: protocol.nonce() },
            h: self.document.hash(),
            adopt: AdoptRequest {
                cluster: join.cluster,
                document: self.document.jws().clone(),
                statements: protocol.extras.statements.clone(),
            },
            readmit: redeem::readmission(protocol, join),
            recoveries: match journal::own_recovery(
                &self.identity.recoveries,
                protocol.key.public(),
            ) {
                Some(_) => self.identity.recoveries.jws(),
                None => Vec::new(),
            },
            endpoint: self.client_endpoint(&protocol.layout)?,
            log: protocol.layout.node_log(),
            hint: Arc::clone(&known.hint),
            members: known.members.clone(),
            cas: known.cas.clone(),
            history,
        })
    }

    /// Returns the members' client URLs, from the journal and from the list of members that was
    /// seen last.
    fn client_urls(&self, known: &SharedFacts) -> BTreeSet<String> {
        let members = known.members.borrow();
        let seen = members.iter().flat_map(|member| member.client_urls.iter().cloned());
        self.client_urls.iter().cloned().chain(seen).collect()
    }
}

/// Makes the proof that this agent belongs to its member.
fn own_proof(protocol: &Protocol, join: &Join) -> Option<MemberProof> {
    redeem::member_proof(&protocol.layout, &protocol.extras, protocol.key.public(), join)
}

/// Supervises the node. Meanwhile journals that the node has created its log, and runs the agent's
/// other tasks.
async fn supervise_and_journal(
    supervision: impl Future<Output = SupervisionOutcome>,
    protocol: &mut Protocol,
    mut node: WatchedNode<'_>,
    board: &StatusHandle,
    found: &SharedFacts,
) -> Result<SupervisionOutcome, ExitError> {
    let plan = node.plan;
    let layout = protocol.layout.clone();
    let mut ran = protocol.agent.journal.launch_state == LaunchState::Ran;
    let mut renewal = plan.renewal(protocol, board, found);
    // Pause before the next attempt to journal a longer statement chain and to write its CAs.
    // `None` while there is nothing to journal or to write.
    let (mut follow_in, mut renewal_pause): (Option<Duration>, _) = (None, Duration::ZERO);
    let (mut newest, mut leaves) = (plan.statements.newest().clone(), plan.leaves.clone());
    let mut chores = Box::pin(background_tasks(plan, protocol, board, found));
    let (mut statements, mut members) = (found.statements.subscribe(), found.members.subscribe());
    let mut recorded = found.recorded_address.subscribe();
    let contact = show_contact(found.client.clone(), board.clone());
    let mut others = std::pin::pin!(BackupKeeper::run_beside(contact, node.backups.take()));
    let mut supervision = std::pin::pin!(supervision);
    let mut moved = std::pin::pin!(node.wait_for_move());
    let mut exchanged = std::pin::pin!(certificates_exchanged(&layout).fuse());
    loop {
        let renewed = renew_after(renewal_pause, renewal.as_ref(), &leaves);
        tokio::select! {
            outcome = &mut supervision => return Ok(outcome),
            () = tokio::time::sleep(LOG_CHECK_INTERVAL), if !ran => {
                ran = journal_log(&layout, protocol)?;
            }
            new = renewed, if ran => {
                renewal_pause = FILE_RETRY_PAUSE;
                if plan.install_certificates(&new, &newest, protocol, board) {
                    renewal_pause = Duration::ZERO;
                    found.cas.note_certificates(&new, &newest);
                    leaves = new;
                    // Restart the tasks: their clients hold the old certificates.
                    chores.set(self::background_tasks(plan, protocol, board, found));
                }
            }
            (before, now) = &mut moved, if ran && !node.stop.is_cancelled() => {
                addresses::note_host_move(&mut protocol.extras, &before, now);
                protocol.persist_extras()?;
                node.stop.cancel();
            }
            Ok(()) = statements.changed() => follow_in = Some(Duration::ZERO),
            () = tokio::time::sleep(follow_in.unwrap_or_default()), if follow_in.is_some() => {
                follow_in = None;
                let journalled = journal_statements(&statements.borrow(), protocol);
                match journalled.and_then(|()| plan.follow_statements(protocol, found, &leaves)) {
                    Ok(None) => {}
                    Ok(Some(changed)) => {
                        if let Some(renewal) = &mut renewal {
                            renewal.statement = changed.clone();
                        }
                        newest = changed;
                        // Restart the tasks: their clients trust the old CAs.
                        chores.set(self::background_tasks(plan, protocol, board, found));
                    }
                    Err(end) => {
                        tracing::error!("the newest statement can't be put in force: {end}");
                        follow_in = Some(FILE_RETRY_PAUSE);
                    }
                }
            }
            Ok(()) = recorded.changed() => addresses::journal_recorded_address(protocol, &recorded),
            () = &mut exchanged => {
                found.cas.note_certificates(&leaves, &newest);
                // Restart the tasks: their clients expect the earlier certificate.
                chores.set(self::background_tasks(plan, protocol, board, found));
            }
            Ok(()) = members.changed() => {
                write_known_members(&layout, &members.borrow_and_update());
            }
            never = &mut chores, if ran => match never {},
            never = &mut others => match never {},
        }
    }
}

/// Writes the members to a file, for a later search for the cluster.
fn write_known_members(layout: &Layout, members: &[ClusterMember]) {
    if let Err(error) = known::write(layout, members) {
        tracing::warn!("the list of members can't be written down: {}", error_chain(&error));
    }
}

/// Waits for `pause`, then until `renewal` has new certificates, and returns them. Without a
/// `renewal`, waits for ever.
async fn renew_after(pause: Duration, renewal: Option<&Renewal>, now: &Leaves) -> Leaves {
    let Some(renewal) = renewal else { return std::future::pending().await };
    tokio::time::sleep(pause).await;
    renewal.next_certificates(now).await
}

/// The agent's tasks beside its node: reports to discovery, the search for discovery, the search
/// for members that have moved, and duties for the cluster.
fn background_tasks(
    plan: &NodeStart,
    protocol: &Protocol,
    board: &StatusHandle,
    known: &SharedFacts,
) -> impl Future<Output = Infallible> + use<> {
    let report = run_reporter(plan.report(protocol, known, Some(board)), board.clone());
    let steward = plan.steward(protocol, board, known);
    let finder = plan.finder(protocol, board, known);
    let relocation = plan.relocation(protocol, board, known);
    async move {
        let steward = async {
            match steward {
                Some(steward) => steward.run().await,
                None => std::future::pending().await,
            }
        };
        let finder = async {
            match finder {
                Some(finder) => finder.run().await,
                None => std::future::pending().await,
            }
        };
        let relocation = async {
            match relocation {
                Some(relocation) => relocation.run().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            never = report => never,
            never = steward => never,
            never = finder => never,
            never = relocation => never,
        }
    }
}

/// Journals a longer statement chain. A later start begins with this chain, so nobody can pass off
/// a shorter chain as the current one.
fn journal_statements(longer: &[Jws], protocol: &mut Protocol) -> Result<(), ExitError> {
    if longer.len() <= protocol.extras.statements.len() {
        return Ok(());
    }
    protocol.change_extras(|extras| extras.statements = longer.to_vec())?;
    tracing::info!("the cluster's owners have made a new statement");
    Ok(())
}

/// Shows in status and log whether `client` reaches discovery.
async fn show_contact(client: Option<Arc<DiscoveryClient>>, board: StatusHandle) -> Infallible {
    match client {
        Some(client) => contact::show_and_log(client.contact(), board).await,
        None => std::future::pending().await,
    }
}

async fn run_reporter(report: Option<NodeReporter>, board: StatusHandle) -> Infallible {
    let show = |state: ClusterState| {
        board.update(|status| status.cluster_phase = Some(state.to_string()));
    };
    match report {
        Some(report) => report.run(show).await,
        None => std::future::pending().await,
    }
}

async fn handle_outcome(
    outcome: SupervisionOutcome,
    plan: &NodeStart,
    protocol: &mut Protocol,
    known: &SharedFacts,
) -> Result<(), ExitError> {
    match outcome {
        SupervisionOutcome::Stopped => Ok(()),
        SupervisionOutcome::Failed(end) => Err(end),
        SupervisionOutcome::Removed(_) => {
            let end = journal_removal(protocol);
            report_removal(plan, protocol, known).await;
            Err(end)
        }
        SupervisionOutcome::RemovalLogged => {
            let layout = &protocol.layout;
            if join::is_listed(layout, &plan.client_urls(known), plan.identity.member).await {
                return Err(ExitError::Failed(format!(
                    "the node says that it was removed, and the cluster lists it as member {}: \
                     nothing is written down yet; start the agent again",
                    plan.identity.member
                )));
            }
            node_dir::write_tombstone(&protocol.layout.node(), &plan.tombstone())
                .map_err(state_exit_error)?;
            let end = journal_removal(protocol);
            report_removal(plan, protocol, known).await;
            Err(end)
        }
    }
}

/// Reports the removal, which is durable by now, to discovery. If the report fails, discovery
/// treats this host like one that vanished.
async fn report_removal(plan: &NodeStart, protocol: &Protocol, known: &SharedFacts) {
    let Some(report) = plan.report(protocol, known, None) else { return };
    let told = async {
        let others = join::cluster_client(&protocol.layout, &plan.client_urls(known));
        let others = others.map_err(|error| error_chain(&error))?;
        report.report_removal(MemberId(plan.identity.member.get()), &others).await
    };
    match tokio::time::timeout(REMOVAL_REPORT_TIMEOUT, told).await {
        Ok(Ok(())) => {}
        Ok(Err(why)) => tracing::info!("the removal can't be reported to discovery: {why}"),
        Err(_) => tracing::info!("the removal was not reported to discovery in time"),
    }
}

fn journal_removal(protocol: &mut Protocol) -> ExitError {
    let tombstone = removal::record_removal(&protocol.layout, &mut protocol.extras);
    // The tombstone in the node's directory already keeps the node from starting. The journal's
    // copy is a second safeguard.
    if let Err(end) = protocol.step(AgentEvent::TombstoneSeen) {
        tracing::warn!("can't journal the removal: {end}");
    }
    removal::removal_error(&tombstone)
}

/// Shows the state of the node's process in the agent's status.
struct StatusObserver {
    board: StatusHandle,
    program: std::path::PathBuf,
    cas: OwnCas,
    /// Value of [`OwnCas::written`] right before the node's process was started.
    cas_at_start: u64,
}

impl Observer for StatusObserver {
    fn starting(&mut self) {
        self.cas_at_start = self.cas.written();
    }

    fn running(&mut self, node: &RunningNode) {
        let pid = node.identity.pid;
        if node.is_adopted() {
            tracing::info!(pid, "the node runs already: adopted");
            self.cas.note_adopted(&node.identity);
        } else {
            tracing::info!(pid, "the node was started");
            self.cas.note_start(&node.identity, self.cas_at_start);
        }
        self.board.set_phase(Phase::Running, None);
        self.board.update(|status| {
            let before = status.node.take().unwrap_or_default();
            status.node = Some(NodeProcessStatus {
                program: self.program.display().to_string(),
                pid: Some(pid),
                adopted: node.is_adopted(),
                starts: before.starts + 1,
                last_death: before.last_death,
            });
        });
        // Clears the error: the node runs now. The reason of its last death stays in `last_death`.
        self.board.clear_error();
    }

    fn died(&mut self, reason: &str, pause: Duration) {
        tracing::warn!("the node died ({reason}); it is started again in {} ms", pause.as_millis());
        let at = jiff::Timestamp::now() + jiff::SignedDuration::try_from(pause).unwrap_or_default();
        self.board.set_error(format!("the node died: {reason}"), Some(at));
        self.board.set_phase(Phase::Restarting, format!("the node died: {reason}"));
        self.board.update(|status| {
            if let Some(node) = &mut status.node {
                node.pid = None;
                node.last_death = Some(reason.to_owned());
            }
        });
    }

    fn stopping(&mut self) {
        self.board.set_phase(Phase::Stopping, "waiting for the node to stop".to_owned());
    }
}
