//! Forms the cluster from this host's side: everything from the first journal until the node may
//! start.
//!
//! The protocol's state machine decides. This module passes verified facts to it, and carries out
//! its actions. One task owns everything here: answers of the service, findings of probes and
//! deadlines meet in one `select!`. Sending never blocks that task. Each message is sent by a task
//! of its own, which is aborted when a newer message of that kind is sent.
//!
//! This module does not decide when to sign, release or launch, and it starts no process.

mod act;
mod answers;
pub(crate) mod etcd;
mod mesh;
mod outgoing;
mod progress;
pub(crate) mod record;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use discovery_formation::agent::AgentEvent;
use discovery_formation::{AgentKey, Hash};
use discovery_types::api::{NackReason, NackRequest, PollRequest, ProbeResult, Session};
use discovery_types::client::{ClientConfig, ClientError, DiscoveryClient};
use discovery_types::convert;
use discovery_types::digest::Digest;
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::record::SignedRecord;
use discovery_types::statement::StatementChain;
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::etcd::RunningEtcd;
use self::mesh::Probers;
use self::outgoing::{OutgoingMessage, OutgoingMessageKind, RedeemFailure, RequestResult};
use self::progress::ProgressLog;
use crate::enrol::protocol::Protocol;
use crate::enrol::redeem::UnsignedRedeem;
use crate::exit::{ExitError, error_chain};
use crate::host::Host;
use crate::host::cloud::IdentitySource;
use crate::observe::contact;
use crate::observe::status::{Phase, StatusHandle};
use crate::probe::ProbeIdentity;
use crate::probe::server::{ProbeListener, ProbePolicy};
use crate::retry::Retry;
use crate::state::addresses::ListenAddresses;
use crate::state::journal::Join;

/// The longest that a proposal waits for releases (agents' promises to be in no earlier list),
/// whatever the service allows.
const MAX_WAIT_FOR_RELEASES: Duration = Duration::from_secs(3600);

/// How long the last message (a nack) may take when the agent is told to stop.
const FINAL_NACK_TIMEOUT: Duration = Duration::from_secs(1);

/// Result of forming the cluster.
#[derive(Debug)]
pub(crate) enum FormationResult {
    /// The node may start.
    Launch,
    /// The node's data is lost, or belongs to another incarnation; a person has to replace this
    /// member.
    ReplacementWanted(String),
    /// This host holds the commit document, and its etcd runs on as before.
    Enrolled,
    /// The agent was told to stop.
    Stopped,
}

/// Parts of the agent that forming the cluster depends on.
pub(crate) struct AgentContext {
    pub host: Arc<dyn Host>,
    /// The status to update.
    pub board: StatusHandle,
    /// Cancelled when the agent is told to stop.
    pub stop: CancellationToken,
    /// Source of the identity documents that redeems contain, if `--identity-from` was given.
    pub identity: Option<IdentitySource>,
    /// This host's etcd, if it runs already and comes under management.
    pub etcd: Option<RunningEtcd>,
}

/// The proposal that the state machine was offered last.
struct CurrentProposal {
    h: Hash,
    epoch: u64,
    /// Seat numbers by agent key, for the probe matrix.
    seats: BTreeMap<AgentKey, u8>,
    results: BTreeMap<AgentKey, ProbeResult>,
    release_deadline: Instant,
}

/// State of the one task that forms the cluster.
pub(crate) struct Bootstrap<'a> {
    protocol: &'a mut Protocol,
    context: AgentContext,
    join: Join,
    listen: ListenAddresses,
    client: Arc<DiscoveryClient>,
    identity: Arc<ProbeIdentity>,
    policy: watch::Sender<ProbePolicy>,
    listener: Option<ProbeListener>,
    chain: Option<StatementChain>,
    service_keys: Vec<PublicKey>,
    current_proposal: Option<CurrentProposal>,
    /// Hash of the proposal that was refused before the state machine saw it.
    refused_unverified: Option<Digest>,
    probers: Probers,
    progress: ProgressLog,
    work: JoinSet<RequestResult>,
    pending_messages: BTreeMap<OutgoingMessageKind, AbortHandle>,
    contact: ServiceContact,
    outcome: Option<FormationResult>,
}

/// Contact with the service: one redeem, then one long poll after another.
#[derive(Default)]
struct ServiceContact {
    wanted: bool,
    redeemed: bool,
    is_request_pending: bool,
    revision: Option<u64>,
    retry: Retry,
    pause: Duration,
    /// The failure that was logged last, so that its repetition isn't logged.
    logged_failure: Option<String>,
    last_refusal: Option<String>,
    /// Whether the service's last refusal was that the cluster has its members already.
    is_boot_closed: bool,
}

impl<'a> Bootstrap<'a> {
    /// Makes the state from a journal whose record exists, or is about to be made by
    /// [`Bootstrap::form`].
    pub(crate) fn new(
        protocol: &'a mut Protocol,
        join: Join,
        listen: ListenAddresses,
        surroundings: AgentContext,
    ) -> Result<Self, ExitError> {
        let key = Arc::clone(&protocol.key);
        let config = ClientConfig {
            urls: join.urls.clone(),
            pins: join.pins.clone(),
            key: Some(Arc::clone(&key)),
        };
        let client =
            DiscoveryClient::new(config).map_err(|error| ExitError::Failed(error_chain(&error)))?;
        let identity = Arc::new(ProbeIdentity::new(&key));
        let statements = &protocol.extras.statements;
        Ok(Self {
            chain: StatementChain::verify_from_pin(statements, &join.statement).ok(),
            client: Arc::new(client),
            probers: Probers::new(Arc::clone(&identity)),
            identity,
            policy: watch::Sender::new(ProbePolicy::default()),
            listener: None,
            service_keys: Vec::new(),
            current_proposal: None,
            refused_unverified: None,
            progress: ProgressLog::new(surroundings.board.clone()),
            work: JoinSet::new(),
            pending_messages: BTreeMap::new(),
            contact: ServiceContact::default(),
            outcome: None,
            protocol,
            context: surroundings,
            join,
            listen,
        })
    }

    /// Continues to the launch with a commit document that this host holds already. Contacts
    /// neither the service nor a peer.
    pub(crate) async fn launch_held(mut self) -> Result<FormationResult, ExitError> {
        let actions = self.classify_directory()?;
        self.carry_out_actions(actions).await?;
        self.run_until_outcome().await
    }

    /// Forms the cluster with this host's `record`.
    pub(crate) async fn form(
        mut self,
        record: &SignedRecord,
    ) -> Result<FormationResult, ExitError> {
        // A running etcd occupies the peer address, so the agent can't listen there.
        if self.context.etcd.is_none() {
            self.listen().await?;
        }
        let own = *self.protocol.key.public();
        let record = convert::own_record(record, &own).map_err(|error| {
            ExitError::Failed(format!(
                "this host's own record is not valid: {}",
                error_chain(&error)
            ))
        })?;
        let actions = self.protocol.step(AgentEvent::RecordReady(record))?;
        self.carry_out_actions(actions).await?;
        let (contact, board) = (self.client.contact(), self.context.board.clone());
        let outcome = tokio::select! {
            outcome = self.run_until_outcome() => outcome,
            never = contact::show(contact, board) => match never {},
        };
        // Close the probe listener, which occupies the peer address: this host may go on as a
        // newcomer to a running cluster.
        if let Some(listener) = self.listener.take() {
            listener.close().await;
        }
        outcome
    }

    /// Listens on the node's peer address, and checks that its client address is free.
    async fn listen(&mut self) -> Result<(), ExitError> {
        self.update_policy();
        let listener =
            ProbeListener::open(self.listen.peer, &self.identity, self.policy.subscribe())
                .await
                .map_err(|error| self.address_taken(&error_chain(&error)))?;
        let at = self.listen.client;
        self.context
            .host
            .test_bind(at)
            .map_err(|error| self.address_taken(&format!("can't listen on {at}: {error}")))?;
        self.listener = Some(listener);
        Ok(())
    }

    fn address_taken(&self, what: &str) -> ExitError {
        let own = own_addresses(&*self.context.host);
        ExitError::Failed(format!(
            "{what}; the node could not either. This host's addresses: {own}; see \
             --listen-address, --peer-port and --client-port"
        ))
    }

    async fn run_until_outcome(&mut self) -> Result<FormationResult, ExitError> {
        loop {
            if let Some(outcome) = self.outcome.take() {
                return Ok(outcome);
            }
            self.start_next_request()?;
            let impatient_at =
                self.current_proposal.as_ref().map(|offered| offered.release_deadline);
            tokio::select! {
                () = self.context.stop.cancelled() => {
                    self.send_final_nack().await;
                    return Ok(FormationResult::Stopped);
                }
                Some(done) = self.work.join_next_with_id() => match done {
                    Ok((task, done)) => self.handle_result(task, done).await?,
                    // The task was aborted because a newer message replaced it.
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => return Err(ExitError::Failed(format!("a task failed: {error}"))),
                },
                finding = self.probers.next() => self.handle_finding(finding).await?,
                () = sleep_until(impatient_at) => self.end_release_wait().await?,
                () = tokio::time::sleep(progress::CHECK_INTERVAL) => self.progress.log_due_lines(),
            }
        }
    }

    /// Starts a redeem or a poll unless one is under way.
    fn start_next_request(&mut self) -> Result<(), ExitError> {
        if !self.contact.wanted || self.contact.is_request_pending {
            return Ok(());
        }
        self.contact.is_request_pending = true;
        let client = Arc::clone(&self.client);
        let pause = std::mem::take(&mut self.contact.pause);
        if self.contact.redeemed {
            let session = self.session();
            let journal = &self.protocol.agent.journal;
            let poll = PollRequest {
                after: self.contact.revision,
                boot: session.boot,
                nonce: session.nonce,
                highest_epoch: journal.highest_epoch(),
            };
            self.work.spawn(outgoing::poll(client, self.join.cluster, poll, pause));
        } else {
            let redeem = UnsignedRedeem::new(self.protocol, &self.join)?;
            let source = self.context.identity.clone();
            self.work.spawn(outgoing::redeem(client, redeem, source, pause));
        }
        Ok(())
    }

    fn session(&self) -> Session {
        Session { boot: self.protocol.agent.session.boot, nonce: self.protocol.nonce() }
    }

    async fn handle_result(&mut self, task: Id, done: RequestResult) -> Result<(), ExitError> {
        match done {
            RequestResult::Redeemed(Ok(response)) => {
                self.contact.is_request_pending = false;
                self.contact.redeemed = true;
                self.handle_success();
                self.service_keys =
                    response.jwks.keys.iter().filter_map(|jwk| jwk.public_key()).collect();
                self.handle_answer(response.poll).await
            }
            RequestResult::Polled(Ok(response)) => {
                self.contact.is_request_pending = false;
                self.handle_success();
                match response {
                    Some(changed) => self.handle_answer(*changed).await,
                    None => Ok(()),
                }
            }
            RequestResult::Redeemed(Err(RedeemFailure::Client(error)))
            | RequestResult::Polled(Err(error)) => {
                self.contact.is_request_pending = false;
                self.handle_failure(error).await
            }
            RequestResult::Redeemed(Err(RedeemFailure::Identity(error))) => {
                self.contact.is_request_pending = false;
                self.retry_later("the cloud's identity document", error_chain(&error));
                Ok(())
            }
            RequestResult::MessageSent(kind, result) => {
                // Ignore the result of a message if a newer message has replaced it meanwhile.
                match self.pending_messages.get(&kind).is_some_and(|newest| newest.id() == task) {
                    true => self.handle_message_result(kind, result).await,
                    false => Ok(()),
                }
            }
        }
    }

    fn handle_success(&mut self) {
        if self.contact.logged_failure.take().is_some() {
            tracing::info!("discovery answers again");
            self.context.board.clear_error();
        }
        self.contact.retry.reset();
    }

    /// Handles a failed redeem or poll. The state machine judges a refusal; every other failure is
    /// retried.
    async fn handle_failure(&mut self, error: ClientError) -> Result<(), ExitError> {
        let text = error_chain(&error);
        match &error {
            ClientError::Problem(problem) => {
                self.contact.last_refusal = Some(text.clone());
                self.contact.is_boot_closed = problem.code == Code::BootClosed;
                let (code, retryable) = (convert::refusal_code(problem.code), problem.retryable);
                let actions = self.protocol.step(AgentEvent::RequestRefused { code, retryable })?;
                self.carry_out_actions(actions).await?;
            }
            ClientError::Pin { .. } | ClientError::NoKey | ClientError::Setup(_) => {
                return Err(ExitError::Failed(text));
            }
            ClientError::Unreachable { .. }
            | ClientError::Interrupted { .. }
            | ClientError::Foreign { .. } => {}
        }
        self.retry_later("discovery", text);
        Ok(())
    }

    /// Repeats the redeem or poll after a pause. Shows in the status what the agent waits for
    /// (`awaited`), and why the request failed (`text`).
    fn retry_later(&mut self, awaited: &str, text: String) {
        // The next poll doesn't name the state (`PollResponse::rev`) that this agent has seen. So
        // the service answers at once with the cluster's full state, and the status shows the
        // failure no longer than that.
        self.contact.revision = None;
        let pause = self.contact.retry.next_pause();
        self.contact.pause = pause;
        let at =
            self.context.host.now() + jiff::SignedDuration::try_from(pause).unwrap_or_default();
        self.context.board.set_error(text.clone(), Some(at));
        if self.contact.logged_failure.as_ref() != Some(&text) {
            tracing::warn!("{text}; trying again");
            self.contact.logged_failure = Some(text.clone());
        }
        let what =
            format!("waiting for {awaited} ({} tries): {text}", self.contact.retry.attempts());
        self.context.board.set_phase(Phase::Contacting, what);
    }

    async fn handle_message_result(
        &mut self,
        kind: OutgoingMessageKind,
        result: Result<Option<Box<discovery_types::api::PollResponse>>, ClientError>,
    ) -> Result<(), ExitError> {
        /// HTTP status code 409 Conflict.
        const CONFLICT: u16 = 409;
        self.pending_messages.remove(&kind);
        match result {
            Ok(response) => {
                if kind == OutgoingMessageKind::Answer {
                    crate::crash::at(crate::crash::Failpoint::AckSent);
                }
                match response {
                    Some(response) => self.handle_answer(*response).await,
                    None => Ok(()),
                }
            }
            Err(ClientError::Problem(problem))
                if problem.status != CONFLICT && kind != OutgoingMessageKind::Row =>
            {
                self.contact.last_refusal = Some(problem.to_string());
                let (code, retryable) = (convert::refusal_code(problem.code), problem.retryable);
                let actions = self.protocol.step(AgentEvent::RequestRefused { code, retryable })?;
                self.carry_out_actions(actions).await
            }
            Err(error) => {
                // Only log that the service didn't take the message: the next poll shows the
                // cluster's state.
                tracing::debug!(?kind, error = error_chain(&error), "not taken");
                Ok(())
            }
        }
    }

    async fn end_release_wait(&mut self) -> Result<(), ExitError> {
        let Some(offered) = &mut self.current_proposal else { return Ok(()) };
        // The time-out event is sent once for each proposal, so the next deadline is set far away.
        offered.release_deadline += MAX_WAIT_FOR_RELEASES;
        let epoch = offered.epoch;
        let actions = self.protocol.step(AgentEvent::ReleaseTimeout { epoch })?;
        self.carry_out_actions(actions).await
    }

    /// Tells the service that this host won't sign. Otherwise other hosts would have to wait until
    /// the lease of this host's seat ends.
    async fn send_final_nack(&mut self) {
        let Some(offered) = &self.current_proposal else { return };
        // Send no nack for a list of members that this host has signed. The host stays bound to
        // that list, and its next start goes on with it.
        if self.protocol.agent.journal.signed_lists.contains_key(&offered.epoch) {
            return;
        }
        let nack = NackRequest {
            session: self.session(),
            epoch: offered.epoch,
            h: convert::digest(offered.h),
            reason: NackReason::Stopping,
            detail: "the agent is stopping".to_owned(),
        };
        let board = self.context.board.clone();
        let sent = OutgoingMessage::Nack(nack).send_until_accepted(
            Arc::clone(&self.client),
            self.join.cluster,
            board,
        );
        // Best effort: without this message, the lease of this host's seat ends by itself.
        let _ = tokio::time::timeout(FINAL_NACK_TIMEOUT, sent).await;
    }

    /// Sends a message. If an older message of the same kind is still being sent, aborts that.
    fn send(&mut self, outgoing: OutgoingMessage) {
        let kind = outgoing.kind();
        let board = self.context.board.clone();
        let work = outgoing.send_until_accepted(Arc::clone(&self.client), self.join.cluster, board);
        let handle = self.work.spawn(work);
        if let Some(older) = self.pending_messages.insert(kind, handle) {
            older.abort();
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Returns all addresses of this host, separated by commas.
pub(crate) fn own_addresses(host: &dyn Host) -> String {
    let addresses: Vec<String> = host.addresses().iter().map(ToString::to_string).collect();
    addresses.join(", ")
}
