//! `run`: continues from the state on disk, until the node runs under supervision.

use std::net::IpAddr;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;
use std::time::Duration;

use discovery_formation::Rules;
use discovery_formation::agent::{DirectoryKind, Journal, StartDecision, decide_at_start};
use discovery_types::bundle::Bundle;
use discovery_types::convert;
use discovery_types::grant::TokenKind;
use discovery_types::jws::JwsType;
use discovery_types::key::SigningKey;
use discovery_types::name::Name;
use discovery_types::record::{Record, SignedRecord};
use discovery_types::url::NodeUrl;
use tokio_util::sync::CancellationToken;

use crate::cli;
use crate::cli::settings::RunSettings;
use crate::commands::adopt;
use crate::crash::{self, Failpoint};
use crate::enrol::bootstrap::{AgentContext, Bootstrap, FormationResult, own_addresses, record};
use crate::enrol::bundle::{cluster_to_join, read_bundle};
use crate::enrol::join::{JoinResult, JoiningHost, Newcomer};
use crate::enrol::protocol::Protocol;
use crate::exit::{ExitError, error_chain};
use crate::host::Host;
use crate::host::cloud;
use crate::host::local::LocalHost;
use crate::launch::node_command::{NodeKindFuture, detect_kind_in_background};
use crate::observe::status::{Phase, StatusHandle};
use crate::observe::{metrics, service_manager, status};
use crate::operate::addresses::{self, HostAddressWatch};
use crate::operate::report::StartReporter;
use crate::operate::supervise::{self, NodeEnd};
use crate::operate::{node_start, removal};
use crate::retry::Retry;
use crate::state::addresses::{Addresses, ListenAddresses};
use crate::state::archive::move_to_quarantine;
use crate::state::journal::{self, Join, JournalExtras, VerifiedJournal};
use crate::state::lock::{self, LockError};
use crate::state::node_dir;
use crate::state::state_exit_error;

/// How often a directory whose data is lost is examined again: a volume may be mounted late.
const DIRECTORY_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How often a host that has no place in the cluster tries again, and reads its bundle file for a
/// join ticket.
const TICKET_CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// Runs the command `run`.
pub(crate) async fn run(typed: cli::RunArguments) -> Result<(), ExitError> {
    let own_program = own_program()?;
    let path = std::env::var_os("PATH");
    let mut settings = RunSettings::resolve(typed, &own_program, path.as_deref())?;
    settings.layout = settings.layout.create().map_err(state_exit_error)?;
    adopt::check_may_run(&settings.layout)?;
    let holder = format!("muster-agent run, pid {}", std::process::id());
    let _lock =
        lock::acquire(&settings.layout.agent_lock(), &holder).map_err(|error| match error {
            LockError::Held { .. } => ExitError::Failed(format!(
                "another agent runs on this data directory: {}",
                error_chain(&error)
            )),
            LockError::State(error) => state_exit_error(error),
        })?;
    settings.layout.remove_temporary_files().map_err(state_exit_error)?;
    let (board, stop) = (StatusHandle::default(), CancellationToken::new());
    stop_on_signals(&stop)?;
    let services = BackgroundServices::start(&settings, &board).await?;
    let host: Arc<dyn Host> =
        Arc::new(LocalHost { machine_id_file: settings.machine_id_file.clone() });
    let node_kind = detect_kind_in_background(&settings.node_binary);
    let daemon =
        Daemon { settings: &settings, host, board: board.clone(), stop, own_program, node_kind };
    let result = daemon.run().await;
    let reason = match &result {
        Ok(()) => "told to stop".to_owned(),
        Err(end) => end.to_string(),
    };
    board.set_phase(Phase::Ended, reason);
    services.finish().await;
    result
}

/// Returns the path of this program's own file.
pub(super) fn own_program() -> Result<std::path::PathBuf, ExitError> {
    std::env::current_exe()
        .map_err(|error| ExitError::Failed(format!("can't find this program's own file: {error}")))
}

/// The error for a node's directory in which a recovery was interrupted.
pub(super) fn half_made_error(node: &std::path::Path) -> ExitError {
    ExitError::Failed(format!(
        "{}: a new cluster is half made here: muster-agent recover make ends what it began",
        node.display()
    ))
}

/// Cancels `stop` at SIGTERM or SIGINT. Exits at SIGUSR1: the node runs on, and the next agent
/// adopts it. No clean-up is needed, because an agent may be killed at any time.
#[expect(clippy::disallowed_methods, reason = "an agent may be killed at any time")]
pub(super) fn stop_on_signals(stop: &CancellationToken) -> Result<(), ExitError> {
    use tokio::signal::unix::{SignalKind, signal};
    let failed = |error| ExitError::Failed(format!("can't listen for signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut leave = signal(SignalKind::user_defined1()).map_err(failed)?;
    let stop = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => tracing::info!("SIGTERM: stopping"),
            _ = interrupt.recv() => tracing::info!("SIGINT: stopping"),
            _ = leave.recv() => {
                tracing::info!("SIGUSR1: ending; the node runs on");
                std::process::exit(0);
            }
        }
        stop.cancel();
    });
    Ok(())
}

/// Tasks that run beside the main work: status file, service manager, metrics listener.
struct BackgroundServices {
    stop: CancellationToken,
    tasks: tokio_util::task::TaskTracker,
}

impl BackgroundServices {
    async fn start(settings: &RunSettings, board: &StatusHandle) -> Result<Self, ExitError> {
        let (stop, tasks) = (CancellationToken::new(), tokio_util::task::TaskTracker::new());
        tasks.spawn(status::write_until_stopped(
            board.subscribe(),
            settings.layout.status(),
            stop.clone(),
        ));
        tasks.spawn(service_manager::notify_until_stopped(board.subscribe(), stop.clone()));
        if let Some(at) = settings.metrics_listen {
            let listener = metrics::bind(at)
                .await
                .map_err(|error| ExitError::Failed(format!("--metrics-listen {at}: {error}")))?;
            tracing::info!("metrics on http://{at}/metrics");
            if !at.ip().is_loopback() {
                tracing::warn!(
                    "--metrics-listen {at}: everybody who reaches this address can read the metrics; \
                     let a firewall admit the monitoring hosts alone"
                );
            }
            tasks.spawn(metrics::serve(listener, board.subscribe(), stop.clone()));
        }
        Ok(Self { stop, tasks })
    }

    async fn finish(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// The agent as a long-running program.
struct Daemon<'a> {
    settings: &'a RunSettings,
    host: Arc<dyn Host>,
    board: StatusHandle,
    stop: CancellationToken,
    own_program: std::path::PathBuf,
    node_kind: NodeKindFuture,
}

/// The journal and key that were found at a start.
struct LoadedState {
    key: SigningKey,
    journal: Journal,
    extras: JournalExtras,
    document: Option<discovery_types::document::VerifiedDocument>,
}

impl Daemon<'_> {
    /// Decides what to do by the journal and the node's directory alone, and makes no network
    /// request for that. Then does it.
    async fn run(&self) -> Result<(), ExitError> {
        loop {
            let loaded = journal::read(&self.settings.layout).map_err(state_exit_error)?;
            if let Some((_, loaded)) = &loaded {
                self.show_journal(loaded);
            }
            let machine = self
                .host
                .facts()
                .map_err(|error| ExitError::Usage(format!("--machine-id-file: {error}")))?;
            let node = self.settings.layout.node();
            // Don't start the node now: it would complete the recovery, and run a cluster for which
            // there is no recovery statement.
            if node.join(node_dir::FORCING_FILE).exists() {
                return Err(half_made_error(&node));
            }
            let directory = self.settings.layout.classify_node().map_err(state_exit_error)?;
            let journal = loaded.as_ref().map(|(_, loaded)| loaded.for_directory());
            let decision = decide_at_start(&Rules::ALL, journal.as_ref(), &machine, &directory);
            let copied = journal.is_some_and(|journal| journal.machine.differs_from(&machine));
            tracing::debug!(?decision, %directory, "decided");
            match (decision, loaded) {
                (StartDecision::BeginNew, _) => {
                    let ended = self.begin_as_new_host(machine).await;
                    if let Break(ended) = self.wait_for_ticket(ended).await {
                        return ended;
                    }
                }
                (StartDecision::SetAsideAndBeginNew, _) => {
                    self.quarantine_clone(&directory)?;
                    let ended = self.begin_as_new_host(machine).await;
                    if let Break(ended) = self.wait_for_ticket(ended).await {
                        return ended;
                    }
                }
                (StartDecision::Resume, Some(found)) => {
                    let ended = self.form(with_next_boot(found)).await;
                    if let Break(ended) = self.wait_for_ticket(ended).await {
                        return ended;
                    }
                }
                (StartDecision::ResumeToLaunch, Some(found)) => {
                    return self.launch_held(with_next_boot(found)).await;
                }
                (StartDecision::StartNode(_), Some(found)) => {
                    return self.supervise(with_next_boot(found)).await;
                }
                (StartDecision::RequestReplacement { why }, _) => {
                    if self.wait_for_replacement(&why).await {
                        return Ok(());
                    }
                }
                (StartDecision::Removed, found) => return Err(self.removed_error(found)),
                (StartDecision::Refuse { why }, _) if copied => {
                    return Err(ExitError::DoNotRestart(why));
                }
                (StartDecision::Refuse { why }, _) => return Err(self.refusal_error(&why)),
                (decision, None) => {
                    return Err(ExitError::Failed(format!("{decision:?} without a journal")));
                }
            }
        }
    }

    fn refusal_error(&self, why: &str) -> ExitError {
        let node = self.settings.layout.node();
        let next = if node.join(node_dir::FORCED_FILE).exists() {
            "a new cluster was made of this data, and not by an operator's word that this agent has: \
             muster-agent recover make ends what it began"
        } else {
            "if a volume is mounted late, start again, and if this data is not wanted, move it away"
        };
        ExitError::Failed(format!("{}: {why}. Nothing was touched; {next}", node.display()))
    }

    fn removed_error(&self, found: Option<(SigningKey, VerifiedJournal)>) -> ExitError {
        let layout = &self.settings.layout;
        let Some((_, mut loaded)) = found else {
            return removal::removal_error(&removal::record_removal(
                layout,
                &mut JournalExtras::default(),
            ));
        };
        let tombstone = removal::record_removal(layout, &mut loaded.extras);
        if !loaded.journal.is_removed {
            loaded.journal.is_removed = true;
            if let Err(error) = journal::write(layout, &loaded.journal, &loaded.extras) {
                tracing::warn!(error = error_chain(&error), "can't journal the removal");
            }
        }
        removal::removal_error(&tombstone)
    }

    /// Moves the state of a clone aside: its journal was made on another machine, and the node has
    /// not run yet.
    fn quarantine_clone(&self, directory: &DirectoryKind) -> Result<(), ExitError> {
        let both: &[&str] = match directory {
            // Without a log, the marker in the node's directory names the original machine's
            // incarnation. So that directory is moved aside, too.
            DirectoryKind::Marked(_) => &["agent", "node"],
            _ => &["agent"],
        };
        let reason = "key and journal were made on another machine: put aside, and begun as new";
        let layout = &self.settings.layout;
        if let Some(holder) = lock::holder(&layout.node_lock()).map_err(state_exit_error)? {
            return Err(ExitError::DoNotRestart(format!(
                "{} was made on another machine, and a node runs in it ({holder})",
                layout.root().display()
            )));
        }
        let to =
            move_to_quarantine(layout, both, reason, self.host.now()).map_err(state_exit_error)?;
        if let Some(to) = to {
            tracing::warn!("{reason}; they lie in {}", to.display());
        }
        layout.create().map(drop).map_err(state_exit_error)
    }

    /// Shows that the node's data is lost, and waits before the directory is examined again.
    /// Returns true if the agent was told to stop meanwhile.
    async fn wait_for_replacement(&self, why: &str) -> bool {
        let text = format!(
            "the node's data is lost: {why}. If it is not coming back, this host can come in its own \
             place: muster-agent reset here, and a ticket from an operator (muster-discovery token \
             create --kind join --replace NAME). The directory is looked at again every {} s, in case \
             a volume is mounted late",
            DIRECTORY_CHECK_INTERVAL.as_secs()
        );
        tracing::error!("{text}");
        self.board.set_phase(Phase::ReplacementWanted, text);
        tokio::select! {
            () = tokio::time::sleep(DIRECTORY_CHECK_INTERVAL) => false,
            () = self.stop.cancelled() => true,
        }
    }

    /// Decides whether to try again after an attempt has ended. If this host has no place in the
    /// cluster and `--wait-for-ticket` was given, waits, then continues with the bundle file's new
    /// content. Returns every other result unchanged.
    async fn wait_for_ticket(
        &self,
        ended: Result<(), ExitError>,
    ) -> ControlFlow<Result<(), ExitError>> {
        let why = match ended {
            Err(ExitError::NeedsTicket(why)) if self.settings.wait_for_ticket => why,
            ended => return Break(ended),
        };
        let text = format!(
            "waits for a join ticket in the bundle file, which is read again every {} s: {why}",
            TICKET_CHECK_INTERVAL.as_secs()
        );
        tracing::warn!("{text}");
        self.board.set_phase(Phase::Contacting, text);
        match self.stop.run_until_cancelled(tokio::time::sleep(TICKET_CHECK_INTERVAL)).await {
            Some(()) => Continue(()),
            None => Break(Ok(())),
        }
    }

    async fn begin_as_new_host(
        &self,
        machine: discovery_formation::MachineIdentity,
    ) -> Result<(), ExitError> {
        // Read the bundle before a key is made, so that an unreadable bundle leaves no state
        // behind.
        let read = self.stop.run_until_cancelled(read_bundle(self.settings)).await;
        let Some(bundle) = read.transpose()? else { return Ok(()) };
        if bundle.is_none() {
            return Err(ExitError::Usage(
                "this host has no cluster yet: say --bundle-file FILE (or - for standard input); \
                 an admin makes a join bundle with muster-discovery token create"
                    .to_owned(),
            ));
        }
        let (key, journal, extras) =
            journal::create(&self.settings.layout, machine).map_err(state_exit_error)?;
        crash::at(Failpoint::Key);
        tracing::info!(agent.key = %key.public(), "a new key was made for this host");
        self.form_with(LoadedState { key, journal, extras, document: None }, bundle).await
    }

    async fn form(&self, found: LoadedState) -> Result<(), ExitError> {
        let layout = &self.settings.layout;
        journal::write(layout, &found.journal, &found.extras).map_err(state_exit_error)?;
        let read = self.stop.run_until_cancelled(read_bundle(self.settings)).await;
        let bundle = match read {
            None => return Ok(()),
            Some(Ok(bundle)) => bundle,
            // Go on without the bundle. It was redeemed at an earlier start, and its file may be
            // gone.
            Some(Err(end)) if found.journal.record.is_some() => {
                tracing::warn!("going on without the bundle: {end}");
                None
            }
            Some(Err(end)) => return Err(end),
        };
        self.form_with(found, bundle).await
    }

    async fn form_with(&self, found: LoadedState, bundle: Option<Bundle>) -> Result<(), ExitError> {
        let join = cluster_to_join(&found.extras, bundle.as_ref())?;
        let LoadedState { key, journal, mut extras, document } = found;
        extras.join = Some(join.clone());
        let layout = self.settings.layout.clone();
        let mut protocol = Protocol::new(layout, key, journal, extras, document);
        let Some(addresses) = self.addresses(&join).await? else { return Ok(()) };
        let zone = match &bundle {
            Some(_) => self.stop.run_until_cancelled(self.zone()).await,
            // Without a bundle, the record of an earlier start is used, which contains the zone.
            None => Some(Ok(None)),
        };
        let Some(zone) = zone.transpose()? else { return Ok(()) };
        let record = record::choose_record(
            &protocol,
            self.settings,
            zone,
            &*self.host,
            &addresses,
            bundle.as_ref(),
        )?;
        drop(bundle);
        protocol.extras.listen = Some(addresses.listen);
        self.show_record(&protocol, &record, &addresses);
        if join.kind == TokenKind::Join {
            return self.join_running_cluster(protocol, join, &record, addresses.listen).await;
        }
        let bootstrap =
            Bootstrap::new(&mut protocol, join.clone(), addresses.listen, self.context())?;
        match bootstrap.form(&record).await {
            // The cluster has its members already. Under a replacement policy, this host waits as a
            // standby until a member is dead.
            Err(ExitError::NeedsTicket(why)) if join.kind == TokenKind::Heal => {
                tracing::info!("the cluster has its members: this host waits as a standby ({why})");
                let protocol = protocol.renewed();
                self.join_running_cluster(protocol, join, &record, addresses.listen).await
            }
            formed => self.handle_formation_result(formed?, protocol).await,
        }
    }

    /// Returns the host's zone, from `--zone` or from the cloud's metadata service.
    async fn zone(&self) -> Result<Option<Name>, ExitError> {
        let settings = self.settings;
        let Some(cloud) = settings.zone_from else { return Ok(settings.zone.clone()) };
        let zone = cloud::zone(cloud, &settings.metadata_url).await.map_err(|error| {
            let why = error_chain(&error);
            ExitError::Failed(format!("{why}: say --zone ZONE, or correct --zone-from"))
        })?;
        tracing::info!(%zone, "the cloud has named this host's zone");
        Ok(Some(zone))
    }

    /// Joins a running cluster with a join ticket.
    async fn join_running_cluster(
        &self,
        mut protocol: Protocol,
        join: Join,
        record: &SignedRecord,
        listen: ListenAddresses,
    ) -> Result<(), ExitError> {
        let host = JoiningHost {
            program: self.node_kind.clone().await.map_err(ExitError::Failed)?.program(),
            hints: self.settings.cluster_addresses.iter().map(NodeUrl::to_string).collect(),
        };
        let surroundings = self.context();
        let newcomer = Newcomer::new(&mut protocol, join.clone(), record, host, surroundings)?;
        if newcomer.join(listen).await? == JoinResult::Stopped {
            return Ok(());
        }
        let bootstrap = Bootstrap::new(&mut protocol, join, listen, self.context())?;
        let formed = bootstrap.launch_held().await?;
        self.handle_formation_result(formed, protocol).await
    }

    async fn launch_held(&self, found: LoadedState) -> Result<(), ExitError> {
        let layout = &self.settings.layout;
        journal::write(layout, &found.journal, &found.extras).map_err(state_exit_error)?;
        let join = cluster_to_join(&found.extras, None)?;
        let listen = found.extras.listen.ok_or_else(|| {
            ExitError::DoNotRestart("the journal holds a document and no listen address".to_owned())
        })?;
        let LoadedState { key, journal, extras, document } = found;
        let mut protocol = Protocol::new(layout.clone(), key, journal, extras, document);
        let bootstrap = Bootstrap::new(&mut protocol, join, listen, self.context())?;
        let formed = bootstrap.launch_held().await?;
        self.handle_formation_result(formed, protocol).await
    }

    async fn supervise(&self, found: LoadedState) -> Result<(), ExitError> {
        let LoadedState { key, journal, mut extras, document } = found;
        let layout = self.settings.layout.clone();
        let record = node_start::own_record(&journal, key.public())?;
        addresses::apply_address_flags(
            &mut extras,
            &record,
            self.settings,
            &self.host.addresses(),
        )?;
        // If the journal can't be written, for example on a full disk, a node that has data starts
        // all the same. Only reports to discovery need the new boot counter.
        if let Err(error) = journal::write(&layout, &journal, &extras) {
            tracing::warn!(
                error = error_chain(&error),
                "can't journal this start; the node starts anyway"
            );
        }
        let mut protocol = Protocol::new(layout, key, journal, extras, document);
        let watch = HostAddressWatch::of(
            &self.host,
            &protocol.layout,
            &protocol.extras,
            &record,
            &self.settings.addressing,
        );
        if let Some(watch) = watch {
            let reporter = watch.waits_for().and_then(|_| StartReporter::of(&protocol));
            let wait = async {
                let reporting = async {
                    match reporter {
                        Some(reporter) => reporter.run(|| watch.waits_for()).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    waited = watch.wait_for_addresses(&self.board) => waited,
                    never = reporting => match never {},
                }
            };
            let waited = self.stop.run_until_cancelled(wait).await;
            // If the agent was told to stop while it waited, an earlier agent's node may still run.
            // Then go on to `run_node`, which adopts and stops that node.
            let is_running =
                lock::holder(&protocol.layout.node_lock()).map_err(state_exit_error)?.is_some();
            if waited.is_none() && !is_running {
                return Ok(());
            }
            if let Some(now) = waited.flatten() {
                addresses::note_host_move(&mut protocol.extras, &watch.journalled, now);
                protocol.persist_extras()?;
            }
        }
        self.run_node(protocol).await
    }

    async fn handle_formation_result(
        &self,
        formed: FormationResult,
        protocol: Protocol,
    ) -> Result<(), ExitError> {
        match formed {
            FormationResult::Launch => self.run_node(protocol).await,
            FormationResult::Stopped | FormationResult::Enrolled => Ok(()),
            FormationResult::ReplacementWanted(why) => {
                while !self.wait_for_replacement(&why).await {}
                Ok(())
            }
        }
    }

    /// Runs the node until the agent is told to stop. If the host moves, runs the node again at its
    /// new addresses.
    async fn run_node(&self, mut protocol: Protocol) -> Result<(), ExitError> {
        loop {
            let context = supervise::SupervisionContext {
                own_program: &self.own_program,
                node_kind: self.node_kind.clone(),
                host: Arc::clone(&self.host),
            };
            let end =
                supervise::run(&mut protocol, self.settings, context, &self.board, &self.stop);
            match end.await? {
                NodeEnd::Stopped => return Ok(()),
                NodeEnd::Moved => {}
            }
        }
    }

    fn context(&self) -> AgentContext {
        AgentContext {
            host: Arc::clone(&self.host),
            board: self.board.clone(),
            stop: self.stop.clone(),
            identity: self.settings.identity.clone(),
            etcd: None,
        }
    }

    /// Returns this host's addresses, once there is a route to discovery. `None` if the agent was
    /// told to stop before that.
    async fn addresses(&self, join: &Join) -> Result<Option<Addresses>, ExitError> {
        let addressing = &self.settings.addressing;
        let own = self.host.addresses();
        if addressing.is_complete() {
            return addressing.addresses(None, &own).map(Some);
        }
        let mut retry = Retry::default();
        loop {
            let route: Result<IpAddr, String> =
                record::local_address(&*self.host, &join.urls).await;
            match route {
                Ok(address) => {
                    let addresses = addressing.addresses(Some(address), &own)?;
                    tracing::info!(
                        "this host is reached at {} (its addresses: {}; --advertise-address \
                         overrides)",
                        addresses.peer_url,
                        own_addresses(&*self.host)
                    );
                    return Ok(Some(addresses));
                }
                Err(error) => {
                    let pause = retry.next_pause();
                    let text = format!("waiting for a route to discovery: {error}");
                    if retry.attempts() == 1 {
                        tracing::warn!("{text}");
                    }
                    self.board.set_phase(Phase::Contacting, text);
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = self.stop.cancelled() => return Ok(None),
                    }
                }
            }
        }
    }

    /// Shows in the status, before anything else happens, the facts about this host that the
    /// journal holds.
    fn show_journal(&self, loaded: &VerifiedJournal) {
        let VerifiedJournal { journal, extras, .. } = loaded;
        let incarnation = loaded.for_directory().incarnation;
        self.board.update(|status| {
            status.cluster_id = extras.join.as_ref().map(|join| join.cluster.to_string());
            status.key = Some(convert::public_key(journal.key).to_string());
            status.incarnation = Some(incarnation.to_string());
            status.client_listen = extras.listen.map(|listen| listen.client.to_string());
            if let Some(record) = &journal.record {
                status.name = Some(record.name.clone());
                status.peer_url = record.peer_urls.first().cloned();
                status.client_url = record.client_urls.first().cloned();
            }
            if let Some(moved) = &extras.moved {
                status.peer_url = Some(moved.peer_url.to_string());
                status.client_url = Some(moved.client_url.to_string());
                status.client_listen = Some(moved.listen.client.to_string());
            }
            if let Some(held) = &journal.held_document {
                status.epoch = Some(held.proposal.epoch);
                status.seat = held.proposal.seat_of(journal.key);
            }
        });
    }

    fn show_record(&self, protocol: &Protocol, record: &SignedRecord, addresses: &Addresses) {
        let own = protocol.key.public();
        let claims: Option<Record> = record.record.verify(JwsType::Record, own).ok();
        let name = claims.map(|claims| claims.name.to_string());
        self.board.update(|status| {
            status.cluster_id = protocol.extras.join.as_ref().map(|join| join.cluster.to_string());
            status.name = name;
            status.key = Some(own.to_string());
            status.incarnation = Some(protocol.agent.journal.incarnation.to_string());
            status.peer_url = Some(addresses.peer_url.to_string());
            status.client_url = Some(addresses.client_url.to_string());
            status.client_listen = Some(addresses.listen.client.to_string());
        });
    }
}

/// Returns the state that was read from disk, with its boot counter increased. Each run of the
/// agent is a new session with discovery.
fn with_next_boot((key, loaded): (SigningKey, VerifiedJournal)) -> LoadedState {
    let VerifiedJournal { journal, extras, document, .. } = loaded;
    LoadedState { key, journal: journal.with_next_boot(), extras, document }
}
