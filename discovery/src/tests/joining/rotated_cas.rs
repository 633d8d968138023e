//! Tests of the replacement of a cluster's CAs: which statements the service accepts, and which CAs
//! it issues by.

use discovery_types::api::MemberCas;
use discovery_types::csr::NodeKey;
use discovery_types::leaves::Leaves;
use discovery_types::statement::{CaPair, RotationStep};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::*;

impl CommittedCluster {
    /// Returns the statement for the next step. `new` are the CAs that the step `Begin` adds.
    fn stated(
        &self,
        chain: &StatementChain,
        step: RotationStep,
        new: Option<&CaPair>,
    ) -> Statement {
        let last = chain.newest();
        let mut next =
            Statement { seq: last.seq + 1, previous: Some(chain.newest_hash()), ..last.clone() };
        match step {
            RotationStep::Begin => next.also_trusted = new.cloned(),
            RotationStep::Switch => {
                let other = next.also_trusted.replace(last.issuing_cas()).unwrap();
                (next.peer_ca, next.client_ca) = (other.peer, other.client);
            }
            RotationStep::End => next.also_trusted = None,
        }
        next.version = next.format_version();
        next
    }

    /// Signs the statement for the next step, and sends it to the service.
    async fn take(
        &self,
        chain: &mut StatementChain,
        step: RotationStep,
        new: Option<&CaPair>,
    ) -> Result<(), ClientError> {
        let next = self.stated(chain, step, new).sign(&self.world.owner);
        self.admin.put_statement(self.statement.cluster, &next).await?;
        chain.append(&next).unwrap();
        Ok(())
    }

    async fn renewed(&self, agent: &TestAgent) -> Result<Leaves, ClientError> {
        agent.client.renew_leaves(self.statement.cluster, &agent.record.csr).await
    }

    /// Returns the numbers of CA keys in the database: of CAs that issue, and of others.
    async fn counts(&self) -> (i64, i64) {
        let count = async |table: &str| {
            let sql = format!("SELECT count(wrapped_key) FROM {table} WHERE cluster_id = $1");
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
                .bind(self.statement.cluster)
                .fetch_one(&mut self.world.database.connect().await)
                .await
                .unwrap()
        };
        (count("authorities").await, count("other_authorities").await)
    }
}

fn der(pem: &str) -> Vec<u8> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec()
}

#[tokio::test]
async fn the_service_issues_by_the_cas_of_the_newest_statement_and_deletes_the_old_keys() {
    let cluster = CommittedCluster::of(1).await;
    let (id, agent) = (cluster.statement.cluster, &cluster.agents[0]);
    let mut chain = cluster.chain();
    let new = cluster.admin.make_cas(id).await.unwrap();
    assert_ne!(der(&new.peer), der(&cluster.statement.peer_ca));
    let unused = new;
    let new = cluster.admin.make_cas(id).await.unwrap();
    assert_ne!(new, unused);
    let outdated = cluster.take(&mut chain, RotationStep::Begin, Some(&unused)).await;
    assert_eq!(code(outdated), Code::StatementRefused);
    assert_eq!(cluster.counts().await, (2, 2));

    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    assert_eq!(code(cluster.admin.make_cas(id).await), Code::WrongState);
    let leaves = cluster.renewed(agent).await.unwrap();
    assert!(leaves.are_by_issuing_cas(&cluster.statement), "the old CAs issue still");

    cluster.take(&mut chain, RotationStep::Switch, None).await.unwrap();
    let leaves = cluster.renewed(agent).await.unwrap();
    assert!(leaves.are_by_issuing_cas(chain.newest()));
    let node_key = agent.record.csr.verify().unwrap().node_key;
    assert!(leaves.verify(&node_key, &cluster.statement).is_err(), "only the new CAs trust it");
    let csr = NodeKey::generate().csr;
    let credentials = cluster.admin.issue_credentials(id, &csr).await.unwrap();
    assert_eq!(der(&credentials.client_ca), der(&new.client));

    // Switch back to the old CAs, and again to the new ones.
    for _ in 0..2 {
        cluster.take(&mut chain, RotationStep::Switch, None).await.unwrap();
        let leaves = cluster.renewed(agent).await.unwrap();
        assert!(leaves.are_by_issuing_cas(chain.newest()));
    }
    cluster.take(&mut chain, RotationStep::End, None).await.unwrap();
    assert_eq!(cluster.counts().await, (2, 0));
    let leaves = cluster.renewed(agent).await.unwrap();
    assert!(leaves.are_by_issuing_cas(chain.newest()));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_statement_with_cas_whose_keys_the_service_lacks_is_refused() {
    let cluster = CommittedCluster::of(1).await;
    let (id, mut chain) = (cluster.statement.cluster, cluster.chain());
    let foreign = CaPair {
        peer: discovery_types::fixtures::TestCa::new("peers").pem,
        client: discovery_types::fixtures::TestCa::new("clients").pem,
    };
    for made in [false, true] {
        if made {
            cluster.admin.make_cas(id).await.unwrap();
        }
        let refused = cluster.take(&mut chain, RotationStep::Begin, Some(&foreign)).await;
        assert_eq!(code(refused), Code::StatementRefused, "{made}");
    }
    // An intruder writes other CAs into the database. The service doesn't give them to an owner to
    // sign.
    for (purpose, pem) in [("peer", &foreign.peer), ("client", &foreign.client)] {
        sqlx::query("UPDATE other_authorities SET certificate = $1 WHERE purpose = $2")
            .bind(der(pem))
            .bind(purpose)
            .execute(&mut cluster.world.database.connect().await)
            .await
            .unwrap();
    }
    let new = cluster.admin.make_cas(id).await.unwrap();
    assert!(new != foreign);
    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    cluster.service.stop().await;
}

/// A database from before the replacement has only the keys of the old CAs, although the chain
/// names new ones. An owner replaces the CAs again.
#[tokio::test]
async fn after_the_loss_of_the_new_keys_the_cas_can_be_replaced_again() {
    let cluster = CommittedCluster::of(1).await;
    let (id, agent, mut chain) = (cluster.statement.cluster, &cluster.agents[0], cluster.chain());
    let new = cluster.admin.make_cas(id).await.unwrap();
    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    cluster.take(&mut chain, RotationStep::Switch, None).await.unwrap();
    // The rows are as they would be after a restore: the old CAs issue, and there are no others.
    let mut database = cluster.world.database.connect().await;
    for sql in [
        "UPDATE authorities a SET certificate = o.certificate, wrapped_key = o.wrapped_key
         FROM other_authorities o WHERE o.cluster_id = a.cluster_id AND o.purpose = a.purpose",
        "DELETE FROM other_authorities",
    ] {
        sqlx::query(sql).execute(&mut database).await.unwrap();
    }
    assert_eq!(code(cluster.renewed(agent).await), Code::WrongState);
    let csr = NodeKey::generate().csr;
    assert_eq!(code(cluster.admin.issue_credentials(id, &csr).await), Code::WrongState);

    cluster.take(&mut chain, RotationStep::End, None).await.unwrap();
    let newer = cluster.admin.make_cas(id).await.unwrap();
    assert_ne!(newer, new);
    cluster.take(&mut chain, RotationStep::Begin, Some(&newer)).await.unwrap();
    cluster.take(&mut chain, RotationStep::Switch, None).await.unwrap();
    let leaves = cluster.renewed(agent).await.unwrap();
    assert!(leaves.are_by_issuing_cas(chain.newest()));
    cluster.service.stop().await;
}

#[tokio::test]
async fn members_are_shown_with_the_cas_that_they_trust() {
    let cluster = CommittedCluster::of(2).await;
    let (id, mut chain) = (cluster.statement.cluster, cluster.chain());
    let new = cluster.admin.make_cas(id).await.unwrap();
    cluster.take(&mut chain, RotationStep::Begin, Some(&new)).await.unwrap();
    let agent = &cluster.agents[0];
    let own = cluster.id(agent);
    let report = async |trusted, certified| {
        let mut report = cluster.report_request(cluster.raft_cluster(), agent, None, 12, &[]);
        report.membership = None;
        report.cas = Some(MemberCas { trusted, certified });
        agent.client.report(id, &report).await.unwrap();
        let members = cluster.admin.rotation(id).await.unwrap().members;
        assert_eq!(members.len(), 2);
        members.into_iter().find(|member| member.id == own).unwrap().cas
    };
    let expected = MemberCas { trusted: 1, certified: None };
    assert_eq!(report(1, None).await, Some(expected));
    assert_eq!(report(7, None).await, Some(expected), "there is no statement 7");
    let renewed = MemberCas { trusted: 1, certified: Some(1) };
    assert_eq!(report(1, Some(1)).await, Some(renewed));
    let others = cluster.admin.rotation(id).await.unwrap().members;
    assert!(others.iter().any(|member| member.id != own && member.cas.is_none()));
    cluster.service.stop().await;
}

#[tokio::test]
async fn a_cluster_that_forms_keeps_its_cas() {
    let world = TestInstallation::new().await;
    let service = world.serve().await;
    let admin = world.owner(&service);
    let statement = world.cluster(&admin, "demo", 3).await;
    assert_eq!(code(admin.make_cas(statement.cluster).await), Code::WrongState);
    service.stop().await;
}
