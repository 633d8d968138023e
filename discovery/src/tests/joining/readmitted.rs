//! Tests of members that joined after the backup from which the database was restored.

use discovery_types::api::{IntentState, Outcome};
use discovery_types::client::ClientError;
use discovery_types::csr::NodeKey;
use discovery_types::digest::MemberId;
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::leaves::Leaves;
use discovery_types::member_proof::sign_as_node;
use discovery_types::problem::Code;
use discovery_types::readmission::ReadmitRequest;

use super::policies::policy;
use super::{CommittedCluster, added, code};
use crate::tests::agent::TestAgent;

const MEMBER: u64 = 77;

/// A cluster of three whose fourth member the database has forgotten.
struct ForgottenMember {
    cluster: CommittedCluster,
    agent: TestAgent,
    ticket: Jws,
    leaves: Leaves,
}

impl ForgottenMember {
    async fn new() -> Self {
        let cluster = CommittedCluster::of(3).await;
        let agent = cluster.newcomer(9).await;
        Self::of(cluster, agent).await
    }

    /// Lets `agent` join the cluster as a voter. Then deletes the rows about this from the
    /// database, as a restore from an older backup would.
    async fn of(cluster: CommittedCluster, mut agent: TestAgent) -> Self {
        let intent = cluster.join_as(&agent, MEMBER).await;
        let id = cluster.statement.cluster;
        let leaves = agent.client.renew_leaves(id, &agent.record.csr).await.unwrap();
        let ticket = intent.authority.clone();
        cluster.forget_joins().await;
        // Connect anew: the member's old access token would still be valid for a while.
        agent.connect_to(&cluster.world, &cluster.service);
        ForgottenMember { cluster, agent, ticket, leaves }
    }

    /// The request by which the forgotten member proves that it joined.
    fn request(&self) -> ReadmitRequest {
        ReadmitRequest {
            ticket: self.ticket.clone(),
            redeem: self.agent.envelope(),
            certificate: self.leaves.peer.clone(),
            signature: self.signature(&self.agent),
        }
    }

    fn signature(&self, agent: &TestAgent) -> String {
        let cluster = self.cluster.statement.cluster;
        sign_as_node(&agent.node_key, cluster, agent.key.public()).unwrap()
    }

    async fn send(
        &self,
        agent: &TestAgent,
        request: &ReadmitRequest,
    ) -> Result<IntentState, ClientError> {
        let sent = agent.client.readmit(self.cluster.statement.cluster, request).await;
        sent.map(|view| view.state)
    }

    /// Reports by two of three founders that the cluster has these members in addition to the
    /// founders.
    async fn confirm(&self, others: &[(u64, bool)], configuration: u64) {
        let founders = self.cluster.agents.iter().map(|agent| (self.cluster.id(agent), false));
        let others = others.iter().map(|(id, is_learner)| (MemberId::new(*id), *is_learner));
        let members: Vec<_> = founders.chain(others).collect();
        for founder in &self.cluster.agents[..2] {
            let said = self.cluster.report(founder, Some(configuration), configuration, &members);
            said.await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_member_that_the_database_has_forgotten_proves_how_it_joined() {
    let forgotten = ForgottenMember::new().await;
    let (agent, id) = (&forgotten.agent, forgotten.cluster.statement.cluster);
    assert_eq!(code(agent.client.intents(id, None, false).await), Code::UnknownKey);

    // The known members haven't reported yet.
    let early = forgotten.send(agent, &forgotten.request()).await;
    assert_eq!(code(early), Code::WrongState);
    forgotten.confirm(&[(MEMBER, true)], 30).await;
    assert_eq!(forgotten.send(agent, &forgotten.request()).await.unwrap(), IntentState::Added);
    assert_eq!(forgotten.send(agent, &forgotten.request()).await.unwrap(), IntentState::Added);

    // The readmitted agent has the rights of any member's agent.
    agent.client.intents(id, None, false).await.unwrap();
    agent.client.renew_leaves(id, &agent.record.csr).await.unwrap();
    let members = [(MemberId::new(MEMBER), false)];
    forgotten.cluster.report(agent, Some(30), 31, &members).await.unwrap();
    let shown = forgotten.cluster.admin.show_cluster(id).await.unwrap();
    let own = shown.present.members.iter().find(|shown| shown.id == MemberId::new(MEMBER));
    assert!(own.is_some_and(|own| own.last_heard_ms.is_some()), "{:?}", shown.present.members);
    // The readmitted member's ticket stays used.
    assert_eq!(agent.join().await.unwrap().intent.state, IntentState::Added);
    forgotten.cluster.service.stop().await;
}

/// The database has also forgotten the policy under which the member joined. After the readmission,
/// another host under this policy becomes a standby, as it would have before.
#[tokio::test]
async fn a_member_that_came_by_a_forgotten_policy_proves_how_it_joined() {
    let cluster = CommittedCluster::of(3).await;
    let (token, _) = policy(&cluster).await;
    let newcomer = |number| {
        TestAgent::new(&cluster.world, &cluster.service, &cluster.statement, &token, number)
    };
    let (agent, other) = (newcomer(9), newcomer(10));
    let forgotten = ForgottenMember::of(cluster, agent).await;
    forgotten.confirm(&[(MEMBER, false)], 30).await;
    let said = forgotten.send(&forgotten.agent, &forgotten.request()).await.unwrap();
    assert_eq!(said, IntentState::Promoted);
    let joined = other.join().await.unwrap().intent;
    assert_eq!((joined.state, joined.policy.is_some()), (IntentState::Open, true));
    forgotten.cluster.service.stop().await;
}

#[tokio::test]
async fn a_member_whose_removal_the_database_has_forgotten_does_not_come_back() {
    let forgotten = ForgottenMember::new().await;
    // The backup is older than the removal, too: the members no longer list the forgotten member.
    forgotten.confirm(&[], 40).await;
    let refused = forgotten.send(&forgotten.agent, &forgotten.request()).await;
    assert_eq!(code(refused), Code::WrongState);
    forgotten.confirm(&[(MEMBER + 1, false)], 50).await;
    let refused = forgotten.send(&forgotten.agent, &forgotten.request()).await;
    assert_eq!(code(refused), Code::WrongState);
    forgotten.cluster.service.stop().await;
}

#[tokio::test]
async fn no_part_of_a_members_proof_can_be_replaced() {
    let forgotten = ForgottenMember::new().await;
    forgotten.confirm(&[(MEMBER, false)], 30).await;
    let cluster = &forgotten.cluster;
    let honest = forgotten.request();
    let thief = forgotten.thief();
    let theirs = ReadmitRequest { redeem: thief.envelope(), ..honest.clone() };
    let mut other_node = forgotten.thief();
    other_node.node_key = NodeKey::generate().key_pem.to_string();
    let id = cluster.statement.cluster;
    let other_signature = sign_as_node(&other_node.node_key, id, thief.key.public()).unwrap();
    let boot = cluster.boot_grant().await;
    let founders = cluster.agents[0]
        .client
        .renew_leaves(cluster.statement.cluster, &cluster.agents[0].record.csr);
    let of_founder = founders.await.unwrap().peer;
    for (what, agent, request) in [
        ("another agent's redeem", &thief, honest.clone()),
        ("the node's signature for another agent", &thief, theirs.clone()),
        (
            "a signature by another key",
            &thief,
            ReadmitRequest { signature: other_signature, ..theirs },
        ),
        ("another grant", &forgotten.agent, ReadmitRequest { ticket: boot, ..honest.clone() }),
        (
            "another member's certificate",
            &forgotten.agent,
            ReadmitRequest { certificate: of_founder, ..honest.clone() },
        ),
        (
            "the certificate of the other CA",
            &forgotten.agent,
            ReadmitRequest { certificate: forgotten.leaves.client.clone(), ..honest.clone() },
        ),
        (
            "no signature",
            &forgotten.agent,
            ReadmitRequest { signature: String::new(), ..honest.clone() },
        ),
    ] {
        let refused = forgotten.send(agent, &request).await;
        assert_eq!(code(refused), Code::Forbidden, "{what}");
    }
    assert_eq!(forgotten.send(&forgotten.agent, &honest).await.unwrap(), IntentState::Promoted);
    // A thief with a copy of the whole host can't use the ticket for a second key either.
    let signature = forgotten.signature(&thief);
    let copied = ReadmitRequest { redeem: thief.envelope(), signature, ..honest };
    assert_eq!(code(forgotten.send(&thief, &copied).await), Code::TicketTaken);
    forgotten.cluster.service.stop().await;
}

impl ForgottenMember {
    /// Returns an agent with another key, which has the ticket's token and the same node.
    fn thief(&self) -> TestAgent {
        let key = std::sync::Arc::new(SigningKey::generate());
        self.agent.copy_with_key(&self.cluster.world, &self.cluster.service, key)
    }
}

impl CommittedCluster {
    /// Redeems the newcomer's ticket. Then a founder reports that the newcomer was added and
    /// promoted.
    async fn join_as(&self, newcomer: &TestAgent, id: u64) -> discovery_types::intent::Intent {
        let view = newcomer.join().await.unwrap().intent;
        let founder = &self.agents[0];
        self.report_outcome(founder, &view, added(id), 20).await.unwrap();
        let promoted = Outcome::Promoted { member: MemberId::new(id) };
        self.report_outcome(founder, &view, promoted, 21).await.unwrap();
        view.intent
    }

    /// Removes the rows that a backup from before the join doesn't have.
    async fn forget_joins(&self) {
        sqlx::raw_sql("DELETE FROM intents; DELETE FROM grants WHERE kind <> 'boot'")
            .execute(&mut self.world.database.connect().await)
            .await
            .unwrap();
    }

    async fn boot_grant(&self) -> Jws {
        let grants: Vec<String> = sqlx::query_scalar("SELECT jws FROM grants WHERE kind = 'boot'")
            .fetch_all(&mut self.world.database.connect().await)
            .await
            .unwrap();
        grants[0].parse().unwrap()
    }
}
