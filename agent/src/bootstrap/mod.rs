//! Forms the cluster from this host's side: everything between a journal and a node that may start.
//!
//! The protocol's state machine decides. This module passes verified facts to it, and carries out
//! its actions. One task owns everything here: answers of the service, findings of probes and
//! deadlines meet in one `select!`. Sending never blocks that task. Each message is sent by a task
//! of its own, which a newer message of its kind replaces.
//!
//! This module does not decide when to sign, release or launch, and it starts no process.

mod act;
mod errand;
mod mesh;
mod progress;
pub(crate) mod record;
mod shown;

pub(crate) use self::shown::cut;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use discovery_formation::agent::Event;
use discovery_formation::{Hash, KeyId};
use discovery_types::api::{NackReason, NackRequest, PollRequest, ProbeResult, Session};
use discovery_types::client::{Client, ClientConfig, ClientError};
use discovery_types::convert;
use discovery_types::digest::Digest;
use discovery_types::key::PublicKey;
use discovery_types::problem::Code;
use discovery_types::record::SignedRecord;
use discovery_types::redeem::Redeem;
use discovery_types::statement::StatementChain;
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::errand::{Done, Errand, Kind};
use self::mesh::Mesh;
use self::progress::Progress;
use crate::addressing::Listen;
use crate::exit::{End, chain};
use crate::host::Host;
use crate::probe::ProbeIdentity;
use crate::probe::server::{Policy, ProbeListener};
use crate::protocol::Protocol;
use crate::retry::Retry;
use crate::state::journal::Join;
use crate::status::{Board, Phase};

/// The longest that a proposal waits for releases, whatever the service allows.
const LONGEST_PATIENCE: Duration = Duration::from_secs(3600);

/// How long the last message may take when the agent is told to stop.
const FAREWELL: Duration = Duration::from_secs(1);

/// Result of forming the cluster.
#[derive(Debug)]
pub(crate) enum Formed {
    /// The node may start.
    Launch,
    /// The node's data is lost, or belongs to another incarnation; a person has to replace this
    /// member.
    ReplacementWanted(String),
    /// The agent was told to stop.
    Stopped,
}

/// Parts of the agent that forming the cluster depends on.
pub(crate) struct Surroundings {
    pub host: Arc<dyn Host>,
    /// The status to update.
    pub board: Board,
    /// Cancelled when the agent is told to stop.
    pub stop: CancellationToken,
}

/// The proposal that the state machine was offered last.
struct Offered {
    h: Hash,
    epoch: u64,
    /// Seat numbers by agent key, for the matrix.
    seats: BTreeMap<KeyId, u8>,
    results: BTreeMap<KeyId, ProbeResult>,
    impatient_at: Instant,
}

/// State of the one task that forms the cluster; the only owner of all that it uses.
pub(crate) struct Bootstrap<'a> {
    protocol: &'a mut Protocol,
    surroundings: Surroundings,
    join: Join,
    listen: Listen,
    client: Arc<Client>,
    identity: Arc<ProbeIdentity>,
    policy: watch::Sender<Policy>,
    listener: Option<ProbeListener>,
    chain: Option<StatementChain>,
    service_keys: Vec<PublicKey>,
    offered: Option<Offered>,
    /// Hash of the proposal that was refused before the state machine saw it.
    refused_unseen: Option<Digest>,
    mesh: Mesh,
    progress: Progress,
    work: JoinSet<Done>,
    underway: BTreeMap<Kind, AbortHandle>,
    contact: Contact,
    outcome: Option<Formed>,
}

/// Contact with the service: one redeem, then one long poll after another.
#[derive(Default)]
struct Contact {
    wanted: bool,
    redeemed: bool,
    waiting: bool,
    revision: Option<u64>,
    retry: Retry,
    pause: Duration,
    /// The last failure that was logged, to log each only once.
    complained: Option<String>,
    last_refusal: Option<String>,
    /// Whether the last refusal said that the cluster has its members already.
    is_boot_closed: bool,
    pin: usize,
}

impl<'a> Bootstrap<'a> {
    /// Makes the state from a journal whose record exists, or is about to be made by
    /// [`Bootstrap::form`].
    pub(crate) fn new(
        protocol: &'a mut Protocol,
        join: Join,
        listen: Listen,
        surroundings: Surroundings,
    ) -> Result<Self, End> {
        let key = Arc::clone(&protocol.key);
        let config = ClientConfig {
            urls: join.urls.clone(),
            pins: join.pins.clone(),
            key: Some(Arc::clone(&key)),
        };
        let client = Client::new(config).map_err(|error| End::Failed(chain(&error)))?;
        let identity = Arc::new(ProbeIdentity::new(&key));
        let statements = &protocol.keepsakes.statements;
        Ok(Self {
            chain: StatementChain::verify_from_pin(statements, &join.statement).ok(),
            client: Arc::new(client),
            mesh: Mesh::new(Arc::clone(&identity)),
            identity,
            policy: watch::Sender::new(Policy::default()),
            listener: None,
            service_keys: Vec::new(),
            offered: None,
            refused_unseen: None,
            progress: Progress::new(surroundings.board.clone()),
            work: JoinSet::new(),
            underway: BTreeMap::new(),
            contact: Contact::default(),
            outcome: None,
            protocol,
            surroundings,
            join,
            listen,
        })
    }

    /// Continues to the launch of a document that is already held. Contacts nobody.
    pub(crate) async fn launch_held(mut self) -> Result<Formed, End> {
        let actions = self.look()?;
        self.act(actions).await?;
        self.until_outcome().await
    }

    /// Forms the cluster with this host's `record`.
    pub(crate) async fn form(mut self, record: &SignedRecord) -> Result<Formed, End> {
        self.listen().await?;
        let own = *self.protocol.key.public();
        let record = convert::own_record(record, &own).map_err(|error| {
            End::Failed(format!("this host's own record is not valid: {}", chain(&error)))
        })?;
        let actions = self.protocol.step(Event::RecordReady(record))?;
        self.act(actions).await?;
        self.until_outcome().await
    }

    /// Listens on the node's peer address, and checks that its client address is free.
    async fn listen(&mut self) -> Result<(), End> {
        self.update_policy();
        let listener =
            ProbeListener::open(self.listen.peer, &self.identity, self.policy.subscribe())
                .await
                .map_err(|error| self.address_taken(&chain(&error)))?;
        let at = self.listen.client;
        self.surroundings
            .host
            .test_bind(at)
            .map_err(|error| self.address_taken(&format!("can't listen on {at}: {error}")))?;
        self.listener = Some(listener);
        Ok(())
    }

    fn address_taken(&self, what: &str) -> End {
        let own = own_addresses(&*self.surroundings.host);
        End::Failed(format!(
            "{what}; the node could not either. This host's addresses: {own}; see \
             --listen-address, --peer-port and --client-port"
        ))
    }

    async fn until_outcome(&mut self) -> Result<Formed, End> {
        loop {
            if let Some(outcome) = self.outcome.take() {
                return Ok(outcome);
            }
            self.keep_contact()?;
            let impatient_at = self.offered.as_ref().map(|offered| offered.impatient_at);
            tokio::select! {
                () = self.surroundings.stop.cancelled() => {
                    self.say_farewell().await;
                    return Ok(Formed::Stopped);
                }
                Some(done) = self.work.join_next_with_id() => match done {
                    Ok((task, done)) => self.done(task, done).await?,
                    // The task was aborted because a newer message replaced it.
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => return Err(End::Failed(format!("a task failed: {error}"))),
                },
                finding = self.mesh.next() => self.found(finding).await?,
                () = sleep_until(impatient_at) => self.impatient().await?,
                () = tokio::time::sleep(progress::LOOK_EVERY) => self.progress.look(),
            }
        }
    }

    /// Starts a redeem or a poll unless one is under way.
    fn keep_contact(&mut self) -> Result<(), End> {
        if !self.contact.wanted || self.contact.waiting {
            return Ok(());
        }
        self.contact.waiting = true;
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
            self.work.spawn(errand::poll(client, self.join.cluster, poll, pause));
        } else {
            let envelope = self.envelope()?.sign(&self.protocol.key);
            self.work.spawn(errand::redeem(client, envelope, pause));
        }
        Ok(())
    }

    fn envelope(&self) -> Result<Redeem, End> {
        let journal = &self.protocol.agent.journal;
        let record = journal.record.as_deref().ok_or_else(|| {
            End::Failed("there is no record to redeem: this is a fault of muster-agent".to_owned())
        })?;
        let session = self.session();
        let pins = &self.join.pins;
        Ok(Redeem {
            service: pins[self.contact.pin % pins.len()],
            cluster: self.join.cluster,
            statement: self.join.statement,
            signed: crate::state::journal::signed_record(record),
            boot: session.boot,
            nonce: session.nonce,
            highest_epoch: journal.highest_epoch(),
        })
    }

    fn session(&self) -> Session {
        Session { boot: self.protocol.agent.session.boot, nonce: self.protocol.nonce() }
    }

    async fn done(&mut self, task: Id, done: Done) -> Result<(), End> {
        match done {
            Done::Redeemed(Ok(response)) => {
                self.contact.waiting = false;
                self.contact.redeemed = true;
                self.reached();
                self.service_keys =
                    response.jwks.keys.iter().filter_map(|jwk| jwk.public_key()).collect();
                self.absorb(response.poll).await
            }
            Done::Polled(Ok(response)) => {
                self.contact.waiting = false;
                self.reached();
                self.absorb(*response).await
            }
            Done::Redeemed(Err(error)) | Done::Polled(Err(error)) => {
                self.contact.waiting = false;
                self.failed(error).await
            }
            Done::Carried(kind, result) => {
                // A result that arrived just before a newer message replaced it is ignored.
                match self.underway.get(&kind).is_some_and(|newest| newest.id() == task) {
                    true => self.carried(kind, result).await,
                    false => Ok(()),
                }
            }
        }
    }

    fn reached(&mut self) {
        if self.contact.complained.take().is_some() {
            tracing::info!("discovery answers again");
            self.surroundings.board.healed();
        }
        self.contact.retry.succeeded();
    }

    /// Handles a failed redeem or poll. The state machine judges a refusal; every other failure is
    /// retried.
    async fn failed(&mut self, error: ClientError) -> Result<(), End> {
        let text = chain(&error);
        match &error {
            ClientError::Problem(problem) => {
                self.contact.last_refusal = Some(text.clone());
                self.contact.is_boot_closed = problem.code == Code::BootClosed;
                let (code, retryable) = (convert::refusal_code(problem.code), problem.retryable);
                // While the service rotates its key, a bundle has two pins, but an envelope names
                // only one. So a refusal counts once each pin was tried.
                self.contact.pin = self.contact.pin.wrapping_add(1);
                let named_all = self.contact.pin.is_multiple_of(self.join.pins.len());
                if self.contact.redeemed || named_all {
                    let actions = self.protocol.step(Event::Refused { code, retryable })?;
                    self.act(actions).await?;
                }
            }
            ClientError::Pin { .. } | ClientError::NoKey | ClientError::Setup(_) => {
                return Err(End::Failed(text));
            }
            ClientError::Unreachable { .. }
            | ClientError::Interrupted { .. }
            | ClientError::Foreign { .. } => {}
        }
        let pause = self.contact.retry.next_pause();
        self.contact.pause = pause;
        let at = self.surroundings.host.now()
            + jiff::SignedDuration::try_from(pause).unwrap_or_default();
        self.surroundings.board.error(text.clone(), Some(at));
        if self.contact.complained.as_ref() != Some(&text) {
            tracing::warn!("{text}; trying again");
            self.contact.complained = Some(text.clone());
        }
        let what =
            format!("waiting for discovery ({} tries): {text}", self.contact.retry.attempts());
        self.surroundings.board.phase(Phase::Contacting, what);
        Ok(())
    }

    async fn carried(
        &mut self,
        kind: Kind,
        result: Result<Option<Box<discovery_types::api::PollResponse>>, ClientError>,
    ) -> Result<(), End> {
        /// HTTP status code 409 Conflict.
        const CONFLICT: u16 = 409;
        self.underway.remove(&kind);
        match result {
            Ok(response) => {
                if kind == Kind::Answer {
                    crate::crash::at(crate::crash::Step::AckSent);
                }
                match response {
                    Some(response) => self.absorb(*response).await,
                    None => Ok(()),
                }
            }
            Err(ClientError::Problem(problem))
                if problem.status != CONFLICT && kind != Kind::Row =>
            {
                self.contact.last_refusal = Some(problem.to_string());
                let (code, retryable) = (convert::refusal_code(problem.code), problem.retryable);
                let actions = self.protocol.step(Event::Refused { code, retryable })?;
                self.act(actions).await
            }
            Err(error) => {
                // The next poll shows the cluster's current state.
                tracing::debug!(?kind, error = chain(&error), "not taken");
                Ok(())
            }
        }
    }

    async fn impatient(&mut self) -> Result<(), End> {
        let Some(offered) = &mut self.offered else { return Ok(()) };
        // The event is sent once for each proposal, so the next time is set far away.
        offered.impatient_at += LONGEST_PATIENCE;
        let epoch = offered.epoch;
        let actions = self.protocol.step(Event::Impatient { epoch })?;
        self.act(actions).await
    }

    /// Tells the service that this host won't sign, so that the others needn't wait until its lease
    /// ends.
    async fn say_farewell(&mut self) {
        let Some(offered) = &self.offered else { return };
        // This host stays bound to a list that it has signed; its next start goes on from there.
        if self.protocol.agent.journal.bound.contains_key(&offered.epoch) {
            return;
        }
        let nack = NackRequest {
            session: self.session(),
            epoch: offered.epoch,
            h: convert::digest(offered.h),
            reason: NackReason::Stopping,
            detail: "the agent is stopping".to_owned(),
        };
        let board = self.surroundings.board.clone();
        let sent = Errand::Nack(nack).carry_out(Arc::clone(&self.client), self.join.cluster, board);
        // Best effort: without this message the lease ends by itself.
        let _ = tokio::time::timeout(FAREWELL, sent).await;
    }

    /// Sends a message. An older one of its kind that is still being sent is aborted.
    fn send(&mut self, errand: Errand) {
        let kind = errand.kind();
        let board = self.surroundings.board.clone();
        let work = errand.carry_out(Arc::clone(&self.client), self.join.cluster, board);
        let handle = self.work.spawn(work);
        if let Some(older) = self.underway.insert(kind, handle) {
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
