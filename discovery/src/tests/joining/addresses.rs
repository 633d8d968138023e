//! Tests of the mailbox for the addresses of members that have moved.

use discovery_types::client::ClientError;
use discovery_types::features::AgentBuild;
use discovery_types::member_address::{MemberAddress, SignedMemberAddress};
use discovery_types::member_proof::{MemberProof, sign_as_node};
use discovery_types::problem::Code;

use super::{CommittedCluster, code};
use crate::tests::agent::TestAgent;

impl CommittedCluster {
    async fn proof(&self, agent: &TestAgent) -> MemberProof {
        let cluster = self.statement.cluster;
        let leaves = agent.client.renew_leaves(cluster, &agent.record.csr).await.unwrap();
        let signature = sign_as_node(&agent.node_key, cluster, agent.key.public()).unwrap();
        MemberProof { certificate: leaves.peer, signature }
    }

    /// Signs that the agent's member is at 10.1.0.`host`.
    async fn address(&self, agent: &TestAgent, number: u64, host: u8) -> SignedMemberAddress {
        let address = MemberAddress {
            cluster: self.statement.cluster,
            agent: *agent.key.public(),
            number,
            peer_urls: vec![format!("https://10.1.0.{host}:2380").parse().unwrap()],
        };
        address.sign(&agent.key, self.proof(agent).await)
    }

    async fn exchange(
        &self,
        agent: &TestAgent,
        own: Option<SignedMemberAddress>,
    ) -> Result<Vec<SignedMemberAddress>, ClientError> {
        let answer = agent.client.exchange_addresses(self.statement.cluster, own).await;
        answer.map(|answer| answer.addresses)
    }

    /// Returns the hosts' numbers that the addresses name, in order.
    fn hosts(&self, addresses: &[SignedMemberAddress]) -> Vec<String> {
        let host = |signed: &SignedMemberAddress| {
            let verified = signed.verify(&self.statement).unwrap();
            verified.address.peer_urls[0].host().to_string()
        };
        let mut hosts: Vec<_> = addresses.iter().map(host).collect();
        hosts.sort();
        hosts
    }
}

#[tokio::test]
async fn members_get_the_newest_address_of_each_member_that_moved() {
    let cluster = CommittedCluster::of(3).await;
    let [first, second, third] = &cluster.agents[..] else { panic!("three") };
    assert_eq!(cluster.exchange(third, None).await.unwrap(), []);
    for (agent, number, host) in [(first, 2, 12), (first, 1, 11), (second, 5, 21)] {
        let own = cluster.address(agent, number, host).await;
        cluster.exchange(agent, Some(own)).await.unwrap();
    }
    let seen = cluster.exchange(third, None).await.unwrap();
    assert_eq!(cluster.hosts(&seen), ["10.1.0.12", "10.1.0.21"]);
    // A statement with an equal number replaces the stored one, as after a certificate renewal.
    let own = cluster.address(second, 5, 21).await;
    let seen = cluster.exchange(second, Some(own.clone())).await.unwrap();
    assert!(seen.contains(&own));
    cluster.service.stop().await;
}

#[tokio::test]
async fn members_publish_only_their_own_address_and_removed_ones_none() {
    let cluster = CommittedCluster::of(3).await;
    let [first, second, third] = &cluster.agents[..] else { panic!("three") };
    let others = cluster.address(first, 1, 11).await;
    let refused = cluster.exchange(second, Some(others.clone())).await;
    assert_eq!(code(refused), Code::RecordRefused, "signed by another agent");
    let stolen = MemberAddress {
        cluster: cluster.statement.cluster,
        agent: *second.key.public(),
        number: 1,
        peer_urls: vec!["https://10.1.0.66:2380".parse().unwrap()],
    };
    let stolen = stolen.sign(&second.key, others.proof.clone());
    let refused = cluster.exchange(second, Some(stolen)).await;
    assert_eq!(code(refused), Code::RecordRefused, "with another member's proof");
    let newcomer = cluster.newcomer(9).await;
    newcomer.join().await.unwrap();
    assert_eq!(code(cluster.exchange(&newcomer, None).await), Code::Forbidden, "not yet a member");

    let own = cluster.address(third, 1, 31).await;
    assert_eq!(cluster.exchange(third, Some(own)).await.unwrap().len(), 1);
    let left = [(cluster.id(first), false), (cluster.id(second), false)];
    for agent in [first, second] {
        cluster.report(agent, Some(7), 7, &left).await.unwrap();
    }
    assert_eq!(code(cluster.exchange(third, None).await), Code::Removed);
    assert_eq!(cluster.exchange(first, None).await.unwrap(), []);
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_member_that_moved_is_explained_until_its_cluster_has_recorded_the_address() {
    let cluster = CommittedCluster::of(3).await;
    let members: Vec<_> = cluster.agents.iter().map(|agent| (cluster.id(agent), false)).collect();
    for agent in &cluster.agents {
        cluster.report(agent, Some(3), 13, &members).await.unwrap();
    }
    let id = cluster.statement.cluster;
    let explain = async || cluster.admin.explain(id).await.unwrap().explain;
    assert_eq!(explain().await, []);
    let first = &cluster.agents[0];
    let own = cluster.address(first, 1, 11).await;
    cluster.exchange(first, Some(own)).await.unwrap();
    let lines = explain().await;
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert_eq!(lines[0].code, "member_moved");
    assert!(lines[0].missing.contains("moved to https://10.1.0.11:2380"), "{}", lines[0].missing);
    assert_eq!(cluster.admin.show_cluster(id).await.unwrap().explain, lines);

    for agent in &cluster.agents {
        let raft_cluster = cluster.raft_cluster();
        let mut report = cluster.report_request(raft_cluster, agent, Some(4), 14, &members);
        let listed = &mut report.membership.as_mut().unwrap().members[0];
        listed.peer_urls = vec!["https://10.1.0.11:2380".to_owned()];
        agent.client.report(id, &report, &AgentBuild::own()).await.unwrap();
    }
    assert_eq!(explain().await, []);
    cluster.service.stop().await;
}
