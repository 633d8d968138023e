//! Tests of changes of running clusters: tickets, orders, and agents' reports about them.

mod addresses;
mod announced;
mod certificates;
mod members;
mod orders;
mod policies;
mod present;
mod readmitted;
mod recovered;
mod rotated_cas;
mod tickets;

use discovery_types::api::{
    ClusterState, InitialMember, IntentView, ListedMember, Membership, Outcome, OutcomeRequest,
    ReportRequest,
};
use discovery_types::client::{ClientError, DiscoveryClient};
use discovery_types::digest::{Digest, MemberId, Nonce};
use discovery_types::features::AgentBuild;
use discovery_types::order::{Order, OrderedChange};
use discovery_types::problem::Code;
use discovery_types::raft_id;
use discovery_types::statement::{Statement, StatementChain};
use discovery_types::token::Token;
use x509_parser::prelude::*;

use super::agent::{TestAgent, form};
use super::support::TestInstallation;
use crate::server::RunningService;

/// A committed cluster and its agents.
struct CommittedCluster {
    world: TestInstallation,
    service: RunningService,
    admin: DiscoveryClient,
    statement: Statement,
    agents: Vec<TestAgent>,
    /// The boot token that the founders used.
    token: Token,
    h: Digest,
}

impl CommittedCluster {
    async fn of(size: u8) -> Self {
        let world = TestInstallation::new().await;
        let service = world.serve().await;
        let admin = world.owner(&service);
        let statement = world.cluster(&admin, "demo", size).await;
        let token = world.token(&admin, &statement).await;
        let numbers = 1..=u16::from(size);
        let mut agents: Vec<TestAgent> =
            numbers.map(|i| TestAgent::new(&world, &service, &statement, &token, i)).collect();
        let seen = form(&mut agents).await;
        let h = agents[usize::from(size) - 1].document(&seen).hash();
        CommittedCluster { world, service, admin, statement, agents, token, h }
    }

    fn chain(&self) -> StatementChain {
        StatementChain::verify_links(&[self.statement.sign(&self.world.owner)]).unwrap()
    }

    async fn newcomer(&self, number: u16) -> TestAgent {
        let ticket = self.world.ticket(&self.admin, &self.statement).await;
        TestAgent::new(&self.world, &self.service, &self.statement, &ticket, number)
    }

    fn id(&self, agent: &TestAgent) -> MemberId {
        raft_id::of_founder(&self.h, &agent.record.peer_urls)
    }

    fn raft_cluster(&self) -> u64 {
        raft_id::of_cluster(self.agents.iter().map(|founder| self.id(founder)))
    }

    fn order(&self, change: OrderedChange) -> Order {
        let now = self.admin.service_now_ms().unsigned_abs() / 1_000;
        Order {
            version: 1,
            id: Nonce::random(),
            cluster: self.statement.cluster,
            statement: self.statement.sign(&self.world.owner).hash(),
            change,
            planned_at: None,
            issued_at: now,
            expires_at: now + 900,
            reason: "its disk is gone".into(),
        }
    }

    async fn put(&self, order: &Order) -> Result<IntentView, ClientError> {
        self.admin.put_order(&order.sign(&self.world.owner)).await
    }

    /// Sends an agent's report of an intent's outcome.
    async fn report_outcome(
        &self,
        agent: &TestAgent,
        intent: &IntentView,
        outcome: Outcome,
        raft_index: u64,
    ) -> Result<IntentView, ClientError> {
        let request = OutcomeRequest { outcome, raft_term: 2, raft_index };
        let operation = intent.intent.operation;
        agent.client.report_outcome(self.statement.cluster, operation, &request).await
    }

    /// Sends an agent's report of its cluster's members.
    async fn report(
        &self,
        agent: &TestAgent,
        configuration: Option<u64>,
        raft_index: u64,
        members: &[(MemberId, bool)],
    ) -> Result<ClusterState, ClientError> {
        self.report_of(self.raft_cluster(), agent, configuration, raft_index, members).await
    }

    /// Sends an agent's report of the members of the given Raft cluster.
    async fn report_of(
        &self,
        raft_cluster: u64,
        agent: &TestAgent,
        configuration: Option<u64>,
        raft_index: u64,
        members: &[(MemberId, bool)],
    ) -> Result<ClusterState, ClientError> {
        let report = self.report_request(raft_cluster, agent, configuration, raft_index, members);
        let build = AgentBuild::own();
        let answer = agent.client.report(self.statement.cluster, &report, &build).await;
        answer.map(|answer| answer.state)
    }

    /// Makes an agent's report of the members of a Raft cluster.
    fn report_request(
        &self,
        raft_cluster: u64,
        agent: &TestAgent,
        configuration: Option<u64>,
        raft_index: u64,
        members: &[(MemberId, bool)],
    ) -> ReportRequest {
        let listed = |(id, is_learner): &(MemberId, bool)| ListedMember {
            id: *id,
            name: format!("node-{id}"),
            peer_urls: vec![format!("https://127.0.0.9:{}", id.get() % 50_000 + 2_000)],
            client_urls: Vec::new(),
            is_learner: *is_learner,
        };
        let members = members.iter().map(listed).collect();
        ReportRequest {
            session: agent.session(),
            h: self.h,
            raft_cluster_id: format!("{raft_cluster:016x}"),
            member_id: "0000000000000001".into(),
            leader_id: Some("0000000000000001".into()),
            raft_term: 2,
            raft_index,
            membership: Some(Membership { configuration, members }),
            cas: None,
        }
    }

    /// Returns the member ids of the confirmed list; `None` if no list is confirmed.
    async fn confirmed(&self) -> Option<Vec<MemberId>> {
        let directory = self.admin.directory(self.statement.cluster).await.unwrap();
        let view = directory.view.filter(|view| view.confirmed)?;
        Some(view.membership.members.iter().map(|member| member.id).collect())
    }
}

pub(super) fn added(id: u64) -> Outcome {
    let peer_url = "https://127.0.0.1:2001".parse().unwrap();
    let initial_cluster = vec![InitialMember { name: "node-1".into(), peer_url }];
    Outcome::Added { member: MemberId::new(id), initial_cluster, replaces: None }
}

fn remove(member: MemberId) -> OrderedChange {
    OrderedChange::Remove { member }
}

fn code<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> Code {
    let error = answer.expect_err("it was not refused");
    error.code().unwrap_or_else(|| panic!("{error}"))
}

/// Returns the names in a certificate.
fn names(pem: &str) -> Vec<String> {
    let (_, pem) = parse_x509_pem(pem.as_bytes()).unwrap();
    let certificate = pem.parse_x509().unwrap();
    let names = certificate.subject_alternative_name().unwrap().unwrap();
    names.value.general_names.iter().map(|name| name.to_string()).collect()
}
