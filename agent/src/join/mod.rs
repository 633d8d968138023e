//! Joins a running cluster with a join ticket: every step between a record and a node that may
//! start.
//!
//! The ticket is only a request. A person signed it; the cluster's own agents verify that, and one
//! of them adds this host through the cluster's API. Discovery carries the messages, so nothing
//! that it says makes this host a member. Before anything is journalled, the cluster itself is
//! asked over mutual TLS. It has to be the one founded with the document, and has to list this
//! host. A cluster that was recovered counts as the founded one if recovery statements lead to it.
//!
//! Two steps are made durable:
//! - the record, before the ticket is redeemed and so shown to anybody;
//! - the admission, before the node may start.
//!
//! A restart between them begins again at the redeem, which the same key may repeat.

mod check;
mod judge;

use std::sync::Arc;

use discovery_formation::agent::Event;
use discovery_types::api::{IntentView, JoinResponse, NodeProgram};
use discovery_types::client::{Client, ClientConfig, ClientError};
use discovery_types::convert;
use discovery_types::digest::MemberId;
use discovery_types::document::VerifiedDocument;
use discovery_types::jws::Typ;
use discovery_types::leaves::Leaves;
use discovery_types::problem::Code;
use discovery_types::record::{Record, SignedRecord};
use discovery_types::redeem::Redeem;
use discovery_types::statement::StatementChain;

use self::judge::Standing;
use crate::addressing::Listen;
use crate::bootstrap::Surroundings;
use crate::crash::{self, Step};
use crate::exit::{End, chain};
use crate::node_command::put_leaves;
use crate::protocol::Protocol;
use crate::retry::Retry;
use crate::state::journal::{Admission, Join};
use crate::status::Phase;

pub(crate) use self::check::{is_listed, now_listed, reach};

/// Result of joining a running cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// The admission is durable: the node may start.
    Admitted,
    /// The agent was told to stop.
    Stopped,
}

/// Settings of a joining host that its operator decides.
pub(crate) struct JoiningHost {
    /// The program that this host runs as its node.
    pub program: NodeProgram,
    /// URLs of the cluster's members according to the operator. A server there has to prove that it
    /// is a member.
    pub hints: Vec<String>,
}

/// A host that joins a running cluster.
pub(crate) struct Newcomer<'a> {
    protocol: &'a mut Protocol,
    surroundings: Surroundings,
    join: Join,
    record: Record,
    host: JoiningHost,
    client: Client,
    retry: Retry,
    /// The last reason shown, to log each reason only once.
    said: Option<String>,
}

/// The verified result of redeeming a ticket.
struct Ticket {
    chain: StatementChain,
    document: VerifiedDocument,
    view: IntentView,
}

impl<'a> Newcomer<'a> {
    /// Makes a newcomer from a journal that may hold this host's record already. Makes the record
    /// durable.
    pub(crate) fn new(
        protocol: &'a mut Protocol,
        join: Join,
        signed: &SignedRecord,
        host: JoiningHost,
        surroundings: Surroundings,
    ) -> Result<Self, End> {
        let own = *protocol.key.public();
        let not_valid = |why: &dyn std::error::Error| {
            End::Failed(format!("this host's own record is not valid: {}", chain(why)))
        };
        let record: Record =
            signed.record.verify(Typ::Record, &own).map_err(|error| not_valid(&error))?;
        let ours = convert::own_record(signed, &own).map_err(|error| not_valid(&error))?;
        // The record must be durable before it is shown to anybody.
        protocol.step(Event::RecordReady(ours))?;
        let config = ClientConfig {
            urls: join.urls.clone(),
            pins: join.pins.clone(),
            key: Some(Arc::clone(&protocol.key)),
        };
        let client = Client::new(config).map_err(|error| End::Failed(chain(&error)))?;
        let retry = Retry::default();
        Ok(Self { protocol, surroundings, join, record, host, client, retry, said: None })
    }

    /// Joins the cluster. The node will listen on `listen`.
    pub(crate) async fn join(mut self, listen: Listen) -> Result<Joined, End> {
        for at in [listen.peer, listen.client] {
            let bound = self.surroundings.host.test_bind(at);
            bound.map_err(|error| {
                End::Failed(format!(
                    "can't listen on {at}: {error}; the node could not either. See \
                     --listen-address, --peer-port and --client-port"
                ))
            })?;
        }
        let stop = self.surroundings.stop.clone();
        match stop.run_until_cancelled(self.be_admitted()).await {
            None => Ok(Joined::Stopped),
            Some(result) => result.map(|()| Joined::Admitted),
        }
    }

    async fn be_admitted(&mut self) -> Result<(), End> {
        let (ticket, member) = loop {
            let ticket = self.redeem().await?;
            if let Some(member) = self.wait(&ticket.view).await? {
                break (ticket, member);
            }
        };
        crash::at(Step::Added);
        let leaves = self.leaves(&ticket.chain).await?;
        put_leaves(&self.protocol.layout, &leaves, ticket.chain.newest())?;
        let listed = self.ask_cluster(&ticket, member).await?;
        let keepsakes = &mut self.protocol.keepsakes;
        keepsakes.leaves = Some(leaves);
        keepsakes.statements = ticket.chain.jws();
        keepsakes.recoveries = listed.recoveries.jws();
        keepsakes.admission = Some(Admission {
            member,
            members: listed.initial,
            client_urls: listed.client_urls,
            document: ticket.document.jws().clone(),
        });
        // Later steps read the node's directory again.
        self.protocol.step(Event::Admitted)?;
        self.protocol.document = Some(ticket.document);
        crash::at(Step::Admit);
        self.surroundings.board.healed();
        tracing::info!(member.id = %member, "the cluster has added this host");
        Ok(())
    }

    /// Redeems the ticket until the service accepts it, and verifies the answer.
    async fn redeem(&mut self) -> Result<Ticket, End> {
        let mut pin = 0;
        loop {
            let envelope = self.envelope(pin)?.sign(&self.protocol.key);
            // A bundle has two pins while the service changes its key, but an envelope names only
            // one.
            pin += 1;
            let last = pin % self.join.pins.len() == 0;
            match self.client.join(&envelope, Some(self.host.program)).await {
                Ok(response) => return self.verified(response),
                Err(ClientError::Problem(problem)) if !problem.retryable && !last => {}
                Err(error) => self.failed(&error).await?,
            }
        }
    }

    fn envelope(&self, pin: usize) -> Result<Redeem, End> {
        let record = self.protocol.agent.journal.record.as_deref();
        let record = record.ok_or_else(|| {
            End::Failed("there is no record to redeem: this is a fault of muster-agent".to_owned())
        })?;
        Ok(Redeem {
            service: self.join.pins[pin % self.join.pins.len()],
            cluster: self.join.cluster,
            statement: self.join.statement,
            signed: crate::state::journal::signed_record(record),
            boot: self.protocol.agent.session.boot,
            nonce: self.protocol.nonce(),
            highest_epoch: self.protocol.agent.journal.highest_epoch(),
        })
    }

    fn verified(&mut self, response: JoinResponse) -> Result<Ticket, End> {
        self.retry.succeeded();
        let refused =
            |why: String| End::DoNotRestart(format!("discovery's answer is refused: {why}"));
        let chain_of = StatementChain::verify_from_pin(&response.statements, &self.join.statement)
            .map_err(|error| refused(chain(&error)))?;
        if chain_of.newest().cluster != self.join.cluster {
            return Err(refused("the statement chain is another cluster's".to_owned()));
        }
        let document = VerifiedDocument::verify(&response.document, &chain_of)
            .map_err(|error| refused(chain(&error)))?;
        judge::is_ours(&response.intent, &self.record)?;
        let name = chain_of.newest().name.to_string();
        self.surroundings.board.update(|status| status.cluster_name = Some(name));
        Ok(Ticket { chain: chain_of, document, view: response.intent })
    }

    /// Waits until the cluster's agents have added this host, and returns its member id. `None` if
    /// the service has forgotten the intent, so that the ticket has to be redeemed again.
    async fn wait(&mut self, first: &IntentView) -> Result<Option<MemberId>, End> {
        let operation = first.intent.operation;
        let mut view = first.clone();
        loop {
            match judge::standing(&view) {
                Standing::Added(member) => return Ok(Some(member)),
                Standing::Over(why) => return Err(End::DoNotRestart(why)),
                Standing::Waits(why) => self.waits(&view, why),
            }
            let after = Some(view.rev);
            match self.client.intent(self.join.cluster, operation, after).await {
                Ok(next) => {
                    self.retry.succeeded();
                    view = next;
                }
                Err(error) if matches!(error.code(), Some(Code::UnknownKey | Code::NotFound)) => {
                    tracing::warn!("discovery has forgotten this ticket: handing it in again");
                    tokio::time::sleep(self.retry.next_pause()).await;
                    return Ok(None);
                }
                Err(error) => self.failed(&error).await?,
            }
        }
    }

    fn waits(&mut self, view: &IntentView, why: String) {
        let explain = view.explain.iter().map(ToString::to_string).collect();
        self.surroundings.board.update(|status| status.explain = explain);
        self.say(Phase::Waiting, why);
    }

    /// Shows the current step in the status, and logs it unless it is unchanged.
    fn say(&mut self, phase: Phase, what: String) {
        if self.said.as_ref() != Some(&what) {
            tracing::info!("{what}");
            self.said = Some(what.clone());
        }
        self.surroundings.board.phase(phase, what);
    }

    /// Handles a failed request to the service: waits before a retry, or returns the error if no
    /// retry can help.
    async fn failed(&mut self, error: &ClientError) -> Result<(), End> {
        if let Some(end) = judge::refusal(error) {
            return Err(end);
        }
        let text = format!("waiting for discovery: {}", chain(error));
        self.later(text).await;
        Ok(())
    }

    /// Shows the obstacle, and waits before the next attempt.
    async fn later(&mut self, text: String) {
        let pause = self.retry.next_pause();
        let at = self.surroundings.host.now()
            + jiff::SignedDuration::try_from(pause).unwrap_or_default();
        self.surroundings.board.error(text.clone(), Some(at));
        self.say(Phase::Contacting, text);
        tokio::time::sleep(pause).await;
    }

    async fn leaves(&mut self, chain_of: &StatementChain) -> Result<Leaves, End> {
        let node_key =
            self.record.csr.verify().map_err(|error| End::Failed(chain(&error)))?.node_key;
        loop {
            match self.client.leaves(self.join.cluster, &self.record.csr).await {
                Ok(leaves) => {
                    self.retry.succeeded();
                    let verified = leaves.verify(&node_key, chain_of.newest());
                    return verified.map(|()| leaves).map_err(|error| {
                        End::DoNotRestart(format!(
                            "discovery's answer is refused: {}",
                            chain(&error)
                        ))
                    });
                }
                Err(error) => self.failed(&error).await?,
            }
        }
    }
}
