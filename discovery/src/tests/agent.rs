//! A test agent without a host. It uses the real client and protocol, and each step is a call by
//! the test.

use std::sync::Arc;

use discovery_types::api::{
    JoinResponse, NodeProgram, PollRequest, PollResponse, ProbeResult, ProbesRequest, Session,
    Standing,
};
use discovery_types::client::{ClientError, DiscoveryClient};
use discovery_types::csr::NodeKey;
use discovery_types::digest::{Digest, Incarnation, Nonce};
use discovery_types::document::VerifiedDocument;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::machine::MachineFacts;
use discovery_types::proposal::{Ack, VerifiedProposal};
use discovery_types::record::Record;
use discovery_types::redeem::Redeem;
use discovery_types::statement::{Statement, StatementChain};
use discovery_types::token::Token;

use muster_identity::IdentityDocument;

use super::support::TestInstallation;
use crate::server::RunningService;

pub(super) struct TestAgent {
    pub key: Arc<SigningKey>,
    pub client: DiscoveryClient,
    pub record: Record,
    pub boot: u64,
    pub nonce: Nonce,
    pub highest_epoch: u64,
    pub token: SigningKey,
    /// Private key of the agent's node, as PEM.
    pub node_key: String,
    /// Hash of the statement that the agent's join bundle pins.
    pub statement: Digest,
    pub service: Digest,
    /// Identity document that the agent sends with its redeems.
    pub identity: Option<IdentityDocument>,
}

impl TestAgent {
    /// Makes an agent. `number` determines its name and ports.
    pub(super) fn new(
        world: &TestInstallation,
        service: &RunningService,
        statement: &Statement,
        token: &Token,
        number: u16,
    ) -> Self {
        let key = Arc::new(SigningKey::generate());
        let url = |port: u16| format!("https://127.0.0.1:{}", port + number).parse().unwrap();
        let node = NodeKey::generate();
        let record = Record {
            version: 1,
            cluster: statement.cluster,
            grant: token.id(),
            agent_key: *key.public(),
            incarnation: Incarnation::random(),
            name: format!("node-{number}").parse().unwrap(),
            peer_urls: vec![url(2_000)],
            client_urls: vec![url(3_000)],
            csr: node.csr,
            machine: MachineFacts { dmi_uuid: None, machine_id: Some(format!("m{number}")) },
            zone: None,
        };
        let seed = secrecy::ExposeSecret::expose_secret(token.key().seed());
        TestAgent {
            client: world.client(service, Some(&key)),
            key,
            record,
            boot: 1,
            nonce: Nonce::random(),
            highest_epoch: 0,
            token: SigningKey::from_seed(seed),
            node_key: node.key_pem.to_string(),
            statement: statement.sign(&world.owner).hash(),
            service: world.context.pins[0],
            identity: None,
        }
    }

    /// Makes the agent use another discovery service from now on.
    pub(super) fn connect_to(&mut self, world: &TestInstallation, service: &RunningService) {
        self.client = world.client(service, Some(&self.key));
    }

    /// Returns a copy of the agent, with the same token and node key, that uses `key` instead of
    /// the agent's own key.
    pub(super) fn copy_with_key(
        &self,
        world: &TestInstallation,
        service: &RunningService,
        key: Arc<SigningKey>,
    ) -> Self {
        TestAgent {
            client: world.client(service, Some(&key)),
            record: Record { agent_key: *key.public(), ..self.record.clone() },
            token: SigningKey::from_seed(secrecy::ExposeSecret::expose_secret(self.token.seed())),
            node_key: self.node_key.clone(),
            identity: self.identity.clone(),
            key,
            ..*self
        }
    }

    pub(super) fn envelope(&self) -> Jws {
        Redeem {
            service: self.service,
            cluster: self.record.cluster,
            statement: self.statement,
            signed: self.record.sign(&self.key, &self.token),
            boot: self.boot,
            nonce: self.nonce,
            highest_epoch: self.highest_epoch,
            identity: self.identity.clone(),
        }
        .sign(&self.key)
    }

    pub(super) async fn redeem(&self) -> Result<PollResponse, ClientError> {
        self.client.redeem(&[self.envelope()]).await.map(|response| response.poll)
    }

    pub(super) async fn join_running(
        &self,
        program: NodeProgram,
    ) -> Result<JoinResponse, ClientError> {
        self.client.join(&[self.envelope()], Some(program)).await
    }

    pub(super) async fn join(&self) -> Result<JoinResponse, ClientError> {
        self.client.join(&[self.envelope()], None).await
    }

    pub(super) async fn poll(&self, after: Option<u64>) -> Result<PollResponse, ClientError> {
        self.client.poll(self.record.cluster, &self.poll_request(after)).await
    }

    /// Polls with the preference for an answer without a body if nothing has changed. Returns
    /// `None` in that case.
    pub(super) async fn poll_for_changes(
        &self,
        after: Option<u64>,
    ) -> Result<Option<PollResponse>, ClientError> {
        self.client.poll_for_changes(self.record.cluster, &self.poll_request(after)).await
    }

    /// Returns the body of this agent's poll.
    pub(super) fn poll_request(&self, after: Option<u64>) -> PollRequest {
        let (boot, nonce, highest_epoch) = (self.boot, self.nonce, self.highest_epoch);
        PollRequest { after, boot, nonce, highest_epoch }
    }

    pub(super) fn session(&self) -> Session {
        Session { boot: self.boot, nonce: self.nonce }
    }

    /// Sends probe results in which the agent reached every other seat.
    pub(super) async fn probe(&self, seen: &PollResponse) -> Result<PollResponse, ClientError> {
        let proposal = seen.proposal.as_ref().unwrap();
        let Standing::Seated(own) = seen.standing else { panic!("{:?}", seen.standing) };
        let results = (1..=seen.size)
            .filter(|seat| *seat != own)
            .map(|seat| ProbeResult { seat, reached: true, error: None, round_trip_us: Some(1) })
            .collect();
        let request = ProbesRequest {
            session: self.session(),
            epoch: proposal.epoch,
            h: proposal.hash(),
            results,
        };
        self.client.send_probe_results(self.record.cluster, &request).await
    }

    /// Acks the proposal in `seen`, after verifying it as a real agent does.
    pub(super) async fn ack(&mut self, seen: &PollResponse) -> Result<PollResponse, ClientError> {
        let chain = StatementChain::verify_links(&seen.statements).unwrap();
        let proposal = seen.proposal.as_ref().unwrap();
        let verified = VerifiedProposal::verify(proposal, &chain).unwrap();
        self.highest_epoch = proposal.epoch;
        let ack = Ack { cluster: proposal.cluster, epoch: proposal.epoch, h: verified.hash() };
        self.client.ack(self.record.cluster, &ack.sign(&self.key)).await
    }

    /// Polls until a response satisfies `wanted`.
    pub(super) async fn poll_until(&self, wanted: impl Fn(&PollResponse) -> bool) -> PollResponse {
        let mut seen = self.poll(None).await.unwrap();
        while !wanted(&seen) {
            seen = self.poll(Some(seen.rev)).await.unwrap();
        }
        seen
    }

    /// Returns the commit document in `seen`, fully verified.
    pub(super) fn document(&self, seen: &PollResponse) -> VerifiedDocument {
        let delivered = seen.document.as_ref().unwrap();
        let chain = StatementChain::verify_links(&delivered.statements).unwrap();
        VerifiedDocument::verify(&delivered.document, &chain).unwrap()
    }
}

/// Redeems for all agents, then probes and signs until the cluster is committed. Returns the last
/// agent's response.
pub(super) async fn form(agents: &mut [TestAgent]) -> PollResponse {
    for agent in agents.iter() {
        agent.redeem().await.unwrap();
    }
    sign(agents).await
}

/// Probes and signs for agents that have seats. Returns the last agent's response.
pub(super) async fn sign(agents: &mut [TestAgent]) -> PollResponse {
    let mut last = None;
    for agent in agents.iter_mut() {
        let seen = agent.poll_until(|seen| seen.proposal.is_some()).await;
        agent.probe(&seen).await.unwrap();
        last = Some(agent.ack(&seen).await.unwrap());
    }
    last.unwrap()
}
