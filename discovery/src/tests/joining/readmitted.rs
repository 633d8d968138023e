//! Tests of members that joined after the backup from which the database was restored.

use discovery_types::api::{IntentState, Outcome};
use discovery_types::client::ClientError;
use discovery_types::csr::NodeKey;
use discovery_types::digest::{Incarnation, MemberId};
use discovery_types::jws::Jws;
use discovery_types::key::SigningKey;
use discovery_types::leaves::Leaves;
use discovery_types::member_proof::sign_as_node;
use discovery_types::problem::Code;
use discovery_types::readmission::ReadmitRequest;
use discovery_types::recovery::{NodeIdentity, Recovery};

use super::policies::policy;
use super::present::retire;
use super::recovered::{FIRST_RECOVERED_CLUSTER, SURVIVOR};
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
            recoveries: Vec::new(),
        }
    }

    fn signature(&self, agent: &TestAgent) -> String {
        let cluster = self.cluster.statement.cluster;
        sign_as_node(&agent.node_key, cluster, agent.key.public()).unwrap()
    }

    /// Returns the identity of a member of the founded cluster that no agent here has.
    fn other_node(&self) -> NodeIdentity {
        NodeIdentity {
            cluster_id: format!("{:016x}", self.cluster.raft_cluster()),
            member_id: format!("{:016x}", MEMBER + 1),
            incarnation: Incarnation::random(),
        }
    }

    /// Returns the members that the service shows as unknown to its database.
    async fn unknown_members(&self) -> Vec<MemberId> {
        let shown = self.cluster.admin.show_cluster(self.cluster.statement.cluster).await.unwrap();
        shown.present.unknown.iter().map(|member| member.id).collect()
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
    assert_eq!(forgotten.unknown_members().await, [MemberId::new(MEMBER)]);
    forgotten.confirm(&[(MEMBER, true)], 30).await;
    assert_eq!(forgotten.send(agent, &forgotten.request()).await.unwrap(), IntentState::Added);
    assert!(forgotten.unknown_members().await.is_empty());
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

/// The founders have all been replaced since the backup, so nobody can confirm the member. People
/// see that the database is old, and a retirement has to be forced.
#[tokio::test]
async fn an_unknown_members_cluster_is_explained_as_newer_than_the_database() {
    let forgotten = ForgottenMember::new().await;
    let (cluster, id) = (&forgotten.cluster, forgotten.cluster.statement.cluster);
    let retire = retire(cluster, false);
    let refused = forgotten.send(&forgotten.agent, &forgotten.request()).await;
    assert_eq!(code(refused), Code::WrongState);
    let explained = cluster.admin.explain(id).await.unwrap().explain;
    let line = explained.iter().find(|line| line.code == "members_unknown").unwrap();
    assert!(line.missing.contains(&forgotten.agent.record.name.to_string()), "{}", line.missing);
    assert!(line.command.as_ref().unwrap().contains("Don't retire or recover"), "{line:?}");
    let refused = cluster.admin.retire(id, &retire).await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::MembersReport), "{refused}");
    // A proof of a day ago means nothing.
    let old = "UPDATE unknown_members SET at_us = at_us - 86400000000";
    sqlx::raw_sql(old).execute(&mut cluster.world.database.connect().await).await.unwrap();
    assert!(forgotten.unknown_members().await.is_empty());
    cluster.admin.retire(id, &retire).await.unwrap();
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

/// All founders were replaced since the backup, and then the cluster was lost, too. An operator has
/// made a new one of the data of a member that the database doesn't know.
#[tokio::test]
async fn a_recovery_of_a_member_that_the_database_has_forgotten_is_followed() {
    let forgotten = ForgottenMember::new().await;
    let (cluster, agent) = (&forgotten.cluster, &forgotten.agent);
    let owner = &cluster.world.owner;
    let right = Recovery {
        was: NodeIdentity { member_id: format!("{MEMBER:016x}"), ..forgotten.other_node() },
        ..cluster.recovery(cluster.raft_cluster(), FIRST_RECOVERED_CLUSTER, agent)
    };
    let of_founder = Recovery { agent: *cluster.agents[0].key.public(), ..right.clone() };
    let of_another_member = Recovery { was: forgotten.other_node(), ..right.clone() };
    for (what, statement) in [
        ("a statement of nobody", right.sign(&agent.key)),
        ("another agent", of_founder.sign(owner)),
        ("another member", of_another_member.sign(owner)),
    ] {
        let request = ReadmitRequest { recoveries: vec![statement], ..forgotten.request() };
        let refused = forgotten.send(agent, &request).await;
        assert_eq!(code(refused), Code::RecoveryRefused, "{what}");
    }
    let request = ReadmitRequest { recoveries: vec![right.sign(owner)], ..forgotten.request() };
    for _ in 0..2 {
        assert_eq!(forgotten.send(agent, &request).await.unwrap(), IntentState::Promoted);
    }
    let recovered = FIRST_RECOVERED_CLUSTER;
    let answer = cluster.answer(recovered, agent, 2, &[SURVIVOR]).await.unwrap();
    assert_eq!(answer.raft_cluster_id, Some(format!("{recovered:016x}")));
    assert_eq!(cluster.confirmed().await, Some(vec![SURVIVOR]));
    assert!(forgotten.unknown_members().await.is_empty());
    let lost = cluster.answer(recovered, &cluster.agents[0], 3, &[SURVIVOR]).await;
    assert_eq!(code(lost), Code::ClusterLost);
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
