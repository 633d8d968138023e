//! An agent without a host: it speaks the real protocol, with real keys and signatures.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use discovery_types::api::{
    PollRequest, PollResponse, ProbeResult, ProbesRequest, Session, Standing,
};
use discovery_types::client::DiscoveryClient;
use discovery_types::csr::NodeKey;
use discovery_types::digest::{Digest, Incarnation, Nonce};
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::machine::MachineFacts;
use discovery_types::proposal::{Ack, VerifiedProposal};
use discovery_types::record::Record;
use discovery_types::redeem::Redeem;
use discovery_types::statement::StatementChain;
use uuid::Uuid;

use super::service::{BenchService, OpenCluster};

pub(super) struct BenchAgent {
    key: Arc<SigningKey>,
    client: DiscoveryClient,
    cluster: Uuid,
    nonce: Nonce,
    highest_epoch: u64,
    /// The signed redeem. It is made beforehand, so that its cost isn't measured.
    envelope: Jws,
}

impl BenchAgent {
    /// Makes an agent for a seat of `cluster`, with a client that isn't connected yet. `number`
    /// determines the agent's name and ports.
    pub(super) fn new(service: &BenchService, cluster: &OpenCluster, number: u16) -> Result<Self> {
        let key = Arc::new(SigningKey::generate());
        let url = |port: u16| format!("https://127.0.0.1:{}", port + number).parse();
        let statement = &cluster.statement;
        let record = Record {
            version: 1,
            cluster: statement.cluster,
            grant: cluster.token.id(),
            agent_key: *key.public(),
            incarnation: Incarnation::random(),
            name: format!("node-{number}").parse()?,
            peer_urls: vec![url(20_000)?],
            client_urls: vec![url(30_000)?],
            csr: NodeKey::generate().csr,
            machine: MachineFacts { dmi_uuid: None, machine_id: Some(format!("m{number}")) },
            zone: None,
        };
        let nonce = Nonce::random();
        let redeem = Redeem {
            service: service.context.pins[0],
            cluster: statement.cluster,
            statement: cluster.hash,
            signed: record.sign(&key, cluster.token.key()),
            boot: 1,
            nonce,
            highest_epoch: 0,
            identity: None,
        };
        Ok(Self {
            client: service.client(&key)?,
            cluster: statement.cluster,
            nonce,
            highest_epoch: 0,
            envelope: redeem.sign(&key),
            key,
        })
    }

    /// Takes a seat in the cluster.
    pub(super) async fn redeem(&self) -> Result<PollResponse> {
        Ok(self.client.redeem(std::slice::from_ref(&self.envelope)).await?.poll)
    }

    /// Asks for the state of the cluster. With `after`, the service waits until the number of the
    /// state (`PollResponse::rev`) isn't `after` any more, or until its limit for polls.
    pub(super) async fn poll(&self, after: Option<u64>) -> Result<PollResponse> {
        Ok(self.client.poll(self.cluster, &self.poll_request(after)).await?)
    }

    /// Waits for a newer state of the cluster than the one with the number `rev`, as a waiting
    /// agent does. Returns `None` if nothing has changed until the service's limit for polls.
    pub(super) async fn wait_for_change(&self, rev: u64) -> Result<Option<PollResponse>> {
        let request = self.poll_request(Some(rev));
        Ok(self.client.poll_for_changes(self.cluster, &request).await?)
    }

    fn poll_request(&self, after: Option<u64>) -> PollRequest {
        let Session { boot, nonce } = self.session();
        PollRequest { after, boot, nonce, highest_epoch: self.highest_epoch }
    }

    fn session(&self) -> Session {
        Session { boot: 1, nonce: self.nonce }
    }

    /// Does a seated agent's part in forming the cluster. Polls until all seats are taken, reports
    /// that it reaches the other agents, and signs the list of members.
    pub(super) async fn sign(&mut self) -> Result<PollResponse> {
        let mut seen = self.poll(None).await?;
        while seen.proposal.is_none() {
            seen = self.poll(Some(seen.rev)).await?;
        }
        let proposal = seen.proposal.as_ref().context("the loop ends with a proposal")?;
        let Standing::Seated(own) = seen.standing else { bail!("no seat: {:?}", seen.standing) };
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
        self.client.send_probe_results(self.cluster, &request).await?;
        let chain = StatementChain::verify_links(&seen.statements)?;
        let h: Digest = VerifiedProposal::verify(proposal, &chain)?.hash();
        self.highest_epoch = proposal.epoch;
        let ack = Ack { cluster: self.cluster, epoch: proposal.epoch, h };
        Ok(self.client.ack(self.cluster, &ack.sign(&self.key)).await?)
    }
}
