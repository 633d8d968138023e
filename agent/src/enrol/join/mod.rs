//! Joins a running cluster with a join ticket: every step between a record and a node that may
//! start.
//!
//! The ticket is only a request. A person signed it; the cluster's own agents verify that, and one
//! of them adds this host through the cluster's API. Discovery carries the messages, so nothing
//! that it says makes this host a member. Before anything is journalled, the cluster itself is
//! asked over mutual TLS. It has to be the cluster that was founded with the commit document, and
//! has to list this host. A cluster that was recovered counts as the founded one if recovery
//! statements lead to it.
//!
//! Two steps are made durable:
//! - the record, before the ticket is redeemed, because the redeem sends the record;
//! - the admission, before the node may start.
//!
//! A restart between them begins again at the redeem, which the same key may repeat.

mod check;
mod judge;

use std::sync::Arc;

use discovery_formation::agent::AgentEvent;
use discovery_types::api::{IntentView, JoinResponse, NodeProgram};
use discovery_types::client::{ClientConfig, ClientError, DiscoveryClient};
use discovery_types::convert;
use discovery_types::digest::MemberId;
use discovery_types::document::VerifiedDocument;
use discovery_types::jws::Jws;
use discovery_types::jws::JwsType;
use discovery_types::leaves::Leaves;
use discovery_types::problem::Code;
use discovery_types::record::{Record, SignedRecord};
use discovery_types::statement::StatementChain;

use self::judge::JoinState;
use crate::crash::{self, Failpoint};
use crate::enrol::bootstrap::AgentContext;
use crate::enrol::protocol::Protocol;
use crate::enrol::redeem::{self, UnsignedRedeem};
use crate::exit::{ExitError, error_chain};
use crate::launch::node_command::write_certificates;
use crate::observe::contact;
use crate::observe::status::Phase;
use crate::retry::Retry;
use crate::state::addresses::ListenAddresses;
use crate::state::journal::{Admission, Join};

pub(crate) use self::check::{cluster_client, current_initial_members, is_listed};

/// Result of joining a running cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JoinResult {
    /// The admission is durable: the node may start.
    Admitted,
    /// The agent was told to stop.
    Stopped,
}

/// Settings of a joining host that come from its operator.
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
    context: AgentContext,
    join: Join,
    record: Record,
    host: JoiningHost,
    client: DiscoveryClient,
    retry: Retry,
    /// The reason that was shown last, so that its repetition isn't logged.
    last_shown: Option<String>,
}

/// The verified result of redeeming a ticket.
struct RedeemedTicket {
    chain: StatementChain,
    document: VerifiedDocument,
    view: IntentView,
}

impl<'a> Newcomer<'a> {
    /// Makes a newcomer, and makes its record `signed` durable in the journal. The journal may hold
    /// that record already.
    pub(crate) fn new(
        protocol: &'a mut Protocol,
        join: Join,
        signed: &SignedRecord,
        host: JoiningHost,
        surroundings: AgentContext,
    ) -> Result<Self, ExitError> {
        let own = *protocol.key.public();
        let not_valid = |why: &dyn std::error::Error| {
            ExitError::Failed(format!("this host's own record is not valid: {}", error_chain(why)))
        };
        let record: Record =
            signed.record.verify(JwsType::Record, &own).map_err(|error| not_valid(&error))?;
        let ours = convert::own_record(signed, &own).map_err(|error| not_valid(&error))?;
        // The record must be durable before it is sent to anybody.
        protocol.step(AgentEvent::RecordReady(ours))?;
        let config = ClientConfig {
            urls: join.urls.clone(),
            pins: join.pins.clone(),
            key: Some(Arc::clone(&protocol.key)),
        };
        let client =
            DiscoveryClient::new(config).map_err(|error| ExitError::Failed(error_chain(&error)))?;
        let retry = Retry::default();
        Ok(Self {
            protocol,
            context: surroundings,
            join,
            record,
            host,
            client,
            retry,
            last_shown: None,
        })
    }

    /// Joins the cluster. The node will listen on `listen`.
    pub(crate) async fn join(mut self, listen: ListenAddresses) -> Result<JoinResult, ExitError> {
        for at in [listen.peer, listen.client] {
            let bound = self.context.host.test_bind(at);
            bound.map_err(|error| {
                ExitError::Failed(format!(
                    "can't listen on {at}: {error}; the node could not either. See \
                     --listen-address, --peer-port and --client-port"
                ))
            })?;
        }
        let stop = self.context.stop.clone();
        let (contact, board) = (self.client.contact(), self.context.board.clone());
        tokio::select! {
            () = stop.cancelled() => Ok(JoinResult::Stopped),
            admitted = self.obtain_admission() => admitted.map(|()| JoinResult::Admitted),
            never = contact::show(contact, board) => match never {},
        }
    }

    async fn obtain_admission(&mut self) -> Result<(), ExitError> {
        let (mut ticket, member) = loop {
            let ticket = self.redeem().await?;
            if let Some(member) = self.wait(&ticket.view).await? {
                break (ticket, member);
            }
        };
        crash::at(Failpoint::Added);
        let leaves = self.request_leaves(&mut ticket.chain).await?;
        write_certificates(&self.protocol.layout, &leaves, ticket.chain.newest())?;
        let listed = self.ask_cluster(&ticket, member).await?;
        let extras = &mut self.protocol.extras;
        extras.leaves = Some(leaves);
        extras.statements = ticket.chain.jws();
        extras.recoveries = listed.recoveries.jws();
        extras.admission = Some(Admission {
            member,
            members: listed.members,
            client_urls: listed.client_urls,
            document: ticket.document.jws().clone(),
            ticket: Some(ticket.view.intent.authority.clone()),
        });
        // The returned actions are ignored: later steps read the node's directory again.
        self.protocol.step(AgentEvent::Admitted)?;
        self.protocol.document = Some(ticket.document);
        crash::at(Failpoint::Admit);
        self.context.board.clear_error();
        tracing::info!(member.id = %member, "the cluster has added this host");
        Ok(())
    }

    /// Redeems the ticket until the service accepts it, and verifies the answer.
    async fn redeem(&mut self) -> Result<RedeemedTicket, ExitError> {
        loop {
            let redeem = UnsignedRedeem::new(self.protocol, &self.join)?;
            let redeems = match redeem.sign(self.context.identity.as_ref()).await {
                Ok(redeems) => redeems,
                Err(error) => {
                    self.wait_before_retry(error_chain(&error)).await;
                    continue;
                }
            };
            match self.client.join(&redeems, Some(self.host.program)).await {
                Ok(response) => return self.verify_response(response),
                Err(error) => self.handle_failure(&error).await?,
            }
        }
    }

    /// Extends `chain_of` by discovery's `statements`, if they continue that chain.
    fn extend_chain(
        &self,
        chain_of: &mut StatementChain,
        statements: &[Jws],
    ) -> Result<(), ExitError> {
        let found = redeem::verify_statements(statements, &self.join)
            .map_err(|error| refused_answer(&error))?;
        if found.position(&chain_of.newest_hash()).is_some() {
            *chain_of = found;
        }
        Ok(())
    }

    fn verify_response(&mut self, response: JoinResponse) -> Result<RedeemedTicket, ExitError> {
        self.retry.reset();
        let refused =
            |why: String| ExitError::DoNotRestart(format!("discovery's answer is refused: {why}"));
        let chain_of = redeem::verify_statements(&response.statements, &self.join)
            .map_err(|error| refused(error_chain(&error)))?;
        let document = VerifiedDocument::verify(&response.document, &chain_of)
            .map_err(|error| refused(error_chain(&error)))?;
        judge::check_own_record(&response.intent, &self.record)?;
        let name = chain_of.newest().name.to_string();
        self.context.board.update(|status| status.cluster_name = Some(name));
        Ok(RedeemedTicket { chain: chain_of, document, view: response.intent })
    }

    /// Waits until the cluster's agents have added this host, and returns its member id. `None` if
    /// the service has forgotten the intent, so that the ticket has to be redeemed again.
    async fn wait(&mut self, first: &IntentView) -> Result<Option<MemberId>, ExitError> {
        let operation = first.intent.operation;
        let mut view = first.clone();
        loop {
            match judge::join_state(&view) {
                JoinState::Added(member) => return Ok(Some(member)),
                JoinState::Ended(why) => return Err(ExitError::DoNotRestart(why)),
                JoinState::Waiting(why) => self.show_wait(&view, why),
            }
            let after = Some(view.rev);
            match self.client.intent(self.join.cluster, operation, after).await {
                Ok(next) => {
                    self.retry.reset();
                    view = next;
                }
                Err(error) if matches!(error.code(), Some(Code::UnknownKey | Code::NotFound)) => {
                    tracing::warn!("discovery has forgotten this ticket: handing it in again");
                    tokio::time::sleep(self.retry.next_pause()).await;
                    return Ok(None);
                }
                Err(error) => self.handle_failure(&error).await?,
            }
        }
    }

    fn show_wait(&mut self, view: &IntentView, why: String) {
        let explain = view.explain.iter().map(ToString::to_string).collect();
        self.context.board.update(|status| status.explain = explain);
        self.show_step(Phase::Waiting, why);
    }

    /// Shows the current step in the status, and logs it unless it is unchanged.
    fn show_step(&mut self, phase: Phase, what: String) {
        if self.last_shown.as_ref() != Some(&what) {
            tracing::info!("{what}");
            self.last_shown = Some(what.clone());
        }
        self.context.board.set_phase(phase, what);
    }

    /// Handles a failed request to the service: waits before a retry, or returns the error if no
    /// retry can help.
    async fn handle_failure(&mut self, error: &ClientError) -> Result<(), ExitError> {
        if let Some(end) = judge::fatal_error(error) {
            return Err(end);
        }
        let text = format!("waiting for discovery: {}", error_chain(error));
        self.wait_before_retry(text).await;
        Ok(())
    }

    /// Shows the obstacle, and waits before the next attempt.
    async fn wait_before_retry(&mut self, text: String) {
        let pause = self.retry.next_pause();
        let at =
            self.context.host.now() + jiff::SignedDuration::try_from(pause).unwrap_or_default();
        self.context.board.set_error(text.clone(), Some(at));
        self.show_step(Phase::Contacting, text);
        tokio::time::sleep(pause).await;
    }

    /// Gets this host's certificates. Extends `chain_of` before it verifies them: this host may
    /// have waited for weeks, and the cluster's CAs may have been replaced meanwhile.
    async fn request_leaves(&mut self, chain_of: &mut StatementChain) -> Result<Leaves, ExitError> {
        let node_key = self
            .record
            .csr
            .verify()
            .map_err(|error| ExitError::Failed(error_chain(&error)))?
            .node_key;
        loop {
            let leaves = match self.client.renew_leaves(self.join.cluster, &self.record.csr).await {
                Ok(leaves) => leaves,
                Err(error) => {
                    self.handle_failure(&error).await?;
                    continue;
                }
            };
            // Read the statements after the certificates: a later chain also names the CAs that
            // issued them.
            match self.client.statements(self.join.cluster).await {
                Ok(list) => self.extend_chain(chain_of, &list.statements)?,
                Err(error) => {
                    self.handle_failure(&error).await?;
                    continue;
                }
            }
            self.retry.reset();
            match leaves.verify(&node_key, chain_of.newest()) {
                Ok(()) => return Ok(leaves),
                // The CAs may have been replaced between the two requests. Ask for certificates
                // again.
                Err(error) => {
                    let text =
                        format!("discovery's certificates are refused: {}", error_chain(&error));
                    self.wait_before_retry(text).await;
                }
            }
        }
    }
}

fn refused_answer(error: &(dyn std::error::Error + 'static)) -> ExitError {
    ExitError::DoNotRestart(format!("discovery's answer is refused: {}", error_chain(error)))
}
